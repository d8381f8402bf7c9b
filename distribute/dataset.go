package distribute

import (
	"context"
	"errors"
	"fmt"
	"iter"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute/internal/pieces"
)

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
			"Leave out Shard; to share out the data yourself set AutoShard to ShardOff, or use DistributeDatasetsFromFunction",
			index, count)
	}
	d.sources = []data.Dataset{ds}
	rows, _, known := data.BatchSize(ds)
	switch {
	case in.NumReplicasInSync == 1: // not split, so elements need no rows
		d.steps = ds.Len()
		d.pieces = func(ds data.Dataset) pieces.Pieces { return ds.Iter }
	case policy == ShardData:
		d.steps = ds.Len()
		d.pieces = func(ds data.Dataset) pieces.Pieces { return pieces.Split(ds, in.NumReplicasInSync, in.has) }
	case known && rows > 0:
		sizes := pieces.Sizes(rows, in.NumReplicasInSync, in.first)
		d.pieces = func(ds data.Dataset) pieces.Pieces { return pieces.Rebatch(ds, sizes) }
	default:
		d.pieces = func(ds data.Dataset) pieces.Pieces { return pieces.Split(ds, in.NumReplicasInSync, nil) }
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
func (s *Strategy) DistributeDatasetsFromFunction(
	ctx context.Context, f func(InputContext) (data.Dataset, error), opts ...InputOptions,
) (*DistributedDataset, error) {
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
			contexts = append(contexts,
				InputContext{NumInputPipelines: len(s.devices), InputPipelineID: i, NumReplicasInSync: in.NumReplicasInSync})
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
		d.pieces = func(ds data.Dataset) pieces.Pieces { return ds.Iter }
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

// ValueContext identifies for which replica [Strategy.DistributeValuesFromFunction] needs a value (TensorFlow's
// ValueContext).
type ValueContext struct {
	ReplicaID   int // TensorFlow's replica_id_in_sync_group: over all workers
	NumReplicas int // its num_replicas_in_sync
}

// String prints the context as TensorFlow does.
func (c ValueContext) String() string {
	return fmt.Sprintf("tf.distribute.ValueContext(replica id %d,  total replicas in sync: %d)", c.ReplicaID,
		c.NumReplicas)
}

// DistributeValuesFromFunction calls f once per replica of this worker, in order, and returns the results as one
// nest of [*PerReplica], even with one replica or if all values are equal (TensorFlow's
// experimental_distribute_values_from_function). With [NewOneDeviceStrategy] it returns the result unchanged.
func (s *Strategy) DistributeValuesFromFunction(
	ctx context.Context, f func(ValueContext) (Value, error),
) (Value, error) {
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

// input returns the part of the job's input that the strategy's worker reads.
func (s *Strategy) input(o InputOptions) inputShare {
	in := inputShare{InputContext{s.workersInSync, s.workerID, s.size}, s.first, len(s.devices), true}
	if o.Input != nil {
		in.InputContext = *o.Input
		in.replicas = in.NumReplicasInSync / in.NumInputPipelines
		in.first = in.InputPipelineID * in.replicas
		return in
	}
	for _, n := range s.replicasOf {
		in.turns = in.turns && n == len(s.devices)
	}
	return in
}
