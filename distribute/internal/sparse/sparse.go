// Package sparse computes with [tensor.IndexedSlices]: rows and their indices, with which each replica updates a few
// rows of a large tensor.
package sparse

import (
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/distribute/internal/dense"
	"github.com/lockstep-ml/lockstep/distribute/internal/kinds"
	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Check validates IndexedSlices.
func Check(s *tensor.IndexedSlices) error {
	switch {
	case s.Values == nil || s.Indices == nil:
		return fmt.Errorf("IndexedSlices have no values or no indices")
	case s.Values.Rank() == 0:
		return fmt.Errorf("values of IndexedSlices are a scalar: want at least one dimension")
	case s.Indices.DType() != tensor.Int32 && s.Indices.DType() != tensor.Int64 || s.Indices.Rank() != 1:
		return fmt.Errorf("indices of IndexedSlices are %v%s: want a vector of int32 or int64",
			s.Indices.DType(), tensor.FormatShape(s.Indices.Shape()))
	case s.Indices.Len() != s.Values.Shape()[0]:
		return fmt.Errorf("IndexedSlices of %d rows with %d indices", s.Values.Shape()[0], s.Indices.Len())
	case s.DenseShape != nil &&
		(s.DenseShape.DType() != tensor.Int32 && s.DenseShape.DType() != tensor.Int64 ||
			s.DenseShape.Len() != s.Values.Rank()):
		return fmt.Errorf("a dense shape %v of IndexedSlices whose values are %s: want %d dimensions as int32 or int64",
			s.DenseShape, dense.Bracketed(s.Values.Shape()), s.Values.Rank())
	}
	return nil
}

// DenseRows returns the number of rows of the dense tensor, or 0 if that is not known.
func DenseRows(s *tensor.IndexedSlices) int {
	if s.DenseShape == nil {
		return 0
	}
	return int(tensor.Data[int64](Int64(s.DenseShape))[0])
}

// Concat returns IndexedSlices with all rows, in the order of the components. Rows with equal indices are
// not combined. The dense shape is that of the first component; indices of different dtypes become int64.
func Concat(values []any) (*tensor.IndexedSlices, error) {
	first := values[0].(*tensor.IndexedSlices)
	if !first.Values.DType().IsNumeric() {
		return nil, dense.NotNumeric(first.Values.DType())
	}
	rows := make([]*tensor.Tensor, len(values))
	indices := make([]*tensor.Tensor, len(values))
	wide := false
	for i, v := range values {
		s := v.(*tensor.IndexedSlices)
		if s.Values.DType() != first.Values.DType() {
			return nil, kinds.Errorf(kinds.Mismatch, "the values of component %d were expected to be a %v tensor, as "+
				"component 0's are, but are a %v tensor", i, first.Values.DType(), s.Values.DType())
		}
		if s.Values.Rank() == 0 || !slices.Equal(s.Values.Shape()[1:], first.Values.Shape()[1:]) {
			return nil, kinds.Errorf(kinds.Mismatch, "the rows of component %d must have the same size and shape as component "+
				"0's: shapes %s and %s", i, dense.Bracketed(s.Values.Shape()), dense.Bracketed(first.Values.Shape()))
		}
		rows[i], indices[i] = s.Values, s.Indices
		wide = wide || s.Indices.DType() != first.Indices.DType()
	}
	if wide {
		for i, t := range indices {
			indices[i] = Int64(t)
		}
	}
	return &tensor.IndexedSlices{
		Values: dense.ConcatRows(rows), Indices: dense.ConcatRows(indices),
		DenseShape: first.DenseShape,
	}, nil
}

// RowBytes returns the size of one row of values.
func RowBytes(values *tensor.Tensor) int {
	return dense.Product(values.Shape()[1:]) * values.DType().Bytes()
}

// Union returns the distinct indices in ascending order.
func Union(indices *tensor.Tensor) []int64 {
	return slices.Compact(slices.Sorted(slices.Values(tensor.Data[int64](Int64(indices)))))
}

// Block returns one row for each index of the union: the sum of the slices' rows with that index, added in
// their order, or zeros.
func Block(s *tensor.IndexedSlices, union []int64) *tensor.Tensor {
	shape := append([]int{len(union)}, s.Values.Shape()[1:]...)
	out := tensor.New(s.Values.DType(), shape...)
	for i, index := range tensor.Data[int64](Int64(s.Indices)) {
		at, _ := slices.BinarySearch(union, index)
		addRow(out, at, s.Values, i)
	}
	return out
}

// addRow adds row i of rows to row at of out.
func addRow(out *tensor.Tensor, at int, rows *tensor.Tensor, i int) {
	row := out.Rows(at, at+1)
	if row.Len() > 0 {
		kernel.Reduce(kernel.Sum, row.DType(), row.Memory().Ptr, row.Memory().Ptr, rows.Rows(i, i+1).Memory().Ptr, row.Len())
	}
}

// Indices returns indices as a tensor of int32 or int64.
func Indices(union []int64, d tensor.DType) *tensor.Tensor {
	if d != tensor.Int32 {
		return tensor.From(union)
	}
	out := tensor.New(tensor.Int32, len(union))
	for i, x := range union {
		tensor.Data[int32](out)[i] = int32(x)
	}
	return out
}

// Int64 returns an int32 or int64 tensor as int64.
func Int64(t *tensor.Tensor) *tensor.Tensor {
	if t.DType() != tensor.Int32 {
		return t
	}
	out := tensor.New(tensor.Int64, t.Shape()...)
	for i, x := range tensor.Data[int32](t) {
		tensor.Data[int64](out)[i] = int64(x)
	}
	return out
}

// Densify converts s to a dense tensor. Rows with the same index are added. The dense shape must be known.
func Densify(s *tensor.IndexedSlices) (*tensor.Tensor, error) {
	if err := Check(s); err != nil {
		return nil, kinds.Errorf(kinds.Invalid, "%w", err)
	}
	if s.DenseShape == nil {
		return nil, kinds.Errorf(kinds.Invalid, "the dense shape of the IndexedSlices is not known")
	}
	if !s.Values.DType().IsNumeric() {
		return nil, dense.NotNumeric(s.Values.DType())
	}
	var shape []int
	for _, d := range tensor.Data[int64](Int64(s.DenseShape)) {
		shape = append(shape, int(d))
	}
	if len(shape) != s.Values.Rank() || len(shape) == 0 || !slices.Equal(shape[1:], s.Values.Shape()[1:]) {
		return nil, kinds.Errorf(kinds.Mismatch, "rows of shape %s do not fit the dense shape %s",
			dense.Bracketed(s.Values.Shape()), dense.Bracketed(shape))
	}
	out := tensor.New(s.Values.DType(), shape...)
	for i, index := range tensor.Data[int64](Int64(s.Indices)) {
		if index < 0 || index >= int64(shape[0]) {
			return nil, kinds.Errorf(kinds.Invalid, "index %d of row %d is outside of the %d rows", index, i, shape[0])
		}
		addRow(out, int(index), s.Values, i)
	}
	return out, nil
}
