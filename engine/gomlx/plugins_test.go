package gomlx_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lockstep-ml/lockstep/engine/gomlx"
)

func TestPlugins(t *testing.T) {
	folder, home := t.TempDir(), t.TempDir()
	for _, name := range []string{
		"pjrt_c_api_cpu_v0.1_plugin.so.part", "pjrt_c_api_cpu_0_plugin.so", "nvidia/pjrt_c_api_cuda_plugin.so",
		"nvidia/libcudnn.so", "pjrt_c_api_tpu_plugin.so", "own.so",
	} {
		path := filepath.Join(folder, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	link := filepath.Join(folder, "pjrt_c_api_cpu_plugin.so")
	if err := os.Symlink("pjrt_c_api_cpu_0_plugin.so", link); err != nil {
		t.Fatal(err)
	}
	t.Setenv("HOME", home)
	t.Setenv("PJRT_PLUGIN_LIBRARY_PATH", folder)
	t.Setenv(gomlx.PluginEnv, filepath.Join(folder, "own.so"))
	var got []gomlx.Plugin
	for _, p := range gomlx.Plugins() {
		if p.From != "/usr/local/lib/go-xla" { // this machine's
			got = append(got, p)
		}
	}
	want := []gomlx.Plugin{
		{Kind: "TPU", Path: filepath.Join(folder, "pjrt_c_api_tpu_plugin.so"), From: folder},
		{Kind: "GPU", Path: filepath.Join(folder, "nvidia/pjrt_c_api_cuda_plugin.so"), From: folder},
		{Kind: "CPU", Path: filepath.Join(folder, "own.so"), From: "$" + gomlx.PluginEnv},
		{Kind: "CPU", Path: filepath.Join(folder, "pjrt_c_api_cpu_0_plugin.so"), From: folder},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func TestChoose(t *testing.T) {
	gpu, tpu := gomlx.Plugin{Kind: "GPU", Path: "/gpu.so"}, gomlx.Plugin{Kind: "TPU", Path: "/tpu.so"}
	none := gomlx.Choice{Engine: "go", Why: "no plugin of an accelerator is installed"}
	cpu := gomlx.Plugin{Kind: "CPU", Path: "/cpu.so"}
	for _, c := range []struct {
		name    string
		plugins []gomlx.Plugin
		withXLA bool
		device  string // of this machine
		want    gomlx.Choice
	}{
		{"nothing", nil, true, "GPU", none},
		{"a processor's", []gomlx.Plugin{cpu}, true, "GPU", none},
		{
			"without XLA",
			[]gomlx.Plugin{gpu},
			false, "GPU",
			gomlx.Choice{Engine: "go", Why: "/gpu.so is installed, but this program was built without XLA"},
		},
		{
			"no device",
			[]gomlx.Plugin{gpu, cpu},
			true, "",
			gomlx.Choice{Engine: "go", Why: "/gpu.so is installed, but this machine has no GPU"},
		},
		{
			"the other's device",
			[]gomlx.Plugin{gpu, tpu},
			true, "TPU",
			gomlx.Choice{Engine: "xla", Plugin: "/tpu.so", Why: "this machine has a TPU, and its plugin is installed"},
		},
	} {
		got := gomlx.ChooseAmong(c.plugins, c.withXLA, func(kind string) bool { return kind == c.device })
		if got != c.want {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
	}
}
