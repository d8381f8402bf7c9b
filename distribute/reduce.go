package distribute

import (
	"context"
	"slices"

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
	from, err := r.Value.destination("")
	if err != nil || slices.ContainsFunc(r.To, isCPU) || !slices.Equal(from, r.To) ||
		dtypeOf(r.Value.values[0]) == tensor.Int32 {
		return ReductionToOneDevice{}
	}
	return s.ops
}

// batchOps selects the CrossDeviceOps for a batch: the user's, except for int32; otherwise the collectives.
func (s *Strategy) batchOps(batch []Reduction) CrossDeviceOps {
	switch {
	case s.ops == nil:
		return s.collective
	case dtypeOf(batch[0].Value.values[0]) == tensor.Int32:
		return ReductionToOneDevice{}
	}
	return s.ops
}

// ReduceOptions configure [Strategy.Reduce].
type ReduceOptions struct {
	// Axis lists the dimensions over which each replica's value is reduced first. Negative ones count from the
	// end. The lengths may differ between replicas. Nil: none. An empty, non-nil Axis also reduces over no
	// dimension, but counts every replica's value once in a mean, as TensorFlow's axis=() does.
	Axis []int
	Options
}

// Reduce combines the components of v and returns the result as one host value (TensorFlow's Strategy.reduce).
// Without an axis it adds the components, leaf by leaf, and for a mean divides by their number. With an axis it
// first sums each component over the axis; a mean then divides the sum of all elements by their number over all
// replicas. So components of different lengths are weighted by their elements.
//
// A value that is not distributed is the same on all replicas. Its mean is the value itself. Its sum is an
// error without an axis, and the number of replicas times its sum with one. A mirrored value's mean is the
// value itself, and its sum an error; with an axis its first component counts for every replica. With several
// workers a value that is not distributed may differ between the workers. Without an axis its sum and mean are
// those of the workers' values (see [NewMultiWorkerMirroredStrategy]); with one it counts for every replica of
// its worker.
func (s *Strategy) Reduce(ctx context.Context, op ReduceOp, v Value, opts ReduceOptions) (Value, error) {
	const name = "Reduce"
	o, err := s.enterCross(ctx, name, op, []Options{opts.Options})
	if err != nil {
		return nil, err
	}
	host := []Device{hostDevice(ctx)}
	if opts.Axis == nil {
		return s.reduceToHost(ctx, name, op, v, host, o)
	}
	n := len(s.devices)
	if m, ok := v.(*Mirrored); ok && len(m.values) > 0 {
		v = m.values[0] // equal on all replicas
	}
	sums := make([]Value, n)
	count := 0
	for i := range sums {
		mine, err := selectReplica(i, v, s.checkLocal)
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
	if s.size > 1 {
		if total, err = s.reduceToHost(ctx, name, Sum, NewPerReplica(sums...), host, o); err != nil {
			return nil, err
		}
	}
	if op == Mean {
		if count, err = s.countAll(ctx, name, count, o); err != nil {
			return nil, err
		}
		return dense.Divide(total.(*tensor.Tensor), count), nil
	}
	return total, nil
}

func (s *Strategy) reduceToHost(
	ctx context.Context, name string, op ReduceOp, v Value, host []Device, o Options,
) (Value, error) {
	out, err := s.reduceTo(ctx, name, op, v, host, o)
	if err != nil {
		return nil, err
	}
	return s.LocalResults(out)[0], nil
}

// ReduceTo combines the components of v and places the result on the destination's devices (TensorFlow's
// StrategyExtended.reduce_to): a tensor on one, a [*Mirrored] on several. Values that are not distributed, and
// mirrored values, are treated as in [Strategy.Reduce]. With [NewOneDeviceStrategy] it returns the value unchanged.
func (s *Strategy) ReduceTo(ctx context.Context, op ReduceOp, v Value, to Destination, opts ...Options) (Value, error) {
	const name = "ReduceTo"
	o, err := s.enterCross(ctx, name, op, opts)
	if err != nil {
		return nil, err
	}
	devices, err := s.destination(name, to)
	if err != nil {
		return nil, err
	}
	return s.reduceTo(ctx, name, op, v, devices, o)
}

// BatchReduceTo is [Strategy.ReduceTo] for several values, which may share transfers (TensorFlow's
// StrategyExtended.batch_reduce_to). The results are in the order of the batch.
func (s *Strategy) BatchReduceTo(ctx context.Context, op ReduceOp, batch []ValueTo, opts ...Options) ([]Value, error) {
	const name = "BatchReduceTo"
	o, err := s.enterCross(ctx, name, op, opts)
	if err != nil || len(batch) == 0 {
		return nil, err
	}
	out := make([]Value, len(batch))
	if s.oneDevice {
		for i, b := range batch {
			out[i] = b.Value
		}
		return out, nil
	}
	var together []Reduction
	var first []any
	var places []int // indices in the batch of the values that are reduced together
	workerValues := make([]bool, len(batch))
	to := make([][]Device, len(batch))
	for i, b := range batch {
		if to[i], err = s.destination(name, b.To); err != nil {
			return nil, err
		}
		if workerValues[i] = s.isWorkerValue(b.Value); workerValues[i] {
			continue
		}
		value, err := s.forReplicas(name, op, b.Value)
		if err != nil {
			return nil, err
		}
		p, err := perReplica(value)
		if err != nil {
			return nil, errorf(name, ErrInvalid, "value %d: %w", i, err)
		}
		together, places = append(together, Reduction{Value: p, To: to[i]}), append(places, i)
		first = append(first, p.values[0])
	}
	if err := s.checkBatch(name, first); err != nil {
		return nil, err
	}
	for i, b := range batch {
		if err := s.checkLocal(b.Value); err != nil {
			return nil, errorf(name, ErrInvalid, "value %d: %w", i, err)
		}
	}
	if len(together) > 0 {
		results, err := s.batchOps(together).BatchReduce(ctx, op, together, o)
		if err != nil {
			return nil, err
		}
		for i, v := range results {
			out[places[i]] = v
		}
	}
	for i, b := range batch {
		if workerValues[i] {
			if out[i], err = s.reduceWorkers(ctx, name, op, b.Value, to[i], o); err != nil {
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
	ctx context.Context, name string, op ReduceOp, v Value, to []Device, o Options,
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
			return s.reduceLeaf(ctx, name, op, d.perReplica(), to, o)
		case distributed:
			if err := s.checkLocal(leaf); err != nil {
				return nil, errorf(name, ErrInvalid, "%w", err)
			}
			return s.reduceLeaf(ctx, name, op, &PerReplica{components{d.Values()}}, to, o)
		}
		if s.isWorkerValue(leaf) {
			return s.reduceWorkers(ctx, name, op, leaf, to, o)
		}
		if s.workersInSync > 1 {
			same, err := s.forReplicas(name, op, leaf)
			if err != nil {
				return nil, err
			}
			return s.reduceLeaf(ctx, name, op, same.(*PerReplica), to, o)
		}
		return s.reduceSame(name, op, leaf, to)
	})
}

// reduceLeaf reduces the components of one value, which may be nests themselves.
func (s *Strategy) reduceLeaf(
	ctx context.Context, name string, op ReduceOp, p *PerReplica, to []Device, o Options,
) (Value, error) {
	if len(p.values) == 0 {
		return nil, errorf(name, ErrInvalid, "per-replica value must be non-empty")
	}
	return tensor.Zip(func(_ string, leaves []any) (any, error) {
		batch := []Reduction{{Value: &PerReplica{components{leaves}}, To: to}}
		out, err := s.reduceOps(batch[0]).BatchReduce(ctx, op, batch, o)
		if err != nil {
			return nil, err
		}
		return out[0], nil
	}, nil, p.values...)
}

// reduceSame reduces a value that is not distributed, so that it is the same on all replicas.
func (s *Strategy) reduceSame(name string, op ReduceOp, v Value, to []Device) (Value, error) {
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
			return &Mirrored{v.perReplica().components}, true
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

// Reduce is [Strategy.Reduce].
func (c *CrossReplica) Reduce(ctx context.Context, op ReduceOp, v Value, opts ReduceOptions) (Value, error) {
	if err := c.valid("Reduce"); err != nil {
		return nil, err
	}
	return c.strategy.Reduce(ctx, op, v, opts)
}

// ReduceTo is [Strategy.ReduceTo].
func (c *CrossReplica) ReduceTo(
	ctx context.Context, op ReduceOp, v Value, to Destination, opts ...Options,
) (Value, error) {
	if err := c.valid("ReduceTo"); err != nil {
		return nil, err
	}
	return c.strategy.ReduceTo(ctx, op, v, to, opts...)
}

// BatchReduceTo is [Strategy.BatchReduceTo].
func (c *CrossReplica) BatchReduceTo(
	ctx context.Context, op ReduceOp, batch []ValueTo, opts ...Options,
) ([]Value, error) {
	if err := c.valid("BatchReduceTo"); err != nil {
		return nil, err
	}
	return c.strategy.BatchReduceTo(ctx, op, batch, opts...)
}
