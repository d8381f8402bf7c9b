package kernel

import (
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
)

// table holds the loops by operation and element type; types that are not numeric have none. It is never changed.
var table = fastest(loopTable{
	Sum:  genericLoops(Sum),
	Prod: genericLoops(Prod),
	Min:  genericLoops(Min),
	Max:  genericLoops(Max),
})

type loopTable [opCount][tensor.String]loops

func genericLoops(op Op) [tensor.String]loops {
	return [tensor.String]loops{
		tensor.Int8:     loopsOf[int8](op),
		tensor.Int16:    loopsOf[int16](op),
		tensor.Int32:    loopsOf[int32](op),
		tensor.Int64:    loopsOf[int64](op),
		tensor.Uint8:    loopsOf[uint8](op),
		tensor.Uint16:   loopsOf[uint16](op),
		tensor.Uint32:   loopsOf[uint32](op),
		tensor.Uint64:   loopsOf[uint64](op),
		tensor.Float16:  halfLoops(op, tensor.Float16),
		tensor.BFloat16: halfLoops(op, tensor.BFloat16),
		tensor.Float32:  loopsOf[float32](op),
		tensor.Float64:  loopsOf[float64](op),
	}
}

type number interface {
	int8 | int16 | int32 | int64 | uint8 | uint16 | uint32 | uint64 | float32 | float64
}

func loopsOf[T number](op Op) loops {
	return [opCount]loops{
		Sum:  {sum2[T], sum3[T], sum4[T]},
		Prod: {prod2[T], prod3[T], prod4[T]},
		Min:  {min2[T], min3[T], min4[T]},
		Max:  {max2[T], max3[T], max4[T]},
	}[op]
}

// lanes is how many elements a loop handles per turn: arrays of fixed length need no bounds checks.
const lanes = 8

// at returns the lanes elements of p that start at element i.
func at[T number](p unsafe.Pointer, i int) *[lanes]T {
	var zero T
	return (*[lanes]T)(unsafe.Add(p, i*int(unsafe.Sizeof(zero))))
}

// one returns element i of p.
func one[T number](p unsafe.Pointer, i int) *T {
	var zero T
	return (*T)(unsafe.Add(p, i*int(unsafe.Sizeof(zero))))
}

// The loops. Each equals: for i := range n { dst[i] = … }, with the expression of its last lines.

func sum2[T number](dst, a, b unsafe.Pointer, n int) {
	i := 0
	for ; i+lanes <= n; i += lanes {
		r, w, x := at[T](dst, i), at[T](a, i), at[T](b, i)
		r[0] = w[0] + x[0]
		r[1] = w[1] + x[1]
		r[2] = w[2] + x[2]
		r[3] = w[3] + x[3]
		r[4] = w[4] + x[4]
		r[5] = w[5] + x[5]
		r[6] = w[6] + x[6]
		r[7] = w[7] + x[7]
	}
	for ; i < n; i++ {
		*one[T](dst, i) = *one[T](a, i) + *one[T](b, i)
	}
}

func sum3[T number](dst, a, b, c unsafe.Pointer, n int) {
	i := 0
	for ; i+lanes <= n; i += lanes {
		r, w, x, y := at[T](dst, i), at[T](a, i), at[T](b, i), at[T](c, i)
		r[0] = (w[0] + x[0]) + y[0]
		r[1] = (w[1] + x[1]) + y[1]
		r[2] = (w[2] + x[2]) + y[2]
		r[3] = (w[3] + x[3]) + y[3]
		r[4] = (w[4] + x[4]) + y[4]
		r[5] = (w[5] + x[5]) + y[5]
		r[6] = (w[6] + x[6]) + y[6]
		r[7] = (w[7] + x[7]) + y[7]
	}
	for ; i < n; i++ {
		*one[T](dst, i) = (*one[T](a, i) + *one[T](b, i)) + *one[T](c, i)
	}
}

func sum4[T number](dst, a, b, c, d unsafe.Pointer, n int) {
	i := 0
	for ; i+lanes <= n; i += lanes {
		r, w, x, y, z := at[T](dst, i), at[T](a, i), at[T](b, i), at[T](c, i), at[T](d, i)
		r[0] = (w[0] + x[0]) + (y[0] + z[0])
		r[1] = (w[1] + x[1]) + (y[1] + z[1])
		r[2] = (w[2] + x[2]) + (y[2] + z[2])
		r[3] = (w[3] + x[3]) + (y[3] + z[3])
		r[4] = (w[4] + x[4]) + (y[4] + z[4])
		r[5] = (w[5] + x[5]) + (y[5] + z[5])
		r[6] = (w[6] + x[6]) + (y[6] + z[6])
		r[7] = (w[7] + x[7]) + (y[7] + z[7])
	}
	for ; i < n; i++ {
		*one[T](dst, i) = (*one[T](a, i) + *one[T](b, i)) + (*one[T](c, i) + *one[T](d, i))
	}
}

func prod2[T number](dst, a, b unsafe.Pointer, n int) {
	i := 0
	for ; i+lanes <= n; i += lanes {
		r, w, x := at[T](dst, i), at[T](a, i), at[T](b, i)
		r[0] = w[0] * x[0]
		r[1] = w[1] * x[1]
		r[2] = w[2] * x[2]
		r[3] = w[3] * x[3]
		r[4] = w[4] * x[4]
		r[5] = w[5] * x[5]
		r[6] = w[6] * x[6]
		r[7] = w[7] * x[7]
	}
	for ; i < n; i++ {
		*one[T](dst, i) = *one[T](a, i) * *one[T](b, i)
	}
}

func prod3[T number](dst, a, b, c unsafe.Pointer, n int) {
	i := 0
	for ; i+lanes <= n; i += lanes {
		r, w, x, y := at[T](dst, i), at[T](a, i), at[T](b, i), at[T](c, i)
		r[0] = (w[0] * x[0]) * y[0]
		r[1] = (w[1] * x[1]) * y[1]
		r[2] = (w[2] * x[2]) * y[2]
		r[3] = (w[3] * x[3]) * y[3]
		r[4] = (w[4] * x[4]) * y[4]
		r[5] = (w[5] * x[5]) * y[5]
		r[6] = (w[6] * x[6]) * y[6]
		r[7] = (w[7] * x[7]) * y[7]
	}
	for ; i < n; i++ {
		*one[T](dst, i) = (*one[T](a, i) * *one[T](b, i)) * *one[T](c, i)
	}
}

func prod4[T number](dst, a, b, c, d unsafe.Pointer, n int) {
	i := 0
	for ; i+lanes <= n; i += lanes {
		r, w, x, y, z := at[T](dst, i), at[T](a, i), at[T](b, i), at[T](c, i), at[T](d, i)
		r[0] = (w[0] * x[0]) * (y[0] * z[0])
		r[1] = (w[1] * x[1]) * (y[1] * z[1])
		r[2] = (w[2] * x[2]) * (y[2] * z[2])
		r[3] = (w[3] * x[3]) * (y[3] * z[3])
		r[4] = (w[4] * x[4]) * (y[4] * z[4])
		r[5] = (w[5] * x[5]) * (y[5] * z[5])
		r[6] = (w[6] * x[6]) * (y[6] * z[6])
		r[7] = (w[7] * x[7]) * (y[7] * z[7])
	}
	for ; i < n; i++ {
		*one[T](dst, i) = (*one[T](a, i) * *one[T](b, i)) * (*one[T](c, i) * *one[T](d, i))
	}
}

func min2[T number](dst, a, b unsafe.Pointer, n int) {
	i := 0
	for ; i+lanes <= n; i += lanes {
		r, w, x := at[T](dst, i), at[T](a, i), at[T](b, i)
		r[0] = min(w[0], x[0])
		r[1] = min(w[1], x[1])
		r[2] = min(w[2], x[2])
		r[3] = min(w[3], x[3])
		r[4] = min(w[4], x[4])
		r[5] = min(w[5], x[5])
		r[6] = min(w[6], x[6])
		r[7] = min(w[7], x[7])
	}
	for ; i < n; i++ {
		*one[T](dst, i) = min(*one[T](a, i), *one[T](b, i))
	}
}

func min3[T number](dst, a, b, c unsafe.Pointer, n int) {
	i := 0
	for ; i+lanes <= n; i += lanes {
		r, w, x, y := at[T](dst, i), at[T](a, i), at[T](b, i), at[T](c, i)
		r[0] = min(min(w[0], x[0]), y[0])
		r[1] = min(min(w[1], x[1]), y[1])
		r[2] = min(min(w[2], x[2]), y[2])
		r[3] = min(min(w[3], x[3]), y[3])
		r[4] = min(min(w[4], x[4]), y[4])
		r[5] = min(min(w[5], x[5]), y[5])
		r[6] = min(min(w[6], x[6]), y[6])
		r[7] = min(min(w[7], x[7]), y[7])
	}
	for ; i < n; i++ {
		*one[T](dst, i) = min(min(*one[T](a, i), *one[T](b, i)), *one[T](c, i))
	}
}

func min4[T number](dst, a, b, c, d unsafe.Pointer, n int) {
	i := 0
	for ; i+lanes <= n; i += lanes {
		r, w, x, y, z := at[T](dst, i), at[T](a, i), at[T](b, i), at[T](c, i), at[T](d, i)
		r[0] = min(min(w[0], x[0]), min(y[0], z[0]))
		r[1] = min(min(w[1], x[1]), min(y[1], z[1]))
		r[2] = min(min(w[2], x[2]), min(y[2], z[2]))
		r[3] = min(min(w[3], x[3]), min(y[3], z[3]))
		r[4] = min(min(w[4], x[4]), min(y[4], z[4]))
		r[5] = min(min(w[5], x[5]), min(y[5], z[5]))
		r[6] = min(min(w[6], x[6]), min(y[6], z[6]))
		r[7] = min(min(w[7], x[7]), min(y[7], z[7]))
	}
	for ; i < n; i++ {
		*one[T](dst, i) = min(min(*one[T](a, i), *one[T](b, i)), min(*one[T](c, i), *one[T](d, i)))
	}
}

func max2[T number](dst, a, b unsafe.Pointer, n int) {
	i := 0
	for ; i+lanes <= n; i += lanes {
		r, w, x := at[T](dst, i), at[T](a, i), at[T](b, i)
		r[0] = max(w[0], x[0])
		r[1] = max(w[1], x[1])
		r[2] = max(w[2], x[2])
		r[3] = max(w[3], x[3])
		r[4] = max(w[4], x[4])
		r[5] = max(w[5], x[5])
		r[6] = max(w[6], x[6])
		r[7] = max(w[7], x[7])
	}
	for ; i < n; i++ {
		*one[T](dst, i) = max(*one[T](a, i), *one[T](b, i))
	}
}

func max3[T number](dst, a, b, c unsafe.Pointer, n int) {
	i := 0
	for ; i+lanes <= n; i += lanes {
		r, w, x, y := at[T](dst, i), at[T](a, i), at[T](b, i), at[T](c, i)
		r[0] = max(max(w[0], x[0]), y[0])
		r[1] = max(max(w[1], x[1]), y[1])
		r[2] = max(max(w[2], x[2]), y[2])
		r[3] = max(max(w[3], x[3]), y[3])
		r[4] = max(max(w[4], x[4]), y[4])
		r[5] = max(max(w[5], x[5]), y[5])
		r[6] = max(max(w[6], x[6]), y[6])
		r[7] = max(max(w[7], x[7]), y[7])
	}
	for ; i < n; i++ {
		*one[T](dst, i) = max(max(*one[T](a, i), *one[T](b, i)), *one[T](c, i))
	}
}

func max4[T number](dst, a, b, c, d unsafe.Pointer, n int) {
	i := 0
	for ; i+lanes <= n; i += lanes {
		r, w, x, y, z := at[T](dst, i), at[T](a, i), at[T](b, i), at[T](c, i), at[T](d, i)
		r[0] = max(max(w[0], x[0]), max(y[0], z[0]))
		r[1] = max(max(w[1], x[1]), max(y[1], z[1]))
		r[2] = max(max(w[2], x[2]), max(y[2], z[2]))
		r[3] = max(max(w[3], x[3]), max(y[3], z[3]))
		r[4] = max(max(w[4], x[4]), max(y[4], z[4]))
		r[5] = max(max(w[5], x[5]), max(y[5], z[5]))
		r[6] = max(max(w[6], x[6]), max(y[6], z[6]))
		r[7] = max(max(w[7], x[7]), max(y[7], z[7]))
	}
	for ; i < n; i++ {
		*one[T](dst, i) = max(max(*one[T](a, i), *one[T](b, i)), max(*one[T](c, i), *one[T](d, i)))
	}
}

// divide sets dst[i] = src[i] / divisor. Where divisor is a power of two, multiplying by its inverse is exact in the
// same way and gives the same bits, many times faster.
func divide[T float32 | float64](dst, src unsafe.Pointer, n, divisor int) {
	d := T(divisor)
	for i := divideFast(int(unsafe.Sizeof(d)), dst, src, n, divisor); i < n; i++ {
		*one[T](dst, i) = *one[T](src, i) / d
	}
}

// powerOfTwo reports whether n, positive, is one.
func powerOfTwo(n int) bool { return n&(n-1) == 0 }
