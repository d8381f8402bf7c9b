// Package cluster knows who is in a job: how many workers there are, which of them this process is, and where they meet.
//
// [Discover] finds out: from lockstep run, TF_CONFIG, torchrun, mpirun, Slurm, Kubernetes and others (see docs/clusters.md), in one
// order of precedence. It refuses sources that disagree, and never guesses how many workers there are. What comes out is a
// [Job], which says whom it believed and what it read ([Job.Describe]).
//
//	job, err := cluster.Discover(cluster.Discovery{})
//	fmt.Print(job.Describe())
//
// A [Spec] lists the tasks of a cluster by job ("chief", "worker", "ps", "evaluator"), as TensorFlow's ClusterSpec does. A
// [Resolver] finds the spec and this process's place in it: from a Job ([Job.Resolver]), from TF_CONFIG ([TFConfig]), from
// Slurm ([Slurm]), from what the program says ([Simple]), or from several of these ([Union]). [IsChief], [IDInCluster] and the
// like answer what a task's part in the job is.
//
// Nothing here opens a connection.
package cluster
