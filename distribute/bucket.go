package distribute

import (
	"context"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
)

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
func (r *Replica) StartAllReduce(ctx context.Context, op ReduceOp, b Bucket, opts ...Options) (Handle, error) {
	return r.start(ctx, "StartAllReduce", reduction{Bucket: b, op: op}, opts, nil)
}

// start starts the call of a bucket, under the name of the public method. follows is nil unless it follows another
// call.
func (r *Replica) start(
	ctx context.Context, name string, x reduction, opts []Options, follows *Follower,
) (Handle, error) {
	run, o, err := r.enter(ctx, name, x.op, opts)
	switch {
	case err != nil:
	case x.call == 0:
		err = checkInto(name, x.op, x.Dst, x.Src, x.Names)
	default:
		err = r.checkOwned(name, x.call, x.op, x.Bucket)
	}
	if err != nil {
		return Handle{}, located(err)
	}
	x.options = o
	c := r.newCall(run)
	if x.lane = o.lane(); follows != nil {
		x.lane = laneFollowing
		follows.set(c)
	}
	switch {
	case r.strategy.size == 1:
		c.computeAlone()
		if err := copyAll(run, r.local, x.Dst, x.Src); err != nil {
			return Handle{}, err
		}
	case r.strategy.ops != nil:
		op, b := x.op, x.Bucket // not x, which would be allocated in every call
		c.later = func(ctx context.Context) error {
			if err := c.followByOps(ctx); err != nil {
				return err
			}
			return r.allReduceBucketByOps(ctx, op, b, o)
		}
	case len(x.Src)+len(x.Scalars) > 0:
		if err := r.startReduction(ctx, c, &x); err != nil {
			return Handle{}, err
		}
	default:
		c.signal()
	}
	return r.handle(c), nil
}

// startReduction starts the call of a bucket.
func (r *Replica) startReduction(ctx context.Context, c *startedCall, x *reduction) error {
	if err := c.run.Acquire(r.local); err != nil {
		return err
	}
	defer c.run.Release(r.local)
	x.options.BytesPerPack = OnePack
	p, err := r.packed(ctx, x)
	if err == nil {
		if c.scalars, c.sums = p.scalars, x.Scalars; p.scalars != nil {
			p.scalars.put(x.Scalars)
		}
		err = p.start(ctx, c.preparation(), c.signal)
	}
	if err != nil {
		return c.run.Fail(err)
	}
	c.reducer = p
	return nil
}

// StartReduceToOwners starts to combine the replicas' buckets as [Replica.StartAllReduce] does, except that each
// tensor's result is stored only at the replica that owns it: in ZeRO-1 this replica updates the parameter. Dst[i] is
// not used on other replicas and may be nil. It transfers about half as much as an all-reduce, and the bits are the
// same. Scalars are combined on all replicas, by a separate call.
//
// Custom [CrossDeviceOps] have no such operation: it returns an error.
func (r *Replica) StartReduceToOwners(ctx context.Context, op ReduceOp, b Bucket, opts ...Options) (Handle, error) {
	return r.start(ctx, "StartReduceToOwners", reduction{Bucket: b, op: op, call: collective.ReduceScatter}, opts, nil)
}

// StartGatherFromOwners starts to copy each tensor from the replica that owns it to all replicas, such as the values of
// the parameters that each replica has updated. Src[i] is not used on other replicas and may be nil; Dst[i] is the same
// memory or does not overlap it. Scalars are summed over all replicas, by a separate call. Apart from that it is as
// [Replica.StartReduceToOwners].
func (r *Replica) StartGatherFromOwners(ctx context.Context, b Bucket, opts ...Options) (Handle, error) {
	return r.start(ctx, "StartGatherFromOwners", reduction{Bucket: b, op: Sum, call: collective.AllGather}, opts, nil)
}

// checkOwned validates a bucket whose tensors have owners.
func (r *Replica) checkOwned(name string, call collective.Op, op ReduceOp, b Bucket) error {
	if !r.strategy.HasCollectives() {
		return errorf(name, ErrUnsupported, "%v has no such operation: use a strategy without CrossDeviceOps", r.strategy.ops)
	}
	if n := len(b.Owners); len(b.Src) != n || len(b.Dst) != n || b.Names != nil && len(b.Names) != n {
		return errorf(name, ErrInvalid, "%d sources, %d destinations, %d names and %d owners given: want as many of each",
			len(b.Src), len(b.Dst), len(b.Names), n)
	}
	for i, owner := range b.Owners {
		if owner < 0 || owner >= r.strategy.size {
			return errorf(name, ErrInvalid, "%s: the owner is replica %d of %d", leafName(i, nameAt(b.Names, i)), owner,
				r.strategy.size)
		}
		src, dst := b.Src[i], b.Dst[i]
		switch {
		case owner == r.id:
		case call == collective.AllGather:
			src = dst
		default:
			dst = src
		}
		if err := checkPair(name, op, dst, src, i, nameAt(b.Names, i)); err != nil {
			return err
		}
	}
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

// StartAllReduce is [Replica.StartAllReduce] for a call that follows another one.
func (f Follower) StartAllReduce(ctx context.Context, op ReduceOp, b Bucket, opts ...Options) (Handle, error) {
	r, err := f.replica("Follower.StartAllReduce")
	if err != nil {
		return Handle{}, err
	}
	return r.start(ctx, "Follower.StartAllReduce", reduction{Bucket: b, op: op}, opts, &f)
}
