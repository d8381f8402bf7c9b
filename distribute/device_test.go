package distribute_test

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/engine"
)

// fakeEngine reports devices and computes nothing.
type fakeEngine []engine.Device

func (fakeEngine) Name() string               { return "fake" }
func (fakeEngine) Description() string        { return "fake" }
func (e fakeEngine) Devices() []engine.Device { return e }
func (fakeEngine) Close() error               { return nil }

func TestStrategyDevices(t *testing.T) {
	gpus := fakeEngine{{Kind: "CPU", Index: 0}, {Kind: "GPU", Index: 0}, {Kind: "GPU", Index: 1}}
	full := func(names ...string) string {
		for i, n := range names {
			names[i] = "/job:localhost/replica:0/task:0/device:" + n
		}
		return strings.Join(names, " ")
	}
	cpus := make([]string, runtime.GOMAXPROCS(0))
	for i := range cpus {
		cpus[i] = fmt.Sprintf("CPU:%d", i)
	}
	for _, c := range []struct {
		name    string
		cfg     distribute.MirroredConfig
		want    string
		message string
	}{
		{name: "one per core", want: full(cpus...)},
		{name: "logical CPUs", cfg: distribute.MirroredConfig{LogicalCPUs: 3}, want: full("CPU:0", "CPU:1", "CPU:2")},
		{name: "all accelerators", cfg: distribute.MirroredConfig{Engine: gpus}, want: full("GPU:0", "GPU:1")},
		{
			name: "accelerators of another kind",
			cfg: distribute.MirroredConfig{Engine: fakeEngine{
				{Kind: "NPU", Index: 0},
				{Kind: "NPU", Index: 1},
			}}, want: full("NPU:0", "NPU:1"),
		},
		{
			name: "one of another kind",
			cfg: distribute.MirroredConfig{
				Engine:  fakeEngine{{Kind: "NPU", Index: 0}},
				Devices: []string{"/device:npu:0"},
			}, want: full("NPU:0"),
		},
		{name: "an engine without accelerators", cfg: distribute.MirroredConfig{Engine: gpus[:1]}, want: full("CPU:0")},
		{
			name: "short forms",
			cfg: distribute.MirroredConfig{
				LogicalCPUs: 5,
				Devices:     []string{"cpu:1", "/cpu:2", "/device:CPU:3", "CPU:0", "/job:localhost/replica:0/task:0/device:CPU:4"},
			},
			want: full("CPU:1", "CPU:2", "CPU:3", "CPU:0", "CPU:4"),
		},
		{
			name: "a CPU and a GPU", cfg: distribute.MirroredConfig{Engine: gpus, Devices: []string{"/gpu:1", "cpu"}},
			want: full("GPU:1", "CPU:0"),
		},
		{
			name: "empty", cfg: distribute.MirroredConfig{LogicalCPUs: 1, Devices: []string{}},
			want: "/job:localhost/replica:0/task:0/device:CPU:0",
		},
		{
			name: "twice", cfg: distribute.MirroredConfig{LogicalCPUs: 2, Devices: []string{"CPU:1", "/device:cpu:1"}},
			message: "no duplicates allowed",
		},
		{
			name: "unknown index", cfg: distribute.MirroredConfig{LogicalCPUs: 2, Devices: []string{"CPU:2"}},
			message: "device CPU:2 does not exist: want one of CPU:0, CPU:1",
		},
		{
			name: "unknown kind", cfg: distribute.MirroredConfig{LogicalCPUs: 2, Devices: []string{"GPU:0"}},
			message: "device GPU:0 does not exist",
		},
		{
			name: "a type that is not a name", cfg: distribute.MirroredConfig{Devices: []string{"/device:7:0"}},
			message: "'7' in the device spec '/device:7:0' is not a device type",
		},
		{name: "malformed", cfg: distribute.MirroredConfig{Devices: []string{"FOO:0"}}, message: "unknown attribute 'FOO'"},
		{
			name: "another worker's", cfg: distribute.MirroredConfig{Devices: []string{"/job:worker/task:1/device:CPU:0"}},
			message: "belongs to another worker",
		},
		{
			name: "more CPUs than the engine has", cfg: distribute.MirroredConfig{Engine: gpus, LogicalCPUs: 2},
			message: "opened with 1 CPU devices",
		},
		{name: "negative", cfg: distribute.MirroredConfig{LogicalCPUs: -1}, message: "LogicalCPUs is -1"},
		{
			name: "packs", cfg: distribute.MirroredConfig{Options: distribute.Options{BytesPerPack: -2}},
			message: "must be >=0, received -2",
		},
	} {
		s, err := distribute.NewMirroredStrategy(c.cfg)
		if c.message != "" {
			if err == nil || !strings.Contains(err.Error(), c.message) {
				t.Errorf("%s: got %v, want an error with %q", c.name, err, c.message)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if got := strings.Join(s.Devices(), " "); got != c.want {
			t.Errorf("%s: got %s, want %s", c.name, got, c.want)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	one, err := distribute.NewOneDeviceStrategy(distribute.OneDeviceConfig{Engine: gpus})
	if err != nil {
		t.Fatal(err)
	}
	defer one.Close()
	if got := one.String(); got != "OneDeviceStrategy(GPU:0)" {
		t.Errorf("got %s", got)
	}
}

func FuzzParseDevice(f *testing.F) {
	for _, s := range []string{
		"", "cpu", "CPU:0", "/gpu:1", "/job:worker/replica:0/task:3/device:CPU:1", "/device:GPU:*",
		"TPU:0/CPU:1", "/device:XLA_NPU:2", "//", "job::", "cpu:-1",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		d, err := device.Parse(s)
		if err != nil {
			if !errors.Is(err, distribute.ErrInvalid) {
				t.Errorf("%q: got %v, want ErrInvalid", s, err)
			}
			return
		}
		again, err := device.Parse(d.String())
		if d.Kind == "" && d.Index >= 0 {
			t.Errorf("%q has an index but no kind: %+v", s, d)
		}
		if err != nil || again != d {
			t.Errorf("%q is %+v, printed as %q, which is %+v, %v", s, d, d, again, err)
		}
		full, err := device.Canonical(s)
		if err != nil || full.Job == "" || full.Kind == "" || full.Index < 0 || full.Task < 0 || full.Replica < 0 {
			t.Errorf("%q is not canonical: %+v, %v", s, full, err)
		}
	})
}
