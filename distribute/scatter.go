package distribute

import (
	"strings"

	"github.com/lockstep-ml/lockstep/tensor"
)

// ScatterAdd adds the rows of x to the rows of the variable given by their indices. x is IndexedSlices or a
// distributed value of them. Rows with the same index are added in order. In replica context the replicas'
// slices are first combined by the variable's aggregation, as in [Variable.Assign]: a sum has all rows in the
// order of the replicas, a mean has the same rows divided by the number of replicas. A variable of
// [NewCentralStorageStrategy] applies the replicas' rows in replica order, whatever its aggregation.
//
// Sync-on-read variables do not support it; the error matches [ErrUnsupported].
func (v *Variable) ScatterAdd(in Context, x Value) error { return v.scatter(in, x, scatterAdd) }

// ScatterSub subtracts the rows of x, under the conditions of [Variable.ScatterAdd].
func (v *Variable) ScatterSub(in Context, x Value) error { return v.scatter(in, x, scatterSub) }

// ScatterMul multiplies rows of the variable by the rows of x, under the conditions of [Variable.ScatterAdd]. A
// mean multiplies by each row divided by the number of replicas.
func (v *Variable) ScatterMul(in Context, x Value) error { return v.scatter(in, x, scatterMul) }

// ScatterDiv divides rows of the variable by the rows of x, under the conditions of [Variable.ScatterMul].
// Integer division truncates; integer division by zero is an error.
func (v *Variable) ScatterDiv(in Context, x Value) error { return v.scatter(in, x, scatterDiv) }

// ScatterMin keeps the smaller of each element of the variable and of the rows of x. A mirrored variable must
// have [AggregateNone] or [AggregateFirst]; the error for others matches [ErrUnsupported].
func (v *Variable) ScatterMin(in Context, x Value) error { return v.scatter(in, x, scatterMin) }

// ScatterMax keeps the larger elements, under the conditions of [Variable.ScatterMin].
func (v *Variable) ScatterMax(in Context, x Value) error { return v.scatter(in, x, scatterMax) }

// ScatterUpdate sets rows, under the conditions of [Variable.ScatterMin].
func (v *Variable) ScatterUpdate(in Context, x Value) error { return v.scatter(in, x, scatterUpdate) }

// scatterOp is the operation of a scatter on two elements.
type scatterOp uint8

const (
	scatterAdd scatterOp = iota
	scatterSub
	scatterMul
	scatterDiv
	scatterMin
	scatterMax
	scatterUpdate
)

// String returns the method's name.
func (o scatterOp) String() string {
	return [...]string{"ScatterAdd", "ScatterSub", "ScatterMul", "ScatterDiv", "ScatterMin", "ScatterMax", "ScatterUpdate"}[o]
}

// scatters are the mutations, by operation.
var scatters = func() (m [scatterUpdate + 1]mutation) {
	for o := range scatterUpdate + 1 {
		m[o] = mutation{
			op:     o.String(),
			fit:    func(v *Variable, op string, x Value) (Value, error) { return v.fitRows(op, o, x) },
			apply:  func(old *tensor.Tensor, x Value) *tensor.Tensor { return scattered(o, old, x.(*tensor.IndexedSlices)) },
			inTurn: true,
		}
	}
	return m
}()

func (v *Variable) scatter(in Context, x Value, o scatterOp) error {
	op := o.String()
	switch name := "scatter_" + strings.ToLower(strings.TrimPrefix(op, "Scatter")); {
	case v.Kind() == SyncOnReadVariable:
		return errorf(op, ErrUnsupported, "variables with `synchronization=ON_READ` don't support `%s`: %s has a separate value on each replica; scatter to a tensor and assign it", name, v.Name())
	case v.Kind() == MirroredVariable && o >= scatterMin && (v.agg == AggregateSum || v.agg == AggregateMean):
		return errorf(op, ErrUnsupported, "%s is only supported for mirrored variable %s with NONE or `ONLY_FIRST_REPLICA` aggregation, got: %v", name, v.Name(), v.agg)
	}
	return v.write(in, x, scatters[o])
}

// fitRows converts x to slices that fit the variable: its dtype, rows of its shape, indices in its range.
func (v *Variable) fitRows(op string, o scatterOp, x Value) (Value, error) {
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
		return nil, errorf(op, ErrInvalid, "variable %s: %v indices of shape %s for values of shape %s: want one int32 or int64 for each row", v.Name(), d, tensor.FormatShape(s.Indices.Shape()), tensor.FormatShape(rows))
	case s.Values.DType() != v.DType():
		return nil, errorf(op, ErrInvalid, "variable %s has dtype %v, the slices %v", v.Name(), v.DType(), s.Values.DType())
	case o != scatterUpdate && !v.DType().IsNumeric():
		return nil, badDType(op, v.DType())
	case len(shape) == 0 || len(rows) != len(shape) || tensor.FormatShape(rows[1:]) != tensor.FormatShape(shape[1:]):
		return nil, errorf(op, ErrInvalid, "the rows of shape %s do not fit variable %s of shape %s", tensor.FormatShape(rows), v.Name(), tensor.FormatShape(shape))
	}
	for i, at := range s.Indices.Float64s() {
		if at < 0 || at >= float64(shape[0]) {
			return nil, errorf(op, ErrInvalid, "indices[%d] = %v is not in [0, %d), the rows of variable %s", i, at, shape[0], v.Name())
		}
	}
	if o == scatterDiv && v.DType().IsInteger() {
		for _, d := range s.Values.Float64s() {
			if d == 0 {
				return nil, errorf(op, ErrInvalid, "integer division by zero in variable %s", v.Name())
			}
		}
	}
	return s, nil
}

// scattered returns a copy of old with the rows of s applied.
func scattered(o scatterOp, old *tensor.Tensor, s *tensor.IndexedSlices) *tensor.Tensor {
	out := old.Clone()
	switch old.DType() {
	case tensor.Bool:
		scatterRows(tensor.Data[bool](out), s, tensor.Data[bool](s.Values), func(_, x bool) bool { return x })
	case tensor.String:
		scatterRows(out.StringData(), s, s.Values.StringData(), func(_, x string) string { return x })
	case tensor.Int8:
		scatterNumbers[int8](o, out, s)
	case tensor.Int16:
		scatterNumbers[int16](o, out, s)
	case tensor.Int32:
		scatterNumbers[int32](o, out, s)
	case tensor.Int64:
		scatterNumbers[int64](o, out, s)
	case tensor.Uint8:
		scatterNumbers[uint8](o, out, s)
	case tensor.Uint16:
		scatterNumbers[uint16](o, out, s)
	case tensor.Uint32:
		scatterNumbers[uint32](o, out, s)
	case tensor.Uint64:
		scatterNumbers[uint64](o, out, s)
	case tensor.Float32:
		scatterNumbers[float32](o, out, s)
	case tensor.Float64:
		scatterNumbers[float64](o, out, s)
	case tensor.Float16:
		f := combine[float32](o)
		scatterRows(tensor.Data[tensor.F16](out), s, tensor.Data[tensor.F16](s.Values), func(a, b tensor.F16) tensor.F16 {
			return tensor.F16From(f(a.Float32(), b.Float32()))
		})
	case tensor.BFloat16:
		f := combine[float32](o)
		scatterRows(tensor.Data[tensor.BF16](out), s, tensor.Data[tensor.BF16](s.Values), func(a, b tensor.BF16) tensor.BF16 {
			return tensor.BF16From(f(a.Float32(), b.Float32()))
		})
	}
	return out
}

func scatterNumbers[T number](o scatterOp, out *tensor.Tensor, s *tensor.IndexedSlices) {
	scatterRows(tensor.Data[T](out), s, tensor.Data[T](s.Values), combine[T](o))
}

// number lists the Go types of numeric elements, without the half-precision ones.
type number interface {
	int8 | int16 | int32 | int64 | uint8 | uint16 | uint32 | uint64 | float32 | float64
}

// combine returns the function of an operation on the variable's element and the row's element.
func combine[T number](o scatterOp) func(a, b T) T {
	switch o {
	case scatterAdd:
		return func(a, b T) T { return a + b }
	case scatterSub:
		return func(a, b T) T { return a - b }
	case scatterMul:
		return func(a, b T) T { return a * b }
	case scatterDiv:
		return func(a, b T) T { return a / b }
	case scatterMin:
		return func(a, b T) T { return min(a, b) }
	case scatterMax:
		return func(a, b T) T { return max(a, b) }
	}
	return func(_, b T) T { return b }
}

// scatterRows applies the rows of src to the rows of dst at s.Indices, element by element.
func scatterRows[T any](dst []T, s *tensor.IndexedSlices, src []T, f func(a, b T) T) {
	rows := s.Indices.Len()
	if rows == 0 {
		return
	}
	width := len(src) / rows
	for i, at := range s.Indices.Float64s() {
		to := dst[int(at)*width:][:width]
		for j, x := range src[i*width:][:width] {
			to[j] = f(to[j], x)
		}
	}
}
