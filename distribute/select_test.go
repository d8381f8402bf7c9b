package distribute_test

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

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

// TestNcclAddsOnTheCPU: NcclAllReduce adds on the CPU, and logs that once.
func TestNcclAddsOnTheCPU(t *testing.T) {
	var log bytes.Buffer
	ops, err := distribute.NewNcclAllReduce(1, slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		v := distribute.NewComponents(tensor.From([]float32{1, 2}), tensor.From([]float32{3, 4}))
		out, err := reduceWith(t.Context(), ops, distribute.Sum, v, "CPU:0")
		if err != nil || fmt.Sprint(out.(*tensor.Tensor).Float64s()) != "[4 6]" {
			t.Fatalf("got %v, %v", out, err)
		}
	}
	if n := strings.Count(log.String(), "adds on the CPU, whether NCCL is installed or not"); n != 1 {
		t.Errorf("%d lines in the log, want 1: %s", n, &log)
	}
	if _, err := distribute.NewNcclAllReduce(-1, nil); !errors.Is(err, distribute.ErrInvalid) ||
		!containsAll(err.Error(), "NCCL all-reduce requires num_packs >= 0, but -1 is specified") {
		t.Errorf("got %v", err)
	}
}
