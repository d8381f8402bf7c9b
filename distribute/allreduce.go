package distribute

import (
	"context"
	"fmt"
	"strings"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/ledger"
	"github.com/lockstep-ml/lockstep/tensor"
)

// AllReduce combines the replicas' values and gives every replica the result. v is a nest, of the same structure on all
// replicas, of tensors of the same dtype and shape, IndexedSlices (whose rows are concatenated in the order of the
// replicas), variables (the replica's own component) and host numbers. The result has the same structure; the mean of
// integers is a float (see [Mean]). A batch with int32 tensors must have nothing else in it and one of them only, as in
// TensorFlow, which keeps int32 on the host.
func (r *Replica) AllReduce(ctx context.Context, op ReduceOp, v Value, opts ...Options) (Value, error) {
	const name = "AllReduce"
	run, o, err := r.enter(ctx, name, op, opts)
	if err != nil {
		return nil, located(err)
	}
	leaves, names := named(v)
	dense := true
	for i, leaf := range leaves {
		if leaves[i], err = r.operand(leaf); err != nil {
			return nil, located(errorf(name, ErrInvalid, "%s: %w", leafName(i, names[i]), err))
		}
		_, isTensor := leaves[i].(*tensor.Tensor)
		dense = dense && isTensor
	}
	if err := r.strategy.checkBatch(name, leaves); err != nil {
		return nil, located(err)
	}
	switch {
	case len(leaves) == 0 || len(r.strategy.devices) == 1:
		return tensor.Pack(v, leaves)
	case !dense || r.strategy.ops != nil:
		structure := strings.Join(names, " ")
		out, err := r.mergeCall(ctx, name, o.Timeout, func(ctx context.Context, _ *CrossReplica, args ...Value) (Value, error) {
			leaves := args[:len(args)-1]
			if p, ok := args[len(leaves)].(*PerReplica); ok {
				return nil, errorf(name, ErrMismatch, "the structures of the nests differ between the replicas: %q", p.values)
			}
			batch := make([]Reduction, len(leaves))
			for i, leaf := range leaves {
				p, ok := leaf.(*PerReplica)
				if !ok { // the very same object on all replicas
					p = NewPerReplica(repeat(leaf, len(r.strategy.devices))...)
				}
				batch[i] = Reduction{Value: p, To: r.strategy.devices}
			}
			return r.strategy.batchOps(batch).BatchReduce(ctx, op, batch, o)
		}, append(leaves, structure))
		if err != nil {
			return nil, err
		}
		return tensor.Pack(v, out.([]Value))
	}
	return r.allReduceDense(ctx, run, op, v, leaves, names, o)
}

// named returns the leaves of a nest, and where in it they are: what must be the same on all replicas.
func named(v Value) (leaves []any, names []string) {
	_, _ = tensor.Zip(func(path string, leaf []any) (any, error) {
		leaves, names = append(leaves, leaf[0]), append(names, path)
		return leaf[0], nil
	}, nil, v)
	return leaves, names
}

// allReduceDense reduces tensors, each by one collective call between the replicas.
func (r *Replica) allReduceDense(ctx context.Context, run *ledger.Run, op ReduceOp, v Value, leaves []any, names []string, o Options) (Value, error) {
	if err := run.Acquire(r.id); err != nil {
		return nil, err
	}
	defer run.Release(r.id)
	for _, leaf := range leaves {
		if t := leaf.(*tensor.Tensor).DType(); !t.IsNumeric() {
			return nil, located(badDType("AllReduce", t))
		}
	}
	out := make([]any, len(leaves))
	begin := r.stats.arrive(r)
	for i, leaf := range leaves {
		t := leaf.(*tensor.Tensor)
		sum := tensor.New(t.DType(), t.Shape()...).OnDevice(r.device.Index)
		direct := op
		if op == Mean && !t.DType().IsFloat() {
			direct = Sum // the quotient has another type
		}
		if err := r.do(ctx, run, direct, sum, t, names[i], o); err != nil {
			return nil, err
		}
		if direct != op {
			sum = divide(sum, len(r.strategy.devices)).OnDevice(r.device.Index)
		}
		out[i] = sum
	}
	r.stats.leave(r, begin)
	return tensor.Pack(v, out)
}

// AllReduceInto combines the replicas' tensors src[i] into dst[i], reading and writing them where they lie, without a copy
// and without allocating: what training does with gradients. dst[i] must have the dtype and as many elements as src[i]
// and be the same memory or apart from it; names, if not nil, says in errors which tensor is meant. After an error
// the contents of dst are undefined. The memory belongs to the library until the call returns.
//
// The mean of integers has no place in a dst of their type and is an error.
func (r *Replica) AllReduceInto(ctx context.Context, op ReduceOp, dst, src []*tensor.Tensor, names []string, opts ...Options) error {
	const name = "AllReduceInto"
	run, o, err := r.enter(ctx, name, op, opts)
	if err == nil {
		err = checkInto(name, op, dst, src, names)
	}
	if err != nil {
		return located(err)
	}
	if run != nil { // else outside of every Run, where there is one replica and nothing to wait for
		if err := run.Acquire(r.id); err != nil {
			return err
		}
		if len(r.strategy.devices) > 1 && r.strategy.ops != nil {
			run.Release(r.id) // AllReduce takes it itself
			return r.allReduceIntoByOps(ctx, op, dst, src, o)
		}
		defer run.Release(r.id)
	}
	if len(src) == 0 {
		return nil // no replica waits for another
	}
	begin := r.stats.arrive(r)
	for i, t := range src {
		if len(r.strategy.devices) == 1 {
			copyMemory(dst[i].Memory(), t.Memory())
			continue
		}
		named := ""
		if names != nil {
			named = names[i]
		}
		if err := r.do(ctx, run, op, dst[i], t, named, o); err != nil {
			return err
		}
	}
	r.stats.leave(r, begin)
	return nil
}

// checkInto reports what is wrong with the tensors of AllReduceInto.
func checkInto(op string, reduce ReduceOp, dst, src []*tensor.Tensor, names []string) error {
	if len(dst) != len(src) || names != nil && len(names) != len(src) {
		return errorf(op, ErrInvalid, "%d destinations and %d names given for %d tensors", len(dst), len(names), len(src))
	}
	for i, t := range src {
		name := ""
		if names != nil {
			name = names[i]
		}
		switch d := dst[i]; {
		case t == nil || d == nil:
			return errorf(op, ErrInvalid, "%s: the tensor or its destination is nil", leafName(i, name))
		case d.DType() != t.DType() || d.Len() != t.Len():
			return errorf(op, ErrInvalid, "%s: the destination is %v %s, the source %v %s: want one dtype and as many elements",
				leafName(i, name), d.DType(), tensor.FormatShape(d.Shape()), t.DType(), tensor.FormatShape(t.Shape()))
		case !t.DType().IsNumeric():
			return badDType(op, t.DType())
		case reduce == Mean && !t.DType().IsFloat():
			return errorf(op, ErrInvalid, "%s: the mean of %v is no %v: use AllReduce, which returns a float", leafName(i, name), t.DType(), t.DType())
		}
	}
	return nil
}

// leafName names a tensor of a call in errors.
func leafName(i int, name string) string {
	if name == "" {
		return fmt.Sprintf("value %d", i)
	}
	return fmt.Sprintf("value %d (%s)", i, name)
}

// allReduceIntoByOps reduces by the user's CrossDeviceOps, which return new tensors, and copies these.
func (r *Replica) allReduceIntoByOps(ctx context.Context, op ReduceOp, dst, src []*tensor.Tensor, o Options) error {
	values := make([]any, len(src))
	for i, t := range src {
		values[i] = t
	}
	out, err := r.AllReduce(ctx, op, values, o)
	if err != nil {
		return err
	}
	for i, v := range out.([]any) {
		t, ok := v.(*tensor.Tensor)
		if !ok || t.DType() != dst[i].DType() || t.Len() != dst[i].Len() {
			return errorf("AllReduceInto", ErrInvalid, "%v gave %v for a tensor of %v%s", r.strategy.ops, v, dst[i].DType(), tensor.FormatShape(dst[i].Shape()))
		}
		copyMemory(dst[i].Memory(), t.Memory())
	}
	return nil
}

// do makes one collective call of this replica, which has been acquired.
func (r *Replica) do(ctx context.Context, run *ledger.Run, op ReduceOp, dst, src *tensor.Tensor, name string, o Options) error {
	r.manifest.Name, r.manifest.Shape = name, src.Shape()
	r.options = o.collective()
	r.call.Op, r.call.Reduce, r.call.Type = collective.AllReduce, op, src.DType()
	r.call.Src, r.call.Dst = src.Memory(), dst.Memory()
	if err := r.home.group.comms[r.id].Do(ctx, &r.call); err != nil {
		return run.Fail(err)
	}
	return nil
}

// operand returns a leaf of AllReduce as a tensor or IndexedSlices.
func (r *Replica) operand(leaf any) (any, error) {
	switch leaf := leaf.(type) {
	case *tensor.Tensor, *tensor.IndexedSlices:
		return leaf, nil
	case *Variable:
		return leaf.Read(r)
	}
	return hostTensor(leaf)
}

func repeat(v Value, n int) []Value {
	out := make([]Value, n)
	for i := range out {
		out[i] = v
	}
	return out
}
