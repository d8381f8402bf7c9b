package distribute

import (
	"context"
	"fmt"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Gather concatenates the replicas' components of v along an axis, in the order of the replicas, and returns
// the result as one host value (TensorFlow's Strategy.gather). A negative axis counts from the end. The lengths
// along the axis may differ. IndexedSlices are converted to dense tensors. A value that is not distributed is
// returned unchanged; with several workers it is repeated once per worker. A mirrored value is repeated once
// per replica. In a nest each leaf is gathered. Inside a step use [Replica.AllGather].
func (s *Strategy) Gather(ctx context.Context, v Value, axis int, opts ...Options) (Value, error) {
	const name = "Gather"
	if f := frameOf(ctx); f != nil && f.replica != nil && f.strategy == s {
		return nil, errorf(name, ErrContext, "called inside a step function; the method requires being in cross-replica "+
			"context: use Replica.AllGather instead")
	}
	o, err := s.enterCross(ctx, name, Sum, opts)
	if err != nil {
		return nil, err
	}
	if err := s.checkLocal(v); err != nil {
		return nil, errorf(name, ErrInvalid, "%w", err)
	}
	if _, sparse := v.(*tensor.IndexedSlices); sparse {
		return nil, errorf(name, ErrUnsupported, "gather does not support IndexedSlices: pass the replicas' components, or "+
			"convert them with Densify")
	}
	d, ok := v.(distributed)
	if kept, isStored := v.(stored); isStored {
		d, ok = kept.perReplica(), true
	}
	if !ok && (hasDistributed(v) || s.isWorkerValue(v) && tensor.IsNest(v)) {
		return tensor.Map(v, func(leaf any) (any, error) { return s.Gather(ctx, leaf, axis, opts...) })
	}
	if s.isWorkerValue(v) {
		return s.gatherWorkers(ctx, name, v, axis, o)
	}
	if !ok && s.workersInSync > 1 {
		d, ok = s.onReplicas(v), true
	}
	if !ok || s.oneDevice {
		return s.LocalResults(v)[0], nil
	}
	dense := make([]Value, len(d.Values()))
	for i, c := range d.Values() {
		if dense[i], err = densified(c); err != nil {
			return nil, errorf(name, ErrInvalid, "component %d: %w", i, err)
		}
	}
	batch := []Reduction{{NewPerReplica(dense...), []Device{hostDevice(ctx)}}}
	out, err := gatherBatch(ctx, s.batchOps(batch), batch, axis, o)
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
	out, err := gatherHere(name, []Reduction{{NewPerReplica(all...), []Device{hostDevice(ctx)}}}, axis)
	if err != nil {
		return nil, err
	}
	return out[0], nil
}

// Gather is [Strategy.Gather].
func (c *CrossReplica) Gather(ctx context.Context, v Value, axis int, opts ...Options) (Value, error) {
	if err := c.valid("Gather"); err != nil {
		return nil, err
	}
	return c.strategy.Gather(ctx, v, axis, opts...)
}
