package distribute_test

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestSelectCrossDeviceOps is the table of TensorFlow's select_cross_device_ops, and of the default rule of 2.21's
// MirroredStrategy.
func TestSelectCrossDeviceOps(t *testing.T) {
	gpus := []string{"GPU:0", "GPU:1"}
	for _, c := range []struct {
		name     string
		devices  []string
		machine  distribute.Machine
		want     string
		warns    []string
		standard string
	}{
		{
			"GPUs", gpus,
			distribute.Machine{Devices: gpus, PhysicalGPUs: 2, NCCL: true},
			"NcclAllReduce 1 NCCL", nil,
			"CollectiveAllReduce 0 NCCL",
		},
		{
			"GPUs in TensorFlow's full form",
			[]string{"/job:localhost/replica:0/task:0/device:GPU:1", "/gpu:0"},
			distribute.Machine{Devices: gpus, PhysicalGPUs: 2, NCCL: true},
			"NcclAllReduce 1 NCCL", nil, "CollectiveAllReduce " +
				"0 NCCL",
		},
		{
			"virtual GPUs", gpus,
			distribute.Machine{Devices: gpus, PhysicalGPUs: 1, NCCL: true},
			"ReductionToOneDevice 0 AUTO",
			[]string{"virtual GPUs"},
			"CollectiveAllReduce 0 AUTO",
		},
		{
			"no NCCL", gpus,
			distribute.Machine{Devices: gpus, PhysicalGPUs: 2},
			"ReductionToOneDevice 0 AUTO",
			[]string{"NCCL is not found"},
			"CollectiveAllReduce 0 NCCL",
		},
		{
			"CPUs",
			[]string{"CPU:0", "CPU:1"},
			distribute.Machine{Devices: []string{"CPU:0", "CPU:1"}, NCCL: true},
			"ReductionToOneDevice 0 AUTO",
			[]string{"non-GPU"},
			"CollectiveAllReduce 0 RING",
		},
		{
			"a CPU among GPUs",
			[]string{"CPU:0", "GPU:0"},
			distribute.Machine{
				Devices: []string{"CPU:0", "GPU:0"}, PhysicalGPUs: 1,
				NCCL: true,
			},
			"ReductionToOneDevice 0 AUTO",
			[]string{"non-GPU"},
			"ReductionToOneDevice 0 AUTO",
		},
		{
			"a TPU",
			[]string{"TPU:0"},
			distribute.Machine{Devices: []string{"TPU:0"}, NCCL: true},
			"ReductionToOneDevice 0 AUTO",
			[]string{"non-GPU"},
			"CollectiveAllReduce 0 NCCL",
		},
		{
			"a GPU that is not there",
			[]string{"GPU:0", "GPU:7"},
			distribute.Machine{Devices: gpus, PhysicalGPUs: 2, NCCL: true},
			"NcclAllReduce 1 NCCL",
			[]string{"not visible: " +
				"/job:localhost/replica:0/task:0/device:GPU:7"},
			"CollectiveAllReduce 0 NCCL",
		},
		{
			"a CPU that is not there",
			[]string{"CPU:7", "CPU:7"},
			distribute.Machine{NCCL: true},
			"ReductionToOneDevice 0 AUTO",
			[]string{"not visible: /job:localhost/replica:0/task:0/device:CPU:7", "non-GPU"},
			"CollectiveAllReduce 0 RING",
		},
	} {
		got, err := distribute.SelectCrossDeviceOps(c.devices, c.machine)
		if text := fmt.Sprint(got.Ops, " ", got.Packs, " ", got.Implementation); err != nil || text != c.want {
			t.Errorf("%s: got %s, %v, want %s", c.name, text, err, c.want)
		}
		if !slices.EqualFunc(got.Warnings, c.warns, strings.Contains) {
			t.Errorf("%s: warnings %q, want %q", c.name, got.Warnings, c.warns)
		}
		got, err = distribute.DefaultCrossDeviceOps(c.devices, c.machine)
		if text := fmt.Sprint(got.Ops, " ", got.Packs, " ", got.Implementation); err != nil || text != c.standard {
			t.Errorf("%s, the default: got %s, %v, want %s", c.name, text, err, c.standard)
		}
	}
	if _, err := distribute.SelectCrossDeviceOps([]string{"FOO:0"}, distribute.Machine{}); !errors.Is(err,
		distribute.ErrInvalid) {
		t.Errorf("no device: got %v", err)
	}
	if _, err := distribute.DefaultCrossDeviceOps(nil, distribute.Machine{Devices: []string{"FOO:0"}}); !errors.Is(err,
		distribute.ErrInvalid) {
		t.Errorf("no device of the machine: got %v", err)
	}
}

// TestStrategysOps: a strategy selects its CrossDeviceOps; those of its configuration take precedence.
func TestStrategysOps(t *testing.T) {
	mixed := fakeEngine{{Kind: "CPU", Index: 0}, {Kind: "GPU", Index: 0}}
	given := &recorder{}
	for _, c := range []struct {
		cfg            distribute.MirroredConfig
		ops            string
		implementation distribute.Implementation
	}{
		{distribute.MirroredConfig{LogicalCPUs: 2}, "CollectiveAllReduce", distribute.ImplementationRing},
		{distribute.MirroredConfig{LogicalCPUs: 2, CrossDeviceOps: given}, "recorder", distribute.ImplementationRing},
		{
			distribute.MirroredConfig{Engine: mixed, Devices: []string{"CPU:0", "GPU:0"}},
			"ReductionToOneDevice",
			distribute.ImplementationAuto,
		},
		{
			distribute.MirroredConfig{Engine: mixed, Devices: []string{"CPU:0", "GPU:0"}, CrossDeviceOps: given},
			"recorder",
			distribute.ImplementationAuto,
		},
		{
			distribute.MirroredConfig{Engine: fakeEngine{engine.Device{Kind: "GPU"}}, Logger: quiet},
			"CollectiveAllReduce",
			distribute.ImplementationNCCL,
		},
	} {
		s, err := distribute.NewMirroredStrategy(c.cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		if got := s.CrossDeviceOps().String(); got != c.ops || s.Options().Implementation != c.implementation {
			t.Errorf("%v: got %s with %v, want %s with %v", s, got, s.Options().Implementation, c.ops, c.implementation)
		}
	}
}

// TestNcclFallsBack: NCCL's operations reduce without it, and log that once.
func TestNcclFallsBack(t *testing.T) {
	var log bytes.Buffer
	ops, err := distribute.NewNcclAllReduce(1, slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		v := distribute.NewPerReplica(tensor.From([]float32{1, 2}), tensor.From([]float32{3, 4}))
		out, err := distribute.ReduceWith(t.Context(), ops, distribute.Sum, v, distribute.At("CPU:0"))
		if err != nil || fmt.Sprint(out.(*tensor.Tensor).Float64s()) != "[4 6]" {
			t.Fatalf("got %v, %v", out, err)
		}
	}
	if n := strings.Count(log.String(), "NCCL is not available"); n != 1 {
		t.Errorf("%d lines in the log, want 1: %s", n, &log)
	}
	if _, err := distribute.NewNcclAllReduce(-1, nil); !errors.Is(err, distribute.ErrInvalid) ||
		!containsAll(err.Error(), "NCCL all-reduce requires num_packs >= 0, but -1 is specified") {
		t.Errorf("got %v", err)
	}
}
