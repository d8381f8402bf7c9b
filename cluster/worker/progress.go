package worker

import (
	"encoding/json"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
)

// doing is what this worker's program says that it does.
type doing struct {
	count atomic.Uint64 // how often it said something
	step  atomic.Int64
	phase atomic.Pointer[string]
	runs  atomic.Int64 // step functions under way
}

// Progress says that the training goroutine has come to a phase of a step: "compute", "reduce", "apply", "snapshot", …. The
// others show it if this worker is lost, and see from it that it is not stuck. It costs some nanoseconds. A negative step is one
// that is not known.
func (w *Worker) Progress(step int64, phase string) {
	w.doing.step.Store(step)
	if p := w.doing.phase.Load(); p == nil || *p != phase {
		kept := phase
		w.doing.phase.Store(&kept)
	}
	w.doing.count.Add(1)
	if w.cfg.OnProgress != nil {
		w.cfg.OnProgress(step, phase)
	}
}

// Running says that a step function begins, or that one has ended. Strategies call it.
func (w *Worker) Running(now bool) {
	if now {
		w.doing.runs.Add(1)
	} else {
		w.doing.runs.Add(-1)
	}
	w.doing.count.Add(1)
}

// state is how far a worker has come: what it publishes.
type state struct {
	Step    int64         `json:"step"`            // -1: not known
	Phase   string        `json:"phase,omitempty"` // "": not known
	Count   uint64        `json:"count"`           // of what its program said
	Running bool          `json:"running,omitempty"`
	Begun   uint64        `json:"begun"`          // calls of all its replicas
	Over    uint64        `json:"over"`           // of these
	Call    string        `json:"call,omitempty"` // one that is under way
	Same    time.Duration `json:"same"`           // for how long nothing of this has changed, to a beat
}

// stateMax bounds what a worker publishes, in bytes.
const stateMax = 4096

func decodeState(text []byte) (s state, ok bool) {
	return s, len(text) <= stateMax && json.Unmarshal(text, &s) == nil
}

func (s *state) encode() []byte {
	short := *s
	short.Phase, short.Call = clip(s.Phase, 200), clip(s.Call, 1000)
	text, err := json.Marshal(&short)
	if err != nil {
		return nil // of numbers and texts there is always one
	}
	return text
}

func clip(s string, most int) string {
	if len(s) > most {
		return strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}

// moved reports whether the worker has come further between two states.
func (s *state) moved(since *state) bool {
	return s.Count != since.Count || s.Begun != since.Begun || s.Over != since.Over
}

// waits reports whether a replica of the worker is in a call, where it may wait for others.
func (s *state) waits() bool { return s.Begun != s.Over }

// String says it for an error: "at step 17, compute, for 12s, in all_reduce SUM …".
func (s *state) String() string {
	var parts []string
	switch {
	case s.Step >= 0 && s.Phase != "":
		parts = append(parts, fmt.Sprintf("at step %d, %s", s.Step, s.Phase))
	case s.Step >= 0:
		parts = append(parts, fmt.Sprintf("at step %d", s.Step))
	case s.Phase != "":
		parts = append(parts, "at "+s.Phase)
	}
	switch {
	case s.Call != "":
		parts = append(parts, "in "+s.Call)
	case s.waits():
		parts = append(parts, "in a call")
	case s.Running:
		parts = append(parts, "in its step function")
	case len(parts) == 0:
		parts = append(parts, "in no step")
	}
	text := strings.Join(parts, ", ")
	if s.Same >= 2*beatMost {
		text += fmt.Sprintf(" for %v", s.Same.Round(time.Second))
	}
	return fmt.Sprintf("%s, after %d calls", text, s.Over)
}

// state returns how far this worker is, except for how long.
func (w *Worker) state() state {
	s := state{Step: w.doing.step.Load(), Count: w.doing.count.Load(), Running: w.doing.runs.Load() > 0}
	if p := w.doing.phase.Load(); p != nil {
		s.Phase = *p
	}
	for _, c := range w.current.now() {
		o, ok := c.(collective.Observable)
		if !ok {
			continue
		}
		begun, over, call := o.Progress()
		s.Begun, s.Over = s.Begun+begun, s.Over+over
		if s.Call == "" {
			s.Call = call
		}
	}
	return s
}
