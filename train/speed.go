package train

import (
	"time"

	"github.com/lockstep-ml/lockstep/distribute"
)

// Speed is the training throughput of a Fit. It excludes the first step, a warm-up, unless that is the only
// one. Its time includes waiting for batches, and excludes validation and callbacks.
type Speed struct {
	Steps             int           // steps measured
	Examples          int64         // examples of these steps, of all replicas
	Duration          time.Duration // of these steps
	ExamplesPerSecond float64       // of all replicas together
	ReduceShare       float64       // share of the replicas' time spent in all-reduces, from 0 to 1
	// WaitShare is the share of the first replica's time spent waiting for collective calls and other replicas, from 0 to
	// 1: communication that computation does not hide. The live page and traces have the same one.
	WaitShare float64
}

// stopwatch accumulates steps for a Speed.
type stopwatch struct {
	first, rest   lap
	before, after distribute.Stats // of the last step
}

type lap struct {
	steps    int
	examples int64
	duration time.Duration
	reduce   time.Duration // of all replicas
	wait     time.Duration // of the first replica
}

// add adds a step. waited is the time in it that the first replica waited.
func (w *stopwatch) add(s Step, waited time.Duration) {
	l := &w.rest
	if w.first.steps == 0 {
		l = &w.first
	}
	l.steps++
	l.examples += int64(s.Examples)
	l.duration += s.Duration
	l.wait += waited
	for i := range w.after.Replicas {
		l.reduce += w.after.Replicas[i].Reduce - w.before.Replicas[i].Reduce
	}
}

func (w *stopwatch) result(replicas int) Speed {
	l := w.rest
	if l.steps == 0 {
		l = w.first
	}
	s := Speed{Steps: l.steps, Examples: l.examples, Duration: l.duration}
	if l.duration > 0 {
		total := float64(l.duration) * float64(replicas)
		s.ExamplesPerSecond = float64(l.examples) / l.duration.Seconds()
		s.ReduceShare = float64(l.reduce) / total
		s.WaitShare = float64(l.wait) / float64(l.duration)
	}
	return s
}
