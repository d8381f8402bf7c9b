// Package worker makes this process a worker of its job: it discovers the job, joins the rendezvous, opens a
// communicator between the replicas of all workers, and monitors the health of the other workers.
//
//	w, err := worker.Join(ctx, worker.Config{Replicas: 2})
//	…
//	defer w.Close()
//	for _, c := range w.Group().Local() { … }
//
// [distribute.NewMultiWorkerMirroredStrategy] does this for programs that use a strategy.
//
// # Joining
//
// [Join] discovers the job and the worker's index with package cluster, opens the rendezvous store (worker 0
// serves it, unless it exists already), registers, and waits for all other workers. Then the processes
// exchange addresses and connect: by shared memory on one host, by TCP between hosts, encrypted and mutually
// authenticated with the job's secret. A job on several hosts without a secret is refused.
//
// # Failure detection
//
// Every worker publishes a heartbeat each second (less often in jobs of more than 200 workers), and 0.2 s after a
// change of phase (later in jobs of more than 40): the step and phase reported to [Worker.Progress], and its
// communicator's call count. It watches the heartbeats of the others, by its own clock. A worker without a
// heartbeat for [Config.HeartbeatTimeout] is lost: its process is suspended, or its host or network is down. A
// worker that has a heartbeat, but whose training goroutine makes no progress while others wait for it, is
// logged after Config.HeartbeatTimeout, with its goroutines' stacks. It is lost after [Config.ProgressTimeout],
// unless the deadline of the waiting workers expires first.
//
// A lost worker aborts the communicator on all others. Whatever the cause, the error identifies the workers
// involved (number, ranks, host, process), their last reported step and phase, and the failure that they
// reported before they exited: docs/failure.md lists the errors.
//
// # Records
//
// A worker that fails reports its failure ([Worker.Fail]) in the store and as a file in the folder named by
// LOCKSTEP_RECORDS. [Worker.Close] notifies the others that this worker leaves the job normally, and closes
// everything that Join opened.
//
// [distribute.NewMultiWorkerMirroredStrategy]:
// https://pkg.go.dev/github.com/lockstep-ml/lockstep/distribute#NewMultiWorkerMirroredStrategy
package worker
