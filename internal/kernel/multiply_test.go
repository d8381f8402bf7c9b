package kernel

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/lockstep-ml/lockstep/tensor"
)

// TestMultiply compares every element with its product by definition.
func TestMultiply(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	for _, dtype := range []tensor.DType{tensor.Float32, tensor.Float64, tensor.Float16, tensor.BFloat16} {
		for _, n := range []int{0, 1, 7, 1000, chunk, chunk + 1, 3*chunk + 5} {
			for _, factor := range []float64{0, 1, -2, 0.5, 1.0 / 3, 0.1} {
				x := newVector(dtype, n, 3)
				x.fill(random)
				before := x.clone()
				Multiply(dtype, x.pointer(), n, factor)
				for i := range n {
					want := toBits(dtype, number32(dtype, before.get(i))*float32(factor))
					if dtype == tensor.Float64 {
						want = math.Float64bits(math.Float64frombits(before.get(i)) * factor)
					}
					if got := x.get(i); got != want && !(isNaN(dtype, got) && isNaN(dtype, want)) {
						t.Fatalf("%v: %#x * %v = %#x, want %#x", dtype, before.get(i), factor, got, want)
					}
				}
				x.intact(t, "x")
			}
		}
	}
}
