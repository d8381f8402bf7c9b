package distribute

import (
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
)

// extent has the sizes that the choice depends on.
type extent struct {
	rows     int // of all replicas
	distinct int // distinct rows; 0: not known yet
	longest  int // of one replica: a lower bound of distinct, if no index repeats
	whole    int // of the dense tensor; 0: not known
	rowBytes int
}

// indexBytes is the size of a transferred index.
const indexBytes = 8

// choose returns the way to reduce slices of this extent. Before the indices are known it returns SparseAuto,
// unless SparseDense is better than both others can be.
func (e extent) choose() Sparse {
	gather, dense := e.rows*e.rowBytes, 2*e.whole*e.rowBytes
	if e.distinct == 0 && e.rows > 0 {
		if e.whole > 0 && dense <= e.rows*indexBytes+min(gather, 2*e.longest*e.rowBytes) {
			return SparseDense
		}
		return SparseAuto
	}
	union := 2 * e.distinct * e.rowBytes
	switch {
	case e.whole > 0 && dense < min(gather, union):
		return SparseDense
	case union < gather:
		return SparseReduce
	}
	return SparseGather
}

// checkSlices validates IndexedSlices.
func checkSlices(s *tensor.IndexedSlices) error {
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
	case s.DenseShape != nil && (s.DenseShape.DType() != tensor.Int32 && s.DenseShape.DType() != tensor.Int64 || s.DenseShape.Len() != s.Values.Rank()):
		return fmt.Errorf("a dense shape %v of IndexedSlices whose values are %s: want %d dimensions as int32 or int64", s.DenseShape, bracketed(s.Values.Shape()), s.Values.Rank())
	}
	return nil
}

// wholeRows returns the number of rows of the dense tensor, or 0 if that is not known.
func wholeRows(s *tensor.IndexedSlices) int {
	if s.DenseShape == nil {
		return 0
	}
	return int(tensor.Data[int64](toInt64(s.DenseShape))[0])
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

// reduceSlices reduces the components of a value that are all IndexedSlices, on one goroutine.
func reduceSlices(op string, reduce ReduceOp, values []Value, o Options) (Value, error) {
	all, err := concatSlices(op, values)
	if err != nil {
		return nil, err
	}
	if o.Sparse.keeps() {
		if reduce == Mean {
			return meanOf(op, all, len(values))
		}
		return all, nil
	}
	union := unionOf(all.Indices)
	blocks := make([]*tensor.Tensor, len(values))
	longest := 0
	for i, v := range values {
		s := v.(*tensor.IndexedSlices)
		blocks[i] = block(s, union)
		longest = max(longest, s.Indices.Len())
	}
	way := o.Sparse
	if way == SparseAuto {
		way = extent{all.Indices.Len(), len(union), longest, wholeRows(all), rowBytes(all.Values)}.choose()
	}
	rows := &tensor.IndexedSlices{Values: reduceTree(reduce, blocks, o.Accumulate), Indices: indicesOf(union, all.Indices.DType()), DenseShape: all.DenseShape}
	if way == SparseDense {
		return Densify(rows)
	}
	return rows, nil
}

func rowBytes(values *tensor.Tensor) int { return product(values.Shape()[1:]) * values.DType().Bytes() }

// unionOf returns the distinct indices in ascending order.
func unionOf(indices *tensor.Tensor) []int64 {
	return slices.Compact(slices.Sorted(slices.Values(tensor.Data[int64](toInt64(indices)))))
}

// block returns one row for each index of the union: the sum of the slices' rows with that index, added in
// their order, or zeros.
func block(s *tensor.IndexedSlices, union []int64) *tensor.Tensor {
	shape := append([]int{len(union)}, s.Values.Shape()[1:]...)
	out := tensor.New(s.Values.DType(), shape...)
	for i, index := range tensor.Data[int64](toInt64(s.Indices)) {
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

// indicesOf returns indices as a tensor of int32 or int64.
func indicesOf(union []int64, d tensor.DType) *tensor.Tensor {
	if d != tensor.Int32 {
		return tensor.From(union)
	}
	out := tensor.New(tensor.Int32, len(union))
	for i, x := range union {
		tensor.Data[int32](out)[i] = int32(x)
	}
	return out
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
