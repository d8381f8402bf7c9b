package distribute

import (
	"context"
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Sparse says how IndexedSlices are reduced.
type Sparse uint8

// The ways to reduce IndexedSlices. [SparseKeep] is TensorFlow's, and the default: the result has the rows of
// all replicas, in the order of the replicas. Rows with equal indices are not combined; they add up when the
// slices are applied.
//
// All others add the rows with equal indices, first within a replica in their order, then over the replicas
// along the canonical tree. Their results represent the same tensor, bit for bit; the transferred data differ.
// With [SparseGather] every replica gathers and combines all rows; it is best if few replicas share few rows.
// With [SparseReduce] the indices are gathered, then the rows of their union are summed; it is best if many
// replicas have the same rows. Both return each index once, in ascending order. With [SparseDense] slices are
// converted to tensors first; it is best if most rows are present. Its result is a tensor.
//
// [SparseAuto] chooses one of the three for each leaf of each call. Let K be the number of rows of all
// replicas, u the number of distinct rows among them, and R the number of rows of the tensor. Gathering
// transfers K rows to every replica, summing the union about 2u, and summing tensors about 2R. K is computed
// from the lengths, which are exchanged first; u is known after the indices are gathered.
const (
	SparseInherit Sparse = iota
	SparseKeep
	SparseAuto
	SparseGather
	SparseReduce
	SparseDense
)

// String returns the way's name: "keep".
func (s Sparse) String() string {
	names := [...]string{"inherit", "keep", "auto", "gather", "reduce", "dense"}
	if int(s) < len(names) {
		return names[s]
	}
	return fmt.Sprintf("Sparse(%d)", uint8(s))
}

// keeps reports whether rows with equal indices are not combined.
func (s Sparse) keeps() bool { return s == SparseInherit || s == SparseKeep }

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

// reduceSparse reduces leaves that are IndexedSlices on some replicas; sparse has which leaves on which
// replica.
func (r *Replica) reduceSparse(ctx context.Context, run *deadlock.Run, op ReduceOp, leaves []any, names []string, sparse [][]int64, o Options) ([]any, error) {
	out := make([]any, len(leaves))
	var dense []any
	var denseNames []string
	var at []int
	for i, leaf := range leaves {
		count := int64(0)
		for _, replica := range sparse {
			count += replica[i]
		}
		if count == int64(len(sparse)) {
			v, err := r.reduceRows(ctx, run, op, leaf.(*tensor.IndexedSlices), leafName(i, names[i]), o)
			if err != nil {
				return nil, err
			}
			out[i] = onDevice(v, *r.device)
			continue
		}
		t, err := densified(leaf)
		if err != nil { // the others wait for this replica's tensor
			return nil, run.Fail(located(errorf("AllReduce", ErrInvalid, "%s: %w", leafName(i, names[i]), err)))
		}
		dense, denseNames, at = append(dense, t), append(denseNames, names[i]), append(at, i)
	}
	if len(dense) == 0 {
		return out, nil
	}
	sums, err := r.allReduceDense(ctx, run, op, dense, denseNames, o)
	if err != nil {
		return nil, err
	}
	for k, i := range at {
		out[i] = sums[k]
	}
	return out, nil
}

// reduceRows reduces a leaf that is IndexedSlices on every replica.
func (r *Replica) reduceRows(ctx context.Context, run *deadlock.Run, op ReduceOp, s *tensor.IndexedSlices, name string, o Options) (Value, error) {
	all, err := r.exchangeSlices(ctx, run, s, name, o)
	if err != nil {
		return nil, err
	}
	way := o.Sparse
	if way == SparseAuto {
		way = all.choose()
	}
	if way == SparseDense {
		t, err := Densify(&tensor.IndexedSlices{Values: s.Values, Indices: s.Indices, DenseShape: all.denseShape})
		if err != nil { // the others wait for this replica's tensor
			return nil, run.Fail(located(errorf("AllReduce", ErrInvalid, "%s: %w", name, err)))
		}
		return r.reduceOne(ctx, run, op, t, name, o)
	}
	mine := s.Indices
	if all.wide {
		mine = toInt64(mine)
	}
	indices, err := r.gatherFlat(ctx, run, mine, all.counts(1), "indices of "+name, o)
	if err != nil {
		return nil, err
	}
	var union []int64
	if !way.keeps() {
		union = unionOf(indices)
		if all.distinct = len(union); way == SparseAuto {
			way = all.choose()
		}
	}
	switch width := product(s.Values.Shape()[1:]); way {
	case SparseReduce, SparseDense:
		rows, err := r.reduceOne(ctx, run, op, block(s, union), name, o)
		if err != nil {
			return nil, err
		}
		return all.result(way, rows, indicesOf(union, indices.DType()))
	default:
		flat, err := r.gatherFlat(ctx, run, s.Values, all.counts(width), "rows of "+name, o)
		if err != nil {
			return nil, err
		}
		rows := flat.Reshape(append([]int{all.rows}, s.Values.Shape()[1:]...)...)
		parts, lo := make([]Value, len(all.lengths)), 0
		for i, n := range all.lengths {
			parts[i] = &tensor.IndexedSlices{Values: rows.Rows(lo, lo+n), Indices: indices.Rows(lo, lo+n), DenseShape: all.denseShape}
			lo += n
		}
		return reduceSlices("AllReduce", op, parts, Options{Sparse: way, Accumulate: o.Accumulate})
	}
}

// result returns the reduced rows of the distinct indices.
func (a *allSlices) result(way Sparse, rows, indices *tensor.Tensor) (Value, error) {
	s := &tensor.IndexedSlices{Values: rows, Indices: indices, DenseShape: a.denseShape}
	if way == SparseDense {
		return Densify(s)
	}
	return s, nil
}

// reduceOne reduces one tensor.
func (r *Replica) reduceOne(ctx context.Context, run *deadlock.Run, op ReduceOp, t *tensor.Tensor, name string, o Options) (*tensor.Tensor, error) {
	out, err := r.allReduceDense(ctx, run, op, []any{t}, []string{name}, o)
	if err != nil {
		return nil, err
	}
	return out[0].(*tensor.Tensor), nil
}

// allSlices describes a leaf that is IndexedSlices on every replica; it is the same on all replicas.
type allSlices struct {
	extent
	lengths    []int          // rows, by replica
	wide       bool           // their indices have different dtypes
	denseShape *tensor.Tensor // replica 0's
}

// counts returns the number of elements by replica, for rows of width elements.
func (a *allSlices) counts(width int) []int {
	out := make([]int, len(a.lengths))
	for i, n := range a.lengths {
		out[i] = n * width
	}
	return out
}

// sliceDims is the largest number of dimensions of IndexedSlices that can be transferred.
const sliceDims = 14

// exchangeSlices exchanges the replicas' numbers of rows and checks that their slices match.
func (r *Replica) exchangeSlices(ctx context.Context, run *deadlock.Run, s *tensor.IndexedSlices, name string, o Options) (*allSlices, error) {
	const op = "AllReduce"
	if s.Values.Rank() > sliceDims {
		return nil, run.Fail(located(errorf(op, ErrUnsupported, "%s: IndexedSlices of %d dimensions: want at most %d", name, s.Values.Rank(), sliceDims)))
	}
	mine := make([]int64, 4+2*sliceDims)
	mine[0], mine[1], mine[2] = int64(s.Values.DType()), int64(s.Indices.DType()), int64(s.Values.Rank())
	for i, d := range s.Values.Shape() {
		mine[4+i] = int64(d)
	}
	if s.DenseShape != nil {
		mine[3] = int64(s.DenseShape.DType())
		copy(mine[4+sliceDims:], tensor.Data[int64](toInt64(s.DenseShape)))
	}
	headers, err := r.exchange(ctx, run, mine, "extent of "+name, o)
	if err != nil {
		return nil, err
	}
	return joinSlices(op, name, headers)
}

// joinSlices decodes the replicas' headers. The result, including an error, is the same on every replica.
func joinSlices(op, name string, headers [][]int64) (*allSlices, error) {
	first := headers[0]
	rank := int(first[2])
	all := &allSlices{}
	for i, h := range headers {
		switch {
		case h[0] != first[0]:
			return nil, errorf(op, ErrMismatch, "%s: the values differ: replica %d's were expected to be a %v tensor, as replica 0's are, but are a %v tensor", name, i, tensor.DType(first[0]), tensor.DType(h[0]))
		case h[2] != first[2] || !slices.Equal(h[5:4+rank], first[5:4+rank]):
			return nil, errorf(op, ErrMismatch, "%s: the rows differ: replica %d's must have the same size and shape as replica 0's: shapes %v and %v", name, i, h[4:4+h[2]], first[4:4+rank])
		}
		all.lengths = append(all.lengths, int(h[4]))
		all.rows += int(h[4])
		all.longest = max(all.longest, int(h[4]))
		all.wide = all.wide || h[1] != first[1]
	}
	all.rowBytes = tensor.DType(first[0]).Bytes()
	for _, d := range first[5 : 4+rank] {
		all.rowBytes *= int(d)
	}
	if d := tensor.DType(first[3]); d != tensor.Invalid {
		dims := first[4+sliceDims : 4+sliceDims+rank]
		all.denseShape = indicesOf(slices.Clone(dims), d)
		all.whole = int(dims[0])
	}
	return all, nil
}
