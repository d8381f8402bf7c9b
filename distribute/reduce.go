package distribute

import (
	"context"
	"slices"

	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/distribute/internal/dense"
	"github.com/lockstep-ml/lockstep/tensor"
)

// CrossDeviceOps returns the strategy's CrossDeviceOps: those of its configuration, or the default.
func (s *Strategy) CrossDeviceOps() CrossDeviceOps {
	if s.ops != nil {
		return s.ops
	}
	return s.collective
}

// HasCollectives reports whether the replicas' calls are collectives of the library. Custom [CrossDeviceOps] only
// reduce: with them, calls such as [Replica.StartAllToAll] and [Replica.StartReduceToOwners] are errors.
func (s *Strategy) HasCollectives() bool { return s.ops == nil || s.size == 1 }

// reduceOps selects the CrossDeviceOps for one value, by TensorFlow's rules. A user's CrossDeviceOps are used
// only if value and destination are on the same accelerators. With a CPU among the destinations, with other
// devices, and for int32, it is ReductionToOneDevice. Without a user's CrossDeviceOps the collectives are used
// wherever possible, which gives the same bits.
func (s *Strategy) reduceOps(r Reduction) CrossDeviceOps {
	if s.ops == nil {
		return s.collective
	}
	from, err := devicesOf("", r.Values)
	isCPU := func(d device.Spec) bool { return d.Kind == "CPU" }
	if err != nil || slices.ContainsFunc(r.To, isCPU) || !slices.Equal(from, r.To) ||
		dtypeOf(r.Values[0]) == tensor.Int32 {
		return reductionToOneDevice{}
	}
	return s.ops
}

// batchOps selects the CrossDeviceOps for a batch: the user's, except for int32; otherwise the collectives.
func (s *Strategy) batchOps(batch []Reduction) CrossDeviceOps {
	switch {
	case s.ops == nil:
		return s.collective
	case dtypeOf(batch[0].Values[0]) == tensor.Int32:
		return reductionToOneDevice{}
	}
	return s.ops
}

// ReduceOptions configure [Reduce].
type ReduceOptions struct {
	// Axis lists the dimensions over which each replica's value is reduced first. Negative ones count from the
	// end. The lengths may differ between replicas. Nil: none. An empty, non-nil Axis also reduces over no
	// dimension, but counts every replica's value once in a mean, as TensorFlow's axis=() does.
	Axis []int
	Options
}

// Reduce combines the replicas' values and returns the result as one host value, on the current device (see
// [device.With]; TensorFlow's Strategy.reduce). T is a tensor, IndexedSlices, an int, int32, int64, float32 or float64,
// or a nest of tensors and IndexedSlices. Without an axis it adds the values, leaf by leaf, and for a mean divides by
// their number. With an axis it first sums each value over the axis; a mean then divides the sum of all elements by
// their number over all replicas. So values of different lengths are weighted by their elements.
//
// One variable that all replicas return counts once, as in [Extended.Reduce]. It is an error if T cannot hold the
// result: a T of any type can.
func Reduce[T any](ctx context.Context, s *Strategy, op ReduceOp, v PerReplica[T], opts ReduceOptions) (T, error) {
	out, err := Extended{s}.Reduce(ctx, op, whole(s, v), opts)
	return resultAs[T]("Reduce", out, err)
}

// whole returns a value of all replicas for functions that do not know its type: the variable that all replicas have,
// or their components.
func whole[T any](s *Strategy, v PerReplica[T]) Value {
	d := v.dynamic()
	if len(v) == 1 && s.oneDevice || len(v) > 0 && sameVariable(d.values) != nil {
		return d.values[0]
	}
	for i, x := range v {
		d.values[i] = exactly(x)
	}
	return d
}

// sameVariable returns the variable that all leaves are, or nil.
func sameVariable(leaves []Value) stored {
	if v, ok := leaves[0].(stored); ok && sameLeaf(leaves) {
		return v
	}
	return nil
}

// Reduce is [Reduce] for a value that may be distributed, mirrored, or the same on all replicas.
//
// A value that is not distributed is the same on all replicas. Its mean is the value itself. Its sum is an
// error without an axis, and the number of replicas times its sum with one. A mirrored value's mean is the
// value itself, and its sum an error; with an axis its first component counts for every replica. With several
// workers a value that is not distributed may differ between the workers. Without an axis its sum and mean are
// those of the workers' values (see [NewMultiWorkerMirroredStrategy]); with one it counts for every replica of
// its worker.
func (e Extended) Reduce(ctx context.Context, op ReduceOp, v Value, opts ReduceOptions) (Value, error) {
	const name = "Reduce"
	o, err := e.s.enterCross(ctx, name, op, []Options{opts.Options})
	if err != nil {
		return nil, err
	}
	v, host := untyped(v, e.s.oneDevice), []device.Spec{device.Host(ctx)}
	if opts.Axis == nil {
		return e.s.reduceToHost(ctx, name, op, v, host, o)
	}
	n := len(e.s.devices)
	if m, ok := v.(*Mirrored); ok && len(m.Values) > 0 {
		v = m.Values[0] // equal on all replicas
	}
	sums := make([]Value, n)
	count := 0
	for i := range sums {
		mine, err := selectReplica(i, v, e.s.checkLocal)
		if err == nil {
			mine, err = e.s.ownComponents(i, mine)
		}
		if err != nil {
			return nil, errorf(name, ErrInvalid, "%w", err)
		}
		t, err := stack(mine)
		if err != nil {
			return nil, errorf(name, ErrInvalid, "replica %d: %w", i, err)
		}
		sum, elements, err := dense.SumAxes(t, opts.Axis)
		if err != nil {
			return nil, failed(name, err)
		}
		if op == Mean && tensor.IsNest(mine) {
			return nil, errorf(name, ErrInvalid, "the mean over an axis needs a tensor on each replica, not a nest: reduce "+
				"its leaves one by one")
		}
		sums[i] = sum
		count += elements
	}
	total := sums[0]
	if e.s.size > 1 {
		if total, err = e.s.reduceToHost(ctx, name, Sum, perReplicaOf(sums...), host, o); err != nil {
			return nil, err
		}
	}
	if op == Mean {
		if count, err = e.s.countAll(ctx, name, count, o); err != nil {
			return nil, err
		}
		return dense.Divide(total.(*tensor.Tensor), count), nil
	}
	return total, nil
}

// ownComponents returns the nest with every variable that has a component for each replica replaced by that of one.
func (s *Strategy) ownComponents(replica int, v Value) (Value, error) {
	own := func(leaf any) (any, error) {
		if kept, ok := leaf.(stored); ok {
			if p := kept.Values(); len(p) == len(s.devices) {
				return p[replica], nil
			}
		}
		return leaf, nil
	}
	if !tensor.IsNest(v) {
		return own(v)
	}
	return tensor.Map(v, own)
}

func (s *Strategy) reduceToHost(
	ctx context.Context, name string, op ReduceOp, v Value, host []device.Spec, o Options,
) (Value, error) {
	out, err := s.reduceTo(ctx, name, op, v, host, o)
	if err != nil {
		return nil, err
	}
	return Extended{s}.LocalResults(out)[0], nil
}

// ReduceTo combines the components of v and places the result on the destination's devices (reduce_to): a tensor on
// one, a [*Mirrored] on several. The destination is a device's name, a [device.Spec], a distributed value, a variable
// or a tensor, whose devices receive the result. Values that are not distributed, and mirrored values, are treated as
// in [Extended.Reduce]. With [NewOneDeviceStrategy] it returns the value unchanged.
func (e Extended) ReduceTo(ctx context.Context, op ReduceOp, v, to Value, opts ...Options) (Value, error) {
	const name = "ReduceTo"
	o, err := e.s.enterCross(ctx, name, op, opts)
	if err != nil {
		return nil, err
	}
	devices, err := e.s.destination(name, to)
	if err != nil {
		return nil, err
	}
	return e.s.reduceTo(ctx, name, op, untyped(v, e.s.oneDevice), devices, o)
}

// BatchReduceTo is [Extended.ReduceTo] for several values, each with its destination, which may share transfers
// (batch_reduce_to). The results are in the order of the values.
func (e Extended) BatchReduceTo(
	ctx context.Context, op ReduceOp, values, destinations []Value, opts ...Options,
) ([]Value, error) {
	const name = "BatchReduceTo"
	o, err := e.s.enterCross(ctx, name, op, opts)
	if err != nil || len(values) == 0 {
		return nil, err
	}
	if len(destinations) != len(values) {
		return nil, errDestinations(name, values, destinations)
	}
	if e.s.oneDevice {
		return slices.Clone(values), nil
	}
	out := make([]Value, len(values))
	var together []Reduction
	var first []any
	var places []int // indices in the batch of the values that are reduced together
	workerValues := make([]bool, len(values))
	to := make([][]device.Spec, len(values))
	for i, v := range values {
		if to[i], err = e.s.destination(name, destinations[i]); err != nil {
			return nil, err
		}
		if workerValues[i] = e.s.isWorkerValue(v); workerValues[i] {
			continue
		}
		value, err := e.s.forReplicas(name, op, v)
		if err != nil {
			return nil, err
		}
		p, err := componentsOf(value)
		if err != nil {
			return nil, errorf(name, ErrInvalid, "value %d: %w", i, err)
		}
		together, places = append(together, Reduction{Values: p, To: to[i]}), append(places, i)
		first = append(first, p[0])
	}
	if err := e.s.checkBatch(name, first); err != nil {
		return nil, err
	}
	for i, v := range values {
		if err := e.s.checkLocal(v); err != nil {
			return nil, errorf(name, ErrInvalid, "value %d: %w", i, err)
		}
	}
	if len(together) > 0 {
		results, err := e.s.batchOps(together).BatchReduce(ctx, op, together, o)
		if err != nil {
			return nil, err
		}
		for i, v := range results {
			out[places[i]] = v
		}
	}
	for i, v := range values {
		if workerValues[i] {
			if out[i], err = e.s.reduceWorkers(ctx, name, op, v, to[i], o); err != nil {
				return nil, err
			}
		}
	}
	return out, nil
}

// enterCross checks the preconditions of reductions in cross-replica context.
func (s *Strategy) enterCross(ctx context.Context, name string, op ReduceOp, opts []Options) (Options, error) {
	if err := s.requireCross(ctx, name); err != nil {
		return Options{}, err
	}
	if err := checkReduceOp(name, op); err != nil {
		return Options{}, err
	}
	if err := s.requireOpen(name); err != nil {
		return Options{}, err
	}
	o, err := s.options.over(opts)
	if err == nil {
		s.warnImplementation(o)
	}
	return o, err
}

// reduceTo reduces a nest leaf by leaf.
func (s *Strategy) reduceTo(
	ctx context.Context, name string, op ReduceOp, v Value, to []device.Spec, o Options,
) (Value, error) {
	if err := s.checkLocal(v); err != nil {
		return nil, errorf(name, ErrInvalid, "%w", err)
	}
	if s.oneDevice {
		return v, nil
	}
	if plain, ok := v.(stored); ok && !s.kind.mirrors() {
		v = plain.first() // the same for all replicas
	}
	if m, ok := mirroredValue(v); ok && s.kind.mirrors() {
		if op == Mean {
			return m, nil
		}
		return nil, errorf(name, ErrInvalid, "the sum of a mirrored value over the replicas is not defined: it is the same "+
			"on all of them. Its mean is the value itself")
	}
	return tensor.Map(v, func(leaf any) (any, error) {
		switch d := leaf.(type) {
		case stored:
			return s.reduceLeaf(ctx, name, op, d.Values(), to, o)
		case distributed:
			if err := s.checkLocal(leaf); err != nil {
				return nil, errorf(name, ErrInvalid, "%w", err)
			}
			return s.reduceLeaf(ctx, name, op, d.byReplica(), to, o)
		}
		if s.isWorkerValue(leaf) {
			return s.reduceWorkers(ctx, name, op, leaf, to, o)
		}
		if s.workersInSync > 1 {
			same, err := s.forReplicas(name, op, leaf)
			if err != nil {
				return nil, err
			}
			return s.reduceLeaf(ctx, name, op, same.(*perReplica).values, to, o)
		}
		return s.reduceSame(name, op, leaf, to)
	})
}

// reduceLeaf reduces the components of one value, which may be nests themselves.
func (s *Strategy) reduceLeaf(
	ctx context.Context, name string, op ReduceOp, values []Value, to []device.Spec, o Options,
) (Value, error) {
	if len(values) == 0 {
		return nil, errorf(name, ErrInvalid, "per-replica value must be non-empty")
	}
	out, err := tensor.Zip(func(_ string, leaves []any) (any, error) {
		if v := sameVariable(leaves); v != nil && len(v.Values()) == len(leaves) {
			leaves = v.Values()
		}
		batch := []Reduction{{Values: leaves, To: to}}
		out, err := s.reduceOps(batch[0]).BatchReduce(ctx, op, batch, o)
		if err != nil {
			return nil, err
		}
		return out[0], nil
	}, nil, values...)
	return out, unlike(name, err)
}

// reduceSame reduces a value that is not distributed, so that it is the same on all replicas.
func (s *Strategy) reduceSame(name string, op ReduceOp, v Value, to []device.Spec) (Value, error) {
	switch {
	case isHostZero(v), op == Mean:
		return v, nil
	case len(s.devices) != 1:
		return nil, errorf(name, ErrInvalid, "a non-DistributedValues value %v cannot be reduced with the given reduce op "+
			"%v: it is the same on all replicas. Want a value of each replica, such as Run returns", v, op)
	}
	leaf, err := operand(v)
	if err != nil {
		return nil, errorf(name, ErrInvalid, "%w", err)
	}
	return place(leaf, to), nil
}

// mirroredValue returns the mean of a mirrored value: the value itself, or a variable's value.
func mirroredValue(v Value) (Value, bool) {
	switch v := v.(type) {
	case *Mirrored:
		return v, true
	case stored:
		if v.keptEqual() {
			return &Mirrored{v.Values()}, true
		}
	}
	return nil, false
}

// checkBatch rejects batches that TensorFlow's MirroredStrategy rejects: int32 tensors are on the host there,
// and each needs a separate reduction.
func (s *Strategy) checkBatch(name string, leaves []any) error {
	int32s := 0
	for _, leaf := range leaves {
		if dtypeOf(leaf) == tensor.Int32 {
			int32s++
		}
	}
	if int32s > 0 && len(leaves) > 1 && s.kind == mirroredKind {
		return errorf(name, ErrInvalid, "inputs to batch_reduce_to must be either all on the host or all on the compute "+
			"devices: int32 tensors count as host values, one batch each. Reduce them one by one, or as int64 or float32")
	}
	return nil
}
