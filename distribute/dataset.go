package distribute

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"

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
// With [ShardOff], [ShardFile] and [ShardHint] the sizes of the parts differ by one row at most (TensorFlow's
// batch_sizes_for_worker), and parts continue from one batch into the next. This needs a dataset of package data, which
// knows its batch size; other datasets are split as above. With [NewCentralStorageStrategy] these policies drop a last
// step that lacks a part for some replica, as TensorFlow does; [ShardAuto] and [ShardData] keep it.
//
// A dataset that is already sharded by Shard(worker, workers) is an error with [ShardFile] and [ShardData]:
// each worker would get a shard of its shard.
//
// With a single replica its element is unchanged, and need not be a batch.
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
		sizes := pieces.Sizes(rows, in.order)
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

// Iter reads the dataset from its start and yields the replicas' elements of one step at a time, an argument for
// [Run]. It yields an error at
// most once, as its last pair. Inside a step it yields an error that matches [ErrContext].
func (d *DistributedDataset) Iter(ctx context.Context) iter.Seq2[PerReplica[data.Element], error] {
	const op = "DistributedDataset.Iter"
	return func(yield func(PerReplica[data.Element], error) bool) {
		if err := d.strategy.requireCross(ctx, op); err != nil && d.strategy.kind != defaultKind {
			yield(nil, fmt.Errorf("%w. Take elements outside of the step and pass them to Run", err))
			return
		}
		for v, err := range d.each(ctx) {
			parts, ok := v.(PerReplica[data.Element])
			if !ok && err == nil {
				parts = PerReplica[data.Element]{v} // of the only replica
			}
			if !yield(parts, err) {
				return
			}
		}
	}
}

// each returns the steps' values: a PerReplica, or the dataset's elements for the only replica.
func (d *DistributedDataset) each(ctx context.Context) iter.Seq2[Value, error] {
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

// input returns the part of the job's input that the strategy's worker reads.
func (s *Strategy) input(o InputOptions) inputShare {
	in := inputShare{InputContext{s.workersInSync, s.workerID, s.size}, s.ids, len(s.ids), true}
	if o.Input != nil {
		in.InputContext = *o.Input
		in.order, in.mine = make([]int, in.NumReplicasInSync), in.NumReplicasInSync/in.NumInputPipelines
		for i := range in.order {
			in.order[i] = (in.InputPipelineID*in.mine + i) % len(in.order)
		}
		return in
	}
	for i := 1; i < len(s.replicasOf); i++ {
		ids := s.replicasOf[(s.workerID+i)%len(s.replicasOf)]
		in.order = slices.Concat(in.order, ids)
		in.turns = in.turns && len(ids) == in.mine
	}
	return in
}
