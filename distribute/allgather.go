package distribute

import (
	"context"

	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
	"github.com/lockstep-ml/lockstep/distribute/internal/dense"
	"github.com/lockstep-ml/lockstep/tensor"
)

// AllGather concatenates the replicas' tensors along an axis, in the order of the replicas, and returns the
// result on every replica (TensorFlow's ReplicaContext.all_gather). A negative axis counts from the end. v is a
// nest of tensors with the same structure on all replicas. The tensors of one leaf have the same dtype and the
// same dimensions, except for the length along the axis; the replicas exchange these lengths first.
// IndexedSlices are not supported, as in TensorFlow. With one replica AllGather returns v unchanged.
func AllGather[T any](ctx context.Context, r *Replica, v T, axis int, opts ...Options) (T, error) {
	out, err := r.allGather(ctx, exactly(v), axis, opts)
	return resultAs[T]("AllGather", out, err)
}

func (r *Replica) allGather(ctx context.Context, v Value, axis int, opts []Options) (Value, error) {
	const name = "AllGather"
	run, o, err := r.enter(ctx, name, Sum, opts)
	if err != nil {
		return nil, located(err)
	}
	leaves, names := named(v)
	for i, leaf := range leaves {
		if leaves[i], err = r.operand(leaf); err != nil {
			return nil, located(errorf(name, ErrInvalid, "%s: %w", leafName(i, names[i]), err))
		}
		if _, sparse := leaves[i].(*tensor.IndexedSlices); sparse {
			return nil, located(errorf(name, ErrUnsupported, "%s: all_gather does not support IndexedSlices",
				leafName(i, names[i])))
		}
	}
	s := r.strategy
	switch {
	case len(leaves) == 0 || s.size == 1:
		return tensor.Pack(v, leaves)
	case s.ops != nil:
		out, err := r.mergeLeaves(ctx, name, leaves, names, o, func(ctx context.Context, batch []Reduction) ([]Value, error) {
			return gatherBatch(ctx, s.batchOps(batch), batch, axis, o)
		})
		if err != nil {
			return nil, err
		}
		return tensor.Pack(v, out)
	}
	out, err := r.gatherLeaves(ctx, run, leaves, names, axis, o)
	if err != nil {
		return nil, located(err)
	}
	return tensor.Pack(v, out)
}

// partDims is the largest number of dimensions of a tensor that can be gathered.
const partDims = 30

// gatherLeaves exchanges the shapes of all replicas' tensors, then gathers one tensor after the other.
func (r *Replica) gatherLeaves(
	ctx context.Context, run *deadlock.Run, leaves []any, names []string, axis int, o Options,
) ([]any, error) {
	const name, width = "AllGather", 2 + partDims
	mine := make([]int64, width*len(leaves))
	for i, leaf := range leaves {
		t := leaf.(*tensor.Tensor)
		if t.Rank() > partDims {
			return nil, errorf(name, ErrUnsupported, "%s: a tensor of %d dimensions: want at most %d", leafName(i, names[i]),
				t.Rank(), partDims)
		}
		h := mine[width*i:]
		h[0], h[1] = int64(t.DType()), int64(t.Rank())
		for d, n := range t.Shape() {
			h[2+d] = int64(n)
		}
	}
	headers, err := r.exchange(ctx, run, mine, "shapes of "+nestText(names), purpose("all_gather", leaves, names), o)
	if err != nil {
		return nil, err
	}
	out := make([]any, len(leaves))
	for i, leaf := range leaves {
		parts := make([]dense.Part, len(headers))
		for k, h := range headers {
			h = h[width*i : width*(i+1)]
			parts[k].DType = tensor.DType(h[0])
			for _, n := range h[2 : 2+h[1]] {
				parts[k].Shape = append(parts[k].Shape, int(n))
			}
		}
		at, shape, err := dense.JoinedShape(parts, axis)
		if err != nil {
			return nil, errorf(name, nil, "%s: %w", leafName(i, names[i]), failed(name, err))
		}
		if out[i], err = r.gatherLeaf(ctx, run, leaf.(*tensor.Tensor), parts, at, shape, names[i], o); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// gatherLeaf gathers one tensor; the parts' shapes have been checked.
func (r *Replica) gatherLeaf(
	ctx context.Context, run *deadlock.Run, t *tensor.Tensor, parts []dense.Part, axis int, shape []int, name string,
	o Options,
) (*tensor.Tensor, error) {
	if t.DType() == tensor.String {
		return r.gatherStrings(ctx, t, axis, name, o)
	}
	counts := make([]int, len(parts))
	for k, p := range parts {
		counts[k] = dense.Product(p.Shape)
	}
	flat, err := r.gatherFlat(ctx, run, t, counts, name, o)
	if err != nil {
		return nil, err
	}
	if rows := dense.Product(shape[:axis]); rows != 1 && flat.Len() > 0 {
		out, from, to := tensor.New(t.DType(), shape...), 0, 0
		for k, p := range parts {
			dense.CopyColumns(out, dense.Slice(flat, from, from+counts[k]), rows, to)
			from, to = from+counts[k], to+dense.Product(p.Shape[axis:])
		}
		return out.OnDevice(r.device.Index), nil
	}
	return flat.Reshape(shape...), nil
}

// gatherStrings gathers strings, which collectives on raw memory cannot transfer.
func (r *Replica) gatherStrings(
	ctx context.Context, t *tensor.Tensor, axis int, name string, o Options,
) (*tensor.Tensor, error) {
	out, err := r.mergeLeaves(ctx, "AllGather", []any{t}, []string{name}, o,
		func(ctx context.Context, batch []Reduction) ([]Value, error) {
			return gatherBatch(ctx, r.strategy.collective, batch, axis, o)
		})
	if err != nil {
		return nil, err
	}
	return out[0].(*tensor.Tensor), nil
}
