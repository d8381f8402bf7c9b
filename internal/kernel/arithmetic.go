package kernel

import (
	"fmt"
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Arithmetic is an operation of [Combine].
type Arithmetic uint8

// The operations.
const (
	Sums Arithmetic = iota
	Differences
	Products
	Quotients
)

// Single specifies which operand of [Combine] is one number, and not a vector.
type Single uint8

// Its values.
const (
	Neither Single = iota
	Left
	Right
)

// Combine sets dst[i] = a[i] ∘ b[i] for the n elements of each, where a or b is a single number if single says so. It
// panics unless t is float32 or float64.
func Combine(op Arithmetic, t tensor.DType, dst, a, b unsafe.Pointer, n int, single Single) {
	switch t {
	case tensor.Float32:
		combine[float32](op, dst, a, b, n, single)
	case tensor.Float64:
		combine[float64](op, dst, a, b, n, single)
	default:
		panic(fmt.Sprintf("kernel: Combine of %v", t))
	}
}

// SquareRoots sets dst[i] = √src[i] for the n elements of each. It panics unless t is float32 or float64.
func SquareRoots(t tensor.DType, dst, src unsafe.Pointer, n int) {
	switch t {
	case tensor.Float32:
		roots[float32](dst, src, n)
	case tensor.Float64:
		roots[float64](dst, src, n)
	default:
		panic(fmt.Sprintf("kernel: SquareRoots of %v", t))
	}
}

func combine[T float32 | float64](op Arithmetic, dst, a, b unsafe.Pointer, n int, single Single) {
	size := int(unsafe.Sizeof(T(0)))
	m := combineFast(op, size, dst, a, b, n, single)
	if m == n {
		return
	}
	dst = unsafe.Add(dst, m*size)
	if single != Left {
		a = unsafe.Add(a, m*size)
	}
	if single != Right {
		b = unsafe.Add(b, m*size)
	}
	combinePlain[T](op, dst, a, b, n-m, single)
}

// combinePlain is Combine in Go, the reference of the loops in assembly.
func combinePlain[T float32 | float64](op Arithmetic, dst, a, b unsafe.Pointer, n int, single Single) {
	i, j := 1, 1 // how far an operand moves per element
	switch single {
	case Left:
		i = 0
	case Right:
		j = 0
	}
	switch op {
	case Sums:
		for k := range n {
			*one[T](dst, k) = add(*one[T](a, i*k), *one[T](b, j*k))
		}
	case Differences:
		for k := range n {
			*one[T](dst, k) = sub(*one[T](a, i*k), *one[T](b, j*k))
		}
	case Products:
		for k := range n {
			*one[T](dst, k) = mul(*one[T](a, i*k), *one[T](b, j*k))
		}
	case Quotients:
		for k := range n {
			*one[T](dst, k) = div(*one[T](a, i*k), *one[T](b, j*k))
		}
	}
}

func roots[T float32 | float64](dst, src unsafe.Pointer, n int) {
	for i := rootsFast(int(unsafe.Sizeof(T(0))), dst, src, n); i < n; i++ {
		*one[T](dst, i) = sqrt(*one[T](src, i))
	}
}
