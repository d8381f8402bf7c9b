// Package worker makes this process a worker of its job: it finds out which job that is, meets the other workers, joins their
// replicas by a communicator, and from then on knows how the others are.
//
//	w, err := worker.Join(ctx, worker.Config{Replicas: 2})
//	…
//	defer w.Close()
//	for _, c := range w.Group().Local() { … }
//
// [distribute.NewMultiWorkerMirroredStrategy] does it for those who use a strategy.
//
// # Joining
//
// [Join] asks package cluster who this process is, opens the store where the workers meet (worker 0 serves it, unless it is there
// already), registers, and waits for all others. Then the processes exchange addresses and connect: by shared memory on one
// host, by TCP between hosts, encrypted and mutually authenticated by the job's secret. Several hosts without a secret are refused.
//
// # While it works
//
// Every worker publishes each second how far it has come: the step and phase that [Worker.Progress] was told, and its
// communicator's calls. It watches what the others publish, by its own clock. One that publishes nothing for
// [Config.HeartbeatTimeout] is lost: its process is stopped, or its host or network is gone. One that publishes, but whose
// training goroutine comes no further while others wait for it, is reported in the log after that time, with its goroutines'
// stacks, and is lost after [Config.ProgressTimeout], unless the deadline of those who wait for it comes first.
//
// A lost worker ends the communicator on all others. Whatever ends it, the error says of the workers concerned which ones they
// are (number, ranks, host, process), what they were last seen doing, and what they said of themselves before they
// ended: docs/failure.md lists it.
//
// # What is left behind
//
// A worker that fails tells so ([Worker.Fail]) in the store and as a file in the folder that LOCKSTEP_RECORDS names. [Worker.Close]
// says to the others that it leaves in good order, and closes all that Join has opened.
//
// [distribute.NewMultiWorkerMirroredStrategy]: https://pkg.go.dev/github.com/lockstep-ml/lockstep/distribute#NewMultiWorkerMirroredStrategy
package worker
