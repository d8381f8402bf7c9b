package membership

import (
	"fmt"
	"time"
)

// Heartbeat is the state that a worker publishes during training.
type Heartbeat struct {
	// Step and Phase are the worker's position: the global step, and "compute", "reduce", "apply", ….
	Step  int64  `json:"step"`
	Phase string `json:"phase,omitempty"`
	// Progress changes when the training goroutines advance. A worker that is alive but stuck has a
	// heartbeat, and no progress.
	Progress uint64 `json:"progress"`
	// Waiting reports that the worker is in a collective call, where it may have to wait for others: it is not
	// stuck itself.
	Waiting bool `json:"waiting,omitempty"`
	// Text is additional information, for display.
	Text string `json:"text,omitempty"`
	// Timeout is the worker's own heartbeat timeout in milliseconds; negative: it is never lost; 0: its node's. The
	// membership service sets it.
	Timeout int64 `json:"timeout_ms,omitempty"`
	// Count counts the heartbeats from 1. The membership service sets it.
	Count uint64 `json:"count"`
	// Final marks the last heartbeat: the worker has left on purpose. The membership service sets it.
	Final bool `json:"final,omitempty"`
}

// Timing configures how often members publish, and when they are lost.
type Timing struct {
	Every   time.Duration   // the longest interval between two heartbeats, or two reports of a node
	Min     time.Duration   // the shortest interval between two heartbeats; also how often files are read
	Timeout time.Duration   // a member without a heartbeat for this long is lost; 0: never
	Wake    <-chan struct{} // receives a value when there is news that should not wait for Every; nil: never
}

// How many reports all nodes together send in a second: the process that serves the store trains too; and the longest
// interval between two reports of a node in smaller jobs.
const (
	reportsMax = 1000
	everyMax   = time.Second
)

// missedMin is the smallest number of intervals in a heartbeat timeout: each is an opportunity to report.
const missedMin = 4

// NewTiming returns the timing of heartbeats and reports for a heartbeat timeout, zero or negative for none, in a job
// of so many nodes: one each second; with a timeout below 8 seconds, one each eighth of it. In a job of more than 1,000
// nodes the intervals are longer, so that all nodes together send at most 1,000 reports a second. The timeout is at
// least four intervals.
func NewTiming(timeout time.Duration, nodes int) Timing {
	every := everyMax
	if timeout > 0 {
		every = min(every, timeout/8)
	}
	t := Timing{Every: max(every, time.Duration(nodes)*time.Second/reportsMax)}
	t.Min = t.Every / 5
	if timeout > 0 {
		t.Timeout = max(timeout, missedMin*t.Every)
	}
	return t
}

// Through returns the timing of a worker whose heartbeats an agent reports, which reads them from file: the worker's
// timeout is at least four of the agent's intervals, since the store acknowledges a heartbeat once in an interval. An
// agent that has not written its interval yet has the longest one for the number of nodes.
func (t Timing) Through(file *NodeFile) Timing {
	if t.Timeout <= 0 {
		return t
	}
	every := max(everyMax, t.Every)
	if a, ok := file.answer(0); ok && a.Every > 0 {
		every = fromMilliseconds(a.Every)
	}
	t.Timeout = max(t.Timeout, missedMin*every)
	return t
}

// suspectAfter is how long a member is silent before it is a suspect: three missed heartbeats.
func (t *Timing) suspectAfter() time.Duration { return 3 * t.Every }

// lease is how long a coordinator, or a node's reporter, may be silent before another one takes over.
func (t *Timing) lease() time.Duration {
	timeout := t.Timeout
	if timeout <= 0 {
		timeout = 30 * time.Second
	}
	return max(timeout/4, 3*t.Every)
}

// WorkerState is the known state of a worker.
type WorkerState struct {
	Worker int
	// Heartbeat is its latest known heartbeat, if Seen. Of a worker of another node only [Member.Latest] knows it.
	Heartbeat Heartbeat
	Seen      bool
	// Silent is the time without a new heartbeat, 0 for a worker that is not a suspect. Stalled is the time in which
	// the worker neither made progress nor waited for others, 0 if it is short.
	Silent, Stalled time.Duration
	// Lost reports the verdict, and HostReports that another process of the silent worker's host reported its silence:
	// the host can be reached.
	Lost, HostReports bool
}

// String describes the worker's last known state.
func (v WorkerState) String() string {
	switch {
	case v.Heartbeat.Final:
		return fmt.Sprintf("worker %d left in step %d", v.Worker, v.Heartbeat.Step)
	case !v.Seen:
		return fmt.Sprintf("worker %d has not been seen for %v", v.Worker, v.Silent.Round(time.Millisecond))
	}
	return fmt.Sprintf("worker %d was last seen %v ago in step %d", v.Worker, v.Silent.Round(time.Millisecond),
		v.Heartbeat.Step)
}
