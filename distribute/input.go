package distribute

import (
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/data"
)

// AutoShardPolicy specifies how the workers of a job shard a dataset (TensorFlow's
// tf.data.experimental.AutoShardPolicy).
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
	// ShardHint gives worker w of n the elements w, w+n, … at the place marked by [data.Pipeline.ShardHint].
	// Without a mark every worker gets all elements.
	ShardHint
)

// String returns TensorFlow's name: "AUTO".
func (p AutoShardPolicy) String() string {
	return enumName("AutoShardPolicy", uint8(p), "AUTO", "OFF", "FILE", "DATA", "HINT")
}

// ReplicationMode specifies how often [Strategy.DistributeDatasetsFromFunction] calls its function (TensorFlow's
// InputReplicationMode).
type ReplicationMode uint8

// The modes, TensorFlow's InputReplicationMode.
const (
	PerWorker       ReplicationMode = iota // once per worker; successive elements go to successive replicas
	PerReplicaInput                        // once per replica; with [NewMirroredStrategy] only
)

// InputOptions configure distributed datasets. The zero value has TensorFlow's defaults, except for Prefetch,
// which is 1 in TensorFlow.
type InputOptions struct {
	// AutoShard specifies how several workers shard the data.
	AutoShard AutoShardPolicy
	// KeepOnHost leaves the elements on the host's device. By default each replica's elements are on the
	// replica's device (TensorFlow's experimental_fetch_to_device, negated).
	KeepOnHost bool
	// ReplicationMode specifies how often a dataset function is called.
	ReplicationMode ReplicationMode
	// PlaceOnDevice creates each replica's dataset on the replica's device. It needs PerReplicaInput and
	// KeepOnHost. It has no effect on logical CPU devices, which share the host's memory.
	PlaceOnDevice bool
	// Prefetch is the number of steps to prefetch; 0: none (experimental_per_replica_buffer_size).
	Prefetch int
	// Input selects the part of the job's input. Default: the part of the strategy's worker.
	Input *InputContext
}

// validate checks the options independently of a strategy.
func (o InputOptions) validate(op string) error {
	switch {
	case o.AutoShard > ShardHint:
		return errorf(op, ErrInvalid, "%v is not one of AUTO, OFF, FILE, DATA and HINT", o.AutoShard)
	case o.ReplicationMode > PerReplicaInput:
		return errorf(op, ErrInvalid, "ReplicationMode(%d) is not one of PerWorker and PerReplicaInput", o.ReplicationMode)
	case o.Prefetch < 0:
		return errorf(op, ErrInvalid, "Prefetch is %d steps; want at least 0", o.Prefetch)
	case o.PlaceOnDevice && o.ReplicationMode != PerReplicaInput:
		return errorf(op, ErrInvalid, "when PlaceOnDevice is set, you must also specify PerReplicaInput for the "+
			"replication mode")
	case o.PlaceOnDevice && !o.KeepOnHost:
		return errorf(op, ErrInvalid, "PlaceOnDevice can not be set while elements are fetched to the device: set KeepOnHost")
	}
	return o.Input.validate(op)
}

// InputContext describes the part of a job's input for which a dataset function makes a dataset (TensorFlow's
// InputContext).
type InputContext struct {
	NumInputPipelines int // number of input pipelines, usually one per worker
	InputPipelineID   int // index of this pipeline, from 0
	NumReplicasInSync int // number of replicas of all workers
}

// String prints the context as TensorFlow does.
func (c InputContext) String() string {
	return fmt.Sprintf("tf.distribute.InputContext(input pipeline id %d, total: %d)", c.InputPipelineID,
		c.NumInputPipelines)
}

// PerReplicaBatchSize returns the number of examples of a global batch per replica (TensorFlow's
// get_per_replica_batch_size). It is an error if the division has a remainder.
func (c InputContext) PerReplicaBatchSize(global int) (int, error) {
	if c.NumReplicasInSync < 1 || global%c.NumReplicasInSync != 0 {
		return 0, errorf("PerReplicaBatchSize", ErrInvalid, "the global batch size %d is not divisible by the number of "+
			"replicas in sync, %d", global, c.NumReplicasInSync)
	}
	return global / c.NumReplicasInSync, nil
}

func (c *InputContext) validate(op string) error {
	switch {
	case c == nil:
		return nil
	case c.NumInputPipelines < 1 || c.InputPipelineID < 0 || c.InputPipelineID >= c.NumInputPipelines ||
		c.NumReplicasInSync < 1:
		return errorf(op, ErrInvalid, "%v for %d replicas: want an id from 0 to one less than the total, and a replica at "+
			"least", *c, c.NumReplicasInSync)
	case c.NumReplicasInSync%c.NumInputPipelines != 0:
		return errorf(op, ErrInvalid, "every worker must have the same number of replicas: %d replicas cannot be divided "+
			"among %d workers", c.NumReplicasInSync, c.NumInputPipelines)
	}
	return nil
}

// ValueContext identifies for which replica [Extended.DistributeValues] needs a value (TensorFlow's
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

// inputShare is the part of the job's input that one worker reads.
type inputShare struct {
	InputContext
	order []int // ids of all replicas: first those of this worker, then those of the following workers
	mine  int   // number of this worker's replicas
	turns bool  // parts of a batch go to the workers in turn; otherwise to the replicas by id
}

// has reports whether a part of a batch belongs to the worker.
func (in *inputShare) has(part int) bool {
	if in.turns {
		return part%in.NumInputPipelines == in.InputPipelineID
	}
	return slices.Contains(in.order[:in.mine], part)
}

// policy returns the effective policy for a dataset.
func (o InputOptions) policy(ds data.Dataset) AutoShardPolicy {
	switch {
	case o.AutoShard != ShardAuto:
		return o.AutoShard
	case len(data.Files(ds)) > 0:
		return ShardFile
	}
	return ShardData
}
