package timeline

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"time"
)

// Writer writes Chrome's trace format (the Trace Event Format, as a JSON object), which Perfetto and chrome://tracing
// display. A process of the trace has threads, which are rows of spans. A Writer is not safe for concurrent use.
type Writer struct {
	w    *bufio.Writer
	err  error
	some bool // an event was written
}

// NewWriter returns a writer to w. The metadata, which may be nil, is shown as the trace's; its keys must not be those
// of the format (traceEvents, displayTimeUnit).
func NewWriter(w io.Writer, metadata map[string]any) *Writer {
	t := &Writer{w: bufio.NewWriter(w)}
	text := []byte("{}")
	if len(metadata) > 0 {
		text, t.err = json.Marshal(metadata)
	}
	if t.err == nil {
		_, t.err = fmt.Fprintf(t.w, "{\"displayTimeUnit\":\"ms\",\"metadata\":%s,\"traceEvents\":[\n", text)
	}
	return t
}

// Span is an event with a duration.
type Span struct {
	Name, Category  string
	Process, Thread int
	Start, Duration time.Duration
	Args            map[string]any // details; nil: none
}

// traceEvent is an event in Chrome's format; times are in microseconds.
type traceEvent struct {
	Name     string         `json:"name"`
	Category string         `json:"cat,omitempty"`
	Phase    string         `json:"ph"` // X: an event with a duration; M: metadata
	Start    float64        `json:"ts"`
	Duration *float64       `json:"dur,omitempty"`
	Process  int            `json:"pid"`
	Thread   int            `json:"tid"`
	Args     map[string]any `json:"args,omitempty"`
}

// Span writes a span. Close returns its error.
func (t *Writer) Span(s Span) {
	duration := micros(s.Duration)
	t.write(&traceEvent{
		Name: s.Name, Category: s.Category, Phase: "X", Start: micros(s.Start), Duration: &duration,
		Process: s.Process, Thread: s.Thread, Args: s.Args,
	})
}

// NameProcess names a process. Viewers sort processes by number.
func (t *Writer) NameProcess(process int, name string) {
	t.write(&traceEvent{Name: "process_name", Phase: "M", Process: process, Args: map[string]any{"name": name}})
	t.write(&traceEvent{
		Name: "process_sort_index", Phase: "M", Process: process, Args: map[string]any{"sort_index": process},
	})
}

// NameThread names a thread of a process. Viewers sort threads by number.
func (t *Writer) NameThread(process, thread int, name string) {
	t.write(&traceEvent{
		Name: "thread_name", Phase: "M", Process: process, Thread: thread, Args: map[string]any{"name": name},
	})
	t.write(&traceEvent{
		Name: "thread_sort_index", Phase: "M", Process: process, Thread: thread,
		Args: map[string]any{"sort_index": thread},
	})
}

func (t *Writer) write(e *traceEvent) {
	if t.err != nil {
		return
	}
	text, err := json.Marshal(e)
	if err != nil {
		t.err = err
		return
	}
	if t.some {
		t.w.WriteString(",\n") // Flush returns the error
	}
	t.some = true
	t.w.Write(text)
}

// Close ends the trace and returns the first error. It does not close the underlying writer.
func (t *Writer) Close() error {
	if t.err == nil {
		t.w.WriteString("\n]}\n")
		t.err = t.w.Flush()
	}
	if t.err != nil {
		return fmt.Errorf("timeline: writing the trace: %w", t.err)
	}
	return nil
}
