package distribute

import (
	"fmt"

	"github.com/lockstep-ml/lockstep/data"
)

// AutoShardPolicy says how the workers of a job share out a dataset that each of them reads.
type AutoShardPolicy uint8

// The policies, TensorFlow's AutoShardPolicy.
const (
	ShardAuto AutoShardPolicy = iota // ShardFile if the dataset reads files, else ShardData
	// ShardOff gives every worker all of the data.
	ShardOff
	// ShardFile gives worker w of n the files w, w+n, ….
	ShardFile
	// ShardData gives the workers equal parts of every global batch.
	ShardData
	// ShardHint gives worker w of n the elements w, w+n, … where [data.Pipeline.ShardHint] marks it, and else all of them.
	ShardHint
)

// String returns TensorFlow's name: "AUTO".
func (p AutoShardPolicy) String() string {
	if p > ShardHint {
		return fmt.Sprintf("AutoShardPolicy(%d)", uint8(p))
	}
	return [...]string{"AUTO", "OFF", "FILE", "DATA", "HINT"}[p]
}

// ReplicationMode says how often [Strategy.DistributeDatasetsFromFunction] calls its function.
type ReplicationMode uint8

// The modes, TensorFlow's InputReplicationMode.
const (
	PerWorker       ReplicationMode = iota // once per worker; successive elements go to successive replicas
	PerReplicaInput                        // once per replica; with [NewMirroredStrategy] only
)

// InputOptions tune distributed datasets. The zero value is TensorFlow's default, but for Prefetch, which is 1 there.
type InputOptions struct {
	// AutoShard says how several workers share out the data.
	AutoShard AutoShardPolicy
	// KeepOnHost leaves the elements on the host's device. Else each replica's lie on its own
	// (TensorFlow's experimental_fetch_to_device, negated).
	KeepOnHost bool
	// ReplicationMode says how often a dataset function is called.
	ReplicationMode ReplicationMode
	// PlaceOnDevice makes each replica's dataset on its own device. It needs PerReplicaInput and KeepOnHost. Logical CPU
	// devices share the host's memory, so there it changes nothing.
	PlaceOnDevice bool
	// Prefetch is the number of steps that are made ready ahead; 0: none (experimental_per_replica_buffer_size).
	Prefetch int
	// Input says which part of the job's input this is. Nil: that of the strategy's worker.
	Input *InputContext
}

// validate reports what is wrong with the options, by themselves.
func (o InputOptions) validate(op string) error {
	switch {
	case o.AutoShard > ShardHint:
		return errorf(op, ErrInvalid, "%v is none of AUTO, OFF, FILE, DATA and HINT", o.AutoShard)
	case o.ReplicationMode > PerReplicaInput:
		return errorf(op, ErrInvalid, "ReplicationMode(%d) is none of PerWorker and PerReplicaInput", o.ReplicationMode)
	case o.Prefetch < 0:
		return errorf(op, ErrInvalid, "Prefetch is %d steps; want at least 0", o.Prefetch)
	case o.PlaceOnDevice && o.ReplicationMode != PerReplicaInput:
		return errorf(op, ErrInvalid, "when PlaceOnDevice is set, you must also specify PerReplicaInput for the replication mode")
	case o.PlaceOnDevice && !o.KeepOnHost:
		return errorf(op, ErrInvalid, "PlaceOnDevice can not be set when elements are fetched to the device, too: set KeepOnHost")
	}
	return o.Input.validate(op)
}

// InputContext says for which part of a job's input a dataset function makes a dataset.
type InputContext struct {
	NumInputPipelines int // how many there are, mostly one per worker
	InputPipelineID   int // which of them this is, from 0
	NumReplicasInSync int // replicas of all workers
}

// String prints the context as TensorFlow does.
func (c InputContext) String() string {
	return fmt.Sprintf("tf.distribute.InputContext(input pipeline id %d, total: %d)", c.InputPipelineID, c.NumInputPipelines)
}

// PerReplicaBatchSize returns the number of examples of a global batch that each replica gets; it is an error if they do
// not divide evenly.
func (c InputContext) PerReplicaBatchSize(global int) (int, error) {
	if c.NumReplicasInSync < 1 || global%c.NumReplicasInSync != 0 {
		return 0, errorf("PerReplicaBatchSize", ErrInvalid, "the global batch size %d is not divisible by the number of replicas in sync, %d", global, c.NumReplicasInSync)
	}
	return global / c.NumReplicasInSync, nil
}

func (c *InputContext) validate(op string) error {
	switch {
	case c == nil:
		return nil
	case c.NumInputPipelines < 1 || c.InputPipelineID < 0 || c.InputPipelineID >= c.NumInputPipelines || c.NumReplicasInSync < 1:
		return errorf(op, ErrInvalid, "%v for %d replicas: want an id from 0 to one less than the total, and a replica at least", *c, c.NumReplicasInSync)
	case c.NumReplicasInSync%c.NumInputPipelines != 0:
		return errorf(op, ErrInvalid, "every worker must have the same number of replicas: %d replicas cannot be divided by %d workers", c.NumReplicasInSync, c.NumInputPipelines)
	}
	return nil
}

// BatchSizesForWorker returns the sizes of the parts that a global batch is cut into on one of several workers, one for
// each replica of the job. They differ by at most one; worker 0 has the larger ones first, and the others the same list
// from their own replicas on (TensorFlow's batch_sizes_for_worker).
func BatchSizesForWorker(global, workers, replicasPerWorker, worker int) ([]int, error) {
	if global < 0 || workers < 1 || replicasPerWorker < 1 || worker < 0 || worker >= workers {
		return nil, errorf("BatchSizesForWorker", ErrInvalid, "a global batch of %d for worker %d of %d with %d replicas each: want a worker from 0 to one less than their number, and a replica at least", global, worker, workers, replicasPerWorker)
	}
	return batchSizes(global, workers*replicasPerWorker, worker*replicasPerWorker), nil
}

// batchSizes returns the sizes of n parts, beginning with those of replica first.
func batchSizes(global, n, first int) []int {
	sizes := make([]int, n)
	for i := range sizes {
		sizes[i] = global / n
		if (i+first)%n < global%n {
			sizes[i]++
		}
	}
	return sizes
}

// inputShare is the part of the job's input that one worker reads.
type inputShare struct {
	InputContext
	first, replicas int  // of the worker
	turns           bool // parts of a batch go to the workers by turns; else to the replicas by their ids
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

// has reports whether a part of a batch is the worker's.
func (in *inputShare) has(part int) bool {
	if in.turns {
		return part%in.NumInputPipelines == in.InputPipelineID
	}
	return part >= in.first && part < in.first+in.replicas
}

// policy returns the policy that holds for a dataset.
func (o InputOptions) policy(ds data.Dataset) AutoShardPolicy {
	switch {
	case o.AutoShard != ShardAuto:
		return o.AutoShard
	case len(data.Files(ds)) > 0:
		return ShardFile
	}
	return ShardData
}
