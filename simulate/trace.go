package simulate

import (
	"fmt"
	"io"

	"github.com/lockstep-ml/lockstep/timeline"
)

// Trace writes events in Chrome's trace format, which Perfetto (ui.perfetto.dev) displays: a host is shown as a
// process, a rank as a thread. Pass Write to [Run], then call Close. A Trace is not safe for concurrent use.
type Trace struct {
	w     *timeline.Writer
	hosts map[int]bool
	ranks map[int]bool
}

// NewTrace returns a trace that writes to w.
func NewTrace(w io.Writer) *Trace {
	return &Trace{
		w:     timeline.NewWriter(w, map[string]any{"source": "lockstep simulate: virtual time"}),
		hosts: map[int]bool{}, ranks: map[int]bool{},
	}
}

// Write writes an event. Close returns its error.
func (t *Trace) Write(e Event) {
	if !t.hosts[e.Host] {
		t.hosts[e.Host] = true
		t.w.NameProcess(e.Host, fmt.Sprintf("host %d", e.Host))
	}
	if !t.ranks[e.Rank] {
		t.ranks[e.Rank] = true
		t.w.NameThread(e.Host, e.Rank, fmt.Sprintf("rank %d", e.Rank))
	}
	t.w.Span(timeline.Span{
		Name: e.Step.String(), Category: e.Step.Kind.String(), Process: e.Host, Thread: e.Rank, Start: e.Start,
		Duration: e.End - e.Start,
		Args:     map[string]any{"elements": max(e.Step.In.Hi-e.Step.In.Lo, e.Step.Out.Hi-e.Step.Out.Lo)},
	})
}

// Close ends the trace and returns the first error.
func (t *Trace) Close() error {
	if err := t.w.Close(); err != nil {
		return fmt.Errorf("simulate: %w", err)
	}
	return nil
}
