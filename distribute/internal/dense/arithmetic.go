package dense

import (
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute/internal/kinds"
	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
)

// NotNumeric returns the error of a sum of tensors of dtype d.
func NotNumeric(d tensor.DType) error {
	return kinds.Errorf(kinds.Invalid, "dtype %v is not in the list of allowed values for a sum: want an integer or "+
		"floating-point type", d)
}

// Add returns a + b, of one dtype and shape.
func Add(a, b *tensor.Tensor) *tensor.Tensor {
	out := tensor.New(a.DType(), a.Shape()...)
	if a.Len() > 0 {
		kernel.Reduce(kernel.Sum, a.DType(), out.Memory().Ptr, a.Memory().Ptr, b.Memory().Ptr, a.Len())
	}
	return out
}

// Negate returns -t; integers wrap around.
func Negate(t *tensor.Tensor) *tensor.Tensor {
	if t.DType().IsInteger() {
		return numbersOf(t.DType()).negate(t)
	}
	xs := t.Float64s()
	return fromFloats(t.DType(), t.Shape(), func(i int) float64 { return -xs[i] })
}

// Convert returns t in another numeric dtype. Conversion to an integer dtype truncates.
func Convert(t *tensor.Tensor, d tensor.DType) *tensor.Tensor {
	xs := t.Float64s()
	if d.IsInteger() {
		return numbersOf(d).truncate(xs, t.Shape())
	}
	return fromFloats(d, t.Shape(), func(i int) float64 { return xs[i] })
}

// Divide returns t divided by n. Floating-point types keep their dtype; int32, int64, uint32 and uint64 become
// float64; smaller integers become float32.
func Divide(t *tensor.Tensor, n int) *tensor.Tensor {
	switch t.DType() {
	case tensor.Float16, tensor.BFloat16, tensor.Float32, tensor.Float64:
		if n == 0 {
			return divideByZero(t)
		}
		out := tensor.New(t.DType(), t.Shape()...)
		if out.Len() > 0 {
			kernel.Scale(t.DType(), out.Memory().Ptr, t.Memory().Ptr, t.Len(), n)
		}
		return out
	case tensor.Int8, tensor.Int16, tensor.Uint8, tensor.Uint16:
		out := tensor.New(tensor.Float32, t.Shape()...)
		for i, x := range t.Float64s() {
			tensor.Data[float32](out)[i] = float32(x) / float32(n)
		}
		return out
	}
	out := tensor.New(tensor.Float64, t.Shape()...)
	for i, x := range t.Float64s() {
		tensor.Data[float64](out)[i] = x / float64(n)
	}
	return out
}

// divideByZero returns the mean of no elements: NaN, or an infinity where the sum is not 0.
func divideByZero(t *tensor.Tensor) *tensor.Tensor {
	xs, zero := t.Float64s(), 0.0
	return fromFloats(t.DType(), t.Shape(), func(i int) float64 { return xs[i] / zero })
}

// fromFloats returns a tensor of a floating-point dtype whose element i is f(i), rounded.
func fromFloats(d tensor.DType, shape []int, f func(i int) float64) *tensor.Tensor {
	out := tensor.New(d, shape...)
	for i := range out.Len() {
		x := f(i)
		switch d {
		case tensor.Float16:
			tensor.Data[tensor.F16](out)[i] = tensor.F16From(float32(x))
		case tensor.BFloat16:
			tensor.Data[tensor.BF16](out)[i] = tensor.BF16From(float32(x))
		case tensor.Float32:
			tensor.Data[float32](out)[i] = float32(x)
		default:
			tensor.Data[float64](out)[i] = x
		}
	}
	return out
}

// SumAxes returns the sum of t over the axes, and how many elements of t are summed into each element of the
// result.
func SumAxes(t *tensor.Tensor, axes []int) (*tensor.Tensor, int, error) {
	rank := t.Rank()
	if !t.DType().IsNumeric() {
		return nil, 0, NotNumeric(t.DType())
	}
	reduced := make([]bool, rank)
	count := 1
	for _, axis := range axes {
		at := axis
		if at < 0 {
			at += rank
		}
		switch {
		case at < 0 || at >= rank:
			return nil, 0, kinds.Errorf(kinds.Invalid, "invalid reduction dimension %d for input with %d dimensions", axis, rank)
		case reduced[at]:
			return nil, 0, kinds.Errorf(kinds.Invalid, "invalid reduction arguments: axes contains duplicate dimension: %d in "+
				"%v", axis, axes)
		}
		reduced[at] = true
		count *= t.Shape()[at]
	}
	var shape []int
	strides := make([]int, rank) // of the output, by input dimension; 0 if the dimension is reduced
	for i, size := range t.Shape() {
		if !reduced[i] {
			shape = append(shape, size)
		}
	}
	stride := 1
	for i := rank - 1; i >= 0; i-- {
		if !reduced[i] {
			strides[i] = stride
			stride *= t.Shape()[i]
		}
	}
	return sumStrided(t, shape, strides), count, nil
}

// sumStrided adds element i of t to the output element given by the strides. Floats are added in float64 and
// rounded once; integers wrap around.
func sumStrided(t *tensor.Tensor, shape, strides []int) *tensor.Tensor {
	out := tensor.New(t.DType(), shape...)
	at := make([]int, t.Rank())
	where := func() int {
		o := 0
		for i, x := range at {
			o += x * strides[i]
		}
		return o
	}
	next := func() {
		for i := len(at) - 1; i >= 0; i-- {
			if at[i]++; at[i] < t.Shape()[i] {
				return
			}
			at[i] = 0
		}
	}
	sums := out
	if t.DType().IsFloat() {
		t, sums = tensor.Of(t.Float64s(), t.Shape()...), tensor.New(tensor.Float64, shape...)
	}
	size := t.DType().Bytes()
	for i := range t.Len() {
		// By the kernel, so that NaNs have the same bits as in other sums.
		o := unsafe.Add(sums.Memory().Ptr, where()*size)
		kernel.Reduce(kernel.Sum, t.DType(), o, o, unsafe.Add(t.Memory().Ptr, i*size), 1)
		next()
	}
	if sums == out {
		return out
	}
	return fromFloats(out.DType(), shape, func(i int) float64 { return tensor.Data[float64](sums)[i] })
}

// Divisor returns the divisor to apply to a sum in place, or none if the quotient has another dtype.
func Divisor(op collective.ReduceOp, ts []*tensor.Tensor) int {
	if op == collective.Mean && ts[0].DType().IsFloat() {
		return len(ts)
	}
	return 1
}

// Reduce returns the sum or the mean of tensors of one dtype and shape, along the canonical tree.
func Reduce(op collective.ReduceOp, ts []*tensor.Tensor, acc collective.Accumulate) *tensor.Tensor {
	sum := tensor.New(ts[0].DType(), ts[0].Shape()...)
	by := Divisor(op, ts)
	AddRange(sum, ts, 0, sum.Len(), acc == collective.AccumulateFloat32, by)
	if op == collective.Mean && by == 1 {
		return Divide(sum, len(ts))
	}
	return sum
}

// AddRange adds elements along the tree and divides the sums. wide keeps sums of half-precision numbers in
// float32 until the end.
func AddRange(sum *tensor.Tensor, ts []*tensor.Tensor, lo, hi int, wide bool, by int) {
	if lo >= hi {
		return
	}
	src := make([]unsafe.Pointer, len(ts))
	for i, t := range ts {
		src[i] = t.Memory().Ptr
	}
	tree := kernel.Tree{Op: kernel.Sum, Type: sum.DType(), Float32: wide, Divide: by}
	tree.Reduce(kernel.NewScratch(len(ts)), []unsafe.Pointer{sum.Memory().Ptr}, src, lo, hi)
}
