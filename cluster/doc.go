// Package cluster discovers the job that this process belongs to: the number of workers, this worker's index,
// and the rendezvous store.
//
// [Discover] reads the environment of lockstep run, TF_CONFIG, torchrun, mpirun, Slurm, Kubernetes and others
// (see docs/clusters.md), in a fixed order of precedence. It rejects sources that disagree, and never guesses
// the number of workers. It returns a [Job], which records the source that was used and the values that were
// read ([Job.Describe]).
//
//	job, err := cluster.Discover(cluster.Discovery{})
//	fmt.Print(job.Describe())
//
// A [Spec] lists the tasks of a cluster by job ("chief", "worker", "ps", "evaluator"), like TensorFlow's
// ClusterSpec. A [Resolver] returns the spec and this process's task: from a Job ([Job.Resolver]), from
// TF_CONFIG ([TFConfig]), from Slurm ([Slurm]), from values in the program ([Simple]), or from several
// resolvers ([Union]). [IsChief], [IDInCluster] and similar functions report a task's role in the job.
//
// This package opens no connections.
package cluster
