//go:build xla && cgo

package gomlx_test

import (
	"math"
	"testing"

	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestAllReduceWithoutSharedMemory checks that operands and sums are copied if host and device share no memory.
func TestAllReduceWithoutSharedMemory(t *testing.T) {
	needXLA(t)
	e, err := gomlx.OpenXLA(gomlx.Staged(gomlx.XLAOptions{Devices: 2}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	m := newAdder(2)
	p := compile(t, entangledModel(), e, entangledSpec(e, tensor.Float64, m))
	loss, gradients, err := allGradients(p, m, entangledBatches(tensor.Float64, 2), 6)
	if err != nil {
		t.Fatal(err)
	}
	goes := newAdder(2)
	other := openEngine(t, "go", 2)
	q := compile(t, entangledModel(), other, entangledSpec(other, tensor.Float64, goes))
	wantLoss, want, err := allGradients(q, goes, entangledBatches(tensor.Float64, 2), 6)
	if err != nil {
		t.Fatal(err)
	}
	if math.Abs(loss-wantLoss) > 1e-12 {
		t.Errorf("loss %v, want %v", loss, wantLoss)
	}
	for i := range want {
		for k := range want[i] {
			if math.Abs(gradients[i][k]-want[i][k]) > 1e-12 {
				t.Errorf("gradient %d: %v, want %v", i, gradients[i], want[i])
			}
		}
	}
}
