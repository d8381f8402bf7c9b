package distribute

import (
	"context"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Bucket lists tensors that are reduced together, such as gradients that a backward pass has completed.
type Bucket struct {
	// Src are this replica's tensors, Dst where the results are stored: Dst[i] has the dtype and the number of
	// elements of Src[i], and either is the same memory or does not overlap it.
	Dst, Src []*tensor.Tensor
	// Names are the tensors' names, for errors; nil: none.
	Names []string
	// Scalars are numbers of this replica that are combined too, and replaced by the result, in float64: loss, metrics,
	// flags on which replicas agree. A few of them need no separate call if the bucket has float32 tensors and is
	// summed.
	Scalars []float64
}

// StartAllReduce starts to combine the replicas' buckets and returns at once; [Handle.Wait] waits for the results. It
// is meant for gradients: the reduction of a bucket proceeds while the replica computes the next one. Goroutines of the
// library drive it, so it needs no further call. The calls that a replica has started proceed one after the other, in
// the order in which all replicas start them; a call such as [Replica.AllReduceInto] waits for those started before.
//
//	h, err := r.StartAllReduce(ctx, distribute.Sum, distribute.Bucket{Dst: g, Src: g, Names: names})
//	… // compute the gradients of the next bucket
//	err = h.Wait(ctx)
//
// A bucket is one pack: [Options.BytesPerPack] does not apply. The bits are those of [Replica.AllReduceInto] on each
// tensor, and of a float64 sum of each scalar. The tensors' memory and Scalars belong to the library until Wait has
// returned; the lists Dst, Src and Names do not. In steady state no call allocates.
//
// If the step function returns without Wait, the Run waits for the call. If the Run fails, started calls end with
// its failure. In no case is memory written after the Run has returned. With custom [CrossDeviceOps] Wait makes the
// whole call.
func (r *Replica) StartAllReduce(ctx context.Context, op ReduceOp, b Bucket, opts ...Options) (*Handle, error) {
	const name = "StartAllReduce"
	run, o, err := r.enter(ctx, name, op, opts)
	if err == nil {
		err = checkInto(name, op, b.Dst, b.Src, b.Names)
	}
	if err != nil {
		return nil, located(err)
	}
	h := r.newHandle(run)
	switch {
	case r.strategy.size == 1:
		if err := copyAll(run, r.local, b.Dst, b.Src); err != nil {
			return nil, err
		}
	case r.strategy.ops != nil:
		h.later = func(ctx context.Context) error { return r.allReduceBucketByOps(ctx, op, b, o) }
	case len(b.Src)+len(b.Scalars) > 0:
		if err := r.startReduce(ctx, h, op, b, o); err != nil {
			return nil, err
		}
	}
	h.open.Store(true)
	return h, nil
}

// startReduce starts the reduction of a bucket.
func (r *Replica) startReduce(ctx context.Context, h *Handle, op ReduceOp, b Bucket, o Options) error {
	if err := h.run.Acquire(r.local); err != nil {
		return err
	}
	defer h.run.Release(r.local)
	o.BytesPerPack = OnePack
	p, err := r.packed(ctx, op, b.Dst, b.Src, b.Names, len(b.Scalars), o)
	if err == nil {
		if h.scalars, h.sums = p.scalars, b.Scalars; p.scalars != nil {
			p.scalars.put(b.Scalars)
		}
		err = p.start(ctx)
	}
	if err != nil {
		return h.run.Fail(err)
	}
	h.reducer = p
	return nil
}

// allReduceBucketByOps reduces a bucket by the user's CrossDeviceOps.
func (r *Replica) allReduceBucketByOps(ctx context.Context, op ReduceOp, b Bucket, o Options) error {
	if len(b.Src) > 0 {
		if err := r.allReduceIntoByOps(ctx, op, b.Dst, b.Src, o); err != nil {
			return err
		}
	}
	if len(b.Scalars) == 0 {
		return nil
	}
	t := []*tensor.Tensor{tensor.Of(b.Scalars)}
	return r.allReduceIntoByOps(ctx, op, t, t, o)
}
