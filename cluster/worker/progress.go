package worker

import (
	"fmt"
	"strings"
	"sync/atomic"

	"github.com/lockstep-ml/lockstep/cluster/membership"
)

// progress is the position that this worker's program has reported.
type progress struct {
	count      atomic.Uint64 // number of reports
	step       atomic.Int64
	phase      atomic.Pointer[string]
	runs       atomic.Int64  // step functions that are running
	phaseBegun chan struct{} // has a value if a phase has begun that may not have been published
}

// Progress reports that the training goroutine has reached a phase of a step: "compute", "reduce", "apply",
// "snapshot", …. The others show it if this worker is lost, and see by it that it is not stuck. It costs
// far less than a microsecond. A negative step is unknown.
func (w *Worker) Progress(step int64, phase string) {
	w.progress.step.Store(step)
	if p := w.progress.phase.Load(); p == nil || *p != phase {
		kept := phase
		w.progress.phase.Store(&kept)
		select {
		case w.progress.phaseBegun <- struct{}{}:
		default:
		}
	}
	w.progress.count.Add(1)
	if w.cfg.OnProgress != nil {
		w.cfg.OnProgress(step, phase)
	}
}

// Running reports that a step function begins, or that one has ended. Strategies call it.
func (w *Worker) Running(now bool) {
	if !now {
		w.progress.runs.Add(-1)
		return
	}
	w.progress.runs.Add(1)
	w.progress.count.Add(1)
}

// heartbeat returns this worker's heartbeat.
func (w *Worker) heartbeat() membership.Heartbeat {
	p := membership.Heartbeat{Step: w.progress.step.Load(), Progress: w.progress.count.Load()}
	if phase := w.progress.phase.Load(); phase != nil {
		p.Phase = clip(*phase, 200)
	}
	calls := uint64(0)
	for _, c := range w.communicators() {
		begun, over, call := c.Progress()
		calls += over
		p.Progress += begun + over
		if p.Waiting = p.Waiting || begun != over; p.Text == "" && call != "" {
			p.Text = "in " + clip(call, 1000)
		}
	}
	if p.Text == "" && w.progress.runs.Load() > 0 {
		p.Text = "in its step function"
	}
	if p.Text != "" {
		p.Text += ", "
	}
	p.Text += fmt.Sprintf("after %d calls", calls)
	return p
}

// positionText describes a worker's position: "at step 17, compute, in its step function, after 40 calls".
func positionText(p *membership.Heartbeat) string {
	var parts []string
	if p.Step >= 0 {
		parts = append(parts, fmt.Sprintf("step %d", p.Step))
	}
	if p.Phase != "" {
		parts = append(parts, p.Phase)
	}
	text := strings.Join(parts, ", ")
	if text != "" {
		text = "at " + text
	}
	if text != "" && p.Text != "" {
		text += ", "
	}
	return text + p.Text
}

func clip(s string, most int) string {
	if len(s) > most {
		return strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}
