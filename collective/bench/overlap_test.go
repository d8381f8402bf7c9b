package bench

import (
	"testing"
	"time"
)

func TestHiddenShare(t *testing.T) {
	const ms = time.Millisecond
	for _, c := range []struct {
		name                   string
		pure, compute, overall time.Duration
		want                   float64
	}{
		{"nothing is hidden", 10 * ms, 10 * ms, 20 * ms, 0},
		{"all is hidden", 10 * ms, 10 * ms, 10 * ms, 1},
		{"half", 10 * ms, 10 * ms, 15 * ms, 0.5},
		{"a quarter of a call longer than the computation", 20 * ms, 10 * ms, 25 * ms, 0.25},
		{"a call shorter than the computation", 4 * ms, 10 * ms, 11 * ms, 0.75},
		{"worse than one after the other", 10 * ms, 10 * ms, 30 * ms, 0},
		{"better than the computation alone", 10 * ms, 10 * ms, 9 * ms, 1},
		{"a call without a time", 0, 10 * ms, 10 * ms, 0},
	} {
		if got := hiddenShare(c.pure, c.compute, c.overall); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// TestCalibrate calibrates a computation whose time is known, plus what the clock and an interruption add.
func TestCalibrate(t *testing.T) {
	for _, unit := range []time.Duration{1, 20, 3000, time.Millisecond} {
		for _, target := range []time.Duration{1, 500, 20 * time.Microsecond, 10 * time.Millisecond} {
			runs := 0
			got := calibrate(target, func(units int) time.Duration {
				runs++
				if runs%3 == 1 { // interrupted
					return time.Duration(units)*unit + time.Millisecond
				}
				return time.Duration(units) * unit
			})
			if want := min(max(1, int(target/unit)), 1<<30); got > want+1 || got < want*9/10-1 && unit >= 20 {
				t.Errorf("%d units of %v for %v, want %d", got, unit, target, want)
			}
		}
	}
}

// TestCalibrateOnSharedProcessor calibrates where a run of more than a millisecond takes three times as long.
func TestCalibrateOnSharedProcessor(t *testing.T) {
	const unit = time.Microsecond
	got := calibrate(30*time.Millisecond, func(units int) time.Duration {
		took := time.Duration(units) * unit
		if took > time.Millisecond {
			took *= 3
		}
		return took
	})
	if got != 10_000 {
		t.Errorf("%d units, want 10000", got)
	}
}

func TestPercentile(t *testing.T) {
	var hundred []time.Duration
	for i := range 100 {
		hundred = append(hundred, time.Duration(i+1))
	}
	for _, c := range []struct {
		times   []time.Duration
		percent int
		want    time.Duration
	}{
		{nil, 50, 0},
		{hundred[:1], 50, 1},
		{hundred[:1], 99, 1},
		{hundred[:2], 50, 1},
		{hundred[:3], 50, 2},
		{hundred[:3], 99, 3},
		{hundred, 0, 1},
		{hundred, 50, 50},
		{hundred, 99, 99},
		{hundred, 100, 100},
	} {
		if got := percentile(c.times, c.percent); got != c.want {
			t.Errorf("%d %% of %d times: %v, want %v", c.percent, len(c.times), got, c.want)
		}
	}
	if got := median([]time.Duration{3, 1, 2}); got != 2 {
		t.Errorf("the median is %v, want 2", got)
	}
}

func TestComputationIsFinite(t *testing.T) {
	c := newComputation()
	c.run(10_000)
	if !(c.sum > 0 && c.sum < 1e3) {
		t.Errorf("the sum is %v", c.sum)
	}
}
