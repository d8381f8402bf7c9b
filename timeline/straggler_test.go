package timeline_test

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/timeline"
)

// job simulates the steps of a job in virtual time: every worker computes with noise, and all wait for the slowest.
type job struct {
	workers int
	noise   float64 // standard deviation of the logarithm of each part's time
	lasting float64 // share of a worker's noise that the next step keeps
	spikes  float64 // probability that a step of a worker takes five times as long
	rng     *rand.Rand
	now     time.Duration
	step    int64
	state   []float64 // by worker: of the lasting noise
}

// next returns the next step of all workers. slow changes a worker's parts, in milliseconds, before the noise.
func (j *job) next(slow func(worker int, input, compute *float64)) []timeline.Step {
	j.step++
	steps := make([]timeline.Step, j.workers)
	longest := time.Duration(0)
	for w := range steps {
		input, compute := 1.0, 90.0
		if slow != nil {
			slow(w, &input, &compute)
		}
		noisy := func(ms float64) time.Duration {
			return time.Duration(ms * math.Exp(j.noise*j.rng.NormFloat64()) * 1e6)
		}
		if j.state == nil {
			j.state = make([]float64, j.workers)
		}
		j.state[w] = j.lasting*j.state[w] + math.Sqrt(1-j.lasting*j.lasting)*j.noise*j.rng.NormFloat64()
		if j.lasting > 0 {
			compute *= math.Exp(j.state[w])
		}
		s := &steps[w]
		*s = timeline.Step{
			Step: j.step, Start: j.now, Input: noisy(input), Compute: noisy(compute), Update: noisy(5), Callbacks: noisy(1),
		}
		if j.rng.Float64() < j.spikes {
			s.Compute *= 5
		}
		longest = max(longest, s.Input+s.Compute+s.Update+s.Callbacks)
	}
	j.now += longest + 10*time.Millisecond // and the all-reduce
	for w := range steps {
		s := &steps[w]
		s.End = j.now
		s.Wait = s.End - s.Start - s.Input - s.Compute - s.Update - s.Callbacks
	}
	return steps
}

// TestNoStraggler simulates an hour of steps of equal workers, with noise and single long steps: no worker is named.
func TestNoStraggler(t *testing.T) {
	for _, c := range []struct {
		workers                int
		noise, lasting, spikes float64
	}{
		{2, 0.05, 0, 0.01},
		{4, 0.02, 0, 0.02},
		{4, 0.08, 0, 0.01},
		{16, 0.05, 0, 0.01},
		{4, 0.4, 0, 0.01}, // more processes than cores
		{4, 0.25, 0.5, 0.02},
		{2, 0.25, 0.5, 0.02},
	} {
		for _, seed := range []uint64{1, 103, 110} {
			j := &job{
				workers: c.workers, noise: c.noise, lasting: c.lasting, spikes: c.spikes,
				rng: rand.New(rand.NewPCG(seed, uint64(c.workers))),
			}
			d := timeline.NewDetector(c.workers)
			for j.now < time.Hour {
				for w, s := range j.next(nil) {
					d.Add(w, []timeline.Step{s})
				}
				if s, ok := d.Straggler(); ok {
					t.Fatalf("%+v, seed %d: named after %v, step %d: %v", c, seed, j.now, j.step, s)
				}
			}
			if testing.Short() {
				break
			}
		}
	}
}

// TestStraggler slows one worker by 20 % of a step, in its input or its computation: it is named with the cause within
// 20 steps, no other worker ever, and it is cleared when it is fast again.
func TestStraggler(t *testing.T) {
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 2))
		j := &job{workers: 2 + int(seed%7), noise: 0.03, spikes: 0.01, rng: rng}
		d := timeline.NewDetector(j.workers)
		add := func(slow func(int, *float64, *float64)) {
			steps := j.next(slow)
			for _, w := range rng.Perm(j.workers) { // reports arrive in any order
				d.Add(w, steps[w:w+1])
			}
		}
		for range 50 {
			add(nil)
		}
		worker, cause := rng.IntN(j.workers), []string{"computation", "input"}[seed%2]
		slow := func(w int, input, compute *float64) {
			switch {
			case w != worker:
			case cause == "input":
				*input += 20
			default:
				*compute *= 1.2
			}
		}
		for range 20 {
			add(slow)
		}
		s, ok := d.Straggler()
		if !ok || s.Worker != worker || s.Cause != cause || s.Excess < 0.1 || s.Excess > 0.3 {
			t.Fatalf("seed %d: after 20 slow steps got %+v, %v: want worker %d by %s", seed, s, ok, worker, cause)
		}
		for range 60 {
			add(nil)
		}
		if s, ok := d.Straggler(); ok {
			t.Fatalf("seed %d: named 60 steps after it was fast again: %v", seed, s)
		}
	}
}

// TestDetectorWithGaps checks that steps which a worker does not report are left out, and that nothing accumulates.
func TestDetectorWithGaps(t *testing.T) {
	j := &job{workers: 3, rng: rand.New(rand.NewPCG(3, 3))}
	d := timeline.NewDetector(3)
	for range 5000 {
		for w, s := range j.next(func(w int, _, compute *float64) {
			if w == 1 {
				*compute *= 1.5
			}
		}) {
			if w != 2 || s.Step%4 == 0 {
				d.Add(w, []timeline.Step{s})
			}
		}
	}
	if s, ok := d.Straggler(); !ok || s.Worker != 1 {
		t.Errorf("got %v, %v: want worker 1", s, ok)
	}
	d.Add(7, nil)
	d.Add(-1, nil)
}

func TestReport(t *testing.T) {
	r := timeline.NewRecorder()
	for i := range 1000 {
		at := time.Duration(i) * time.Millisecond
		r.AddStep(timeline.Step{Step: int64(i + 1), Start: at + 1, End: at + time.Millisecond, Loss: math.NaN()})
	}
	report := r.Report()
	for _, s := range report.Steps {
		if s.Step%16 != 0 {
			t.Errorf("step %d is reported: want multiples of 16 of steps of 1 ms", s.Step)
		}
	}
	if len(report.Steps) != 62 {
		t.Errorf("%d steps reported, want 62", len(report.Steps))
	}
	text, err := json.Marshal(report)
	if err != nil {
		t.Fatal(err)
	}
	var back timeline.Report
	if err := json.Unmarshal(text, &back); err != nil || back.Steps[3].Step != report.Steps[3].Step ||
		!math.IsNaN(back.Steps[0].Loss) {
		t.Errorf("decoded %+v, %v", back, err)
	}
}

func FuzzStep(f *testing.F) {
	f.Add([]byte("[1,2,3,4,5,6,7,8,9,10,11,1,12.5]"))
	f.Add([]byte("[1,2,3,4,5,6,7,8,9,10,11,1,null]"))
	f.Add([]byte("[1,2,3,4,5,6,7,8,9,10,11,1,12.5,3,20,30,4096,1,0,0,0,2,0,7,0]"))
	f.Fuzz(func(t *testing.T, text []byte) {
		var s, again timeline.Step
		if s.UnmarshalJSON(text) != nil {
			return
		}
		out, err := s.MarshalJSON()
		if err == nil {
			err = again.UnmarshalJSON(out)
		}
		if math.IsNaN(s.Loss) {
			s.Loss, again.Loss = 0, 0
		}
		if err != nil || s != again {
			t.Errorf("%s: %+v, then %s: %+v, %v", text, s, out, again, err)
		}
	})
}
