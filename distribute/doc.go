// Package distribute implements TensorFlow's tf.distribute API: strategies that run training steps on several
// replicas in parallel, with distributed values, variables and reductions.
//
// A program calls, in this order:
//
//  1. [NewMirroredStrategy], for several devices of this process, or [NewMultiWorkerMirroredStrategy], for all
//     processes of a job. Both return a [Strategy].
//  2. [Strategy.NewVariable], for each value that all replicas keep between steps.
//  3. [Strategy.DistributeDataset], which splits batches between the replicas.
//  4. [Run], once per step: it calls a step function on every replica, each on its own goroutine, all at the same
//     time. In the step, [AllReduce] combines the replicas' values, and [Variable.AssignAdd] and other
//     methods change variables.
//  5. [Reduce] and [Variable.Read], to use results after a step; then [Strategy.Close].
//
// This step returns the sum of the replicas' values on each replica:
//
//	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Devices: []string{"CPU:0", "CPU:1"}})
//	if err != nil {
//		return err
//	}
//	defer s.Close()
//	step := func(ctx context.Context, r *distribute.Replica, x *tensor.Tensor) (*tensor.Tensor, error) {
//		return distribute.AllReduce(ctx, r, distribute.Sum, x)
//	}
//	sums, err := distribute.Run(ctx, s, step, []*tensor.Tensor{a, b})
//
// [NewOneDeviceStrategy] has a single replica, for tests. [NewCentralStorageStrategy] keeps all variables on one
// device. [Default] is the strategy of code that selects none. Package train does all of this for a model and a
// dataset.
//
// # Contexts
//
// Code runs in one of two contexts. A step function is in replica context: it runs once per replica and gets a
// [*Replica]. A merge function ([MergeCall]), an update function and all code outside of Run are in
// cross-replica context: they run once for all replicas. As far as types allow, a function for the wrong
// context does not compile. Otherwise it returns an error that matches [ErrContext].
//
// # Values
//
// A [PerReplica] has a value of your type for each replica: [Run] takes one and returns one, [Reduce] and [Gather]
// combine one, and [AllReduce] and [AllGather] do so in a step. What they combine are tensors, [tensor.IndexedSlices],
// numbers, and nests of these (TensorFlow's tf.nest, JAX's pytree; see package tensor), such as a struct of tensors.
// [Extended] has TensorFlow's functions on values of any type. A [*Variable] is mirrored (its updates keep it equal) or
// sync-on-read (one value per replica, aggregated when it is read in cross-replica context).
//
// # Reductions
//
// The tensors of one call are reduced in packs (DDP's buckets; [Options].BytesPerPack), each where the tensors are.
// [Replica.StartAllReduce] starts the reduction of a [Bucket] of tensors, while the replica computes the next one.
// [Handle.Then] starts a call that follows another one, with a computation in between.
// [Replica.StartReduceToOwners] and [Replica.StartGatherFromOwners] are the two halves of an all-reduce, for optimizers
// whose state is divided among the replicas (ZeRO-1). [CrossDeviceOps] implement reductions across replicas. All
// implementations, all sizes of packs and [AllReduce] give the same bits: those of the canonical tree, a
// fixed order of additions. [Sparse] says how IndexedSlices are reduced. [AllReduceGradient] and
// [AllGatherGradient] are the gradients of collectives.
//
// # Failures
//
// No call can hang. If a replica returns early, panics, calls something else than its peers, or blocks forever, every
// replica and the caller of Run get the same error. It lists what each replica was doing, with file and line. Variables
// keep the values that they had before the Run, and the strategy can run again.
//
// # Several workers
//
// Every worker makes its own [NewMultiWorkerMirroredStrategy], which joins those of the other workers (package
// cluster/worker). All workers make the same calls in the same order. A deadlock among the replicas of one
// process is still detected at once. Between processes a wait ends when the peer's connection closes, its
// heartbeat stops or the deadline passes. The error names the worker and what it was last seen doing
// (docs/failure.md). A failure ends the step on all workers; a worker whose step has already ended keeps its
// writes.
//
// docs/tf-distribute.md has a row for every name of tf.distribute, with the differences and the reasons. One
// difference: the default number of logical CPU devices is one per core; in TensorFlow it is one.
package distribute
