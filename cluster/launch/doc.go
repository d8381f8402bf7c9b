// Package launch starts the workers of a job and watches them, like torchrun.
//
// Each node of the job runs an [Agent]. It starts that node's workers with the environment that identifies
// them (the LOCKSTEP_ variables of package cluster, torchrun's variables, and TF_CONFIG), forwards their
// output line by line, and waits for them. When one fails, the agents of all nodes stop all workers and
// report the first failure. While restarts are left, they restart all workers as the next epoch of the job.
// The agents coordinate through a [rendezvous.Store]; one node alone needs none.
//
// No worker outlives its agent: on Linux the kernel kills it, and a [Guard], a small process that waits for
// the agent's end, kills the processes that the worker started.
//
// agent, err := launch.New(launch.Config{Command: []string{"./prog"}, Workers: 4, Stdout: os.Stdout, Stderr:
// os.Stderr})
//
//	…
//	outcome, err := agent.Run(ctx)
//	os.Exit(outcome.Code)
//
// The agent is a state machine apart from its I/O: decide.go has the function that returns, from a state and an input,
// the next state and the actions to perform; agent.go performs them, and reads the inputs.
//
// The package does not depend on what a worker computes: programs in other languages work too.
package launch
