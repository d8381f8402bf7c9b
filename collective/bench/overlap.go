package bench

import (
	"context"
	"slices"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Overlap is how much of a non-blocking call is hidden behind a computation between its Start and its Wait, as
// IMB-NBC and OSU's osu_iallreduce define it. The times are medians over the calls, by [Result.Average] over the
// ranks. The time of the call without a computation is [Result.Median].
type Overlap struct {
	// Compute is the time of the computation without a call, on all ranks at once. Its amount is chosen so that it takes
	// about as long as the call.
	Compute time.Duration `json:"compute_ns"`
	// During is the time of the same computation while the call runs. It is longer if the call takes processor time from
	// the computation. IMB-NBC and OSU use this time in the place of Compute.
	During time.Duration `json:"compute_during_ns"`
	// Overall is the time of Start, the computation and Wait.
	Overall time.Duration `json:"overall_ns"`
	// Share is the share of the call that is hidden: 1 - (Overall - Compute) / Median, from 0 to 1.
	Share float64 `json:"share"`
}

// hiddenShare returns the share of a call that is hidden behind a computation: 0 if the call and the computation
// together take as long as one after the other, 1 if they take as long as the computation alone. The formula is that of
// the OSU micro-benchmarks (osu_iallreduce.c); IMB-NBC's divides by the shorter of pure and compute, which are about
// equal.
func hiddenShare(pure, compute, overall time.Duration) float64 {
	if pure <= 0 {
		return 0
	}
	return min(max(1-float64(overall-compute)/float64(pure), 0), 1)
}

// computation is processor work that fits into the first-level cache, as IMB-NBC's and OSU's products of small
// matrices do.
type computation struct {
	a, x [64]float32
	sum  float32 // the result, so that the compiler keeps the work
}

func newComputation() *computation {
	c := &computation{}
	for i := range c.a {
		c.a[i], c.x[i] = float32(i%7)/8, float32(i%5)/8
	}
	return c
}

// run multiplies and adds the vectors so many times.
//
//go:noinline
func (c *computation) run(units int) {
	var s0, s1, s2, s3 float32
	for range units {
		s0, s1, s2, s3 = s0/2, s1/2, s2/2, s3/2 // keeps the sums small
		for i := 0; i < len(c.a); i += 4 {
			s0 += c.a[i] * c.x[i]
			s1 += c.a[i+1] * c.x[i+1]
			s2 += c.a[i+2] * c.x[i+2]
			s3 += c.a[i+3] * c.x[i+3]
		}
	}
	c.sum = s0 + s1 + s2 + s3
}

// calibrationLeast is how long a run is at least from which the speed of the computation follows.
const calibrationLeast = 100 * time.Microsecond

// calibrate returns how many units take about the given time. run executes so many units.
func calibrate(target time.Duration, run func(units int) time.Duration) int {
	units := 64
	took := run(units)
	for took < calibrationLeast && units < 1<<30 {
		units *= 2
		took = run(units)
	}
	// The first estimate is made in a short time, in which the processor may not have been shared as in a long one.
	units = scaled(units, target, min(took, run(units)))
	return scaled(units, target, median([]time.Duration{run(units), run(units), run(units)}))
}

// scaled returns how many units take the target, if so many took the given time.
func scaled(units int, target, took time.Duration) int {
	return int(min(max(float64(units)*float64(target)/float64(max(took, 1)), 1), 1<<30))
}

// estimateCalls is how many calls at most the amount of the computation follows from.
const estimateCalls = 20

// overlap times non-blocking calls alone, the computation alone, and both, in turns. Rank 0 gets the times, as by
// [averageTimes].
func (m *member) overlap(ctx context.Context, p *part, calls int) (pure callTimes, o *Overlap, err error) {
	estimates := min(calls, estimateCalls)
	estimate, err := m.times(ctx, p, estimates)
	if err != nil {
		return pure, nil, err
	}
	target, err := m.typical(ctx, p, estimate)
	if err != nil {
		return pure, nil, err
	}
	work := newComputation()
	run := func(units int) time.Duration {
		start := time.Now()
		work.run(units)
		return time.Since(start)
	}
	if err := m.barrier(ctx); err != nil { // the ranks share processors also while they calibrate
		return pure, nil, err
	}
	units := calibrate(target, run)
	// Calls between computations may take longer than those that follow each other, as their ranks have slept.
	t, err := m.turns(ctx, p, estimates, func() time.Duration { return run(units) })
	if err != nil {
		return pure, nil, err
	}
	if target, err = m.typical(ctx, p, t.pure); err != nil {
		return pure, nil, err
	}
	units = scaled(units, target, median(t.compute))
	if t, err = m.turns(ctx, p, calls, func() time.Duration { return run(units) }); err != nil {
		return pure, nil, err
	}
	var medians [4]time.Duration
	for i, own := range [][]time.Duration{t.compute, t.during, t.overall, t.pure} {
		if pure, err = m.average(ctx, p, own); err != nil {
			return pure, nil, err
		}
		medians[i] = median(pure.by(m.opts.Average))
	}
	o = &Overlap{Compute: medians[0], During: medians[1], Overall: medians[2]}
	o.Share = hiddenShare(medians[3], o.Compute, o.Overall)
	return pure, o, nil
}

// turns are the times of calls and computations in turns.
type turns struct{ pure, compute, during, overall []time.Duration }

// turns makes so many calls alone, computations alone, and both, in turns, and returns this rank's times.
func (m *member) turns(ctx context.Context, p *part, calls int, compute func() time.Duration) (*turns, error) {
	times := func() []time.Duration { return make([]time.Duration, 0, calls) }
	t := &turns{times(), times(), times(), times()}
	for range calls {
		took, err := m.timed(ctx, p)
		if err != nil {
			return nil, err
		}
		t.pure = append(t.pure, took)
		if err := m.barrier(ctx); err != nil {
			return nil, err
		}
		t.compute = append(t.compute, compute())
		if err := m.barrier(ctx); err != nil {
			return nil, err
		}
		start := time.Now()
		wait, err := m.start(ctx, p)
		if err != nil {
			return nil, err
		}
		t.during = append(t.during, compute())
		if err := wait(); err != nil {
			return nil, err
		}
		t.overall = append(t.overall, time.Since(start))
	}
	return t, nil
}

// start starts the rank's call and returns what waits for it.
func (m *member) start(ctx context.Context, p *part) (wait func() error, err error) {
	if p.idle {
		return func() error { return nil }, nil
	}
	h, err := m.comm.Start(ctx, &p.call)
	if err != nil {
		return nil, err
	}
	return func() error { return h.Wait(ctx) }, nil
}

// typical returns the median time of calls in rank 0's group, by the average over its ranks, on all ranks.
func (m *member) typical(ctx context.Context, p *part, own []time.Duration) (time.Duration, error) {
	times, err := m.average(ctx, p, own)
	if err != nil {
		return 0, err
	}
	return m.fromFirst(ctx, median(times.by(m.opts.Average)))
}

// fromFirst returns rank 0's time on all ranks.
func (m *member) fromFirst(ctx context.Context, d time.Duration) (time.Duration, error) {
	one := []int64{int64(d)}
	memory := tensor.HostMemory(one)
	err := m.world.Do(ctx, &collective.Call{Op: collective.Broadcast, Type: tensor.Int64, Src: memory, Dst: memory})
	return time.Duration(one[0]), err
}

// median returns the median of some times, which it leaves in their order; 0 of none.
func median(times []time.Duration) time.Duration {
	return percentile(slices.Sorted(slices.Values(times)), 50)
}

// percentile returns a percentile of sorted times, by the nearest-rank method: the smallest time that at least so many
// percent of them do not exceed. It returns 0 for no times.
func percentile(sorted []time.Duration, percent int) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[max(0, (len(sorted)*percent+99)/100-1)]
}
