package distribute

import (
	"context"

	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/tensor"
)

// CrossDeviceOps implements reductions between the devices of a strategy (TensorFlow's CrossDeviceOps). A strategy's
// default are the library's collectives; those of [NewReductionToOneDevice], [NewHierarchicalCopyAllReduce] and
// [NewNcclAllReduce] return the same bits. Users may implement it. If an implementation also has the method
//
//	BatchGather(ctx context.Context, batch []Reduction, axis int, opts Options) ([]Value, error)
//
// this concatenates the components of each value along an axis, in the order of the replicas, and places the results as
// BatchReduce does; otherwise values are gathered on the host.
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
	Values []Value       // by replica: components of one dtype and shape, or IndexedSlices; not to be changed
	To     []device.Spec // of this process
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
		ts, allDense, err := denseOperands(name, b.Values)
		if err != nil {
			return nil, err
		}
		var leaf Value
		switch {
		case len(b.Values) == 1 && !others:
			if leaf, err = operand(b.Values[0]); err != nil {
				err = errorf(name, ErrInvalid, "%w", err)
			} else if op == Mean && !isOn(leaf, b.To) {
				leaf, err = meanOf(name, leaf, 1)
			}
		case allDense:
			if leaf, err = reduce(i, ts); err != nil {
				err = errorf(name, nil, "%w", err)
			}
		default:
			leaf, err = reduceSlices(name, op, b.Values, opts)
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
func isOn(v Value, to []device.Spec) bool {
	d, ok := device.Of(v)
	return ok && len(to) == 1 && d.Kind == to[0].Kind && d.Index == to[0].Index
}
