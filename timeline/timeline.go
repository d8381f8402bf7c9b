package timeline

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"time"
)

// Timeline has the events of all workers of a job.
type Timeline struct {
	Job     string
	Steps   int // of each worker at most so many last ones are kept; 0: no limit
	Workers []Worker
}

// Worker has the events of one worker.
type Worker struct {
	Worker  int
	Host    string
	PID     int
	Clock   Clock  // to worker 0's; of worker 0, nothing
	Unknown string // why the clock's offset is unknown; "": it is known
	Note    string // what to know about the events, for the metadata; "": nothing
	Events  []Event
	Dropped int // events that were lost while they were recorded
}

// The threads of a replica are next to each other: its computation, and the calls of its communicators.
const (
	threadCompute = iota
	threadCalls
	threadsPerReplica
)

// Write writes the timeline in Chrome's trace format. A worker is shown as a process, with two threads for each of its
// replicas: the parts of its steps, and its collective calls. The time of a call before the last rank enters it is
// shown as "wait for …" inside of the call. Times count from the first event of all.
func (t *Timeline) Write(w io.Writer) error {
	var first time.Duration
	for i := range t.Workers {
		for _, e := range t.Workers[i].Events {
			if at := t.Workers[i].Clock.Convert(e.Start); first == 0 || at < first {
				first = at
			}
		}
	}
	entries := t.entries()
	out := NewWriter(w, t.metadata())
	for i := range t.Workers {
		v := &t.Workers[i]
		out.NameProcess(v.Worker, fmt.Sprintf("worker %d (host %s, pid %d)", v.Worker, v.Host, v.PID))
		named := map[int]bool{}
		events := slices.Clone(v.Events)
		slices.SortStableFunc(events, func(a, b Event) int { return cmp.Compare(a.Start, b.Start) })
		for _, e := range events {
			thread := threadsPerReplica*e.Replica + threadCompute
			name := fmt.Sprintf("replica %d", e.Replica)
			if e.Kind == Collective {
				thread, name = threadsPerReplica*e.Replica+threadCalls, name+" calls"
			}
			if !named[thread] {
				named[thread] = true
				out.NameThread(v.Worker, thread, name)
			}
			start, end := v.Clock.Convert(e.Start)-first, v.Clock.Convert(e.End)-first
			out.Span(Span{
				Name: e.Name(), Category: e.Kind.String(), Process: v.Worker, Thread: thread, Start: start,
				Duration: max(end-start, 0), Args: e.args(),
			})
			if last, ok := entries[call{e.Comm, e.Seq}]; ok && e.together() && last.replica != e.Replica {
				if until := min(last.at-first, end); until > start {
					out.Span(Span{
						Name: fmt.Sprintf("wait for replica %d", last.replica), Category: Wait.String(), Process: v.Worker,
						Thread: thread, Start: start, Duration: until - start,
					})
				}
			}
		}
	}
	return out.Close()
}

// call identifies a collective call.
type call struct {
	comm string
	seq  uint64
}

// entry is when the last rank entered a call, by worker 0's clock.
type entry struct {
	at      time.Duration
	replica int
}

// entries returns the last entry into each call.
func (t *Timeline) entries() map[call]entry {
	last := map[call]entry{}
	for i := range t.Workers {
		v := &t.Workers[i]
		for _, e := range v.Events {
			if !e.together() {
				continue
			}
			at := v.Clock.Convert(e.Start)
			if was, ok := last[call{e.Comm, e.Seq}]; !ok || at > was.at {
				last[call{e.Comm, e.Seq}] = entry{at, e.Replica}
			}
		}
	}
	return last
}

// together reports whether all ranks of the communicator take part in the call, so that its number is the same on all.
func (e *Event) together() bool { return e.Kind == Collective && e.Op != "send" && e.Op != "recv" }

// Name returns the name of the event, such as "backward, bucket 2" or "all_reduce".
func (e *Event) Name() string {
	name := e.Kind.String()
	switch {
	case e.Kind == Collective:
		return e.Op
	case e.Kind == Forward:
		name = "forward and backward"
	}
	if e.Bucket > 0 {
		name += fmt.Sprintf(", bucket %d", e.Bucket)
	}
	return name
}

func (e *Event) args() map[string]any {
	args := map[string]any{"step": e.Step}
	if e.Kind == Collective {
		args["algorithm"], args["bytes"], args["communicator"], args["call"] = e.Algorithm, e.Bytes, e.Comm, e.Seq
	}
	return args
}

// metadata describes the trace.
func (t *Timeline) metadata() map[string]any {
	clocks := map[string]any{}
	dropped := 0
	for i := range t.Workers {
		v := &t.Workers[i]
		dropped += v.Dropped
		name := fmt.Sprintf("worker %d", v.Worker)
		switch {
		case v.Unknown != "":
			clocks[name] = "unknown: " + v.Unknown
		case v.Worker == 0:
			clocks[name] = "the clock of the trace"
		default:
			clocks[name] = map[string]any{
				"offset_us": micros(v.Clock.Last.Add), "error_us": micros(v.Clock.Error()),
				"drift_us": micros(v.Clock.Last.Add - v.Clock.First.Add),
			}
		}
	}
	m := map[string]any{"job": t.Job, "clocks": clocks, "dropped_events": dropped}
	if notes := t.notes(); len(notes) > 0 {
		m["notes"] = notes
	}
	if t.has(Forward) {
		m["programs"] = "the engine runs the forward pass and the backward pass of the first bucket as one program, " +
			"which is one span"
	}
	if t.Steps > 0 {
		m["steps"] = fmt.Sprintf("at most the last %d of each worker", t.Steps)
	}
	return m
}

// has reports whether there is an event of a kind.
func (t *Timeline) has(kind Kind) bool {
	return slices.ContainsFunc(t.Workers, func(w Worker) bool {
		return slices.ContainsFunc(w.Events, func(e Event) bool { return e.Kind == kind })
	})
}

func (t *Timeline) notes() (list []string) {
	for i := range t.Workers {
		if v := &t.Workers[i]; v.Note != "" {
			list = append(list, fmt.Sprintf("worker %d: %s", v.Worker, v.Note))
		}
	}
	return list
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

// Trim keeps the events of the last n steps of each worker, and what follows them, and drops those that ended before a
// moment of the worker's clock.
func (t *Timeline) Trim(n int, since time.Duration) {
	t.Steps = n
	for i := range t.Workers {
		v := &t.Workers[i]
		last := int64(0)
		for _, e := range v.Events {
			if e.Kind == Commit {
				last = max(last, e.Step)
			}
		}
		v.Events = slices.DeleteFunc(v.Events, func(e Event) bool { return e.Step <= last-int64(n) || e.End <= since })
	}
}
