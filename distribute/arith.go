package distribute

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
)

// operand converts a leaf to an operand of a reduction: a tensor or IndexedSlices. A host number becomes the
// tensor that TensorFlow makes of it.
func operand(v Value) (Value, error) {
	switch v := v.(type) {
	case *tensor.Tensor:
		return v, nil
	case *tensor.IndexedSlices:
		return v, checkSlices(v)
	case *Variable:
		return v.components[0].load(), nil
	case distributed:
		return nil, fmt.Errorf("%v inside of a distributed value", v)
	}
	return hostTensor(v)
}

// hostTensor returns the tensor that TensorFlow makes of a host number: int32 of integers, float32 of floats; sized Go
// types keep their size.
func hostTensor(v Value) (*tensor.Tensor, error) {
	switch v := v.(type) {
	case *tensor.Tensor:
		if v == nil {
			return nil, errors.New("nil *tensor.Tensor: want a tensor")
		}
		return v, nil
	case int:
		if v < math.MinInt32 || v > math.MaxInt32 {
			return nil, fmt.Errorf("host number %d overflows int32: pass a tensor", v)
		}
		return tensor.Scalar(int32(v)), nil
	case float64:
		return tensor.Scalar(float32(v)), nil
	case bool:
		return tensor.Scalar(v), nil
	case int8:
		return tensor.Scalar(v), nil
	case int16:
		return tensor.Scalar(v), nil
	case int32:
		return tensor.Scalar(v), nil
	case int64:
		return tensor.Scalar(v), nil
	case uint8:
		return tensor.Scalar(v), nil
	case uint16:
		return tensor.Scalar(v), nil
	case uint32:
		return tensor.Scalar(v), nil
	case uint64:
		return tensor.Scalar(v), nil
	case float32:
		return tensor.Scalar(v), nil
	case string:
		return tensor.Strings([]string{v}, []int{}...), nil
	}
	return nil, fmt.Errorf("cannot reduce a %T: want a tensor, IndexedSlices or a host number", v)
}

// isHostZero reports whether v is a host number equal to 0.
func isHostZero(v Value) bool {
	switch v.(type) {
	case int, int8, int16, int32, int64, uint8, uint16, uint32, uint64, float32, float64:
		t, err := hostTensor(v)
		return err == nil && t.Float64s()[0] == 0
	}
	return false
}

// dtypeOf returns the dtype of a leaf's elements, Invalid if it has none.
func dtypeOf(leaf any) tensor.DType {
	switch leaf := leaf.(type) {
	case *tensor.Tensor:
		return leaf.DType()
	case *tensor.IndexedSlices:
		return leaf.Values.DType()
	}
	return tensor.Invalid
}

func badDType(op string, d tensor.DType) error {
	return errorf(op, ErrInvalid, "dtype %v is not in the list of allowed values for a sum: want an integer or floating-point type", d)
}

// denseOperands returns the components as tensors of one numeric dtype and one shape. dense is false if all
// components are IndexedSlices. If only some are, these are converted to tensors.
func denseOperands(op string, values []Value) (ts []*tensor.Tensor, dense bool, err error) {
	ts = make([]*tensor.Tensor, len(values))
	sparse := 0
	for i, v := range values {
		leaf, err := operand(v)
		if err != nil {
			return nil, false, errorf(op, ErrInvalid, "component %d: %w", i, err)
		}
		switch leaf := leaf.(type) {
		case *tensor.Tensor:
			ts[i] = leaf
		case *tensor.IndexedSlices:
			sparse++
		}
	}
	switch {
	case sparse == len(values):
		return nil, false, nil
	case len(values) == 1:
		return ts, true, nil
	case sparse > 0:
		for i, v := range values {
			if ts[i] == nil {
				if ts[i], err = Densify(v.(*tensor.IndexedSlices)); err != nil {
					return nil, false, errorf(op, ErrInvalid, "component %d: %w", i, err)
				}
			}
		}
	}
	first := ts[0]
	if !first.DType().IsNumeric() {
		return nil, false, badDType(op, first.DType())
	}
	for i, t := range ts {
		switch {
		case t.DType() != first.DType():
			return nil, false, errorf(op, ErrMismatch, "component %d was expected to be a %v tensor, as component 0 is, but is a %v tensor", i, first.DType(), t.DType())
		case !t.SameShape(first):
			return nil, false, errorf(op, ErrMismatch, "components must have the same size and shape: component 0 has %s, component %d %s", bracketed(first.Shape()), i, bracketed(t.Shape()))
		case t.Memory().Kind == tensor.Device:
			return nil, false, errorf(op, ErrUnsupported, "component %d is in device memory: copy it to the host first", i)
		}
	}
	return ts, true, nil
}

// bracketed prints a shape as TensorFlow's kernels do: [2,3].
func bracketed(shape []int) string {
	parts := make([]string, len(shape))
	for i, d := range shape {
		parts[i] = strconv.Itoa(d)
	}
	return "[" + strings.Join(parts, ",") + "]"
}

// divide returns t divided by n. Floating-point types keep their dtype; int32, int64, uint32 and uint64 become
// float64; smaller integers become float32.
func divide(t *tensor.Tensor, n int) *tensor.Tensor {
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
	zero := 0.0
	return fromFloats(t.DType(), t.Shape(), func(i int) float64 { return t.Float64s()[i] / zero })
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

// sumAxes returns the sum of t over the axes, and how many elements of t are summed into each element of the
// result.
func sumAxes(op string, t *tensor.Tensor, axes []int) (*tensor.Tensor, int, error) {
	rank := t.Rank()
	if !t.DType().IsNumeric() {
		return nil, 0, badDType(op, t.DType())
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
			return nil, 0, errorf(op, ErrInvalid, "invalid reduction dimension %d for input with %d dimensions", axis, rank)
		case reduced[at]:
			return nil, 0, errorf(op, ErrInvalid, "invalid reduction arguments: axes contains duplicate dimension: %d in %v", axis, axes)
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

// stack returns a leaf as a tensor. A list or tuple of values of one shape becomes one tensor with a new first
// dimension.
func stack(v Value) (*tensor.Tensor, error) {
	var items []any
	switch v := v.(type) {
	case []any:
		items = v
	case tensor.Tuple:
		items = v
	default:
		leaf, err := operand(v)
		if err != nil {
			return nil, err
		}
		if s, ok := leaf.(*tensor.IndexedSlices); ok {
			return Densify(s)
		}
		return leaf.(*tensor.Tensor), nil
	}
	if len(items) == 0 {
		return tensor.New(tensor.Float32, 0), nil
	}
	parts := make([]*tensor.Tensor, len(items))
	for i, item := range items {
		t, err := stack(item)
		if err != nil {
			return nil, err
		}
		if i > 0 && (t.DType() != parts[0].DType() || !slices.Equal(t.Shape(), parts[0].Shape()[1:])) {
			return nil, fmt.Errorf("item %d of the list is %v%s, item 0 %v%s: only values of one dtype and shape make one tensor",
				i, t.DType(), tensor.FormatShape(t.Shape()), parts[0].DType(), tensor.FormatShape(parts[0].Shape()[1:]))
		}
		parts[i] = t.Reshape(append([]int{1}, t.Shape()...)...)
	}
	return concatRows(parts), nil
}

// concatRows returns the concatenation of tensors of one dtype and equal rows along the first dimension.
func concatRows(parts []*tensor.Tensor) *tensor.Tensor {
	shape := slices.Clone(parts[0].Shape())
	shape[0] = 0
	for _, p := range parts {
		shape[0] += p.Shape()[0]
	}
	if parts[0].DType() == tensor.String {
		var all []string
		for _, p := range parts {
			all = append(all, p.StringData()...)
		}
		return tensor.Strings(all, shape...)
	}
	out := tensor.New(parts[0].DType(), shape...)
	at := 0
	for _, p := range parts {
		n := p.Memory().Bytes
		copyMemory(out.Memory().Slice(at, at+n), p.Memory())
		at += n
	}
	return out
}

// concatSlices returns IndexedSlices with all rows, in the order of the components. Rows with equal indices are
// not combined. The dense shape is that of the first component; indices of different dtypes become int64.
func concatSlices(op string, values []Value) (*tensor.IndexedSlices, error) {
	first := values[0].(*tensor.IndexedSlices)
	if !first.Values.DType().IsNumeric() {
		return nil, badDType(op, first.Values.DType())
	}
	rows := make([]*tensor.Tensor, len(values))
	indices := make([]*tensor.Tensor, len(values))
	wide := false
	for i, v := range values {
		s := v.(*tensor.IndexedSlices)
		if s.Values.DType() != first.Values.DType() {
			return nil, errorf(op, ErrMismatch, "the values of component %d were expected to be a %v tensor, as component 0's are, but are a %v tensor", i, first.Values.DType(), s.Values.DType())
		}
		if s.Values.Rank() == 0 || !slices.Equal(s.Values.Shape()[1:], first.Values.Shape()[1:]) {
			return nil, errorf(op, ErrMismatch, "the rows of component %d must have the same size and shape as component 0's: shapes %s and %s", i, bracketed(s.Values.Shape()), bracketed(first.Values.Shape()))
		}
		rows[i], indices[i] = s.Values, s.Indices
		wide = wide || s.Indices.DType() != first.Indices.DType()
	}
	if wide {
		for i, t := range indices {
			indices[i] = toInt64(t)
		}
	}
	return &tensor.IndexedSlices{Values: concatRows(rows), Indices: concatRows(indices), DenseShape: first.DenseShape}, nil
}

// Densify converts s to a dense tensor. Rows with the same index are added. The dense shape must be known.
func Densify(s *tensor.IndexedSlices) (*tensor.Tensor, error) {
	const op = "Densify"
	if err := checkSlices(s); err != nil {
		return nil, errorf(op, ErrInvalid, "%w", err)
	}
	if s.DenseShape == nil {
		return nil, errorf(op, ErrInvalid, "the dense shape of the IndexedSlices is not known")
	}
	if !s.Values.DType().IsNumeric() {
		return nil, badDType(op, s.Values.DType())
	}
	var shape []int
	for _, d := range tensor.Data[int64](toInt64(s.DenseShape)) {
		shape = append(shape, int(d))
	}
	if len(shape) != s.Values.Rank() || len(shape) == 0 || !slices.Equal(shape[1:], s.Values.Shape()[1:]) {
		return nil, errorf(op, ErrMismatch, "rows of shape %s do not fit the dense shape %s", bracketed(s.Values.Shape()), bracketed(shape))
	}
	out := tensor.New(s.Values.DType(), shape...)
	for i, index := range tensor.Data[int64](toInt64(s.Indices)) {
		if index < 0 || index >= int64(shape[0]) {
			return nil, errorf(op, ErrInvalid, "index %d of row %d is outside of the %d rows", index, i, shape[0])
		}
		addRow(out, int(index), s.Values, i)
	}
	return out, nil
}

// toInt64 returns an int32 or int64 tensor as int64.
func toInt64(t *tensor.Tensor) *tensor.Tensor {
	if t.DType() != tensor.Int32 {
		return t
	}
	out := tensor.New(tensor.Int64, t.Shape()...)
	for i, x := range tensor.Data[int32](t) {
		tensor.Data[int64](out)[i] = int64(x)
	}
	return out
}

// copyMemory copies host bytes between memories of equal length, which may be the same.
func copyMemory(dst, src tensor.Memory) {
	if dst.Ptr != src.Ptr {
		copy(dst.HostBytes(), src.HostBytes())
	}
}

// added returns a + b, of one dtype and shape.
func added(a, b *tensor.Tensor) *tensor.Tensor {
	out := tensor.New(a.DType(), a.Shape()...)
	if a.Len() > 0 {
		kernel.Reduce(kernel.Sum, a.DType(), out.Memory().Ptr, a.Memory().Ptr, b.Memory().Ptr, a.Len())
	}
	return out
}

// negated returns -t; integers wrap around.
func negated(t *tensor.Tensor) *tensor.Tensor {
	switch t.DType() {
	case tensor.Int8:
		return neg[int8](t)
	case tensor.Int16:
		return neg[int16](t)
	case tensor.Int32:
		return neg[int32](t)
	case tensor.Int64:
		return neg[int64](t)
	case tensor.Uint8:
		return neg[uint8](t)
	case tensor.Uint16:
		return neg[uint16](t)
	case tensor.Uint32:
		return neg[uint32](t)
	case tensor.Uint64:
		return neg[uint64](t)
	}
	return fromFloats(t.DType(), t.Shape(), func(i int) float64 { return -t.Float64s()[i] })
}

func neg[T int8 | int16 | int32 | int64 | uint8 | uint16 | uint32 | uint64](t *tensor.Tensor) *tensor.Tensor {
	out := tensor.New(t.DType(), t.Shape()...)
	for i, x := range tensor.Data[T](t) {
		tensor.Data[T](out)[i] = -x
	}
	return out
}

// converted returns t in another numeric dtype. Conversion to an integer dtype truncates.
func converted(t *tensor.Tensor, d tensor.DType) *tensor.Tensor {
	xs := t.Float64s()
	switch d {
	case tensor.Int8:
		return fromInts[int8](xs, t.Shape())
	case tensor.Int16:
		return fromInts[int16](xs, t.Shape())
	case tensor.Int32:
		return fromInts[int32](xs, t.Shape())
	case tensor.Int64:
		return fromInts[int64](xs, t.Shape())
	case tensor.Uint8:
		return fromInts[uint8](xs, t.Shape())
	case tensor.Uint16:
		return fromInts[uint16](xs, t.Shape())
	case tensor.Uint32:
		return fromInts[uint32](xs, t.Shape())
	case tensor.Uint64:
		return fromInts[uint64](xs, t.Shape())
	}
	return fromFloats(d, t.Shape(), func(i int) float64 { return xs[i] })
}

func fromInts[T int8 | int16 | int32 | int64 | uint8 | uint16 | uint32 | uint64](xs []float64, shape []int) *tensor.Tensor {
	out := tensor.New(tensor.DTypeOf[T](), shape...)
	for i, x := range xs {
		tensor.Data[T](out)[i] = T(int64(x))
	}
	return out
}
