package distribute

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"

	"github.com/lockstep-ml/lockstep/distribute/internal/dense"
	"github.com/lockstep-ml/lockstep/distribute/internal/sparse"
	"github.com/lockstep-ml/lockstep/tensor"
)

// operand converts a leaf to an operand of a reduction: a tensor or IndexedSlices. A host number becomes the
// tensor that TensorFlow makes of it.
func operand(v Value) (Value, error) {
	switch v := v.(type) {
	case *tensor.Tensor:
		return v, nil
	case *tensor.IndexedSlices:
		return v, sparse.Check(v)
	case stored:
		return v.first(), nil
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

// exactly returns a number of a Go type as a tensor of that type, and anything else unchanged. [hostTensor] follows
// TensorFlow, where a number in a nest of any type has no size.
func exactly[T any](v T) Value {
	switch x := any(&v).(type) {
	case *int:
		return tensor.Scalar(int64(*x))
	case *int32:
		return tensor.Scalar(*x)
	case *int64:
		return tensor.Scalar(*x)
	case *float32:
		return tensor.Scalar(*x)
	case *float64:
		return tensor.Scalar(*x)
	}
	return v
}

// resultAs returns the result of an operation as a T: itself, or the number that [exactly] made a tensor of.
func resultAs[T any](op string, v Value, err error) (out T, _ error) {
	if err != nil || v == nil {
		return out, err
	}
	if x, ok := v.(T); ok {
		return x, nil
	}
	if t, ok := v.(*tensor.Tensor); ok && t.Rank() == 0 && dtypeOf(exactly(out)) == t.DType() {
		switch to := any(&out).(type) {
		case *int:
			*to = int(tensor.Data[int64](t)[0])
		case *int32:
			*to = tensor.Data[int32](t)[0]
		case *int64:
			*to = tensor.Data[int64](t)[0]
		case *float32:
			*to = tensor.Data[float32](t)[0]
		case *float64:
			*to = tensor.Data[float64](t)[0]
		}
		return out, nil
	}
	return out, errorf(op, ErrInvalid, "the result is a %T, which a %v cannot hold: give tensors, or values of type any",
		v, reflect.TypeFor[T]())
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

// denseOperands returns the components as tensors of one numeric dtype and one shape. allDense is false if all
// components are IndexedSlices. If only some are, these are converted to tensors.
func denseOperands(op string, values []Value) (ts []*tensor.Tensor, allDense bool, err error) {
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
				if ts[i], err = densify(v.(*tensor.IndexedSlices)); err != nil {
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
			return nil, false, errorf(op, ErrMismatch, "component %d was expected to be a %v tensor, as component 0 is, but "+
				"is a %v tensor", i, first.DType(), t.DType())
		case !t.SameShape(first):
			return nil, false, errorf(op, ErrMismatch, "components must have the same size and shape: component 0 has %s, "+
				"component %d %s", dense.Bracketed(first.Shape()), i, dense.Bracketed(t.Shape()))
		case t.Memory().Kind == tensor.Device:
			return nil, false, errorf(op, ErrUnsupported, "component %d is in device memory: copy it to the host first", i)
		}
	}
	return ts, true, nil
}

// densified converts IndexedSlices to a dense tensor and returns other leaves unchanged.
func densified(v Value) (Value, error) {
	if s, ok := v.(*tensor.IndexedSlices); ok {
		return densify(s)
	}
	return v, nil
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
			return densify(s)
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
			return nil, fmt.Errorf("item %d of the list is %v%s, item 0 %v%s: only values of one dtype and shape make one "+
				"tensor",
				i, t.DType(), tensor.FormatShape(t.Shape()), parts[0].DType(), tensor.FormatShape(parts[0].Shape()[1:]))
		}
		parts[i] = t.Reshape(append([]int{1}, t.Shape()...)...)
	}
	return dense.ConcatRows(parts), nil
}

// componentsOf returns the components of a value of a batch. A single tensor is one component.
func componentsOf(v Value) ([]Value, error) {
	switch v := v.(type) {
	case *perReplica:
		if len(v.values) > 0 {
			return v.values, nil
		}
		return nil, errorf("PerReplica", ErrInvalid, "per-replica value must be non-empty")
	case stored:
		return v.Values(), nil
	case *Mirrored:
		return v.Values, nil
	}
	leaf, err := operand(v)
	if err != nil {
		return nil, err
	}
	return []Value{leaf}, nil
}

func badDType(op string, d tensor.DType) error { return failed(op, dense.NotNumeric(d)) }

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

// meanOf returns the sum of n components divided by their number.
func meanOf(name string, sum Value, n int) (Value, error) {
	if d := dtypeOf(sum); !d.IsNumeric() {
		return nil, badDType(name, d)
	}
	if s, ok := sum.(*tensor.IndexedSlices); ok {
		mean := *s
		mean.Values = dense.Divide(s.Values, n)
		return &mean, nil
	}
	return dense.Divide(sum.(*tensor.Tensor), n), nil
}

// densify converts s to a dense tensor (TensorFlow's tf.convert_to_tensor of IndexedSlices).
func densify(s *tensor.IndexedSlices) (*tensor.Tensor, error) {
	t, err := sparse.Densify(s)
	return t, failed("Densify", err)
}
