package simulate

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"time"
)

// Trace writes events in Chrome's trace format, which chrome://tracing and Perfetto display: a host is shown as a
// process, a rank as a thread. Pass Write to [Run], then call Close. A Trace is not safe for concurrent use.
type Trace struct {
	w     *bufio.Writer
	err   error
	first bool
}

// NewTrace returns a trace that writes to w.
func NewTrace(w io.Writer) *Trace {
	t := &Trace{w: bufio.NewWriter(w), first: true}
	_, t.err = t.w.WriteString("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n")
	return t
}

// traceEvent is an event in Chrome's format; times are in microseconds.
type traceEvent struct {
	Name     string         `json:"name"`
	Category string         `json:"cat"`
	Phase    string         `json:"ph"` // X: an event with a duration
	Start    float64        `json:"ts"`
	Duration float64        `json:"dur"`
	Host     int            `json:"pid"`
	Rank     int            `json:"tid"`
	Args     map[string]any `json:"args,omitempty"`
}

// Write writes an event. Close returns its error.
func (t *Trace) Write(e Event) {
	if t.err != nil {
		return
	}
	micros := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
	text, err := json.Marshal(traceEvent{
		Name: e.Step.String(), Category: e.Step.Kind.String(), Phase: "X", Start: micros(e.Start),
		Duration: micros(e.End - e.Start), Host: e.Host, Rank: e.Rank,
		Args: map[string]any{"elements": max(e.Step.In.Hi-e.Step.In.Lo, e.Step.Out.Hi-e.Step.Out.Lo)},
	})
	if err != nil {
		t.err = err
		return
	}
	if !t.first {
		t.w.WriteString(",\n") // Flush returns the error
	}
	t.first = false
	t.w.Write(text)
}

// Close ends the trace and returns the first error.
func (t *Trace) Close() error {
	if t.err == nil {
		t.w.WriteString("\n]}\n")
		t.err = t.w.Flush()
	}
	if t.err != nil {
		return fmt.Errorf("simulate: trace: %w", t.err)
	}
	return nil
}
