package distribute

import (
	"context"

	"github.com/lockstep-ml/lockstep/tensor"
)

// CrossDeviceOps implements reductions between the devices of a strategy (TensorFlow's CrossDeviceOps). The package
// has [ReductionToOneDevice], [HierarchicalCopyAllReduce] and [CollectiveAllReduce], which all return the same bits.
// Users may implement it.
//
// Methods are called in cross-replica context, by one goroutine at a time.
type CrossDeviceOps interface {
	// BatchReduce combines the components of each value, by replica, and returns the results in the order of
	// the batch. Each result is placed on its destination: a leaf on one device, a [*Mirrored] on several.
	// Components are *tensor.Tensor or *tensor.IndexedSlices; BatchReduce must not change them.
	BatchReduce(ctx context.Context, op ReduceOp, batch []Reduction, opts Options) ([]Value, error)
	// String names the kind: "ReductionToOneDevice".
	String() string
}

// Reduction is one value to reduce and the devices that receive the result, at least one.
type Reduction struct {
	Value *PerReplica // components of one dtype and shape, or IndexedSlices; not to be changed
	To    []Device    // of this process
}

// ReduceWith combines the components of v by ops, outside of a strategy, and places the result on the destination's
// devices (TensorFlow's CrossDeviceOps.reduce). A single tensor is a value of one component.
func ReduceWith(
	ctx context.Context, ops CrossDeviceOps, op ReduceOp, v Value, to Destination, opts ...Options,
) (Value, error) {
	out, err := BatchReduceWith(ctx, ops, op, []ValueTo{{v, to}}, opts...)
	if err != nil {
		return nil, err
	}
	return out[0], nil
}

// BatchReduceWith is [ReduceWith] of several values at once (TensorFlow's CrossDeviceOps.batch_reduce).
func BatchReduceWith(
	ctx context.Context, ops CrossDeviceOps, op ReduceOp, batch []ValueTo, opts ...Options,
) ([]Value, error) {
	if ops == nil {
		return nil, errorf("BatchReduceWith", ErrInvalid, "the CrossDeviceOps are nil")
	}
	name := ops.String()
	if err := checkReduceOp(name, op); err != nil {
		return nil, err
	}
	o, err := Options{}.over(opts)
	if err != nil {
		return nil, err
	}
	reductions := make([]Reduction, len(batch))
	for i, b := range batch {
		if reductions[i].Value, err = perReplica(b.Value); err != nil {
			return nil, errorf(name, ErrInvalid, "value %d: %w", i, err)
		}
		if b.To == nil {
			return nil, errNoDestination(name)
		}
		if reductions[i].To, err = b.To.destination(name); err != nil {
			return nil, err
		}
	}
	return ops.BatchReduce(ctx, op, reductions, o)
}

// Broadcast places a leaf value on the destination's devices (TensorFlow's CrossDeviceOps.broadcast): unwrapped on
// one device, as a [*Mirrored] on several.
func Broadcast(v Value, to Destination) (Value, error) {
	devices, err := to.destination("Broadcast")
	if err != nil {
		return nil, err
	}
	leaf, err := operand(v)
	if err != nil {
		return nil, errorf("Broadcast", ErrInvalid, "%w", err)
	}
	return place(leaf, devices), nil
}

// reduceEach reduces a batch value by value. It reduces dense tensors by reduce, which gets the index in the
// batch, and everything else by the rules common to all CrossDeviceOps. others reports whether members of other
// workers take part.
func reduceEach(
	name string, op ReduceOp, batch []Reduction, opts Options, others bool,
	reduce func(i int, ts []*tensor.Tensor) (*tensor.Tensor, error),
) ([]Value, error) {
	out := make([]Value, len(batch))
	for i, b := range batch {
		ts, allDense, err := denseOperands(name, b.Value.values)
		if err != nil {
			return nil, err
		}
		var leaf Value
		switch {
		case len(b.Value.values) == 1 && !others:
			if leaf, err = operand(b.Value.values[0]); err != nil {
				err = errorf(name, ErrInvalid, "%w", err)
			} else if op == Mean && !isOn(leaf, b.To) {
				leaf, err = meanOf(name, leaf, 1)
			}
		case allDense:
			if leaf, err = reduce(i, ts); err != nil {
				err = errorf(name, nil, "%w", err)
			}
		default:
			leaf, err = reduceSlices(name, op, b.Value.values, opts)
		}
		if err != nil {
			return nil, err
		}
		out[i] = place(leaf, b.To)
	}
	return out, nil
}

// isOn reports whether a value is on its destination and nowhere else. A single component that is there is
// returned unchanged, even as the mean of an integer, as in TensorFlow.
func isOn(v Value, to []Device) bool {
	d, ok := DeviceOf(v)
	return ok && len(to) == 1 && d.Kind == to[0].Kind && d.Index == to[0].Index
}

// ValueTo is a value and the destination of its reduction.
type ValueTo struct {
	Value Value       // a distributed value, a variable or a leaf
	To    Destination // devices of the result
}
