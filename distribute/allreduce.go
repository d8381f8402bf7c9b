package distribute

import (
	"context"

	"github.com/lockstep-ml/lockstep/distribute/internal/dense"
	"github.com/lockstep-ml/lockstep/tensor"
)

// AllReduce combines the replicas' values and returns the result on every replica. v is a nest with the same
// structure on all replicas. Its leaves are tensors of the same dtype and shape, IndexedSlices, variables (the
// replica's own component) and host numbers. The rows of IndexedSlices are concatenated in the order of the
// replicas unless [Options.Sparse] says otherwise; if other replicas have a tensor at that leaf, they are
// converted to a tensor. The result has the same structure. The mean of integers is a float (see [Mean]). A
// nest with an int32 tensor must contain that one tensor only, as in TensorFlow, which keeps int32 on the host.
//
// The tensors are reduced in packs ([Options.BytesPerPack]). Packing does not change the result, bit for bit.
func AllReduce[T any](ctx context.Context, r *Replica, op ReduceOp, v T, opts ...Options) (T, error) {
	out, err := r.allReduce(ctx, op, exactly(v), opts)
	return resultAs[T]("AllReduce", out, err)
}

func (r *Replica) allReduce(ctx context.Context, op ReduceOp, v Value, opts []Options) (Value, error) {
	const name = "AllReduce"
	run, o, err := r.enter(ctx, name, op, opts)
	if err != nil {
		return nil, located(err)
	}
	leaves, names := named(v)
	for i, leaf := range leaves {
		if leaves[i], err = r.operand(leaf); err != nil {
			return nil, located(errorf(name, ErrInvalid, "%s: %w", leafName(i, names[i]), err))
		}
		if d := dtypeOf(leaves[i]); !d.IsNumeric() && r.strategy.size > 1 {
			return nil, located(badDType(name, d))
		}
	}
	if err := r.strategy.checkBatch(name, leaves); err != nil {
		return nil, located(err)
	}
	if len(leaves) == 0 || r.strategy.size == 1 {
		return tensor.Pack(v, leaves)
	}
	if r.strategy.ops != nil {
		out, err := r.mergeLeaves(ctx, name, leaves, names, o, func(ctx context.Context, batch []Reduction) ([]Value, error) {
			return r.strategy.batchOps(batch).BatchReduce(ctx, op, batch, o)
		})
		if err != nil {
			return nil, err
		}
		return tensor.Pack(v, out)
	}
	sparse, err := r.whichSparse(ctx, run, op, leaves, names, o)
	if err != nil {
		return nil, err
	}
	var out []any
	if sparse == nil {
		out, err = r.allReduceDense(ctx, run, op, leaves, names, o)
	} else {
		out, err = r.reduceSparse(ctx, run, op, leaves, names, sparse, o)
	}
	if err != nil {
		return nil, err
	}
	return tensor.Pack(v, out)
}

// AllReduceInto combines the replicas' tensors src[i] into dst[i] without allocating. It is meant for
// gradients. Tensors are read and written in place; those of a pack ([Options.BytesPerPack]) are one call. dst[i]
// must have the dtype and the number of elements of src[i], and either be the same memory or not overlap it. names, if
// not nil, are the tensors' names for errors. After an error the contents of dst are undefined. The library owns the
// memory until the call returns.
//
// The mean of integers is an error, because a dst of their dtype cannot hold it.
func (r *Replica) AllReduceInto(
	ctx context.Context, op ReduceOp, dst, src []*tensor.Tensor, names []string, opts ...Options,
) error {
	const name = "AllReduceInto"
	run, o, err := r.enter(ctx, name, op, opts)
	if err == nil {
		err = checkInto(name, op, dst, src, names)
	}
	if err != nil {
		return located(err)
	}
	switch {
	case r.strategy.size == 1:
		return copyAll(run, r.local, dst, src)
	case r.strategy.ops != nil:
		return r.allReduceIntoByOps(ctx, op, dst, src, o)
	case len(src) == 0:
		return nil // no replica waits for another
	}
	if err := run.Acquire(r.local); err != nil {
		return err
	}
	defer run.Release(r.local)
	begin := r.arrive()
	if err := r.reduceInto(ctx, run, op, dst, src, names, o); err != nil {
		return err
	}
	r.leave(begin)
	return nil
}

// checkInto validates the tensors of AllReduceInto.
func checkInto(op string, reduce ReduceOp, dst, src []*tensor.Tensor, names []string) error {
	if len(dst) != len(src) || names != nil && len(names) != len(src) {
		return errorf(op, ErrInvalid, "%d destinations and %d names given for %d tensors", len(dst), len(names), len(src))
	}
	for i, t := range src {
		if err := checkPair(op, reduce, dst[i], t, i, nameAt(names, i)); err != nil {
			return err
		}
	}
	return nil
}

// checkPair validates tensor i and its destination.
func checkPair(op string, reduce ReduceOp, dst, src *tensor.Tensor, i int, name string) error {
	switch {
	case src == nil || dst == nil:
		return errorf(op, ErrInvalid, "%s: the tensor or its destination is nil", leafName(i, name))
	case dst.DType() != src.DType() || dst.Len() != src.Len():
		return errorf(op, ErrInvalid, "%s: the destination is %v %s, the source %v %s: want one dtype and as many elements",
			leafName(i, name), dst.DType(), tensor.FormatShape(dst.Shape()), src.DType(), tensor.FormatShape(src.Shape()))
	case !src.DType().IsNumeric():
		return badDType(op, src.DType())
	case reduce == Mean && !src.DType().IsFloat():
		return errorf(op, ErrInvalid, "%s: the mean of %v is not a %v: use AllReduce, which returns a float",
			leafName(i, name), src.DType(), src.DType())
	}
	return nil
}

// allReduceIntoByOps reduces by the user's CrossDeviceOps and copies the new tensors that they return into dst.
func (r *Replica) allReduceIntoByOps(ctx context.Context, op ReduceOp, dst, src []*tensor.Tensor, o Options) error {
	values := make([]any, len(src))
	for i, t := range src {
		values[i] = t
	}
	out, err := r.allReduce(ctx, op, values, []Options{o})
	if err != nil {
		return err
	}
	for i, v := range out.([]any) {
		t, ok := v.(*tensor.Tensor)
		if !ok || t.DType() != dst[i].DType() || t.Len() != dst[i].Len() {
			return errorf("AllReduceInto", ErrInvalid, "%v gave %v for a tensor of %v%s", r.strategy.ops, v, dst[i].DType(),
				tensor.FormatShape(dst[i].Shape()))
		}
		dense.CopyMemory(dst[i].Memory(), t.Memory())
	}
	return nil
}
