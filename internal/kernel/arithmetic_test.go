package kernel

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/lockstep-ml/lockstep/tensor"
)

// slowCombine is one element of Combine, as bits.
func slowCombine(op Arithmetic, t tensor.DType, a, b uint64) uint64 {
	switch {
	case isNaN(t, a):
		return a | quietBit(t)
	case isNaN(t, b):
		return b | quietBit(t)
	}
	var r uint64
	if t == tensor.Float64 {
		r = math.Float64bits(arithmeticOf(op, math.Float64frombits(a), math.Float64frombits(b)))
	} else {
		r = uint64(math.Float32bits(arithmeticOf(op, math.Float32frombits(uint32(a)), math.Float32frombits(uint32(b)))))
	}
	if isNaN(t, r) {
		return invalid(t)
	}
	return r
}

func arithmeticOf[T float32 | float64](op Arithmetic, a, b T) T {
	switch op {
	case Sums:
		return a + b
	case Differences:
		return a - b
	case Products:
		return a * b
	}
	return a / b
}

// slowRoot is one element of SquareRoots, as bits.
func slowRoot(t tensor.DType, x uint64) uint64 {
	if isNaN(t, x) {
		return x | quietBit(t)
	}
	var r uint64
	if t == tensor.Float64 {
		r = math.Float64bits(math.Sqrt(math.Float64frombits(x)))
	} else {
		r = uint64(math.Float32bits(float32(math.Sqrt(float64(math.Float32frombits(uint32(x)))))))
	}
	if isNaN(t, r) {
		return invalid(t)
	}
	return r
}

// TestArithmetic compares Combine and SquareRoots, in assembly and in Go, with their definitions.
func TestArithmetic(t *testing.T) {
	for _, dtype := range []tensor.DType{tensor.Float32, tensor.Float64} {
		for _, n := range vectorCounts {
			r := rand.New(rand.NewPCG(uint64(n), 5))
			a, b := newVector(dtype, n, n%4), newVector(dtype, n, 3)
			a.fill(r)
			b.fill(r)
			for op := Sums; op <= Quotients; op++ {
				for single := Neither; single <= Right; single++ {
					testCombine(t, op, dtype, a, b, single)
				}
			}
			want, got, inPlace := newVector(dtype, n, 1), newVector(dtype, n, 2), a.clone()
			for i := range n {
				want.set(i, slowRoot(dtype, a.get(i)))
			}
			SquareRoots(dtype, got.pointer(), a.pointer(), n)
			same(t, "SquareRoots", want, got)
			SquareRoots(dtype, inPlace.pointer(), inPlace.pointer(), n)
			same(t, "SquareRoots in place", want, inPlace)
		}
	}
}

func testCombine(t *testing.T, op Arithmetic, dtype tensor.DType, a, b vector, single Single) {
	t.Helper()
	want, got, plain := newVector(dtype, a.n, 1), newVector(dtype, a.n, 2), newVector(dtype, a.n, 3)
	for i := range a.n {
		x, y := i, i
		switch single {
		case Left:
			x = 0
		case Right:
			y = 0
		}
		want.set(i, slowCombine(op, dtype, a.get(x), b.get(y)))
	}
	Combine(op, dtype, got.pointer(), a.pointer(), b.pointer(), a.n, single)
	same(t, "Combine", want, got)
	if dtype == tensor.Float32 {
		combinePlain[float32](op, plain.pointer(), a.pointer(), b.pointer(), a.n, single)
	} else {
		combinePlain[float64](op, plain.pointer(), a.pointer(), b.pointer(), a.n, single)
	}
	same(t, "combinePlain", want, plain)
	if single != Left {
		inPlace := a.clone()
		Combine(op, dtype, inPlace.pointer(), inPlace.pointer(), b.pointer(), a.n, single)
		same(t, "Combine in place", want, inPlace)
	}
}
