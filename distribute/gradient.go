package distribute

import (
	"context"

	"github.com/lockstep-ml/lockstep/distribute/internal/dense"
	"github.com/lockstep-ml/lockstep/distribute/internal/sparse"
	"github.com/lockstep-ml/lockstep/tensor"
)

// AllReduceGradient returns the gradient of [AllReduce] (in TensorFlow a tape computes it). Let y =
// AllReduce(x) on every replica, and dy be the gradient of a replica's loss with respect to its y. The result
// is the gradient of the sum of all replicas' losses with respect to the replica's x. Every replica calls it
// with its own x and dy, in the order of AllReduce's nest.
//
// For a tensor the result is AllReduce(dy) with the same op, because all replicas used the one sum. TensorFlow
// has no gradient for IndexedSlices. Here the leaf of dy is the gradient with respect to the values of y, one
// row per row of all replicas, and the result is the gradient with respect to the values of x. If some replicas
// have a tensor and others IndexedSlices, y and dy are dense, and the gradient of a row is that of its index.
func AllReduceGradient[T any](
	ctx context.Context, r *Replica, op ReduceOp, x, dy T, opts ...Options,
) (T, error) {
	out, err := r.allReduceGradient(ctx, op, exactly(x), exactly(dy), opts)
	return resultAs[T]("AllReduceGradient", out, err)
}

func (r *Replica) allReduceGradient(ctx context.Context, op ReduceOp, x, dy Value, opts []Options) (Value, error) {
	const name = "AllReduceGradient"
	run, o, err := r.enter(ctx, name, op, opts)
	if err != nil {
		return nil, located(err)
	}
	xs, names, dys, err := r.operandPairs(name, x, dy)
	if err != nil {
		return nil, located(err)
	}
	if len(xs) == 0 || r.strategy.size == 1 {
		return tensor.Pack(x, dys)
	}
	rows := make([]int64, len(xs))
	for i, leaf := range xs {
		rows[i] = isDense
		if s, ok := leaf.(*tensor.IndexedSlices); ok {
			rows[i] = int64(s.Values.Shape()[0])
		}
	}
	all, err := r.exchange(ctx, run, rows, "rows of "+nestText(names), purpose("the gradient of all_reduce", xs, names), o)
	if err != nil {
		return nil, err
	}
	sums, err := r.allReduce(ctx, op, dys, []Options{o})
	if err != nil {
		return nil, err
	}
	out := sums.([]any)
	for i, leaf := range xs {
		s, ok := leaf.(*tensor.IndexedSlices)
		if !ok {
			continue
		}
		if out[i], err = gradientOfRows(name, s, out[i].(*tensor.Tensor), i, r.id, all); err != nil {
			return nil, located(errorf(name, nil, "%s: %w", leafName(i, names[i]), err))
		}
	}
	return tensor.Pack(x, out)
}

// isDense marks a replica that has a tensor, in place of its number of rows.
const isDense = -1

// gradientOfRows returns this replica's part of the reduced gradient dy of leaf i, whose input was slices.
func gradientOfRows(
	op string, s *tensor.IndexedSlices, dy *tensor.Tensor, i, replica int, rows [][]int64,
) (*tensor.Tensor, error) {
	for _, of := range rows {
		if of[i] == isDense { // the result was dense, too
			return rowsAt(op, dy, s.Indices)
		}
	}
	return ownColumns(op, dy, 0, i, replica, rows)
}

// rowsAt returns the rows of t at the indices.
func rowsAt(op string, t, indices *tensor.Tensor) (*tensor.Tensor, error) {
	if t.Rank() == 0 {
		return nil, errorf(op, ErrMismatch, "the gradient of IndexedSlices has no rows")
	}
	rows := []*tensor.Tensor{t.Rows(0, 0)}
	for _, at := range tensor.Data[int64](sparse.Int64(indices)) {
		if at < 0 || at >= int64(t.Shape()[0]) {
			return nil, errorf(op, ErrInvalid, "index %d is outside of the %d rows", at, t.Shape()[0])
		}
		rows = append(rows, t.Rows(int(at), int(at)+1))
	}
	return dense.ConcatRows(rows), nil
}

// operandPairs returns the leaves of two nests of the same structure.
func (r *Replica) operandPairs(op string, x, dy Value) (xs []any, names []string, dys []any, err error) {
	_, err = tensor.Zip(func(path string, pair []any) (any, error) {
		a, err := r.operand(pair[0])
		if err != nil {
			return nil, err
		}
		b, err := r.operand(pair[1])
		if err != nil {
			return nil, err
		}
		if _, dense := b.(*tensor.Tensor); !dense {
			return nil, errorf(op, ErrInvalid, "%s: the gradient must be a tensor; of IndexedSlices, that of their values",
				leafName(len(xs), path))
		}
		xs, names, dys = append(xs, a), append(names, path), append(dys, b)
		return nil, nil
	}, nil, x, dy)
	if err != nil {
		return nil, nil, nil, errorf(op, ErrInvalid, "x and its gradient: %w", err)
	}
	return xs, names, dys, nil
}

// AllGatherGradient returns the gradient of [AllGather]. Let y = AllGather(x, axis) on every replica,
// and dy be the gradient of a replica's loss with respect to its y. The result is the gradient of the sum of
// all replicas' losses with respect to the replica's x: its own columns of AllReduce(Sum, dy). Every replica
// calls it with its own x and dy.
func AllGatherGradient[T any](
	ctx context.Context, r *Replica, x, dy T, axis int, opts ...Options,
) (T, error) {
	out, err := r.allGatherGradient(ctx, exactly(x), exactly(dy), axis, opts)
	return resultAs[T]("AllGatherGradient", out, err)
}

func (r *Replica) allGatherGradient(ctx context.Context, x, dy Value, axis int, opts []Options) (Value, error) {
	const name = "AllGatherGradient"
	run, o, err := r.enter(ctx, name, Sum, opts)
	if err != nil {
		return nil, located(err)
	}
	xs, names, dys, err := r.operandPairs(name, x, dy)
	if err != nil {
		return nil, located(err)
	}
	if len(xs) == 0 || r.strategy.size == 1 {
		return tensor.Pack(x, dys)
	}
	axes, lengths := make([]int, len(xs)), make([]int64, len(xs))
	for i, leaf := range xs {
		t, ok := leaf.(*tensor.Tensor)
		if !ok {
			return nil, located(errorf(name, ErrUnsupported, "%s: all_gather does not support IndexedSlices",
				leafName(i, names[i])))
		}
		if axes[i] = axis; axis < 0 {
			axes[i] += t.Rank()
		}
		if axes[i] < 0 || axes[i] >= t.Rank() {
			return nil, located(errorf(name, ErrInvalid, "%s: expected concatenating dimensions in the range [%d, %d), but "+
				"got %d", leafName(i, names[i]), -t.Rank(), t.Rank(), axis))
		}
		lengths[i] = int64(t.Shape()[axes[i]])
	}
	why := purpose("the gradient of all_gather", xs, names)
	all, err := r.exchange(ctx, run, lengths, "lengths of "+nestText(names), why, o)
	if err != nil {
		return nil, err
	}
	sums, err := r.allReduce(ctx, Sum, dys, []Options{o})
	if err != nil {
		return nil, err
	}
	out := make([]any, len(xs))
	for i, sum := range sums.([]any) {
		if out[i], err = ownColumns(name, sum.(*tensor.Tensor), axes[i], i, r.id, all); err != nil {
			return nil, located(err)
		}
	}
	return tensor.Pack(x, out)
}

// ownColumns returns a replica's part of the gathered leaf i.
func ownColumns(op string, t *tensor.Tensor, axis, i, replica int, lengths [][]int64) (*tensor.Tensor, error) {
	from, total := 0, 0
	for k, l := range lengths {
		if k < replica {
			from += int(l[i])
		}
		total += int(l[i])
	}
	if axis >= t.Rank() || t.Shape()[axis] != total {
		return nil, errorf(op, ErrMismatch, "the gradient has shape %s, but the gathered result has length %d along axis "+
			"%d: want the shape of the result", dense.Bracketed(t.Shape()), total, axis)
	}
	return dense.Columns(t, axis, from, int(lengths[replica][i])), nil
}
