package distribute

import (
	"context"

	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
	"github.com/lockstep-ml/lockstep/distribute/internal/dense"
	"github.com/lockstep-ml/lockstep/tensor"
)

// reduceInto reduces tensors in packs and waits for all of them. The caller has acquired the replica.
func (r *Replica) reduceInto(
	ctx context.Context, run *deadlock.Run, op ReduceOp, dst, src []*tensor.Tensor, names []string, o Options,
) error {
	if len(src) == 1 {
		if op == Mean && !src[0].DType().IsFloat() {
			op = Sum // as in packs
		}
		return r.do(ctx, run, op, dst[0], src[0], nameAt(names, 0), o)
	}
	if o.BytesPerPack == 0 && r.comm().Properties().Memory {
		o.BytesPerPack = OnePack // the caller waits for all results, so overlapping copies and transfers gains nothing
	}
	p, err := r.packed(ctx, &reduction{Bucket: Bucket{Dst: dst, Src: src, Names: names}, op: op, options: o})
	if err == nil {
		err = p.do(ctx)
	}
	if err != nil {
		return run.Fail(err)
	}
	return nil
}

// allReduceDense reduces tensors by collective calls between the replicas.
func (r *Replica) allReduceDense(
	ctx context.Context, run *deadlock.Run, op ReduceOp, leaves []any, names []string, o Options,
) ([]any, error) {
	if err := run.Acquire(r.local); err != nil {
		return nil, err
	}
	defer run.Release(r.local)
	src, dst := make([]*tensor.Tensor, len(leaves)), make([]*tensor.Tensor, len(leaves))
	for i, leaf := range leaves {
		t := leaf.(*tensor.Tensor)
		src[i], dst[i] = t, tensor.New(t.DType(), t.Shape()...).OnDevice(r.device.Index)
	}
	begin := r.arrive()
	if err := r.reduceInto(ctx, run, op, dst, src, names, o); err != nil {
		return nil, err
	}
	out := make([]any, len(leaves))
	for i, sum := range dst {
		if op == Mean && !sum.DType().IsFloat() { // only summed so far: the quotient has another dtype
			sum = dense.Divide(sum, r.strategy.size).OnDevice(r.device.Index)
		}
		out[i] = sum
	}
	r.leave(begin)
	return out, nil
}

// copyAll is the reduction over one replica; run is nil outside of a Run.
func copyAll(run *deadlock.Run, replica int, dst, src []*tensor.Tensor) error {
	if run != nil {
		if err := run.Acquire(replica); err != nil {
			return err
		}
		defer run.Release(replica)
	}
	for i, t := range src {
		dense.CopyMemory(dst[i].Memory(), t.Memory())
	}
	return nil
}
