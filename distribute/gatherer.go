package distribute

import (
	"context"

	"github.com/lockstep-ml/lockstep/distribute/internal/dense"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Gatherer is implemented by CrossDeviceOps that also gather. For other CrossDeviceOps values are gathered on
// the host.
type Gatherer interface {
	CrossDeviceOps
	// BatchGather concatenates the components of each value along an axis, in the order of the replicas, and
	// returns the results in the order of the batch. Each result is placed on its destination, as in
	// BatchReduce. Components are *tensor.Tensor.
	BatchGather(ctx context.Context, batch []Reduction, axis int, opts Options) ([]Value, error)
}

// GatherWith concatenates the components of v along an axis by ops, outside of a strategy, and places the
// result on the destination's devices. A single tensor is a value of one component. IndexedSlices are not
// supported, as in TensorFlow.
func GatherWith(
	ctx context.Context, ops CrossDeviceOps, v Value, to Destination, axis int, opts ...Options,
) (Value, error) {
	name := ops.String()
	p, err := perReplica(v)
	if err != nil {
		return nil, errorf(name, ErrInvalid, "%w", err)
	}
	for _, c := range p.values {
		if _, sparse := c.(*tensor.IndexedSlices); sparse {
			return nil, errorf(name, ErrUnsupported, "gather/all_gather does not support IndexedSlices")
		}
	}
	devices, err := to.destination(name)
	if err != nil {
		return nil, err
	}
	o, err := Options{}.over(opts)
	if err != nil {
		return nil, err
	}
	out, err := gatherBatch(ctx, ops, []Reduction{{p, devices}}, axis, o)
	if err != nil {
		return nil, err
	}
	return out[0], nil
}

// gatherBatch concatenates the components of each value of a batch.
func gatherBatch(ctx context.Context, ops CrossDeviceOps, batch []Reduction, axis int, o Options) ([]Value, error) {
	if g, ok := ops.(Gatherer); ok {
		return g.BatchGather(ctx, batch, axis, o)
	}
	return gatherHere(ops.String(), batch, axis)
}

// gatherHere concatenates the components of each value of a batch on the host.
func gatherHere(name string, batch []Reduction, axis int) ([]Value, error) {
	out := make([]Value, len(batch))
	for i, b := range batch {
		parts := make([]*tensor.Tensor, len(b.Value.values))
		for j, v := range b.Value.values {
			leaf, err := operand(v)
			if err != nil {
				return nil, errorf(name, ErrInvalid, "component %d: %w", j, err)
			}
			t, ok := leaf.(*tensor.Tensor)
			if !ok {
				return nil, errorf(name, ErrInvalid, "component %d is sparse: want tensors only", j)
			}
			parts[j] = t
		}
		joined := parts[0]
		if len(parts) > 1 {
			var err error
			if joined, err = dense.Concat(parts, axis); err != nil {
				return nil, failed(name, err)
			}
		}
		out[i] = place(joined, b.To)
	}
	return out, nil
}
