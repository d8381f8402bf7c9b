package distribute

import (
	"context"
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/tensor"
)

// checkLocal returns an error if v is a [PerReplica] whose number of components is not this worker's number of
// replicas. Without the check it could be used as a wrong value silently.
func (s *Strategy) checkLocal(v Value) error {
	p, ok := v.(*perReplica)
	if n := len(s.devices); ok && len(p.values) != n {
		return fmt.Errorf("the per-replica value has %d components, and %v %d replicas here: it must be non-empty and have "+
			"one for each, in their order; does it belong to another strategy?", len(p.values), s, n)
	}
	return nil
}

// LocalResults returns the components of v on this process, by replica (experimental_local_results): those of a
// distributed value, one nest per replica for a nest, and v itself for anything else. With [NewOneDeviceStrategy] it
// always returns v itself.
func (e Extended) LocalResults(v Value) []Value {
	v = untyped(v, e.s.oneDevice)
	kept, isStored := v.(stored)
	switch d, ok := v.(distributed); {
	case e.s.oneDevice:
		return []Value{v}
	case isStored:
		return kept.Values()
	case ok:
		return d.byReplica()
	case !tensor.IsNest(v):
		return []Value{v}
	}
	out := make([]Value, len(e.s.devices))
	for i := range out {
		nest, err := selectReplica(i, v, nil)
		if err != nil {
			return []Value{v} // a value of another strategy, with a different number of components
		}
		out[i] = nest
	}
	return out
}

// onReplicas wraps the components of an argument of a merge function. An argument that is the same object on all
// replicas was not wrapped.
func (s *Strategy) onReplicas(v Value) []Value {
	switch v := v.(type) {
	case *perReplica:
		return v.values
	case stored:
		if values := v.Values(); len(values) == len(s.devices) {
			return values
		}
	}
	return slices.Repeat([]Value{v}, len(s.devices))
}

// isPlain reports whether a value is not distributed.
func isPlain(v Value) bool {
	_, isDistributed := v.(distributed)
	_, isStored := v.(stored)
	return !isDistributed && !isStored
}

// forReplicas returns, with several workers, a value with a component for each of this worker's replicas. A
// value that is not distributed is the same for all of them, and so has no sum.
func (s *Strategy) forReplicas(name string, op ReduceOp, v Value) (Value, error) {
	switch {
	case s.workersInSync == 1 || !isPlain(v):
		return v, nil
	case op == Sum && len(s.devices) > 1:
		return nil, errorf(name, ErrInvalid, "a non-DistributedValues value %v cannot be reduced with the given reduce op "+
			"%v: "+
			"it is the same on the %d replicas of this worker, and other workers have one replica. "+
			"Want a value of each replica, such as Run returns", v, op, len(s.devices))
	}
	return perReplicaOf(s.onReplicas(v)...), nil
}

// isWorkerValue reports whether a value belongs to the whole worker, and not to a replica. This is known only if
// every worker has several replicas: the value of a worker's only replica is not wrapped.
func (s *Strategy) isWorkerValue(v Value) bool {
	return s.workersInSync > 1 && isPlain(v) &&
		!slices.ContainsFunc(s.replicasOf, func(ids []int) bool { return len(ids) < 2 })
}

// reduceWorkers reduces one value per worker. Each counts once, whatever the worker's number of replicas.
func (s *Strategy) reduceWorkers(
	ctx context.Context, name string, op ReduceOp, v Value, to []device.Spec, o Options,
) (Value, error) {
	leaf, err := operand(v)
	if err != nil {
		return nil, errorf(name, ErrInvalid, "%w", err)
	}
	all, err := s.workersValues(ctx, fmt.Sprintf("%v of a value of each worker", op), leaf, o)
	if err != nil {
		return nil, err
	}
	out, err := reductionToOneDevice{}.BatchReduce(ctx, op, []Reduction{{Values: all, To: to}}, o)
	if err != nil {
		return nil, err
	}
	return out[0], nil
}

// workersValues gathers the values of all workers on every worker, by worker.
func (s *Strategy) workersValues(ctx context.Context, what string, v Value, o Options) ([]Value, error) {
	mine := make([]Value, len(s.devices)) // nil for the worker's other replicas
	mine[0] = v
	all, err := s.collective.gatherValues(ctx, what, mine, o)
	if err != nil {
		return nil, err
	}
	out := make([]Value, s.workersInSync)
	for worker, ids := range s.replicasOf {
		out[worker] = all[ids[0]]
	}
	return out, nil
}

// countAll returns the sum of the workers' counts.
func (s *Strategy) countAll(ctx context.Context, name string, count int, o Options) (int, error) {
	if s.workersInSync == 1 {
		return count, nil
	}
	mine := make([][]int64, len(s.devices))
	for i := range mine {
		mine[i] = []int64{0}
	}
	mine[0][0] = int64(count)
	all, err := s.collective.exchange(ctx, "number of elements of "+name, mine, o)
	if err != nil {
		return 0, err
	}
	count = 0
	for _, of := range all {
		count += int(of[0])
	}
	return count, nil
}

// destination returns the devices of a destination. Devices of this worker may be named with its task.
func (s *Strategy) destination(op string, to Value) ([]device.Spec, error) {
	if name, ok := to.(string); ok && s.task.Known() {
		if d, err := device.Canonical(name); err == nil && d.Job == s.task.Type && d.Task == s.task.Index {
			d.Job, d.Task = device.CPU(0).Job, device.CPU(0).Task
			to = d
		}
	}
	return destination(op, to)
}
