// Package cluster knows who is in a job: which tasks there are, at which addresses, and which of them this process is.
//
// A [Spec] lists the tasks of a cluster by job ("chief", "worker", "ps", "evaluator"), as TensorFlow's ClusterSpec does. A
// [Resolver] finds the spec and this process's place in it: from TF_CONFIG ([TFConfig]), from Slurm ([Slurm]), from what
// the program says ([Simple]), or from several of these ([Union]). [IsChief], [IDInCluster] and the like answer what a
// task's part in the job is.
//
// Nothing here opens a connection.
package cluster
