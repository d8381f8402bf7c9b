package distribute

import (
	"context"
	"slices"

	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
	"github.com/lockstep-ml/lockstep/distribute/internal/dense"
	"github.com/lockstep-ml/lockstep/distribute/internal/sparse"
	"github.com/lockstep-ml/lockstep/tensor"
)

// whichSparse returns which leaves are IndexedSlices (1) on which replica: sparse[replica][i], or nil if none
// is. The caller has not acquired the replica.
func (r *Replica) whichSparse(
	ctx context.Context, run *deadlock.Run, op ReduceOp, leaves []any, names []string, o Options,
) (all [][]int64, err error) {
	sparse := make([]int64, 0, 8)
	mine := true
	for _, leaf := range leaves {
		_, dense := leaf.(*tensor.Tensor)
		mine = mine && dense
		sparse = append(sparse, 0)
		if !dense {
			sparse[len(sparse)-1] = 1
		}
	}
	key := nestHash(leaves, names)
	if _, known := r.dense[key]; known && mine {
		return nil, nil
	}
	all, err = r.exchange(ctx, run, sparse, "which are sparse of "+nestText(names),
		purpose("all_reduce "+op.String(), leaves, names), o)
	if err != nil {
		return nil, err
	}
	for _, replica := range all {
		for _, is := range replica {
			if is != 0 {
				return all, nil
			}
		}
	}
	if r.dense == nil || len(r.dense) >= knownDenseMax {
		r.dense = knownDense{}
	}
	r.dense[key] = struct{}{}
	return nil, nil
}

// reduceSparse reduces leaves that are IndexedSlices on some replicas; sparse has which leaves on which
// replica.
func (r *Replica) reduceSparse(
	ctx context.Context, run *deadlock.Run, op ReduceOp, leaves []any, names []string, sparse [][]int64, o Options,
) ([]any, error) {
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
func (r *Replica) reduceRows(
	ctx context.Context, run *deadlock.Run, op ReduceOp, s *tensor.IndexedSlices, name string, o Options,
) (Value, error) {
	all, err := r.exchangeSlices(ctx, run, s, name, o)
	if err != nil {
		return nil, err
	}
	way := o.Sparse
	if way == SparseAuto {
		way = all.choose()
	}
	if way == SparseDense {
		t, err := densify(&tensor.IndexedSlices{Values: s.Values, Indices: s.Indices, DenseShape: all.denseShape})
		if err != nil { // the others wait for this replica's tensor
			return nil, run.Fail(located(errorf("AllReduce", ErrInvalid, "%s: %w", name, err)))
		}
		return r.reduceOne(ctx, run, op, t, name, o)
	}
	mine := s.Indices
	if all.wide {
		mine = sparse.Int64(mine)
	}
	indices, err := r.gatherFlat(ctx, run, mine, all.counts(1), "indices of "+name, o)
	if err != nil {
		return nil, err
	}
	var union []int64
	if !way.keeps() {
		union = sparse.Union(indices)
		if all.distinct = len(union); way == SparseAuto {
			way = all.choose()
		}
	}
	switch width := dense.Product(s.Values.Shape()[1:]); way {
	case SparseReduce, SparseDense:
		rows, err := r.reduceOne(ctx, run, op, sparse.Block(s, union), name, o)
		if err != nil {
			return nil, err
		}
		return all.result(way, rows, sparse.Indices(union, indices.DType()))
	default:
		flat, err := r.gatherFlat(ctx, run, s.Values, all.counts(width), "rows of "+name, o)
		if err != nil {
			return nil, err
		}
		rows := flat.Reshape(append([]int{all.rows}, s.Values.Shape()[1:]...)...)
		parts, lo := make([]Value, len(all.lengths)), 0
		for i, n := range all.lengths {
			parts[i] = &tensor.IndexedSlices{
				Values: rows.Rows(lo, lo+n), Indices: indices.Rows(lo, lo+n),
				DenseShape: all.denseShape,
			}
			lo += n
		}
		return reduceSlices("AllReduce", op, parts, Options{Sparse: way, Accumulate: o.Accumulate})
	}
}

// result returns the reduced rows of the distinct indices.
func (a *allSlices) result(way Sparse, rows, indices *tensor.Tensor) (Value, error) {
	s := &tensor.IndexedSlices{Values: rows, Indices: indices, DenseShape: a.denseShape}
	if way == SparseDense {
		return densify(s)
	}
	return s, nil
}

// reduceOne reduces one tensor.
func (r *Replica) reduceOne(
	ctx context.Context, run *deadlock.Run, op ReduceOp, t *tensor.Tensor, name string, o Options,
) (*tensor.Tensor, error) {
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
func (r *Replica) exchangeSlices(
	ctx context.Context, run *deadlock.Run, s *tensor.IndexedSlices, name string, o Options,
) (*allSlices, error) {
	const op = "AllReduce"
	if s.Values.Rank() > sliceDims {
		return nil, run.Fail(located(errorf(op, ErrUnsupported, "%s: IndexedSlices of %d dimensions: want at most %d", name,
			s.Values.Rank(), sliceDims)))
	}
	mine := make([]int64, 4+2*sliceDims)
	mine[0], mine[1], mine[2] = int64(s.Values.DType()), int64(s.Indices.DType()), int64(s.Values.Rank())
	for i, d := range s.Values.Shape() {
		mine[4+i] = int64(d)
	}
	if s.DenseShape != nil {
		mine[3] = int64(s.DenseShape.DType())
		copy(mine[4+sliceDims:], tensor.Data[int64](sparse.Int64(s.DenseShape)))
	}
	headers, err := r.exchange(ctx, run, mine, "extent of "+name, purpose("all_reduce", []any{s}, []string{name}), o)
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
			return nil, errorf(op, ErrMismatch, "%s: the values differ: replica %d's were expected to be a %v tensor, as "+
				"replica 0's are, but are a %v tensor", name, i, tensor.DType(first[0]), tensor.DType(h[0]))
		case h[2] != first[2] || !slices.Equal(h[5:4+rank], first[5:4+rank]):
			return nil, errorf(op, ErrMismatch, "%s: the rows differ: replica %d's must have the same size and shape as "+
				"replica 0's: shapes %v and %v", name, i, h[4:4+h[2]], first[4:4+rank])
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
		all.denseShape = sparse.Indices(slices.Clone(dims), d)
		all.whole = int(dims[0])
	}
	return all, nil
}
