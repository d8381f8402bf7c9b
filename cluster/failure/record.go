// Package failure defines the record that a worker writes when it fails, and finds the root cause among the
// records of all workers.
package failure

import "time"

// Record describes how one worker ended. A worker that fails writes a record into the folder named by
// LOCKSTEP_RECORDS, as failure-<epoch>-<worker>.json, and into the store. The launcher writes one for a
// worker that could not (killed by a signal, for example).
type Record struct {
	Job    string    `json:"job"`
	Epoch  uint32    `json:"epoch"`
	Worker int       `json:"worker"`
	Ranks  []int     `json:"ranks,omitempty"` // its replicas
	Host   string    `json:"host"`
	PID    int       `json:"pid"`
	Time   time.Time `json:"time"`
	// Kind is the kind of failure: "error", "panic", "signal", "exit", "lost", "store" (the store was lost),
	// "timeout", "mismatch", "interrupted", "memory", "disk".
	Kind    string `json:"kind"`
	Message string `json:"message"`
	// Blames lists the workers whose failure caused this one; empty if the cause is this worker's own.
	Blames []int `json:"blames,omitempty"`
	// Step and Phase are the worker's position: the global step, and "compute", "reduce", "apply",
	// "snapshot", "rendezvous", ….
	Step  int64  `json:"step"`
	Phase string `json:"phase,omitempty"`
	// Stack holds the goroutine stacks that explain the failure, or "".
	Stack string `json:"stack,omitempty"`
	// ExitCode is the process's exit code: 128 + the signal number if a signal ended it; -1 if unknown.
	ExitCode int `json:"exit_code"`
}
