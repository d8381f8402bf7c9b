package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

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
	communication                   time.Duration // of a step's gradients, with nothing else to do
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
	_, err := fmt.Fprintf(out, `a step        %.0f µs on the first replica:
  input       %s
  computation %s forward and backward
  exposed     %s communication that the replica waits for
  update      %s
hidden        communication: %.0f µs of %.0f µs, which the same calls take alone
`, micros(total), row(s.input), row(s.compute), row(s.exposed), row(s.update),
		micros(max(0, s.communication-s.exposed)), micros(s.communication))
	return err
}

func parameterBytes(s *session) (bytes int) {
	for _, v := range s.trainer.Parameters() {
		bytes += v.Bytes()
	}
	return bytes
}

// peakMemory returns the largest number of bytes that this process has had resident, or 0 without Linux' /proc.
func peakMemory() int {
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(text)) {
		var kilobytes int
		if n, _ := fmt.Sscanf(line, "VmHWM: %d kB", &kilobytes); n == 1 {
			return kilobytes << 10
		}
	}
	return 0
}
