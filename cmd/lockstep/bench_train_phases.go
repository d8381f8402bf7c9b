package main

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train"
)

// phaseClock measures how long the first replica of this process is in each phase of training.
type phaseClock struct {
	mu    sync.Mutex
	phase train.Phase
	since time.Time
	times map[train.Phase]time.Duration
}

// at ends the current phase and begins another. It has the signature of train.Config.Progress.
func (c *phaseClock) at(_ int64, phase train.Phase) {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.times != nil {
		c.times[c.phase] += now.Sub(c.since)
	}
	c.phase, c.since = phase, now
}

// reset drops the times measured so far.
func (c *phaseClock) reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.times, c.since = map[train.Phase]time.Duration{}, time.Now()
}

// stepTimes are the parts of a mean step.
type stepTimes struct {
	input, compute, exposed, update time.Duration
	communication                   time.Duration // of the same bytes with nothing else to do; 0: unknown
}

// perStep returns the mean times of n steps.
func (c *phaseClock) perStep(n int) stepTimes {
	c.mu.Lock()
	defer c.mu.Unlock()
	mean := func(p train.Phase) time.Duration { return c.times[p] / time.Duration(max(n, 1)) }
	return stepTimes{
		input: mean(train.PhaseData), compute: mean(train.PhaseCompute), exposed: mean(train.PhaseReduce),
		update: mean(train.PhaseUpdate),
	}
}

func (s stepTimes) table(out io.Writer) error {
	total := s.input + s.compute + s.exposed + s.update
	row := func(d time.Duration) string {
		return fmt.Sprintf("%.0f µs (%.1f %%)", micros(d), 100*float64(d)/float64(max(total, 1)))
	}
	hidden := "unknown"
	if s.communication > 0 {
		hidden = fmt.Sprintf("%.0f µs of %.0f µs, which the same bytes take alone",
			micros(max(0, s.communication-s.exposed)), micros(s.communication))
	}
	_, err := fmt.Fprintf(out, `a step        %.0f µs on the first replica:
  input       %s
  computation %s forward and backward
  exposed     %s communication that the replica waits for
  update      %s
hidden        communication: %s
`, micros(total), row(s.input), row(s.compute), row(s.exposed), row(s.update), hidden)
	return err
}

// communicationAlone returns the median time of n all-reduces of all parameters' bytes, in one call.
func communicationAlone(ctx context.Context, s *session, n int) (time.Duration, error) {
	bytes := 0
	for _, v := range s.trainer.Parameters() {
		bytes += v.Bytes()
	}
	var times []time.Duration
	_, err := distribute.Run(ctx, s.strategy, func(ctx context.Context, r *distribute.Replica,
		_ ...distribute.Value,
	) (distribute.Value, error) {
		t := []*tensor.Tensor{tensor.New(tensor.Float32, bytes/tensor.Float32.Bytes())}
		for range n + 1 {
			start := time.Now()
			if err := r.AllReduceInto(ctx, distribute.Sum, t, t, nil); err != nil {
				return nil, err
			}
			if r.LocalID() == 0 {
				times = append(times, time.Since(start))
			}
		}
		return nil, nil
	})
	if err != nil {
		return 0, err
	}
	return middle(times[1:]), nil
}
