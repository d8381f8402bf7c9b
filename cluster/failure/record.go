// Package failure holds what a worker leaves behind when it fails, and finds the root cause among the records of all workers.
package failure

import "time"

// Record says how one worker ended. A worker that fails writes one into the folder that LOCKSTEP_RECORDS names, as
// failure-<epoch>-<worker>.json, and into the store; the launcher writes one for a worker that could not (killed by a signal, say).
type Record struct {
	Job    string    `json:"job"`
	Epoch  uint32    `json:"epoch"`
	Worker int       `json:"worker"`
	Ranks  []int     `json:"ranks,omitempty"` // its replicas
	Host   string    `json:"host"`
	PID    int       `json:"pid"`
	Time   time.Time `json:"time"`
	// Kind is what happened: "error", "panic", "signal", "exit", "lost", "store" (lost, that is), "timeout", "mismatch",
	// "interrupted", "memory", "disk".
	Kind    string `json:"kind"`
	Message string `json:"message"`
	// Blames are the workers whose failure this one's is a consequence of: none for a cause of its own.
	Blames []int `json:"blames,omitempty"`
	// Step and Phase are what the worker was doing: the global step, and "compute", "reduce", "apply", "snapshot", "rendezvous", ….
	Step  int64  `json:"step"`
	Phase string `json:"phase,omitempty"`
	// Stack is the goroutine stacks that explain it, or "".
	Stack string `json:"stack,omitempty"`
	// ExitCode is the process's exit code: 128 + the signal's number where a signal ended it; -1: not known.
	ExitCode int `json:"exit_code"`
}
