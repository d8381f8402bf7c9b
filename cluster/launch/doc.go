// Package launch starts the workers of a job and watches them, as torchrun does.
//
// An [Agent] is what each node of the job has: it starts that node's workers with the environment that tells them their place (the
// LOCKSTEP_ names of package cluster, torchrun's names, and TF_CONFIG), writes their output line by line, and waits for them. When
// one fails, the agents of all nodes stop all workers, say which failure came first, and, while restarts are left, start all of
// them again as the next epoch of the job. The agents meet in a [rendezvous.Store]; with one node there is no need of one.
//
// No worker outlives its agent: on Linux the kernel kills it, and a [Guard], a small process that waits for the agent's end, kills
// what the worker itself had started.
//
//	agent, err := launch.New(launch.Config{Command: []string{"./prog"}, Workers: 4, Stdout: os.Stdout, Stderr: os.Stderr})
//	…
//	outcome, err := agent.Run(ctx)
//	os.Exit(outcome.Code)
//
// Nothing here knows what a worker computes: a program in another language does as well.
package launch
