package distribute

import (
	"context"
	"fmt"

	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Gather concatenates the replicas' values along an axis, in the order of the replicas, and returns the result as one
// host value (TensorFlow's Strategy.gather). T is a tensor or a nest of tensors, each of which is gathered. A negative
// axis counts from the end. The lengths along the axis may differ. IndexedSlices are converted to dense tensors. Inside
// a step use [AllGather].
func Gather[T any](ctx context.Context, s *Strategy, v PerReplica[T], axis int, opts ...Options) (T, error) {
	d := whole(s, v)
	p, ok := d.(*perReplica)
	if !ok || len(p.values) == 0 || !tensor.IsNest(p.values[0]) {
		out, err := Extended{s}.Gather(ctx, d, axis, opts...)
		return resultAs[T]("Gather", out, err)
	}
	out, err := tensor.Zip(func(_ string, leaves []any) (any, error) {
		return Extended{s}.Gather(ctx, perReplicaOf(leaves...), axis, opts...)
	}, nil, p.values...)
	return resultAs[T]("Gather", out, unlike("Gather", err))
}

// Gather is [Gather] for a value that may be distributed, mirrored, or the same on all replicas. A value that is not
// distributed is returned unchanged; with several workers it is repeated once per worker. A mirrored value is repeated
// once per replica.
func (e Extended) Gather(ctx context.Context, v Value, axis int, opts ...Options) (Value, error) {
	const name = "Gather"
	if f := frameOf(ctx); f != nil && f.replica != nil && f.strategy == e.s {
		return nil, errorf(name, ErrContext, "called inside a step function; the method requires being in cross-replica "+
			"context: use AllGather instead")
	}
	o, err := e.s.enterCross(ctx, name, Sum, opts)
	if err != nil {
		return nil, err
	}
	v = untyped(v, e.s.oneDevice)
	if err := e.s.checkLocal(v); err != nil {
		return nil, errorf(name, ErrInvalid, "%w", err)
	}
	if _, sparse := v.(*tensor.IndexedSlices); sparse {
		return nil, errorf(name, ErrUnsupported, "gather does not support IndexedSlices that are the same on all replicas: "+
			"pass a PerReplica with those of each replica")
	}
	d, ok := v.(distributed)
	if kept, isStored := v.(stored); isStored {
		d, ok = perReplicaOf(kept.Values()...), true
	}
	if !ok && (hasDistributed(v) || e.s.isWorkerValue(v) && tensor.IsNest(v)) {
		return tensor.Map(v, func(leaf any) (any, error) { return e.Gather(ctx, leaf, axis, opts...) })
	}
	if e.s.isWorkerValue(v) {
		return e.s.gatherWorkers(ctx, name, v, axis, o)
	}
	if !ok && e.s.workersInSync > 1 {
		d, ok = perReplicaOf(e.s.onReplicas(v)...), true
	}
	if !ok || e.s.oneDevice {
		return e.LocalResults(v)[0], nil
	}
	dense := make([]Value, len(d.byReplica()))
	for i, c := range d.byReplica() {
		if dense[i], err = densified(c); err != nil {
			return nil, errorf(name, ErrInvalid, "component %d: %w", i, err)
		}
	}
	batch := []Reduction{{dense, []device.Spec{device.Host(ctx)}}}
	out, err := gatherBatch(ctx, e.s.batchOps(batch), batch, axis, o)
	if err != nil {
		return nil, err
	}
	return out[0], nil
}

// gatherWorkers concatenates one value per worker.
func (s *Strategy) gatherWorkers(ctx context.Context, name string, v Value, axis int, o Options) (Value, error) {
	leaf, err := operand(v)
	if err != nil {
		return nil, errorf(name, ErrInvalid, "%w", err)
	}
	all, err := s.workersValues(ctx, fmt.Sprintf("gather a value of each worker along axis %d", axis), leaf, o)
	if err != nil {
		return nil, err
	}
	out, err := gatherHere(name, []Reduction{{all, []device.Spec{device.Host(ctx)}}}, axis)
	if err != nil {
		return nil, err
	}
	return out[0], nil
}
