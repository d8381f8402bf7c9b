package kernel

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
)

// squaresByDefinition is what Squares documents, on numbers that the type represents.
func squaresByDefinition(x []float64) float64 {
	var sums [16]float64
	for i, v := range x {
		product := float64(v * v) // not fused with the addition
		sums[i%16] = sums[i%16] + product
	}
	for _, half := range []int{8, 4, 2, 1} {
		for j := range half {
			sums[j] += sums[j+half]
		}
	}
	return sums[0]
}

// TestSquares compares the sums of squares of vectors of all lengths and alignments, with and without infinities, with
// the definition.
func TestSquares(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for _, dtype := range []tensor.DType{tensor.Float32, tensor.Float64, tensor.Float16, tensor.BFloat16} {
		for _, n := range []int{0, 1, 7, 15, 16, 17, 31, 33, 64, 100, 511, 513, 1025, 4096, 5000} {
			for skip := range 3 { // elements before the vector
				all := tensor.New(dtype, n+skip)
				for i := range all.Len() {
					x := (random.Float64() - 0.5) * math.Ldexp(1, random.IntN(20)-10)
					if n == 100 && random.IntN(50) == 0 {
						x = math.Inf(1)
					}
					switch dtype {
					case tensor.Float32:
						tensor.Data[float32](all)[i] = float32(x)
					case tensor.Float64:
						tensor.Data[float64](all)[i] = x
					case tensor.Float16:
						tensor.Data[tensor.F16](all)[i] = tensor.F16From(float32(x))
					case tensor.BFloat16:
						tensor.Data[tensor.BF16](all)[i] = tensor.BF16From(float32(x))
					}
				}
				var src unsafe.Pointer
				if n > 0 {
					src = unsafe.Pointer(&all.Memory().HostBytes()[skip*dtype.Bytes()])
				}
				got, want := Squares(dtype, src, n), squaresByDefinition(all.Float64s()[skip:])
				if math.Float64bits(got) != math.Float64bits(want) {
					t.Errorf("%d of %v from element %d: %v, want %v", n, dtype, skip, got, want)
				}
			}
		}
	}
	for _, bad := range []float32{float32(math.NaN()), float32(math.Inf(-1))} {
		x := make([]float32, 40)
		x[37] = bad
		if got := Squares(tensor.Float32, unsafe.Pointer(&x[0]), len(x)); !math.IsNaN(got) && !math.IsInf(got, 1) {
			t.Errorf("the squares of a vector with %v add up to %v", bad, got)
		}
	}
}

func BenchmarkSquares(b *testing.B) {
	for _, dtype := range []tensor.DType{tensor.Float32, tensor.Float64, tensor.BFloat16} {
		b.Run(fmt.Sprint(dtype), func(b *testing.B) {
			x := tensor.New(dtype, 4096)
			src := unsafe.Pointer(&x.Memory().HostBytes()[0])
			b.SetBytes(int64(x.Len() * dtype.Bytes()))
			for b.Loop() {
				Squares(dtype, src, x.Len())
			}
		})
	}
}
