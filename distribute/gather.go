package distribute

import (
	"context"
	"fmt"
	"strings"

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
func GatherWith(ctx context.Context, ops CrossDeviceOps, v Value, to Destination, axis int, opts ...Options) (Value, error) {
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

// Gather concatenates the replicas' components of v along an axis, in the order of the replicas, and returns
// the result as one host value (TensorFlow's Strategy.gather). A negative axis counts from the end. The lengths
// along the axis may differ. IndexedSlices are converted to dense tensors. A value that is not distributed is
// returned unchanged; with several workers it is repeated once per worker. A mirrored value is repeated once
// per replica. In a nest each leaf is gathered. Inside a step use [Replica.AllGather].
func (s *Strategy) Gather(ctx context.Context, v Value, axis int, opts ...Options) (Value, error) {
	const name = "Gather"
	if f := frameOf(ctx); f != nil && f.replica != nil && f.strategy == s {
		return nil, errorf(name, ErrContext, "called inside a step function; the method requires being in cross-replica context: use Replica.AllGather instead")
	}
	o, err := s.enterCross(ctx, name, Sum, opts)
	if err != nil {
		return nil, err
	}
	if err := s.suits(v); err != nil {
		return nil, errorf(name, ErrInvalid, "%w", err)
	}
	if _, sparse := v.(*tensor.IndexedSlices); sparse {
		return nil, errorf(name, ErrUnsupported, "gather does not support IndexedSlices: pass the replicas' components, or convert them with Densify")
	}
	d, ok := v.(distributed)
	if variable, isVariable := v.(*Variable); isVariable {
		d, ok = variable.perReplica(), true
	}
	if !ok && (hasDistributed(v) || s.isOfWorker(v) && tensor.IsNest(v)) {
		return tensor.Map(v, func(leaf any) (any, error) { return s.Gather(ctx, leaf, axis, opts...) })
	}
	if s.isOfWorker(v) {
		return s.gatherWorkers(ctx, name, v, axis, o)
	}
	if !ok && s.workersInSync > 1 {
		d, ok = s.onAll(v), true
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

// densified converts IndexedSlices to a dense tensor and returns other leaves unchanged.
func densified(v Value) (Value, error) {
	if s, ok := v.(*tensor.IndexedSlices); ok {
		return Densify(s)
	}
	return v, nil
}

// Gather is [Strategy.Gather].
func (c *CrossReplica) Gather(ctx context.Context, v Value, axis int, opts ...Options) (Value, error) {
	if err := c.valid("Gather"); err != nil {
		return nil, err
	}
	return c.strategy.Gather(ctx, v, axis, opts...)
}

// mergeLeaves runs f on one goroutine for the leaves of all replicas' nests, which must have the same names.
func (r *Replica) mergeLeaves(ctx context.Context, name string, leaves []any, names []string, o Options, f func(context.Context, []Reduction) ([]Value, error)) ([]Value, error) {
	s := r.strategy
	out, err := r.mergeCall(ctx, name, o.Timeout, func(ctx context.Context, _ *CrossReplica, args ...Value) (Value, error) {
		leaves := args[:len(args)-1]
		if p, ok := args[len(leaves)].(*PerReplica); ok {
			return nil, errorf(name, ErrMismatch, "the structures of the nests differ between the replicas: %q", p.values)
		}
		batch := make([]Reduction, len(leaves))
		for i, leaf := range leaves {
			batch[i] = Reduction{Value: s.onAll(leaf), To: s.devices}
		}
		return f(ctx, batch)
	}, append(leaves, strings.Join(names, " ")))
	if err != nil {
		return nil, err
	}
	return out.([]Value), nil
}

// onAll wraps the components of an argument of a merge function. An argument that is the same object on all
// replicas was not wrapped.
func (s *Strategy) onAll(v Value) *PerReplica {
	switch v := v.(type) {
	case *PerReplica:
		return v
	case *Variable:
		if len(v.components) == len(s.devices) {
			return v.perReplica()
		}
	}
	return NewPerReplica(repeat(v, len(s.devices))...)
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
			if joined, err = concat(name, parts, axis); err != nil {
				return nil, err
			}
		}
		out[i] = place(joined, b.To)
	}
	return out, nil
}

// concat concatenates tensors of any dtype along an axis.
func concat(op string, ts []*tensor.Tensor, axis int) (*tensor.Tensor, error) {
	parts := make([]part, len(ts))
	for i, t := range ts {
		if t.Memory().Kind == tensor.Device {
			return nil, errorf(op, ErrUnsupported, "component %d is in device memory: copy it to the host first", i)
		}
		parts[i] = part{t.DType(), t.Shape()}
	}
	at, shape, err := joinedShape(op, parts, axis)
	if err != nil {
		return nil, err
	}
	out := tensor.New(parts[0].dtype, shape...)
	to := 0
	for _, t := range ts {
		copyColumns(out, t, product(shape[:at]), to)
		to += product(t.Shape()[at:])
	}
	return out, nil
}

// part is the dtype and the shape of a tensor to concatenate.
type part struct {
	dtype tensor.DType
	shape []int
}

// joinedShape returns the axis, counted from the front, and the shape of the concatenation.
func joinedShape(op string, parts []part, axis int) (at int, shape []int, err error) {
	first := parts[0]
	rank := len(first.shape)
	if at = axis; at < 0 {
		at += rank
	}
	shape = append([]int(nil), first.shape...)
	for i, p := range parts {
		switch {
		case p.dtype != first.dtype:
			return 0, nil, errorf(op, ErrMismatch, "the components differ: component %d was expected to be a %v tensor, as component 0 is, but is a %v tensor", i, first.dtype, p.dtype)
		case len(p.shape) != rank:
			return 0, nil, errorf(op, ErrMismatch, "the components differ: ranks of all input tensors should match: shape[0] = %s vs. shape[%d] = %s", bracketed(first.shape), i, bracketed(p.shape))
		case rank == 0:
			return 0, nil, errorf(op, ErrInvalid, "can't concatenate scalars: want tensors of at least one dimension")
		case at < 0 || at >= rank:
			return 0, nil, errorf(op, ErrInvalid, "expected concatenating dimensions in the range [%d, %d), but got %d", -rank, rank, axis)
		}
		for d, n := range p.shape {
			if d != at && n != first.shape[d] {
				return 0, nil, errorf(op, ErrMismatch, "the components differ: dimension %d in both shapes must be equal: shape[0] = %s vs. shape[%d] = %s", d, bracketed(first.shape), i, bracketed(p.shape))
			}
		}
		if i > 0 {
			shape[at] += p.shape[at]
		}
	}
	return at, shape, nil
}

func product(shape []int) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}

// copyColumns treats out as a matrix with the given number of rows and copies part into it, starting at column
// to.
func copyColumns(out, part *tensor.Tensor, rows, to int) {
	if part.Len() == 0 {
		return
	}
	width, columns := out.Len()/rows, part.Len()/rows
	for r := range rows {
		if out.DType() == tensor.String {
			copy(out.StringData()[r*width+to:], part.StringData()[r*columns:(r+1)*columns])
			continue
		}
		size := out.DType().Bytes()
		copyMemory(out.Memory().Slice((r*width+to)*size, (r*width+to+columns)*size), part.Memory().Slice(r*columns*size, (r+1)*columns*size))
	}
}

// columnsOf returns the slice [from, from+n) of t along an axis, the inverse of copyColumns.
func columnsOf(t *tensor.Tensor, axis, from, n int) *tensor.Tensor {
	shape := append([]int(nil), t.Shape()...)
	shape[axis] = n
	out := tensor.New(t.DType(), shape...)
	rows, size := product(shape[:axis]), t.DType().Bytes()
	if out.Len() == 0 {
		return out
	}
	width, columns, lo := t.Len()/rows, out.Len()/rows, from*product(shape[axis+1:])
	for r := range rows {
		copyMemory(out.Memory().Slice(r*columns*size, (r+1)*columns*size), t.Memory().Slice((r*width+lo)*size, (r*width+lo+columns)*size))
	}
	return out
}
