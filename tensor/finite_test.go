package tensor_test

import (
	"fmt"
	"math"
	"testing"

	"github.com/lockstep-ml/lockstep/tensor"
)

// TestFirstNotFinite puts an infinity or a NaN at every place of tensors of every length up to a few blocks,
// among the largest and smallest finite numbers, and compares with a plain loop.
func TestFirstNotFinite(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	testFinite(t, func(x float64) float32 { return float32(x) }, []float32{
		math.MaxFloat32, -math.MaxFloat32,
		math.SmallestNonzeroFloat32, 0,
	},
		[]float32{
			float32(nan), float32(inf), float32(-inf), math.Float32frombits(0x7f800001),
			math.Float32frombits(0xffc00000),
		})
	testFinite(t, func(x float64) float64 { return x }, []float64{
		math.MaxFloat64, -math.MaxFloat64,
		math.SmallestNonzeroFloat64, 0,
	},
		[]float64{nan, inf, -inf, math.Float64frombits(0x7ff0000000000001)})
	testFinite(t, func(x float64) tensor.F16 { return tensor.F16From(float32(x)) }, []tensor.F16{
		0x7bff, 0xfbff, 1,
		0x8000,
	},
		[]tensor.F16{0x7c00, 0xfc00, 0x7c01, 0xfe00})
	testFinite(t, func(x float64) tensor.BF16 { return tensor.BF16From(float32(x)) }, []tensor.BF16{
		0x7f7f, 0xff7f, 1,
		0x8000,
	},
		[]tensor.BF16{0x7f80, 0xff80, 0x7f81, 0xffc0})
}

func testFinite[T tensor.Element](t *testing.T, number func(float64) T, finite, others []T) {
	t.Helper()
	for n := range 40 {
		data := make([]T, n+1)
		for i := range data {
			if data[i] = number(float64(i) - 7.5); i%2 == 0 {
				data[i] = finite[i/2%len(finite)]
			}
		}
		x := tensor.Of(data, n+1)
		if got := tensor.FirstNotFinite(x); got != -1 {
			t.Fatalf("%v of %d finite elements: got %d, want -1", x.DType(), n+1, got)
		}
		for at := range data {
			for _, bad := range others {
				was := data[at]
				data[at] = bad
				if got := tensor.FirstNotFinite(x); got != at {
					t.Fatalf("%v of %d elements, element %d is %v: got %d", x.DType(), n+1, at, bad, got)
				}
				// An odd start in memory.
				if got := tensor.FirstNotFinite(x.Rows(min(1, at), n+1)); got != at-min(1, at) {
					t.Fatalf("%v of %d elements from 1 on, element %d is %v: got %d", x.DType(), n+1, at, bad, got)
				}
				if tensor.FiniteBetween(x, 0, n+1) || !tensor.FiniteBetween(x, 0, at) || !tensor.FiniteBetween(x, at+1, n+1) ||
					tensor.FiniteBetween(x, at, at+1) {
					t.Fatalf("%v of %d elements, element %d is %v: wrong about a part", x.DType(), n+1, at, bad)
				}
				data[at] = was
			}
		}
	}
}

func TestFirstNotFiniteOfOthers(t *testing.T) {
	for _, x := range []*tensor.Tensor{tensor.Of([]int64{math.MaxInt64, math.MinInt64}, 2), tensor.New(tensor.Float32,
		0), tensor.Scalar(true)} {
		if got := tensor.FirstNotFinite(x); got != -1 {
			t.Errorf("%v: got %d, want -1", x, got)
		}
	}
	if got := tensor.FirstNotFinite(tensor.Scalar(math.NaN())); got != 0 {
		t.Errorf("a scalar NaN: got %d, want 0", got)
	}
}

func BenchmarkFirstNotFinite(b *testing.B) {
	for _, d := range []tensor.DType{tensor.Float32, tensor.BFloat16} {
		b.Run(fmt.Sprint(d), func(b *testing.B) {
			x := tensor.New(d, 670_000)
			b.SetBytes(int64(x.Memory().Bytes))
			for b.Loop() {
				if tensor.FirstNotFinite(x) >= 0 {
					b.Fatal("zeros are finite")
				}
			}
		})
	}
}
