package distribute

import (
	"github.com/lockstep-ml/lockstep/distribute/internal/dense"
	"github.com/lockstep-ml/lockstep/distribute/internal/sparse"
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

// reduceSlices reduces the components of a value that are all IndexedSlices, on one goroutine.
func reduceSlices(op string, reduce ReduceOp, values []Value, o Options) (Value, error) {
	all, err := sparse.Concat(values)
	if err != nil {
		return nil, failed(op, err)
	}
	if o.Sparse.keeps() {
		if reduce == Mean {
			return meanOf(op, all, len(values))
		}
		return all, nil
	}
	union := sparse.Union(all.Indices)
	blocks := make([]*tensor.Tensor, len(values))
	longest := 0
	for i, v := range values {
		s := v.(*tensor.IndexedSlices)
		blocks[i] = sparse.Block(s, union)
		longest = max(longest, s.Indices.Len())
	}
	way := o.Sparse
	if way == SparseAuto {
		way = extent{all.Indices.Len(), len(union), longest, sparse.DenseRows(all), sparse.RowBytes(all.Values)}.choose()
	}
	rows := &tensor.IndexedSlices{
		Values:  dense.Reduce(reduce, blocks, o.Accumulate),
		Indices: sparse.Indices(union, all.Indices.DType()), DenseShape: all.DenseShape,
	}
	if way == SparseDense {
		return densify(rows)
	}
	return rows, nil
}
