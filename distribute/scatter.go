package distribute

import (
	"strings"

	"github.com/lockstep-ml/lockstep/distribute/internal/dense"
	"github.com/lockstep-ml/lockstep/tensor"
)

// ScatterAdd adds the rows of x to the rows of the variable given by their indices (TensorFlow's scatter_add). x is
// IndexedSlices or a distributed value of them. Rows with the same index are added in order. In replica context the
// replicas' slices are first combined by the variable's aggregation, as in [Variable.Assign]: a sum has all rows in
// the order of the replicas, a mean has the same rows divided by the number of replicas. A variable of
// [NewCentralStorageStrategy] applies the replicas' rows in replica order, whatever its aggregation.
//
// Sync-on-read variables do not support it; the error matches [ErrUnsupported].
func (v *Variable) ScatterAdd(in Context, x Value) error { return v.scatter(in, x, dense.ScatterAdd) }

// ScatterSub subtracts the rows of x, under the conditions of [Variable.ScatterAdd] (TensorFlow's scatter_sub).
func (v *Variable) ScatterSub(in Context, x Value) error { return v.scatter(in, x, dense.ScatterSub) }

// ScatterMul multiplies rows of the variable by the rows of x, under the conditions of [Variable.ScatterAdd]
// (TensorFlow's scatter_mul). A mean multiplies by each row divided by the number of replicas.
func (v *Variable) ScatterMul(in Context, x Value) error { return v.scatter(in, x, dense.ScatterMul) }

// ScatterDiv divides rows of the variable by the rows of x, under the conditions of [Variable.ScatterMul]
// (TensorFlow's scatter_div). Integer division truncates; integer division by zero is an error.
func (v *Variable) ScatterDiv(in Context, x Value) error { return v.scatter(in, x, dense.ScatterDiv) }

// ScatterMin keeps the smaller of each element of the variable and of the rows of x (TensorFlow's scatter_min). A
// mirrored variable must have [AggregateNone] or [AggregateFirst]; the error for others matches [ErrUnsupported].
func (v *Variable) ScatterMin(in Context, x Value) error { return v.scatter(in, x, dense.ScatterMin) }

// ScatterMax keeps the larger elements, under the conditions of [Variable.ScatterMin] (TensorFlow's scatter_max).
func (v *Variable) ScatterMax(in Context, x Value) error { return v.scatter(in, x, dense.ScatterMax) }

// ScatterUpdate sets rows, under the conditions of [Variable.ScatterMin] (TensorFlow's scatter_update).
func (v *Variable) ScatterUpdate(in Context, x Value) error {
	return v.scatter(in, x, dense.ScatterUpdate)
}

// scatters are the mutations, by operation.
var scatters = func() (m [dense.ScatterUpdate + 1]mutation) {
	for o := range dense.ScatterUpdate + 1 {
		m[o] = mutation{
			op:  o.String(),
			fit: func(v *Variable, op string, x Value) (Value, error) { return v.fitRows(op, o, x) },
			apply: func(old *tensor.Tensor, x Value) *tensor.Tensor {
				return dense.Scatter(o, old, x.(*tensor.IndexedSlices))
			},
			inReplicaOrder: true,
		}
	}
	return m
}()

func (v *Variable) scatter(in Context, x Value, o dense.ScatterOp) error {
	op := o.String()
	switch name := "scatter_" + strings.ToLower(strings.TrimPrefix(op, "Scatter")); {
	case v.Kind() == SyncOnReadVariable:
		return errorf(op, ErrUnsupported, "variables with `synchronization=ON_READ` don't support `%s`: %s has a separate "+
			"value on each replica; scatter to a tensor and assign it", name, v.Name())
	case v.Kind() == MirroredVariable && o >= dense.ScatterMin && (v.agg == AggregateSum || v.agg == AggregateMean):
		return errorf(op, ErrUnsupported, "%s is only supported for mirrored variable %s with NONE or `ONLY_FIRST_REPLICA` "+
			"aggregation, got: %v", name, v.Name(), v.agg)
	}
	return v.write(in, x, scatters[o])
}

// fitRows converts x to slices that fit the variable: its dtype, rows of its shape, indices in its range.
func (v *Variable) fitRows(op string, o dense.ScatterOp, x Value) (Value, error) {
	s, ok := x.(*tensor.IndexedSlices)
	if !ok {
		return nil, errorf(op, ErrInvalid, "variable %s: want IndexedSlices, not a %T", v.Name(), x)
	}
	if s == nil || s.Values == nil || s.Indices == nil {
		return nil, errorf(op, ErrInvalid, "variable %s: the slices have no values or no indices", v.Name())
	}
	shape, rows := v.Shape(), s.Values.Shape()
	switch d := s.Indices.DType(); {
	case d != tensor.Int32 && d != tensor.Int64 || s.Indices.Rank() != 1 || len(rows) == 0 || s.Indices.Len() != rows[0]:
		return nil, errorf(op, ErrInvalid, "variable %s: %v indices of shape %s for values of shape %s: want one int32 or "+
			"int64 for each row", v.Name(), d, tensor.FormatShape(s.Indices.Shape()), tensor.FormatShape(rows))
	case s.Values.DType() != v.DType():
		return nil, errorf(op, ErrInvalid, "variable %s has dtype %v, the slices %v", v.Name(), v.DType(), s.Values.DType())
	case o != dense.ScatterUpdate && !v.DType().IsNumeric():
		return nil, badDType(op, v.DType())
	case len(shape) == 0 || len(rows) != len(shape) || tensor.FormatShape(rows[1:]) != tensor.FormatShape(shape[1:]):
		return nil, errorf(op, ErrInvalid, "the rows of shape %s do not fit variable %s of shape %s",
			tensor.FormatShape(rows), v.Name(), tensor.FormatShape(shape))
	}
	for i, at := range s.Indices.Float64s() {
		if at < 0 || at >= float64(shape[0]) {
			return nil, errorf(op, ErrInvalid, "indices[%d] = %v is not in [0, %d), the rows of variable %s", i, at, shape[0],
				v.Name())
		}
	}
	if o == dense.ScatterDiv && v.DType().IsInteger() {
		for _, d := range s.Values.Float64s() {
			if d == 0 {
				return nil, errorf(op, ErrInvalid, "integer division by zero in variable %s", v.Name())
			}
		}
	}
	return s, nil
}
