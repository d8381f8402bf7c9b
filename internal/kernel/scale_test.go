package kernel

import (
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
)

// slowScale is one element of scaleBy, as bits.
func slowScale(op scaling, t tensor.DType, a, b uint64) uint64 {
	switch {
	case isNaN(t, a):
		return a | quietBit(t)
	case isNaN(t, b):
		return b | quietBit(t)
	}
	var r uint64
	if t == tensor.Float64 {
		r = math.Float64bits(scaled(op, math.Float64frombits(a), math.Float64frombits(b)))
	} else {
		r = uint64(math.Float32bits(scaled(op, math.Float32frombits(uint32(a)), math.Float32frombits(uint32(b)))))
	}
	if isNaN(t, r) {
		return invalid(t)
	}
	return r
}

func scaled[T float32 | float64](op scaling, a, b T) T {
	if op == times {
		return a * b
	}
	return a / b
}

// TestScaleBy compares scaleBy, in assembly and in Go, with its definition.
func TestScaleBy(t *testing.T) {
	for _, n := range vectorCounts {
		testScaleBy[float32](t, tensor.Float32, n)
		testScaleBy[float64](t, tensor.Float64, n)
	}
}

func testScaleBy[T float32 | float64](t *testing.T, dtype tensor.DType, n int) {
	t.Helper()
	r := rand.New(rand.NewPCG(uint64(n), 5))
	a, number := newVector(dtype, n, n%4), newVector(dtype, 1, 3)
	a.fill(r)
	number.fill(r)
	by := *(*T)(unsafe.Pointer(number.pointer()))
	for _, op := range []scaling{times, over} {
		want, got, plain, inPlace := newVector(dtype, n, 1), newVector(dtype, n, 2), newVector(dtype, n, 3), a.clone()
		for i := range n {
			want.set(i, slowScale(op, dtype, a.get(i), number.get(0)))
		}
		scaleBy(op, got.pointer(), a.pointer(), n, by)
		same(t, "scaleBy", want, got)
		scalePlain(op, plain.pointer(), a.pointer(), n, by)
		same(t, "scalePlain", want, plain)
		scaleBy(op, inPlace.pointer(), inPlace.pointer(), n, by)
		same(t, "scaleBy in place", want, inPlace)
	}
}
