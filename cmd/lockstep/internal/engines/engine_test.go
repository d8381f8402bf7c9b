package engines

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/engine/gomlx"
)

// wheel writes a wheel with files, in a list whose sum of the file bad is wrong.
func wheel(t *testing.T, files map[string]string, bad string) string {
	t.Helper()
	var archive bytes.Buffer
	w := zip.NewWriter(&archive)
	var record strings.Builder
	for name, text := range files {
		f, err := w.Create(name)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
		sum := sha256.Sum256([]byte(text))
		if name == bad {
			sum[0]++
		}
		fmt.Fprintf(&record, "%s,sha256=%s,%d\n", name, base64.RawURLEncoding.EncodeToString(sum[:]), len(text))
	}
	if bad != "RECORD" {
		f, err := w.Create("x-1.dist-info/RECORD")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.Write([]byte(record.String() + "x-1.dist-info/RECORD,,\n")); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "x-1-py3-none-any.whl")
	if err := os.WriteFile(path, archive.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestInstallWheels(t *testing.T) {
	home := t.TempDir()
	t.Setenv("HOME", home)
	t.Setenv(gomlx.PluginEnv, "")
	folder, err := gomlx.PluginFolder()
	if err != nil {
		t.Fatal(err)
	}
	plugin := wheel(t, map[string]string{
		"jax_plugins/xla_cuda13/xla_cuda_plugin.so": "plugin", "jax_plugins/x.py": "",
	}, "")
	libraries := wheel(t, map[string]string{
		"nvidia/cu13/lib/libcublas.so.13": "blas", "nvidia/cu13/bin/ptxas": "ptxas",
	}, "")
	cmd := New()
	var out bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetArgs([]string{"install", "cuda13", "--wheel", plugin, "--wheel", libraries})
	if err := cmd.Execute(); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		"nvidia/pjrt_c_api_cuda_plugin.so": "plugin", "nvidia/bin/ptxas": "ptxas", "../libcublas.so.13": "blas",
	} {
		got, err := os.ReadFile(filepath.Join(folder, path))
		if err != nil || string(got) != want {
			t.Errorf("%s: %q, %v, want %q", path, got, err, want)
		}
	}
	if _, err := os.Stat(filepath.Join(folder, "jax_plugins")); err == nil {
		t.Error("a file of the wheel that is not needed was extracted")
	}
	want := "xla   GPU: " + filepath.Join(folder, "nvidia/pjrt_c_api_cuda_plugin.so")
	if !strings.Contains(out.String(), want) {
		t.Errorf("the list has no %q:\n%s", want, out.String())
	}
}

func TestInstallWheelErrors(t *testing.T) {
	so := "pkg/pjrt_c_api_cpu_plugin.so"
	noZip := filepath.Join(t.TempDir(), "x.whl")
	if err := os.WriteFile(noZip, []byte("text"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ kind, wheel, want string }{
		"wrong sum":    {"cpu", wheel(t, map[string]string{so: "plugin"}, so), "download the wheel again"},
		"no list":      {"cpu", wheel(t, map[string]string{so: "plugin"}, "RECORD"), "no list of its files (RECORD)"},
		"other wheel":  {"tpu", wheel(t, map[string]string{so: "plugin"}, ""), "has neither the plugin libtpu.so nor"},
		"no archive":   {"cpu", noZip, "not a valid zip file"},
		"libraries":    {"cuda12", wheel(t, map[string]string{"nvidia/lib.so": ""}, ""), "the one of jax-cuda12-pjrt too"},
		"outside":      {"cuda12", wheel(t, map[string]string{"nvidia/../../x": ""}, ""), "outside of its folder"},
		"missing file": {"cpu", filepath.Join(t.TempDir(), "none.whl"), "no such file"},
	} {
		folder := t.TempDir()
		err := installWheels(c.kind, []string{c.wheel}, folder)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want an error with %q", name, err, c.want)
		}
		if _, err := os.Stat(filepath.Join(folder, "pjrt_c_api_cpu_plugin.so")); err == nil {
			t.Errorf("%s: the plugin was installed", name)
		}
	}
}
