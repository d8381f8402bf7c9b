package distribute

import (
	"context"

	"github.com/lockstep-ml/lockstep/tensor"
)

// DistributeValues calls f once per replica of this worker, in order, and returns the results
// (experimental_distribute_values_from_function).
func (e Extended) DistributeValues(
	ctx context.Context, f func(ValueContext) (Value, error),
) (PerReplica[Value], error) {
	const op = "DistributeValues"
	if err := e.s.requireCross(ctx, op); err != nil {
		return nil, err
	}
	if f == nil {
		return nil, errorf(op, ErrInvalid, "the value function is nil")
	}
	values := make(PerReplica[Value], len(e.s.devices))
	for i := range values {
		v, err := f(ValueContext{e.s.ids[i], e.s.size})
		if err != nil {
			return nil, errorf(op, nil, "replica %d: %w", e.s.ids[i], err)
		}
		values[i] = v
	}
	return values, nil
}

// Regroup combines the replicas' nests, by replica, into one nest (distribute_utils.regroup). Each leaf becomes a
// distributed value, with two exceptions: a leaf that is identical on all replicas (the same pointer, or equal host
// values) is kept, and the components of one variable become the variable. A typed container that cannot hold
// distributed values, such as a []*tensor.Tensor or a struct with a *tensor.Tensor field, becomes a distributed value
// as a whole. Nests with different structures are an error.
func (Extended) Regroup(replicas []Value) (Value, error) { return regroup("Regroup", replicas) }

// SelectReplica returns the nest with every distributed value replaced by its component of the replica
// (distribute_utils.select_replica).
func (Extended) SelectReplica(replica int, v Value) (Value, error) {
	return selectReplica(replica, v, nil)
}

// with checks a call that passes CrossDeviceOps, and returns their name and the options of the call.
func (e Extended) with(ctx context.Context, call string, ops CrossDeviceOps, opts []Options) (string, Options, error) {
	if err := e.s.requireCross(ctx, call); err != nil {
		return "", Options{}, err
	}
	if ops == nil {
		return "", Options{}, errorf(call, ErrInvalid, "the CrossDeviceOps are nil")
	}
	o, err := Options{}.over(opts)
	return ops.String(), o, err
}

// BatchReduceWith combines the components of each value by ops, as if they belonged to no strategy, and places the
// results on the devices of the destinations (CrossDeviceOps.batch_reduce). A tensor is a value of one component.
func (e Extended) BatchReduceWith(
	ctx context.Context, ops CrossDeviceOps, op ReduceOp, values, to []Value, opts ...Options,
) ([]Value, error) {
	name, o, err := e.with(ctx, "BatchReduceWith", ops, opts)
	if err != nil {
		return nil, err
	}
	if err := checkReduceOp(name, op); err != nil {
		return nil, err
	}
	if len(to) != len(values) {
		return nil, errDestinations(name, values, to)
	}
	batch := make([]Reduction, len(values))
	for i, v := range values {
		if batch[i].Values, err = componentsOf(v); err != nil {
			return nil, errorf(name, ErrInvalid, "value %d: %w", i, err)
		}
		if batch[i].To, err = destination(name, to[i]); err != nil {
			return nil, err
		}
	}
	return ops.BatchReduce(ctx, op, batch, o)
}

// GatherWith concatenates the components of v along an axis by ops, and places the result as BatchReduceWith does.
// IndexedSlices are not supported, as in TensorFlow.
func (e Extended) GatherWith(
	ctx context.Context, ops CrossDeviceOps, v, to Value, axis int, opts ...Options,
) (Value, error) {
	name, o, err := e.with(ctx, "GatherWith", ops, opts)
	if err != nil {
		return nil, err
	}
	p, err := componentsOf(v)
	if err != nil {
		return nil, errorf(name, ErrInvalid, "%w", err)
	}
	for _, c := range p {
		if _, sparse := c.(*tensor.IndexedSlices); sparse {
			return nil, errorf(name, ErrUnsupported, "gather/all_gather does not support IndexedSlices")
		}
	}
	devices, err := destination(name, to)
	if err != nil {
		return nil, err
	}
	out, err := gatherBatch(ctx, ops, []Reduction{{p, devices}}, axis, o)
	if err != nil {
		return nil, err
	}
	return out[0], nil
}

// Broadcast places a leaf value on the destination's devices (CrossDeviceOps.broadcast): unwrapped on one device, as a
// [*Mirrored] on several.
func (e Extended) Broadcast(ctx context.Context, v, to Value) (Value, error) {
	const name = "Broadcast"
	if err := e.s.requireCross(ctx, name); err != nil {
		return nil, err
	}
	devices, err := destination(name, to)
	if err != nil {
		return nil, err
	}
	leaf, err := operand(v)
	if err != nil {
		return nil, errorf(name, ErrInvalid, "%w", err)
	}
	return place(leaf, devices), nil
}
