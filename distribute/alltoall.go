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
	return r.startMove(ctx, "StartAllToAll", collective.AllToAll, dst, src, name, opts)
}

// StartAllGather starts to gather the replicas' src in every dst, in the order of the replicas, and returns at once;
// [Handle.Wait] waits. All src have the same number of elements. A src may be the replica's part of dst, or does not
// overlap it. Apart from that it is as [Replica.StartAllToAll].
func (r *Replica) StartAllGather(
	ctx context.Context, dst, src *tensor.Tensor, name string, opts ...Options,
) (Handle, error) {
	return r.startMove(ctx, "StartAllGather", collective.AllGather, dst, src, name, opts)
}

// startMove starts a call that moves elements and combines none.
func (r *Replica) startMove(
	ctx context.Context, what string, op collective.Op, dst, src *tensor.Tensor, name string, opts []Options,
) (Handle, error) {
	run, o, err := r.enter(ctx, what, Sum, opts)
	if err != nil {
		return Handle{}, located(err)
	}
	size, count := r.strategy.size, src.Len()
	if op == collective.AllGather {
		count *= size
	}
	switch {
	case src.DType() == tensor.String || dst.DType() != src.DType() || dst.Len() != count || count%size != 0:
		return Handle{}, located(errorf(what, ErrInvalid, "%s: the destination is %v %s, the source %v %s: want one dtype "+
			"of fixed size, %d elements in the destination, and equal parts for %d replicas", name, dst.DType(),
			tensor.FormatShape(dst.Shape()), src.DType(), tensor.FormatShape(src.Shape()), count, size))
	case !r.strategy.HasCollectives():
		return Handle{}, located(errorf(what, ErrUnsupported, "%v has no such operation: use a strategy without "+
			"CrossDeviceOps", r.strategy.ops))
	}
	c := r.newCall(run)
	if err := run.Acquire(r.local); err != nil {
		return Handle{}, err
	}
	defer run.Release(r.local)
	if size == 1 {
		dense.CopyMemory(dst.Memory(), src.Memory())
	} else if count > 0 {
		c.manifest, c.options = collective.Manifest{Name: name}, o.collective()
		c.call = collective.Call{
			Op: op, Type: src.DType(), Src: src.Memory(), Dst: dst.Memory(), Manifest: &c.manifest, Options: &c.options,
		}
		comm, err := r.home.group.comm(ctx, r.local, o)
		if err == nil {
			c.started, err = comm.Start(ctx, &c.call)
		}
		if err != nil {
			return Handle{}, run.Fail(err)
		}
	}
	return r.handle(c), nil
}
