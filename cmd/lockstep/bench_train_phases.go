package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/timeline"
	"github.com/lockstep-ml/lockstep/train"
)

// stepClock adds up where the steps of this process spend their time, on its first replica.
type stepClock struct {
	recorder *timeline.Recorder
	read     uint64 // records
	steps    int
	sum      stepTimes
}

// add adds the steps that were recorded since the last call.
func (c *stepClock) add() {
	list, read := c.recorder.Steps(c.read)
	c.read = read
	c.steps += len(list)
	for _, s := range list {
		c.sum.input += s.Input
		c.sum.compute += s.Compute
		c.sum.exposed += s.Wait
		c.sum.update += s.Update
	}
}

// reset drops the times measured so far.
func (c *stepClock) reset() {
	c.add()
	c.steps, c.sum = 0, stepTimes{}
}

// stepTimes are the parts of a mean step.
type stepTimes struct {
	input, compute, exposed, update time.Duration
	communication                   time.Duration // of a step's gradients, with nothing else to do
	forward                         time.Duration // of a step's batches, measured apart
	whole                           bool          // computation includes the update: one program
}

// perStep returns the mean times of the steps.
func (c *stepClock) perStep() stepTimes {
	mean := func(d time.Duration) time.Duration { return d / time.Duration(max(c.steps, 1)) }
	return stepTimes{
		input: mean(c.sum.input), compute: mean(c.sum.compute), exposed: mean(c.sum.exposed), update: mean(c.sum.update),
	}
}

// divide measures the parts of the computation, and the communication alone.
func (s *stepTimes) divide(ctx context.Context, t *train.Trainer, batches data.Dataset, accumulate int) (err error) {
	if s.communication, err = t.CommunicationTime(ctx, benchSteps); err != nil {
		return err
	}
	forward, err := t.ForwardTime(ctx, batches, forwardPasses)
	s.forward, s.whole = forward*time.Duration(accumulate), t.WholeSteps() && accumulate == 1
	return err
}

func (s stepTimes) table(out io.Writer) error {
	total := s.input + s.compute + s.exposed + s.update
	row := func(d time.Duration) string {
		return fmt.Sprintf("%.0f µs (%.1f %%)", micros(d), 100*float64(d)/float64(max(total, 1)))
	}
	rest := ""
	if s.whole {
		rest = ", with the update, which is in the same program"
	}
	_, err := fmt.Fprintf(out, `a step        %.0f µs on the first replica:
  input       %s
  computation %s
    forward   %.0f µs: loss and metrics in inference mode, measured apart
    backward  %.0f µs: the rest of the computation%s
  exposed     %s communication that the replica waits for
  update      %s
hidden        communication: %.0f µs of %.0f µs, which the same calls take alone
`, micros(total), row(s.input), row(s.compute), micros(s.forward),
		micros(max(0, s.compute-s.forward)), rest, row(s.exposed), row(s.update),
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
