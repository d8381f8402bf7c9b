// Package lockstep is the root of a library for synchronous data-parallel training: one program, as one process or as
// several, trains one model on several replicas, which all-reduce their gradients after every step. It contains no
// code. Import the packages below it:
//
//   - [github.com/lockstep-ml/lockstep/train]: Fit, Evaluate and Predict over a strategy; snapshots; callbacks
//   - [github.com/lockstep-ml/lockstep/distribute]: the strategies, contexts, values and variables of TensorFlow's
//     tf.distribute
//   - [github.com/lockstep-ml/lockstep/engine/gomlx]: models as GoMLX functions, executed in pure Go or by XLA
//   - [github.com/lockstep-ml/lockstep/data]: datasets and pipelines
//   - [github.com/lockstep-ml/lockstep/collective]: all-reduce, broadcast, barrier and the other collectives between
//     goroutines, processes and hosts
//   - [github.com/lockstep-ml/lockstep/cluster/worker]: this process as a worker of a job
//   - [github.com/lockstep-ml/lockstep/tensor]: tensors on the host
//
// The command lockstep trains, starts jobs, and measures: go install
// github.com/lockstep-ml/lockstep/cmd/lockstep@latest. The tutorial is docs/tutorial.md.
//
// # Versions
//
// The module follows semantic versioning. Before version 1.0 the API may change between minor versions (v0.1 to v0.2),
// never between patch versions; CHANGELOG.md names every change. Snapshots, algorithm tables and the protocol between
// workers have separate versions; an unsupported version is an error. All workers of a job must run the same build,
// unless --mixed-builds is given.
package lockstep
