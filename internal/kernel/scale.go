package kernel

import (
	"fmt"
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Scale sets dst[i] = src[i] / divisor, truly divided and rounded once (half-width numbers in float32). It panics if t
// is not a floating-point type: the caller defines the mean of integers.
func Scale(t tensor.DType, dst, src unsafe.Pointer, n, divisor int) {
	switch t {
	case tensor.Float32:
		divide[float32](dst, src, n, divisor)
	case tensor.Float64:
		divide[float64](dst, src, n, divisor)
	case tensor.Float16, tensor.BFloat16:
		op, by := division[float32](divisor)
		scaleHalf(op, t, dst, src, n, by)
	default:
		panic(fmt.Sprintf("kernel: Scale of %v", t))
	}
}

// Multiply sets x[i] = x[i] * factor for the n elements of x. The factor is rounded to their type first; half-width
// numbers are multiplied in float32. It panics if t is not a floating-point type.
func Multiply(t tensor.DType, x unsafe.Pointer, n int, factor float64) {
	switch t {
	case tensor.Float32:
		scaleBy(times, x, x, n, float32(factor))
	case tensor.Float64:
		scaleBy(times, x, x, n, factor)
	case tensor.Float16, tensor.BFloat16:
		scaleHalf(times, t, x, x, n, float32(factor))
	default:
		panic(fmt.Sprintf("kernel: Multiply of %v", t))
	}
}

// divide sets dst[i] = src[i] / divisor.
func divide[T float32 | float64](dst, src unsafe.Pointer, n, divisor int) {
	op, by := division[T](divisor)
	scaleBy(op, dst, src, n, by)
}

// division returns the operation that divides by a positive number. Where that is a power of two, multiplying by its
// inverse is exact in the same way and gives the same bits, many times faster.
func division[T float32 | float64](divisor int) (scaling, T) {
	if divisor&(divisor-1) == 0 {
		return times, 1 / T(divisor)
	}
	return over, T(divisor)
}

// scaling is an operation of a vector and one number.
type scaling uint8

const (
	times scaling = iota
	over
)

// scaleBy sets dst[i] = src[i] ∘ by for the n elements of each.
func scaleBy[T float32 | float64](op scaling, dst, src unsafe.Pointer, n int, by T) {
	size := int(unsafe.Sizeof(by))
	if m := scaleFast(op, size, dst, src, unsafe.Pointer(&by), n); m < n {
		scalePlain(op, unsafe.Add(dst, m*size), unsafe.Add(src, m*size), n-m, by)
	}
}

// scalePlain is scaleBy in Go, the reference of the loops in assembly.
func scalePlain[T float32 | float64](op scaling, dst, src unsafe.Pointer, n int, by T) {
	for i := range n {
		if op == times {
			*one[T](dst, i) = mul(*one[T](src, i), by)
		} else {
			*one[T](dst, i) = div(*one[T](src, i), by)
		}
	}
}
