package distribute

import (
	"strings"

	"github.com/lockstep-ml/lockstep/distribute/internal/dense"
	"github.com/lockstep-ml/lockstep/tensor"
)

// ScatterOp says what [Variable.Scatter] does with the rows of a variable and those of its argument.
type ScatterOp = dense.ScatterOp

// The operations, TensorFlow's scatter_add to scatter_update.
const (
	ScatterAdd    = dense.ScatterAdd    // adds
	ScatterSub    = dense.ScatterSub    // subtracts
	ScatterMul    = dense.ScatterMul    // multiplies; a mean multiplies by each row divided by the number of replicas
	ScatterDiv    = dense.ScatterDiv    // divides; integers are truncated, and division by zero is an error
	ScatterMin    = dense.ScatterMin    // keeps the smaller of each element
	ScatterMax    = dense.ScatterMax    // keeps the larger of each element
	ScatterUpdate = dense.ScatterUpdate // sets
)

// Scatter changes the rows of the variable that the indices of x give by the rows of x. x is IndexedSlices or a
// distributed value of them. Rows with the same index are applied in order. In replica context the replicas' slices are
// first combined by the variable's aggregation, as in [Variable.Assign]: a sum has all rows in the order of the
// replicas, a mean has the same rows divided by the number of replicas. A variable of [NewCentralStorageStrategy]
// applies the replicas' rows in replica order, whatever its aggregation.
//
// Sync-on-read variables do not support it, and mirrored variables with [AggregateSum] or [AggregateMean] do not
// support ScatterMin, ScatterMax and ScatterUpdate; the error matches [ErrUnsupported].
func (v *Variable) Scatter(in Context, op ScatterOp, x Value) error {
	if op > ScatterUpdate {
		return errorf("Scatter", ErrInvalid, "ScatterOp(%d) is not one of ScatterAdd to ScatterUpdate", op)
	}
	return v.scatter(in, x, op)
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
	case v.kind() == syncOnReadVariable:
		return errorf(op, ErrUnsupported, "variables with `synchronization=ON_READ` don't support `%s`: %s has a separate "+
			"value on each replica; scatter to a tensor and assign it", name, v.Name())
	case v.kind() == mirroredVariable && o >= dense.ScatterMin && (v.agg == AggregateSum || v.agg == AggregateMean):
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
