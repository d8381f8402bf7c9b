// Package distribute is tf.distribute in Go: strategies that run a step of training on several replicas in lock-step, and
// the values, variables and reductions that go with it.
//
// A [Strategy] says how training is spread. [NewMirroredStrategy] keeps one replica on each of several devices of this
// process; [NewOneDeviceStrategy] has a single one; [NewCentralStorageStrategy] keeps variables in one place;
// [NewMultiWorkerMirroredStrategy] trains together with the other processes of its job; [Default] is what code runs in that names
// none. [Run] calls a step function once per replica, each on its own goroutine, all at the same time:
//
//	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Devices: []string{"CPU:0", "CPU:1"}})
//	…
//	defer s.Close()
//	losses, err := distribute.Run(ctx, s, func(ctx context.Context, r *distribute.Replica, args ...distribute.Value) (distribute.Value, error) {
//		return r.AllReduce(ctx, distribute.Sum, args[0])
//	}, batch)
//
// # Contexts
//
// Code runs in one of two contexts. A step function is in replica context: it runs once per replica and gets a
// [*Replica]. A merge function ([Replica.MergeCall]), an update function and everything outside of Run are in
// cross-replica context: they run once for all replicas. Functions of the one kind do not compile where the other is
// needed as far as types can tell; the rest is an error that matches [ErrContext].
//
// # Values
//
// A [Value] is a nest (see package tensor) whose leaves are tensors, [tensor.IndexedSlices], host numbers, and the
// distributed values [*PerReplica], one component per replica, and [*Mirrored], the same on every replica. A [*Variable]
// is mirrored (kept equal by its updates) or sync-on-read (one value per replica, aggregated when it is read in
// cross-replica context).
//
// # Reductions
//
// Tensors of one call travel in packs ([Options].BytesPerPack), and [Replica.AllReducePacks] yields each as it is there.
// [CrossDeviceOps] carry out reductions across replicas; all kinds, all packs and [Replica.AllReduce] itself give the same
// bits, the canonical tree's. [Sparse] says how IndexedSlices are reduced. [Replica.AllReduceGradient] and
// [Replica.AllGatherGradient] carry gradients back through a collective.
//
// # Failure
//
// No call can hang. When a replica returns early, panics, makes another call than its peers, or blocks for ever, every
// replica and the caller of Run get the same error, which lists what each replica was doing and where. Variables then
// keep the values that they had before the Run, and the strategy can run again.
//
// # Several workers
//
// Every worker makes its own [NewMultiWorkerMirroredStrategy], which meets those of the others (package cluster/worker), and makes the
// same calls as the others in the same order. What replicas of one process can never do is still proven at once; between
// processes a wait ends by the peer's closed connection, its heartbeat or the deadline, with an error that says which worker it
// is about and what that was last seen doing (docs/failure.md). A failure ends the step on all workers, but one whose step had ended
// already keeps what it wrote.
//
// docs/tf-distribute.md has a row for every name of tf.distribute, with what differs and why.
// Logical CPU devices differ from TensorFlow, which has one unless told otherwise: here there is one per core.
package distribute
