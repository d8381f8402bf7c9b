package timeline

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"time"
)

// Report is what a worker publishes about its last steps, for the search for stragglers and for live displays.
type Report struct {
	Worker   int    `json:"worker"`
	Host     string `json:"host"`
	PID      int    `json:"pid"`
	Replicas int    `json:"replicas"`
	// Steps are the last ones of the latest trainer that took any; of many short steps, those whose numbers are multiples
	// of a power of two.
	Steps    []Step    `json:"steps"`
	Memory   int64     `json:"memory_bytes"`       // resident; 0: unknown
	CPU      float64   `json:"cpu_seconds"`        // processor time of the process; 0: unknown
	Training *Training `json:"training,omitempty"` // nil: unknown
}

// reportSteps is the number of steps of a report.
const reportSteps = 64

// Report returns the state of this process with the last steps.
func (r *Recorder) Report() Report {
	list, _ := r.Steps(0)
	return Report{Steps: sample(list), Memory: residentBytes(), CPU: processorTime().Seconds(), Training: r.Training()}
}

// sample returns at most reportSteps of the last steps. If more than 100 a second are made, it returns every second,
// fourth, … one, so that those of different workers are the same ones and cover the time between two reports.
func sample(list []Step) []Step {
	latest := 0
	for i := range list {
		latest = max(latest, list[i].Trainer)
	}
	list = slices.DeleteFunc(list, func(s Step) bool { return s.Trainer != latest })
	if len(list) == 0 {
		return list
	}
	recent := list[max(len(list)-reportSteps, 0):]
	each := (recent[len(recent)-1].End - recent[0].Start) / time.Duration(len(recent))
	stride := int64(1)
	for each > 0 && time.Duration(stride)*each < 10*time.Millisecond {
		stride *= 2
	}
	var out []Step
	for i := len(list) - 1; i >= 0 && len(out) < reportSteps; i-- {
		if list[i].Step%stride == 0 {
			out = append(out, list[i])
		}
	}
	slices.Reverse(out)
	return out
}

// MarshalJSON encodes the step as a list of numbers: its number, start and end, the parts in the order of the fields
// (all in microseconds), examples, the trainer, and the loss (null if it is not finite). Four numbers for each link
// follow: the other worker, sending, receiving, bytes.
func (s Step) MarshalJSON() ([]byte, error) {
	list := []any{s.Step}
	for _, d := range s.times() {
		list = append(list, d.Microseconds())
	}
	list = append(list, s.Examples, s.Trainer)
	if math.IsNaN(s.Loss) || math.IsInf(s.Loss, 0) {
		list = append(list, nil)
	} else {
		list = append(list, s.Loss)
	}
	for _, l := range s.Links {
		if l.Sending > 0 || l.Receiving > 0 || l.Bytes > 0 {
			list = append(list, l.Peer, l.Sending.Microseconds(), l.Receiving.Microseconds(), l.Bytes)
		}
	}
	return json.Marshal(list)
}

func (s *Step) times() []time.Duration {
	return []time.Duration{
		s.Start, s.End, s.Input, s.Compute, s.Wait, s.Update, s.Callbacks, s.Evaluate, s.Snapshot,
	}
}

// UnmarshalJSON decodes what MarshalJSON has encoded.
func (s *Step) UnmarshalJSON(text []byte) error {
	var list []*float64
	if err := json.Unmarshal(text, &list); err != nil {
		return fmt.Errorf("timeline: a step: %w", err)
	}
	if len(list) < stepWords || len(list) > stepWidth || (len(list)-stepWords)%linkWords != 0 {
		return fmt.Errorf("timeline: a step of %d numbers: want %d, and %d for each of at most %d links", len(list),
			stepWords, linkWords, LinksMax)
	}
	for i, x := range list {
		if i == stepWords-1 {
			continue // the loss
		}
		if x == nil || *x < 0 || *x > 1e15 {
			return fmt.Errorf("timeline: a step with number %d missing, negative or too large", i)
		}
	}
	micros := func(i int) time.Duration { return time.Duration(*list[i]) * time.Microsecond }
	*s = Step{
		Step: int64(*list[0]), Start: micros(1), End: micros(2), Input: micros(3), Compute: micros(4), Wait: micros(5),
		Update: micros(6), Callbacks: micros(7), Evaluate: micros(8), Snapshot: micros(9), Examples: int(*list[10]),
		Trainer: int(*list[11]),
		Loss:    math.NaN(),
	}
	if loss := list[12]; loss != nil {
		s.Loss = *loss
	}
	n := 0
	for at := stepWords; at < len(list); at += linkWords {
		l := Link{Peer: int(*list[at]), Sending: micros(at + 1), Receiving: micros(at + 2), Bytes: int64(*list[at+3])}
		if l.Sending > 0 || l.Receiving > 0 || l.Bytes > 0 {
			s.Links[n] = l
			n++
		}
	}
	return nil
}
