package elementwise

import (
	"unsafe"

	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
)

type float interface{ float32 | float64 }

// typeOf returns the type of the elements.
func typeOf[T float]() tensor.DType {
	if unsafe.Sizeof(T(0)) == 4 {
		return tensor.Float32
	}
	return tensor.Float64
}

// of returns n elements as a slice.
func of[T any](p unsafe.Pointer, n int) []T { return unsafe.Slice((*T)(p), n) }

// copyElements copies n elements of so many bytes, or one of them n times.
func copyElements(dst, src unsafe.Pointer, bytes, n int, single bool) {
	if !single {
		copy(of[byte](dst, n*bytes), of[byte](src, n*bytes))
		return
	}
	switch bytes {
	case 1:
		repeat[uint8](dst, src, n)
	case 2:
		repeat[uint16](dst, src, n)
	case 4:
		repeat[uint32](dst, src, n)
	case 8:
		repeat[uint64](dst, src, n)
	}
}

func repeat[T any](dst, src unsafe.Pointer, n int) {
	d, x := of[T](dst, n), *(*T)(src)
	for i := range d {
		d[i] = x
	}
}

func convertElements(dst, src unsafe.Pointer, to, from tensor.DType, n int) {
	switch {
	case to == tensor.Float64 && from == tensor.Float32:
		cast[float64, float32](dst, src, n)
	case to == tensor.Float32 && from == tensor.Float64:
		cast[float32, float64](dst, src, n)
	default:
		kernel.Convert(to, from, dst, src, n)
	}
}

func cast[To, From float](dst, src unsafe.Pointer, n int) {
	d, s := of[To](dst, n), of[From](src, n)
	for i, x := range s {
		d[i] = To(x)
	}
}

// plain runs the operations on floating-point numbers that have no loop in internal/kernel. c is read by choose only.
func plain[T float](op operation, dst, a, b, c unsafe.Pointer, n int) {
	x := of[T](a, n)
	switch op {
	case negative:
		minus := T(-1) // times -1 is exact
		kernel.Combine(kernel.Products, typeOf[T](), dst, a, unsafe.Pointer(&minus), n, kernel.Right)
	case absolute:
		d := of[T](dst, n)
		for i, x := range x {
			if x < 0 {
				x = -x
			}
			d[i] = x
		}
	case sign:
		d := of[T](dst, n)
		for i, x := range x {
			switch {
			case x < 0:
				d[i] = -1
			case x > 0:
				d[i] = 1
			default:
				d[i] = 0
			}
		}
	case finite:
		d := of[bool](dst, n)
		for i, x := range x {
			d[i] = x-x == 0
		}
	case equal:
		compare(dst, x, of[T](b, n), func(a, b T) bool { return a == b })
	case different:
		compare(dst, x, of[T](b, n), func(a, b T) bool { return a != b })
	case less:
		compare(dst, x, of[T](b, n), func(a, b T) bool { return a < b })
	case atMost:
		compare(dst, x, of[T](b, n), func(a, b T) bool { return a <= b })
	case choose:
		pick[T](dst, a, b, c, n)
	}
}

func compare[T float](dst unsafe.Pointer, a, b []T, f func(a, b T) bool) {
	d := of[bool](dst, len(a))
	for i := range d {
		d[i] = f(a[i], b[i])
	}
}

func pick[T any](dst, condition, a, b unsafe.Pointer, n int) {
	d, c, x, y := of[T](dst, n), of[bool](condition, n), of[T](a, n), of[T](b, n)
	for i := range d {
		if c[i] {
			d[i] = x[i]
		} else {
			d[i] = y[i]
		}
	}
}

// logical runs the operations on booleans.
func logical(op operation, dst, a, b, c unsafe.Pointer, n int) {
	d, x := of[bool](dst, n), of[bool](a, n)
	switch op {
	case both:
		for i, y := range of[bool](b, n) {
			d[i] = x[i] && y
		}
	case either:
		for i, y := range of[bool](b, n) {
			d[i] = x[i] || y
		}
	case not:
		for i := range d {
			d[i] = !x[i]
		}
	case choose:
		pick[bool](dst, a, b, c, n)
	}
}
