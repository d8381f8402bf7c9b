package distribute

import (
	"context"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute/internal/dense"
	"github.com/lockstep-ml/lockstep/tensor"
)

// StartAllToAll starts to exchange parts between the replicas and returns at once; [Handle.Wait] waits. src is as many
// parts of equal size as there are replicas: part i goes to replica i, and becomes the part of its dst with the number
// of the sender. dst has the dtype and the number of elements of src and does not overlap it. Both have a dtype of
// fixed size, and belong to the library until Wait has returned. name describes the tensor in errors.
//
// The order of started calls, and what happens if the Run ends, are as with [Replica.StartAllReduce]. With custom
// [CrossDeviceOps], which have no such operation, it returns an error.
func (r *Replica) StartAllToAll(
	ctx context.Context, dst, src *tensor.Tensor, name string, opts ...Options,
) (Handle, error) {
	return r.startMove(ctx, "StartAllToAll", collective.Call{Op: collective.AllToAll}, dst, src, name, opts, nil)
}

// StartAllGather starts to gather the replicas' src in every dst, in the order of the replicas, and returns at once;
// [Handle.Wait] waits. All src have the same number of elements. A src may be the replica's part of dst, or does not
// overlap it. Apart from that it is as [Replica.StartAllToAll].
func (r *Replica) StartAllGather(
	ctx context.Context, dst, src *tensor.Tensor, name string, opts ...Options,
) (Handle, error) {
	return r.startMove(ctx, "StartAllGather", collective.Call{Op: collective.AllGather}, dst, src, name, opts, nil)
}

// StartGather starts to gather the replicas' src in the dst of one replica, the root, in the order of the replicas, and
// returns at once; [Handle.Wait] waits. counts are the numbers of elements of each replica's src, the same list on all
// replicas, which belongs to the library until Wait has returned; nil means equal numbers. dst is not used on other
// replicas and may be nil there. Apart from that it is as [Replica.StartAllGather].
func (r *Replica) StartGather(
	ctx context.Context, dst, src *tensor.Tensor, counts []int, root int, name string, opts ...Options,
) (Handle, error) {
	const what = "StartGather"
	if size := r.strategy.size; root < 0 || root >= size || counts != nil && len(counts) != size {
		return Handle{}, located(errorf(what, ErrInvalid, "%s: root %d and %d counts given for %d replicas", name, root,
			len(counts), size))
	}
	call := collective.Call{Op: collective.Gather, Root: root, Counts: counts}
	return r.startMove(ctx, what, call, dst, src, name, opts, nil)
}

// startMove starts a call that moves elements and combines none. follows is nil unless it follows another call.
func (r *Replica) startMove(
	ctx context.Context, what string, call collective.Call, dst, src *tensor.Tensor, name string, opts []Options,
	follows *Follower,
) (Handle, error) {
	run, o, err := r.enter(ctx, what, Sum, opts)
	if err != nil {
		return Handle{}, located(err)
	}
	size, own, count := r.strategy.size, src.Len(), src.Len()
	switch {
	case call.Counts != nil:
		own, count = call.Counts[r.id], 0
		for _, n := range call.Counts {
			count += n
		}
	case call.Op != collective.AllToAll:
		count *= size
	}
	gets := call.Op != collective.Gather || r.id == call.Root
	if src.DType() == tensor.String || own != src.Len() || call.Counts == nil && count%size != 0 ||
		gets && (dst == nil || dst.DType() != src.DType() || dst.Len() != count) {
		to := "missing"
		if dst != nil {
			to = dst.DType().String() + " " + tensor.FormatShape(dst.Shape())
		}
		return Handle{}, located(errorf(what, ErrInvalid, "%s: the destination is %s, the source %v %s: want one dtype of "+
			"fixed size, %d elements in the source, %d in the destination, and equal parts for %d replicas, unless counts "+
			"say otherwise", name, to, src.DType(), tensor.FormatShape(src.Shape()), own, count, size))
	}
	if !r.strategy.HasCollectives() {
		return Handle{}, located(errorf(what, ErrUnsupported, "%v has no such operation: use a strategy without "+
			"CrossDeviceOps", r.strategy.ops))
	}
	c, on := r.newCall(run), o.lane()
	if follows != nil {
		on = laneFollowing
		follows.set(c)
	}
	if err := run.Acquire(r.local); err != nil {
		return Handle{}, err
	}
	defer run.Release(r.local)
	if size == 1 {
		c.computeAlone()
		dense.CopyMemory(dst.Memory(), src.Memory())
	} else if count > 0 {
		c.manifest, c.options = collective.Manifest{Name: name}, o.collective()
		call.Type, call.Src, call.Manifest, call.Options = src.DType(), src.Memory(), &c.manifest, &c.options
		if gets {
			call.Dst = dst.Memory()
		}
		call.After = c.signal
		if c.compute != nil {
			call.Before = c.before
		}
		c.call = call
		comm, err := r.home.group.comm(ctx, r.local, on)
		if err == nil {
			c.started, err = comm.Start(ctx, &c.call)
		}
		if err != nil {
			return Handle{}, run.Fail(err)
		}
	} else {
		c.signal()
	}
	return r.handle(c), nil
}

// StartAllGather is [Replica.StartAllGather] for a call that follows another one.
func (f Follower) StartAllGather(
	ctx context.Context, dst, src *tensor.Tensor, name string, opts ...Options,
) (Handle, error) {
	r, err := f.replica("Follower.StartAllGather")
	if err != nil {
		return Handle{}, err
	}
	return r.startMove(ctx, "Follower.StartAllGather", collective.Call{Op: collective.AllGather}, dst, src, name, opts, &f)
}
