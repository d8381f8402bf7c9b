package distribute

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/tensor"
)

// DistributedDataset yields the elements of a dataset, one per replica and step.
type DistributedDataset struct {
	strategy *Strategy
	options  InputOptions
	steps    int                       // per iteration, or -1
	sources  []data.Dataset            // one, or one per replica
	pieces   func(data.Dataset) pieces // nil: elements are not split
	pad      bool                      // complete a last step that lacks elements for some replicas
}

// pieces yields the parts of successive replicas in successive steps.
type pieces = func(context.Context) iter.Seq2[Value, error]

// DistributeDataset splits the elements of ds, which are global batches, along the first dimension of their
// tensors. With one worker replica i gets the rows from i*ceil(n/replicas) on: ceil(n/replicas) of them, or the
// rest, where n is the number of rows of the batch. So later replicas may get fewer rows, or a tensor without
// rows; the step runs on every replica in any case. Several workers split a batch in the same way over all
// replicas and take the parts in turn, as in TensorFlow. If the workers have different numbers of replicas,
// replica i gets part i.
//
// Several workers end at the same step: when the data of all have ended. A worker whose data ended earlier gets
// tensors without rows, and zeros for scalars. The workers agree on the end before each step, so all of them
// must read the same number of steps. An error of one worker's dataset ends the iteration on all workers.
//
// With [ShardOff], [ShardFile] and [ShardHint] the sizes of the parts differ by one row at most, see
// [BatchSizesForWorker], and parts continue from one batch into the next. This needs a dataset of package data,
// which knows its batch size; other datasets are split as above. With [NewCentralStorageStrategy] these
// policies drop a last step that lacks a part for some replica, as TensorFlow does; [ShardAuto] and [ShardData]
// keep it.
//
// A dataset that is already sharded by Shard(worker, workers) is an error with [ShardFile] and [ShardData]:
// each worker would get a shard of its shard.
//
// An element is one nest of [*PerReplica] (see [Regroup]), an argument for [Run]. With a single replica it is
// unchanged, and need not be a batch.
func (s *Strategy) DistributeDataset(ds data.Dataset, opts ...InputOptions) (*DistributedDataset, error) {
	const op = "DistributeDataset"
	o, err := s.inputOptions(op, opts)
	switch {
	case err != nil:
		return nil, err
	case ds == nil:
		return nil, errorf(op, ErrInvalid, "the dataset is nil")
	case o.ReplicationMode == PerReplicaInput && s.kind != defaultKind:
		return nil, errorf(op, ErrUnsupported, "PerReplicaInput is only supported in DistributeDatasetsFromFunction")
	case s.oneDevice && o.Input == nil:
		return &DistributedDataset{strategy: s, options: o, steps: ds.Len(), sources: []data.Dataset{ds}}, nil
	}
	in := s.input(o)
	d := &DistributedDataset{strategy: s, options: o, steps: -1, pad: s.kind != centralKind}
	policy := o.policy(ds)
	index, count, sharded := data.Sharded(ds)
	sharded = sharded && index == in.InputPipelineID && count == in.NumInputPipelines
	switch policy {
	case ShardFile:
		if in.NumInputPipelines == 1 {
			break
		}
		if ds, err = data.ShardFiles(ds, in.InputPipelineID, in.NumInputPipelines); errors.Is(err, data.ErrNoFiles) {
			return nil, errorf(op, ErrInvalid, "found an unshardable source dataset: %w. Use ShardData or ShardOff", err)
		} else if err != nil {
			return nil, errorf(op, ErrInvalid, "%w", err)
		}
	case ShardHint:
		ds = data.ShardHinted(ds, in.InputPipelineID, in.NumInputPipelines)
	}
	if sharded && (policy == ShardFile || policy == ShardData) {
		return nil, errorf(op, ErrInvalid, "the dataset has Shard(%d, %d), this worker's share, which the strategy would "+
			"divide again: it gives each of the %[2]d workers its share itself. "+
			"Leave out Shard; to share out the data yourself set AutoShard to ShardOff, or use DistributeDatasetsFromFunction", index, count)
	}
	d.sources = []data.Dataset{ds}
	rows, _, known := data.BatchSize(ds)
	switch {
	case in.NumReplicasInSync == 1: // not split, so elements need no rows
		d.steps = ds.Len()
		d.pieces = func(ds data.Dataset) pieces { return ds.Iter }
	case policy == ShardData:
		d.steps = ds.Len()
		d.pieces = func(ds data.Dataset) pieces { return cutPieces(op, ds, in, true) }
	case known && rows > 0:
		sizes := batchSizes(rows, in.NumReplicasInSync, in.first)
		d.pieces = func(ds data.Dataset) pieces { return rebatched(op, ds, sizes) }
	default:
		d.pieces = func(ds data.Dataset) pieces { return cutPieces(op, ds, in, false) }
	}
	return d, nil
}

// DistributeDatasetsFromFunction returns a dataset that gives the elements of f's dataset, which are batches of
// one replica, to successive replicas without splitting them (TensorFlow's distribute_datasets_from_function).
// f is called once, by this function. With PerReplicaInput it is called once per replica, and each replica has
// its own dataset.
//
// At the end of the data there may be too few elements for a step. If the dataset's last batch may be smaller,
// the later replicas get tensors without rows. If elements are not batches or all batches are full
// ([data.Pipeline.BatchFull]), and with [NewCentralStorageStrategy], the remaining elements are dropped.
// Several workers end at the same step, as with [Strategy.DistributeDataset].
func (s *Strategy) DistributeDatasetsFromFunction(ctx context.Context, f func(InputContext) (data.Dataset, error), opts ...InputOptions) (*DistributedDataset, error) {
	const op = "DistributeDatasetsFromFunction"
	if err := s.requireCross(ctx, op); err != nil {
		return nil, err
	}
	o, err := s.inputOptions(op, opts)
	switch {
	case err != nil:
		return nil, err
	case f == nil:
		return nil, errorf(op, ErrInvalid, "the dataset function is nil")
	case o.ReplicationMode == PerReplicaInput && s.kind == defaultKind:
		o.ReplicationMode = PerWorker // one replica
	case o.ReplicationMode == PerReplicaInput && s.kind != mirroredKind:
		return nil, errorf(op, ErrUnsupported, "PerReplicaInput is only supported by MirroredStrategy, not by %v", s)
	}
	in := s.input(o)
	contexts := []InputContext{in.InputContext}
	if o.ReplicationMode == PerReplicaInput {
		contexts = nil
		for i := range s.devices {
			contexts = append(contexts, InputContext{NumInputPipelines: len(s.devices), InputPipelineID: i, NumReplicasInSync: in.NumReplicasInSync})
		}
	}
	d := &DistributedDataset{strategy: s, options: o, steps: -1, pad: s.kind != centralKind}
	for _, c := range contexts {
		ds, err := f(c)
		switch {
		case err != nil:
			return nil, errorf(op, nil, "the dataset of %v: %w", c, err)
		case ds == nil:
			return nil, errorf(op, ErrInvalid, "the dataset function returned nil for %v", c)
		}
		if rows, full, known := data.BatchSize(ds); known && (rows == 0 || full) {
			d.pad = false
		}
		d.sources = append(d.sources, ds)
	}
	if !s.oneDevice {
		d.pieces = func(ds data.Dataset) pieces { return ds.Iter }
	}
	return d, nil
}

// inputOptions checks the preconditions of distributed datasets.
func (s *Strategy) inputOptions(op string, opts []InputOptions) (InputOptions, error) {
	if len(opts) > 1 {
		return InputOptions{}, errorf(op, ErrInvalid, "%d options given: want one at most", len(opts))
	}
	if err := s.requireOpen(op); err != nil || len(opts) == 0 {
		return InputOptions{}, err
	}
	return opts[0], opts[0].validate(op)
}

// Len returns the number of steps per iteration, or -1 if it is not known.
func (d *DistributedDataset) Len() int { return d.steps }

// Iter reads the dataset from its start and yields the elements of one step at a time. It yields an error at
// most once, as its last pair. Inside a step it yields an error that matches [ErrContext].
func (d *DistributedDataset) Iter(ctx context.Context) iter.Seq2[Value, error] {
	const op = "DistributedDataset.Iter"
	if err := d.strategy.requireCross(ctx, op); err != nil && d.strategy.kind != defaultKind {
		return func(yield func(Value, error) bool) {
			yield(nil, fmt.Errorf("%w. Take elements outside of the step and pass them to Run", err))
		}
	}
	steps := d.together
	switch {
	case d.strategy.workersInSync > 1:
		return d.agreed(ctx)
	case d.pieces == nil:
		steps = d.sources[0].Iter
	case len(d.sources) > 1:
		steps = d.apart
	}
	if n := d.options.Prefetch; n > 0 {
		steps = data.FromSeq(-1, steps).Prefetch(n).Iter
	}
	return steps(ctx)
}

// together gives successive pieces of one dataset to the replicas, one round per step.
func (d *DistributedDataset) together(ctx context.Context) iter.Seq2[Value, error] {
	return func(yield func(Value, error) bool) {
		for v, err := range d.rounds(ctx) {
			if err != nil {
				yield(nil, err)
				return
			}
			if round := v.([]Value); len(round) == len(d.strategy.devices) {
				v, err = d.group(round)
			} else if v, err = d.fill(round); v == nil && err == nil {
				return
			}
			if !yield(v, err) || err != nil {
				return
			}
		}
	}
}

// rounds collects successive pieces of one dataset, one for each replica of this worker, as a []Value per step.
// The last one may have fewer.
func (d *DistributedDataset) rounds(ctx context.Context) iter.Seq2[Value, error] {
	return func(yield func(Value, error) bool) {
		n := len(d.strategy.devices)
		round := make([]Value, 0, n)
		for piece, err := range d.pieces(d.sources[0])(ctx) {
			if err != nil {
				yield(nil, err)
				return
			}
			if round = append(round, piece); len(round) < n {
				continue
			}
			if !yield(round, nil) {
				return
			}
			round = make([]Value, 0, n)
		}
		if len(round) > 0 {
			yield(round, nil)
		}
	}
}

// apart gives each replica the elements of its dataset, until all datasets have ended.
func (d *DistributedDataset) apart(ctx context.Context) iter.Seq2[Value, error] {
	return func(yield func(Value, error) bool) {
		next := make([]func() (Value, error, bool), len(d.sources))
		for i, ds := range d.sources {
			var stop func()
			next[i], stop = iter.Pull2(ds.Iter(ctx))
			defer stop()
		}
		for {
			round := make([]Value, len(next))
			some, missing := Value(nil), false
			for i := range next {
				v, err, ok := next[i]()
				if err != nil {
					yield(nil, err)
					return
				}
				if round[i] = v; ok {
					some = v
				}
				missing = missing || !ok
			}
			if some == nil || missing && !d.pad {
				return
			}
			for i, v := range round {
				if v != nil {
					continue
				}
				var err error
				if round[i], err = withoutRows(some); round[i] == nil || err != nil {
					if err != nil {
						yield(nil, err)
					}
					return
				}
			}
			if v, err := d.group(round); !yield(v, err) || err != nil {
				return
			}
		}
	}
}

// fill completes a step by pieces without rows. It returns nil if the elements have no rows.
func (d *DistributedDataset) fill(round []Value) (Value, error) {
	if !d.pad {
		return nil, nil
	}
	empty, err := withoutRows(round[0])
	if err != nil || empty == nil {
		return nil, err
	}
	for len(round) < len(d.strategy.devices) {
		round = append(round, empty)
	}
	return d.group(round)
}

// group combines the replicas' elements of a step into one value.
func (d *DistributedDataset) group(round []Value) (Value, error) {
	const op = "DistributedDataset.Iter"
	placed := make([]Value, len(round))
	for i, piece := range round {
		device := d.strategy.devices[i]
		if d.options.KeepOnHost {
			device = localCPU
		}
		var err error
		if placed[i], err = tensor.Map(piece, func(leaf any) (any, error) {
			if t, ok := leaf.(*tensor.Tensor); ok && t == nil {
				return leaf, nil // an optional part that is absent
			}
			return onDevice(leaf, device), nil
		}); err != nil {
			return nil, errorf(op, ErrInvalid, "%w", err)
		}
	}
	if len(placed) == 1 {
		return placed[0], nil
	}
	return regroup(op, placed, true)
}

// cutPieces cuts every element into equal parts, one for each replica of the job, and yields the parts of one
// worker, or all.
func cutPieces(op string, ds data.Dataset, in inputShare, mine bool) pieces {
	return func(ctx context.Context) iter.Seq2[Value, error] {
		return func(yield func(Value, error) bool) {
			for element, err := range ds.Iter(ctx) {
				rows := 0
				if err == nil {
					rows, err = rowsOf(op, element)
				}
				if err != nil {
					yield(nil, err)
					return
				}
				n := in.NumReplicasInSync
				per := (rows + n - 1) / n
				for c := range n {
					if mine && !in.has(c) {
						continue
					}
					part, err := rowsBetween(element, min(c*per, rows), min((c+1)*per, rows))
					if !yield(part, err) || err != nil {
						return
					}
				}
			}
		}
	}
}

// rebatched concatenates the rows of all elements and cuts them into pieces of the given sizes, which repeat.
// The last piece may be smaller; it is followed by pieces without rows up to the end of sizes.
func rebatched(op string, ds data.Dataset, sizes []int) pieces {
	return func(ctx context.Context) iter.Seq2[Value, error] {
		return func(yield func(Value, error) bool) {
			at, have := 0, 0 // index into sizes; rows in parts
			var parts []Value
			var last Value
			emit := func() bool {
				piece, err := joined(op, parts)
				at, have, parts = (at+1)%len(sizes), 0, nil
				return yield(piece, err) && err == nil
			}
			for element, err := range ds.Iter(ctx) {
				rows := 0
				if err == nil {
					rows, err = rowsOf(op, element)
				}
				if err != nil {
					yield(nil, err)
					return
				}
				for lo := 0; lo < rows; {
					hi := min(rows, lo+sizes[at]-have)
					part, err := rowsBetween(element, lo, hi)
					if err != nil {
						yield(nil, err)
						return
					}
					parts, have, lo, last = append(parts, part), have+hi-lo, hi, element
					if have == sizes[at] && !emit() {
						return
					}
				}
			}
			if have > 0 && !emit() {
				return
			}
			for last != nil && sizes[at] == 0 {
				empty, err := rowsBetween(last, 0, 0)
				if parts = []Value{empty}; err != nil || !emit() {
					return
				}
			}
		}
	}
}

// joined concatenates the rows of elements that have the same structure.
func joined(op string, parts []Value) (Value, error) {
	if len(parts) == 1 {
		return parts[0], nil
	}
	return tensor.Zip(func(path string, leaves []any) (any, error) {
		ts := make([]*tensor.Tensor, len(leaves))
		for i, leaf := range leaves {
			t, _ := leaf.(*tensor.Tensor)
			switch {
			case t == nil && i == 0:
				return leaf, nil // an optional part that is absent
			case t == nil || i > 0 && (t.DType() != ts[0].DType() || !slices.Equal(t.Shape()[1:], ts[0].Shape()[1:])):
				return nil, errorf(op, ErrMismatch, "element%s is %v, in the batch before it %v: batches must be of one dtype and their rows of one shape", path, leaf, leaves[0])
			}
			ts[i] = t
		}
		return concatRows(ts), nil
	}, nil, parts...)
}

// rowsBetween returns the rows [lo, hi) of an element's tensors.
func rowsBetween(element Value, lo, hi int) (Value, error) {
	return tensor.Map(element, func(leaf any) (any, error) {
		t, _ := leaf.(*tensor.Tensor)
		if t == nil {
			return leaf, nil // an optional part that is absent
		}
		return t.Rows(lo, hi), nil
	})
}

// withoutRows returns an element without its rows, or nil if one of its tensors has no rows.
func withoutRows(element Value) (Value, error) {
	for _, leaf := range tensor.Flatten(element) {
		if t, ok := leaf.(*tensor.Tensor); ok && t != nil && t.Rank() == 0 {
			return nil, nil
		}
	}
	return rowsBetween(element, 0, 0)
}

// rowsOf returns the number of examples of an element, which must be the same in all its tensors.
func rowsOf(op string, element any) (int, error) {
	rows := -1
	_, err := tensor.Zip(func(path string, leaves []any) (any, error) {
		t, ok := leaves[0].(*tensor.Tensor)
		switch {
		case ok && t == nil, leaves[0] == nil:
			return leaves[0], nil
		case !ok:
			return nil, errorf(op, ErrInvalid, "element%s is a %T: want tensors", path, leaves[0])
		case t.Rank() == 0:
			return nil, errorf(op, ErrInvalid, "element%s is a scalar: call Batch on the dataset, so that its elements can be split across the replicas", path)
		case rows >= 0 && t.Shape()[0] != rows:
			return nil, errorf(op, ErrMismatch, "element%s has %d rows, the tensors before it %d: the first dimension counts examples", path, t.Shape()[0], rows)
		}
		rows = t.Shape()[0]
		return t, nil
	}, nil, element)
	if err == nil && rows < 0 {
		err = errorf(op, ErrInvalid, "the element holds no tensor: %v", element)
	}
	return max(rows, 0), err
}

// ValueContext says for which replica [Strategy.DistributeValuesFromFunction] needs a value.
type ValueContext struct {
	ReplicaID   int // TensorFlow's replica_id_in_sync_group: over all workers
	NumReplicas int // its num_replicas_in_sync
}

// String prints the context as TensorFlow does.
func (c ValueContext) String() string {
	return fmt.Sprintf("tf.distribute.ValueContext(replica id %d,  total replicas in sync: %d)", c.ReplicaID, c.NumReplicas)
}

// DistributeValuesFromFunction calls f once per replica of this worker, in order, and returns the results as
// one nest of [*PerReplica], even with one replica or if all values are equal. With [NewOneDeviceStrategy] it
// returns the result unchanged.
func (s *Strategy) DistributeValuesFromFunction(ctx context.Context, f func(ValueContext) (Value, error)) (Value, error) {
	const op = "DistributeValuesFromFunction"
	if err := s.requireCross(ctx, op); err != nil {
		return nil, err
	}
	if f == nil {
		return nil, errorf(op, ErrInvalid, "the value function is nil")
	}
	values := make([]Value, len(s.devices))
	for i := range values {
		v, err := f(ValueContext{s.first + i, s.size})
		if err != nil {
			return nil, errorf(op, nil, "replica %d: %w", s.first+i, err)
		}
		values[i] = v
	}
	if s.oneDevice {
		return values[0], nil
	}
	return regroup(op, values, true)
}
