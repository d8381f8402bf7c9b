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
		r[0] = add(w[0], x[0])
		r[1] = add(w[1], x[1])
		r[2] = add(w[2], x[2])
		r[3] = add(w[3], x[3])
		r[4] = add(w[4], x[4])
		r[5] = add(w[5], x[5])
		r[6] = add(w[6], x[6])
		r[7] = add(w[7], x[7])
	}
	for ; i < n; i++ {
		*one[T](dst, i) = add(*one[T](a, i), *one[T](b, i))
	}
}

func sum3[T number](dst, a, b, c unsafe.Pointer, n int) {
	i := 0
	for ; i+lanes <= n; i += lanes {
		r, w, x, y := at[T](dst, i), at[T](a, i), at[T](b, i), at[T](c, i)
		r[0] = add(add(w[0], x[0]), y[0])
		r[1] = add(add(w[1], x[1]), y[1])
		r[2] = add(add(w[2], x[2]), y[2])
		r[3] = add(add(w[3], x[3]), y[3])
		r[4] = add(add(w[4], x[4]), y[4])
		r[5] = add(add(w[5], x[5]), y[5])
		r[6] = add(add(w[6], x[6]), y[6])
		r[7] = add(add(w[7], x[7]), y[7])
	}
	for ; i < n; i++ {
		*one[T](dst, i) = add(add(*one[T](a, i), *one[T](b, i)), *one[T](c, i))
	}
}

func sum4[T number](dst, a, b, c, d unsafe.Pointer, n int) {
	i := 0
	for ; i+lanes <= n; i += lanes {
		r, w, x, y, z := at[T](dst, i), at[T](a, i), at[T](b, i), at[T](c, i), at[T](d, i)
		r[0] = add(add(w[0], x[0]), add(y[0], z[0]))
		r[1] = add(add(w[1], x[1]), add(y[1], z[1]))
		r[2] = add(add(w[2], x[2]), add(y[2], z[2]))
		r[3] = add(add(w[3], x[3]), add(y[3], z[3]))
		r[4] = add(add(w[4], x[4]), add(y[4], z[4]))
		r[5] = add(add(w[5], x[5]), add(y[5], z[5]))
		r[6] = add(add(w[6], x[6]), add(y[6], z[6]))
		r[7] = add(add(w[7], x[7]), add(y[7], z[7]))
	}
	for ; i < n; i++ {
		*one[T](dst, i) = add(add(*one[T](a, i), *one[T](b, i)), add(*one[T](c, i), *one[T](d, i)))
	}
}

func prod2[T number](dst, a, b unsafe.Pointer, n int) {
	i := 0
	for ; i+lanes <= n; i += lanes {
		r, w, x := at[T](dst, i), at[T](a, i), at[T](b, i)
		r[0] = mul(w[0], x[0])
		r[1] = mul(w[1], x[1])
		r[2] = mul(w[2], x[2])
		r[3] = mul(w[3], x[3])
		r[4] = mul(w[4], x[4])
		r[5] = mul(w[5], x[5])
		r[6] = mul(w[6], x[6])
		r[7] = mul(w[7], x[7])
	}
	for ; i < n; i++ {
		*one[T](dst, i) = mul(*one[T](a, i), *one[T](b, i))
	}
}

func prod3[T number](dst, a, b, c unsafe.Pointer, n int) {
	i := 0
	for ; i+lanes <= n; i += lanes {
		r, w, x, y := at[T](dst, i), at[T](a, i), at[T](b, i), at[T](c, i)
		r[0] = mul(mul(w[0], x[0]), y[0])
		r[1] = mul(mul(w[1], x[1]), y[1])
		r[2] = mul(mul(w[2], x[2]), y[2])
		r[3] = mul(mul(w[3], x[3]), y[3])
		r[4] = mul(mul(w[4], x[4]), y[4])
		r[5] = mul(mul(w[5], x[5]), y[5])
		r[6] = mul(mul(w[6], x[6]), y[6])
		r[7] = mul(mul(w[7], x[7]), y[7])
	}
	for ; i < n; i++ {
		*one[T](dst, i) = mul(mul(*one[T](a, i), *one[T](b, i)), *one[T](c, i))
	}
}

func prod4[T number](dst, a, b, c, d unsafe.Pointer, n int) {
	i := 0
	for ; i+lanes <= n; i += lanes {
		r, w, x, y, z := at[T](dst, i), at[T](a, i), at[T](b, i), at[T](c, i), at[T](d, i)
		r[0] = mul(mul(w[0], x[0]), mul(y[0], z[0]))
		r[1] = mul(mul(w[1], x[1]), mul(y[1], z[1]))
		r[2] = mul(mul(w[2], x[2]), mul(y[2], z[2]))
		r[3] = mul(mul(w[3], x[3]), mul(y[3], z[3]))
		r[4] = mul(mul(w[4], x[4]), mul(y[4], z[4]))
		r[5] = mul(mul(w[5], x[5]), mul(y[5], z[5]))
		r[6] = mul(mul(w[6], x[6]), mul(y[6], z[6]))
		r[7] = mul(mul(w[7], x[7]), mul(y[7], z[7]))
	}
	for ; i < n; i++ {
		*one[T](dst, i) = mul(mul(*one[T](a, i), *one[T](b, i)), mul(*one[T](c, i), *one[T](d, i)))
	}
}

func min2[T number](dst, a, b unsafe.Pointer, n int) {
	i := 0
	for ; i+lanes <= n; i += lanes {
		r, w, x := at[T](dst, i), at[T](a, i), at[T](b, i)
		r[0] = minOf(w[0], x[0])
		r[1] = minOf(w[1], x[1])
		r[2] = minOf(w[2], x[2])
		r[3] = minOf(w[3], x[3])
		r[4] = minOf(w[4], x[4])
		r[5] = minOf(w[5], x[5])
		r[6] = minOf(w[6], x[6])
		r[7] = minOf(w[7], x[7])
	}
	for ; i < n; i++ {
		*one[T](dst, i) = minOf(*one[T](a, i), *one[T](b, i))
	}
}

func min3[T number](dst, a, b, c unsafe.Pointer, n int) {
	i := 0
	for ; i+lanes <= n; i += lanes {
		r, w, x, y := at[T](dst, i), at[T](a, i), at[T](b, i), at[T](c, i)
		r[0] = minOf(minOf(w[0], x[0]), y[0])
		r[1] = minOf(minOf(w[1], x[1]), y[1])
		r[2] = minOf(minOf(w[2], x[2]), y[2])
		r[3] = minOf(minOf(w[3], x[3]), y[3])
		r[4] = minOf(minOf(w[4], x[4]), y[4])
		r[5] = minOf(minOf(w[5], x[5]), y[5])
		r[6] = minOf(minOf(w[6], x[6]), y[6])
		r[7] = minOf(minOf(w[7], x[7]), y[7])
	}
	for ; i < n; i++ {
		*one[T](dst, i) = minOf(minOf(*one[T](a, i), *one[T](b, i)), *one[T](c, i))
	}
}

func min4[T number](dst, a, b, c, d unsafe.Pointer, n int) {
	i := 0
	for ; i+lanes <= n; i += lanes {
		r, w, x, y, z := at[T](dst, i), at[T](a, i), at[T](b, i), at[T](c, i), at[T](d, i)
		r[0] = minOf(minOf(w[0], x[0]), minOf(y[0], z[0]))
		r[1] = minOf(minOf(w[1], x[1]), minOf(y[1], z[1]))
		r[2] = minOf(minOf(w[2], x[2]), minOf(y[2], z[2]))
		r[3] = minOf(minOf(w[3], x[3]), minOf(y[3], z[3]))
		r[4] = minOf(minOf(w[4], x[4]), minOf(y[4], z[4]))
		r[5] = minOf(minOf(w[5], x[5]), minOf(y[5], z[5]))
		r[6] = minOf(minOf(w[6], x[6]), minOf(y[6], z[6]))
		r[7] = minOf(minOf(w[7], x[7]), minOf(y[7], z[7]))
	}
	for ; i < n; i++ {
		*one[T](dst, i) = minOf(minOf(*one[T](a, i), *one[T](b, i)), minOf(*one[T](c, i), *one[T](d, i)))
	}
}

func max2[T number](dst, a, b unsafe.Pointer, n int) {
	i := 0
	for ; i+lanes <= n; i += lanes {
		r, w, x := at[T](dst, i), at[T](a, i), at[T](b, i)
		r[0] = maxOf(w[0], x[0])
		r[1] = maxOf(w[1], x[1])
		r[2] = maxOf(w[2], x[2])
		r[3] = maxOf(w[3], x[3])
		r[4] = maxOf(w[4], x[4])
		r[5] = maxOf(w[5], x[5])
		r[6] = maxOf(w[6], x[6])
		r[7] = maxOf(w[7], x[7])
	}
	for ; i < n; i++ {
		*one[T](dst, i) = maxOf(*one[T](a, i), *one[T](b, i))
	}
}

func max3[T number](dst, a, b, c unsafe.Pointer, n int) {
	i := 0
	for ; i+lanes <= n; i += lanes {
		r, w, x, y := at[T](dst, i), at[T](a, i), at[T](b, i), at[T](c, i)
		r[0] = maxOf(maxOf(w[0], x[0]), y[0])
		r[1] = maxOf(maxOf(w[1], x[1]), y[1])
		r[2] = maxOf(maxOf(w[2], x[2]), y[2])
		r[3] = maxOf(maxOf(w[3], x[3]), y[3])
		r[4] = maxOf(maxOf(w[4], x[4]), y[4])
		r[5] = maxOf(maxOf(w[5], x[5]), y[5])
		r[6] = maxOf(maxOf(w[6], x[6]), y[6])
		r[7] = maxOf(maxOf(w[7], x[7]), y[7])
	}
	for ; i < n; i++ {
		*one[T](dst, i) = maxOf(maxOf(*one[T](a, i), *one[T](b, i)), *one[T](c, i))
	}
}

func max4[T number](dst, a, b, c, d unsafe.Pointer, n int) {
	i := 0
	for ; i+lanes <= n; i += lanes {
		r, w, x, y, z := at[T](dst, i), at[T](a, i), at[T](b, i), at[T](c, i), at[T](d, i)
		r[0] = maxOf(maxOf(w[0], x[0]), maxOf(y[0], z[0]))
		r[1] = maxOf(maxOf(w[1], x[1]), maxOf(y[1], z[1]))
		r[2] = maxOf(maxOf(w[2], x[2]), maxOf(y[2], z[2]))
		r[3] = maxOf(maxOf(w[3], x[3]), maxOf(y[3], z[3]))
		r[4] = maxOf(maxOf(w[4], x[4]), maxOf(y[4], z[4]))
		r[5] = maxOf(maxOf(w[5], x[5]), maxOf(y[5], z[5]))
		r[6] = maxOf(maxOf(w[6], x[6]), maxOf(y[6], z[6]))
		r[7] = maxOf(maxOf(w[7], x[7]), maxOf(y[7], z[7]))
	}
	for ; i < n; i++ {
		*one[T](dst, i) = maxOf(maxOf(*one[T](a, i), *one[T](b, i)), maxOf(*one[T](c, i), *one[T](d, i)))
	}
}
