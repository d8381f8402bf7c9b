// Package timelinetest reads Chrome's trace format strictly, for tests.
package timelinetest

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
)

// Event is an event of a trace, as the format defines it. Times are in microseconds.
type Event struct {
	Name     string         `json:"name"`
	Category string         `json:"cat"`
	Phase    string         `json:"ph"`
	Start    *float64       `json:"ts"`
	Duration *float64       `json:"dur"`
	Process  *int           `json:"pid"`
	Thread   *int           `json:"tid"`
	Args     map[string]any `json:"args"`
}

// End returns when a span ends.
func (e *Event) End() float64 { return *e.Start + *e.Duration }

// Trace is the content of a trace file.
type Trace struct {
	Events    []Event           `json:"traceEvents"`
	Unit      string            `json:"displayTimeUnit"`
	Metadata  map[string]any    `json:"metadata"`
	Processes map[int]string    `json:"-"` // their names
	Threads   map[[2]int]string `json:"-"` // by process and thread
}

// Spans returns the spans of a thread, by their start.
func (t *Trace) Spans(process int, thread string) (list []Event) {
	for _, e := range t.Events {
		if e.Phase == "X" && *e.Process == process && t.Threads[[2]int{*e.Process, *e.Thread}] == thread {
			list = append(list, e)
		}
	}
	slices.SortStableFunc(list, func(a, b Event) int { return cmp.Compare(*a.Start, *b.Start) })
	return list
}

// Read reads a trace in the JSON object form of the Trace Event Format. It returns an error for everything that the
// format does not define, for events without a named process and thread, and for spans of one thread that overlap
// without one containing the other, which viewers draw wrongly.
func Read(r io.Reader) (*Trace, error) {
	text, err := io.ReadAll(r)
	if err != nil {
		return nil, err
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	t := &Trace{Processes: map[int]string{}, Threads: map[[2]int]string{}}
	if err := d.Decode(t); err != nil {
		return nil, fmt.Errorf("not a trace: %w", err)
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, fmt.Errorf("text follows the trace: %v", err)
	}
	if t.Unit != "ms" && t.Unit != "ns" {
		return nil, fmt.Errorf("displayTimeUnit is %q: want ms or ns", t.Unit)
	}
	for i := range t.Events {
		if err := t.check(&t.Events[i]); err != nil {
			return nil, fmt.Errorf("event %d: %w", i, err)
		}
	}
	return t, t.checkSpans()
}

func (t *Trace) check(e *Event) error {
	switch {
	case e.Process == nil || e.Thread == nil || e.Start == nil:
		return fmt.Errorf("%q has no pid, tid or ts", e.Name)
	case e.Name == "":
		return fmt.Errorf("no name")
	case e.Phase == "X":
		if e.Duration == nil || *e.Duration < 0 || *e.Start < 0 {
			return fmt.Errorf("%q has no duration, or a negative time", e.Name)
		}
		return nil
	case e.Phase != "M":
		return fmt.Errorf("%q has the phase %q: want X or M", e.Name, e.Phase)
	}
	name, isName := e.Args["name"].(string)
	_, isNumber := e.Args["sort_index"].(float64)
	switch e.Name {
	case "process_name":
		t.Processes[*e.Process] = name
	case "thread_name":
		t.Threads[[2]int{*e.Process, *e.Thread}] = name
	case "process_sort_index", "thread_sort_index":
		isName = isNumber
	default:
		return fmt.Errorf("unknown metadata %q", e.Name)
	}
	if !isName || len(e.Args) != 1 {
		return fmt.Errorf("%s has the arguments %v", e.Name, e.Args)
	}
	return nil
}

// checkSpans checks that the spans of each thread are nested.
func (t *Trace) checkSpans() error {
	threads := map[[2]int][]Event{}
	for _, e := range t.Events {
		if e.Phase == "X" {
			key := [2]int{*e.Process, *e.Thread}
			threads[key] = append(threads[key], e)
		}
	}
	const rounding = 0.002 // µs
	for key, list := range threads {
		if t.Processes[key[0]] == "" || t.Threads[key] == "" {
			return fmt.Errorf("process %d, thread %d has no name", key[0], key[1])
		}
		slices.SortStableFunc(list, func(a, b Event) int {
			return cmp.Or(cmp.Compare(*a.Start, *b.Start), cmp.Compare(*b.Duration, *a.Duration))
		})
		var open []Event
		for _, e := range list {
			for len(open) > 0 && open[len(open)-1].End() <= *e.Start+rounding {
				open = open[:len(open)-1]
			}
			if len(open) > 0 && e.End() > open[len(open)-1].End()+rounding {
				return fmt.Errorf("process %d, thread %d: %q overlaps the end of %q", key[0], key[1], e.Name,
					open[len(open)-1].Name)
			}
			open = append(open, e)
		}
	}
	return nil
}
