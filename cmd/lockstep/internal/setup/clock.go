package setup

import (
	"time"

	"github.com/lockstep-ml/lockstep/timeline"
)

// StepClock adds up where the steps of this process spend their time, on its first replica.
type StepClock struct {
	Recorder *timeline.Recorder
	read     uint64 // records
	Steps    int
	sum      StepTimes
}

// Add adds the steps that were recorded since the last call.
func (c *StepClock) Add() {
	list, read := c.Recorder.Steps(c.read)
	c.read = read
	c.Steps += len(list)
	for _, s := range list {
		c.sum.Input += s.Input
		c.sum.Compute += s.Compute
		c.sum.Exposed += s.Wait
		c.sum.Update += s.Update
	}
}

// Reset drops the times measured so far.
func (c *StepClock) Reset() {
	c.Add()
	c.Steps, c.sum = 0, StepTimes{}
}

// PerStep returns the mean times of the steps.
func (c *StepClock) PerStep() StepTimes {
	mean := func(d time.Duration) time.Duration { return d / time.Duration(max(c.Steps, 1)) }
	return StepTimes{
		Input: mean(c.sum.Input), Compute: mean(c.sum.Compute), Exposed: mean(c.sum.Exposed), Update: mean(c.sum.Update),
	}
}

// ParameterBytes returns the size of the parameters that a step updates.
func ParameterBytes(s *Session) (bytes int) {
	for _, v := range s.Trainer.Parameters() {
		bytes += v.Bytes()
	}
	return bytes
}

// StepTimes are the parts of a mean step.
type StepTimes struct {
	Input         time.Duration `json:"input_ns"`
	Compute       time.Duration `json:"computation_ns"`
	Exposed       time.Duration `json:"exposed_ns"` // communication that the replica waits for
	Update        time.Duration `json:"update_ns"`
	Communication time.Duration `json:"communication_ns"` // of the same calls alone; 0: not measured
}

// Total returns the time of the step.
func (t *StepTimes) Total() time.Duration { return t.Input + t.Compute + t.Exposed + t.Update }
