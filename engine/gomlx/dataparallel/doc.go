// Package dataparallel trains programs that use GoMLX's own train.Trainer and train.Loop on several workers, with
// few changed lines. Each worker is a process that runs the whole program, on other batches, as with Horovod:
//
//	job := dataparallel.MustJoin()   // of lockstep run, TF_CONFIG, torchrun, Slurm, …
//	defer job.Close()
//	backend := job.Backend(compute.MustNew())
//	…
//	trainer := train.NewTrainer(backend, store, modelFn, lossFn, job.Optimizer(optimizer.FromStore(store)), …)
//	loop := train.NewLoop(trainer)
//	job.Attach(loop)
//	metrics, err := loop.RunSteps(job.Dataset(trainDS), steps)
//
// The optimizer gets the mean of the workers' gradients, so all workers make the same update and keep the same bits.
// The backend that [Job.Backend] returns runs the graph of a step in stages, and the all-reduce between them.
//
// What GoMLX's loop itself computes is of one worker: losses and metrics are those of its batches ([Job.Mean]
// averages them), and so is the state of layers, except for moving averages. Package train of this module does
// more: exact means over batches of any size, snapshots, and communication during the computation.
package dataparallel
