package product

import (
	"math"
	"unsafe"
)

// plain has kernels in Go, of 4 rows and 8 columns.
var plain = set{
	f32: kernels{rows: 4, wide: 8, multiply: plainKernel(fma32)},
	f64: kernels{rows: 4, wide: 8, multiply: plainKernel(math.FMA)},
}

// plainKernel returns the kernel that a fused multiply-add makes.
func plainKernel[T Float](fma func(x, y, z T) T) func(rows, vectors int, x *arguments) {
	size := unsafe.Sizeof(*new(T))
	return func(rows, vectors int, x *arguments) {
		for i := range rows {
			for j := range 4 * vectors {
				a, b := unsafe.Add(x.a, i*x.row), unsafe.Add(x.b, uintptr(j)*size)
				sum := T(0)
				for s := range x.segments {
					for k := range x.steps {
						step := s*x.steps + k
						left, right := step*x.column+s*x.segmentStep, step*x.right+s*x.rightStep
						sum = fma(*(*T)(unsafe.Add(a, left)), *(*T)(unsafe.Add(b, right)), sum)
					}
				}
				c := (*T)(unsafe.Add(x.c, i*x.result+j*int(size)))
				if x.add != 0 {
					sum = *c + sum
				}
				*c = sum
			}
		}
	}
}

// fma32 returns x·y + z, rounded once. The product of two float32 is exact in float64. Their sum with z is rounded to
// odd there: if it is not exact, its last bit is 1. Then rounding it once more gives what one rounding gives
// (Boldo and Melquiond, Emulation of FMA and correctly rounded sums).
func fma32(x, y, z float32) float32 {
	p, c := float64(x)*float64(y), float64(z)
	sum := p + c
	// The error of the sum is exact (Knuth's TwoSum), and NaN if the sum is not finite.
	t := sum - p
	err := (p - (sum - t)) + (c - t)
	bits := math.Float64bits(sum)
	if (err > 0 || err < 0) && bits&1 == 0 {
		if (err > 0) == (sum > 0) {
			bits++
		} else {
			bits--
		}
	}
	return float32(math.Float64frombits(bits))
}
