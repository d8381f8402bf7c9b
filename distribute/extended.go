package distribute

import (
	"context"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Extended has what TensorFlow's StrategyExtended has beyond the functions and methods of this package, on values of
// any type: nests with distributed values at any depth, as TensorFlow's functions take and return them. Programs in Go
// rarely need it. [Strategy.Extended] returns it.
type Extended interface {
	// Reduce is [Reduce] for a value that may be distributed, mirrored, or the same on all replicas. A mean of a value
	// that is the same on all replicas, or mirrored, is the value itself, and its sum is an error; with an axis it counts
	// for every replica.
	Reduce(ctx context.Context, op ReduceOp, v Value, opts ReduceOptions) (Value, error)
	// ReduceTo combines the components of v and places the result on the destination's devices (reduce_to): a tensor on
	// one, a [*Mirrored] on several. The destination is a device's name, a [device.Spec], a distributed value, a variable
	// or a tensor, whose devices receive the result. With [NewOneDeviceStrategy] it returns the value unchanged.
	ReduceTo(ctx context.Context, op ReduceOp, v, to Value, opts ...Options) (Value, error)
	// BatchReduceTo is ReduceTo for several values, each with its destination, which may share transfers
	// (batch_reduce_to). The results are in the order of the values.
	BatchReduceTo(ctx context.Context, op ReduceOp, values, to []Value, opts ...Options) ([]Value, error)
	// Gather is [Gather] for a value that may be distributed, mirrored, or the same on all replicas.
	Gather(ctx context.Context, v Value, axis int, opts ...Options) (Value, error)
	// LocalResults returns the components of v on this process, by replica (experimental_local_results).
	LocalResults(v Value) []Value
	// Update calls f once for each component of v, in the order of the replicas, and returns f's results as a
	// [*Mirrored], leaf by leaf (update). [Variable.Update] has no results.
	Update(ctx context.Context, v *Variable, f UpdateFunc, args ...Value) (Value, error)
	// UpdateUngrouped is Update, except that each leaf of the result is the tuple of the components' results (update with
	// group=False).
	UpdateUngrouped(ctx context.Context, v *Variable, f UpdateFunc, args ...Value) (Value, error)
	// ColocateVariablesWith returns a context of a scope of the strategy, in which new variables are placed on the
	// devices of v, a variable of the strategy (colocate_vars_with).
	ColocateVariablesWith(ctx context.Context, v *Variable) (context.Context, error)

	// DistributeValues calls f once per replica of this worker, in order, and returns the results
	// (experimental_distribute_values_from_function).
	DistributeValues(ctx context.Context, f func(ValueContext) (Value, error)) (PerReplica[Value], error)
	// Regroup combines the replicas' nests, by replica, into one nest (distribute_utils.regroup). Each leaf becomes a
	// distributed value, with two exceptions: a leaf that is identical on all replicas (the same pointer, or equal host
	// values) is kept, and the components of one variable become the variable. A typed container that cannot hold
	// distributed values, such as a []*tensor.Tensor or a struct with a *tensor.Tensor field, becomes a distributed value
	// as a whole. Nests with different structures are an error.
	Regroup(replicas []Value) (Value, error)
	// SelectReplica returns the nest with every distributed value replaced by its component of the replica
	// (distribute_utils.select_replica).
	SelectReplica(replica int, v Value) (Value, error)
	// BatchReduceWith combines the components of each value by ops, as if they belonged to no strategy, and places the
	// results on the devices of the destinations (CrossDeviceOps.batch_reduce). A tensor is a value of one component.
	BatchReduceWith(ctx context.Context, ops CrossDeviceOps, op ReduceOp, values, to []Value, opts ...Options) (
		[]Value, error)
	// GatherWith concatenates the components of v along an axis by ops, and places the result as BatchReduceWith does.
	// IndexedSlices are not supported, as in TensorFlow.
	GatherWith(ctx context.Context, ops CrossDeviceOps, v, to Value, axis int, opts ...Options) (Value, error)
	// Broadcast places a leaf value on the destination's devices (CrossDeviceOps.broadcast): unwrapped on one device, as a
	// [*Mirrored] on several.
	Broadcast(ctx context.Context, v, to Value) (Value, error)
}

// Extended returns what TensorFlow's Strategy.extended has.
func (s *Strategy) Extended() Extended { return extended{s} }

// DistributeValues implements [Extended].
func (s extended) DistributeValues(
	ctx context.Context, f func(ValueContext) (Value, error),
) (PerReplica[Value], error) {
	const op = "DistributeValues"
	if err := s.requireCross(ctx, op); err != nil {
		return nil, err
	}
	if f == nil {
		return nil, errorf(op, ErrInvalid, "the value function is nil")
	}
	values := make(PerReplica[Value], len(s.devices))
	for i := range values {
		v, err := f(ValueContext{s.ids[i], s.size})
		if err != nil {
			return nil, errorf(op, nil, "replica %d: %w", s.ids[i], err)
		}
		values[i] = v
	}
	return values, nil
}

// Regroup implements [Extended].
func (extended) Regroup(replicas []Value) (Value, error) { return regroup("Regroup", replicas) }

// SelectReplica implements [Extended].
func (extended) SelectReplica(replica int, v Value) (Value, error) {
	return selectReplica(replica, v, nil)
}

// with checks a call that passes CrossDeviceOps, and returns their name and the options of the call.
func (s extended) with(ctx context.Context, call string, ops CrossDeviceOps, opts []Options) (string, Options, error) {
	if err := s.requireCross(ctx, call); err != nil {
		return "", Options{}, err
	}
	if ops == nil {
		return "", Options{}, errorf(call, ErrInvalid, "the CrossDeviceOps are nil")
	}
	o, err := Options{}.over(opts)
	return ops.String(), o, err
}

// BatchReduceWith implements [Extended].
func (s extended) BatchReduceWith(
	ctx context.Context, ops CrossDeviceOps, op ReduceOp, values, to []Value, opts ...Options,
) ([]Value, error) {
	name, o, err := s.with(ctx, "BatchReduceWith", ops, opts)
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

// GatherWith implements [Extended].
func (s extended) GatherWith(
	ctx context.Context, ops CrossDeviceOps, v, to Value, axis int, opts ...Options,
) (Value, error) {
	name, o, err := s.with(ctx, "GatherWith", ops, opts)
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

// Broadcast implements [Extended].
func (s extended) Broadcast(ctx context.Context, v, to Value) (Value, error) {
	const name = "Broadcast"
	if err := s.requireCross(ctx, name); err != nil {
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
