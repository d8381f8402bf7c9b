// Package pieces cuts the elements of a dataset, which are batches, into pieces for the replicas.
package pieces

import (
	"context"
	"iter"
	"slices"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute/internal/dense"
	"github.com/lockstep-ml/lockstep/distribute/internal/kinds"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Sizes returns the sizes of the parts of these replicas, which are all replicas of the job.
func Sizes(global int, ids []int) []int {
	sizes := make([]int, len(ids))
	for i, id := range ids {
		sizes[i] = global / len(ids)
		if id < global%len(ids) {
			sizes[i]++
		}
	}
	return sizes
}

// Pieces yields the parts of successive replicas in successive steps.
type Pieces = func(context.Context) iter.Seq2[any, error]

// Split cuts every element into equal parts, one for each replica of the job, and yields the parts of one
// worker, or all. Of batches whose rows can be read separately and have one shape, it reads only these parts. Other
// batches are read whole: as in TensorFlow, elements that do not fit in one batch are an error on every worker.
func Split(ds data.Dataset, n int, mine func(part int) bool) Pieces {
	all := true
	for part := range n {
		all = all && (mine == nil || mine(part))
	}
	// cut yields the parts of a batch of so many rows.
	cut := func(rows int, read func(lo, hi int) (any, error), yield func(any, error) bool) bool {
		per := (rows + n - 1) / n
		for part := range n {
			if !all && !mine(part) {
				continue
			}
			piece, err := read(min(part*per, rows), min((part+1)*per, rows))
			if !yield(piece, err) || err != nil {
				return false
			}
		}
		return true
	}
	return func(ctx context.Context) iter.Seq2[any, error] {
		r, err := data.Reader(nil), error(nil)
		if !all {
			r, err = data.Open(ctx, ds)
		}
		if rows, ok := r.(data.RowReader); ok && data.Uniform(rows) {
			return data.ReadAhead(ctx, ds, func(ctx context.Context) iter.Seq2[any, error] {
				return func(yield func(any, error) bool) {
					for batch := range rows.Len() {
						read := func(lo, hi int) (any, error) { return readRows(ctx, rows, batch, lo, hi) }
						if !cut(rows.Rows(batch), read, yield) {
							return
						}
					}
				}
			})
		}
		return func(yield func(any, error) bool) {
			if err != nil {
				yield(nil, err)
				return
			}
			for element, err := range ds.Iter(ctx) {
				rows := 0
				if err == nil {
					rows, err = rowsOf(element)
				}
				if err != nil {
					yield(nil, err)
					return
				}
				if !cut(rows, func(lo, hi int) (any, error) { return rowsBetween(element, lo, hi) }, yield) {
					return
				}
			}
		}
	}
}

// readRows reads the rows [lo, hi) of a batch.
func readRows(ctx context.Context, r data.RowReader, batch, lo, hi int) (any, error) {
	rows := make([]int, max(hi-lo, 1)) // one for the structure of a part without rows
	for i := range hi - lo {
		rows[i] = lo + i
	}
	part, _, err := r.ReadRows(ctx, batch, rows)
	if err != nil {
		return nil, err
	}
	return rowsBetween(part, 0, hi-lo)
}

// Rebatch concatenates the rows of all elements and cuts them into pieces of the given sizes, which repeat.
// The last piece may be smaller; it is followed by pieces without rows up to the end of sizes.
func Rebatch(ds data.Dataset, sizes []int) Pieces {
	return func(ctx context.Context) iter.Seq2[any, error] {
		return func(yield func(any, error) bool) {
			at, have := 0, 0 // index into sizes; rows in parts
			var parts []any
			var last any
			emit := func() bool {
				piece, err := joined(parts)
				at, have, parts = (at+1)%len(sizes), 0, nil
				return yield(piece, err) && err == nil
			}
			for element, err := range ds.Iter(ctx) {
				rows := 0
				if err == nil {
					rows, err = rowsOf(element)
				}
				if err != nil {
					yield(nil, err)
					return
				}
				for lo := 0; lo < rows; {
					hi := min(rows, lo+sizes[at]-have)
					part, err := rowsBetween(element, lo, hi)
					if err != nil {
						yield(nil, err)
						return
					}
					parts, have, lo, last = append(parts, part), have+hi-lo, hi, element
					if have == sizes[at] && !emit() {
						return
					}
				}
			}
			if have > 0 && !emit() {
				return
			}
			for last != nil && sizes[at] == 0 {
				empty, err := rowsBetween(last, 0, 0)
				if parts = []any{empty}; err != nil || !emit() {
					return
				}
			}
		}
	}
}

// joined concatenates the rows of elements that have the same structure.
func joined(parts []any) (any, error) {
	if len(parts) == 1 {
		return parts[0], nil
	}
	return tensor.Zip(func(path string, leaves []any) (any, error) {
		ts := make([]*tensor.Tensor, len(leaves))
		for i, leaf := range leaves {
			t, _ := leaf.(*tensor.Tensor)
			switch {
			case t == nil && i == 0:
				return leaf, nil // an optional part that is absent
			case t == nil || i > 0 && (t.DType() != ts[0].DType() || !slices.Equal(t.Shape()[1:], ts[0].Shape()[1:])):
				return nil, kinds.Errorf(kinds.Mismatch, "element%s is %v, in the batch before it %v: batches must be of one "+
					"dtype and their rows of one shape", path, leaf, leaves[0])
			}
			ts[i] = t
		}
		return dense.ConcatRows(ts), nil
	}, nil, parts...)
}

// rowsBetween returns the rows [lo, hi) of an element's tensors.
func rowsBetween(element any, lo, hi int) (any, error) {
	return tensor.Map(element, func(leaf any) (any, error) {
		t, _ := leaf.(*tensor.Tensor)
		if t == nil {
			return leaf, nil // an optional part that is absent
		}
		return t.Rows(lo, hi), nil
	})
}

// WithoutRows returns an element without its rows. A scalar, which has none, is zero.
func WithoutRows(element any) (any, error) {
	return tensor.Map(element, func(leaf any) (any, error) {
		t, _ := leaf.(*tensor.Tensor)
		switch {
		case t == nil:
			return leaf, nil // an optional part that is absent
		case t.Rank() == 0:
			return tensor.New(t.DType()), nil
		}
		return t.Rows(0, 0), nil
	})
}

// HasScalars reports whether one of an element's tensors has no rows.
func HasScalars(element any) bool {
	return slices.ContainsFunc(tensor.Flatten(element), func(leaf any) bool {
		t, ok := leaf.(*tensor.Tensor)
		return ok && t != nil && t.Rank() == 0
	})
}

// rowsOf returns the number of examples of an element, which must be the same in all its tensors.
func rowsOf(element any) (int, error) {
	rows := -1
	_, err := tensor.Zip(func(path string, leaves []any) (any, error) {
		t, ok := leaves[0].(*tensor.Tensor)
		switch {
		case ok && t == nil, leaves[0] == nil:
			return leaves[0], nil
		case !ok:
			return nil, kinds.Errorf(kinds.Invalid, "element%s is a %T: want tensors", path, leaves[0])
		case t.Rank() == 0:
			return nil, kinds.Errorf(kinds.Invalid, "element%s is a scalar: call Batch on the dataset, so that its elements "+
				"can be split across the replicas", path)
		case rows >= 0 && t.Shape()[0] != rows:
			return nil, kinds.Errorf(kinds.Mismatch, "element%s has %d rows, the tensors before it %d: the first dimension "+
				"counts examples", path, t.Shape()[0], rows)
		}
		rows = t.Shape()[0]
		return t, nil
	}, nil, element)
	if err == nil && rows < 0 {
		err = kinds.Errorf(kinds.Invalid, "the element holds no tensor: %v", element)
	}
	return max(rows, 0), err
}
