package simulate

import (
	"math"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/lockstep-ml/lockstep/collective/plan"
)

func describe(ranks, hosts int) Cluster {
	link := plan.Link{Latency: time.Microsecond, Bandwidth: 1e9}
	return Cluster{
		Ranks: ranks, Hosts: hosts, Memory: true, Private: true, Inside: link, Outside: link, Combine: 1e9,
		Copy: 1e9,
	}
}

// TestExtremes simulates clusters with extreme values: each is an error, or gives a valid time.
func TestExtremes(t *testing.T) {
	numbers := []float64{
		0, 0.5, 1, 2, 1e6, 1e9, 1e300, math.MaxFloat64, math.SmallestNonzeroFloat64, -1, math.NaN(),
		math.Inf(1), math.Inf(-1),
	}
	durations := []time.Duration{-1, 0, 1, time.Microsecond, DelayMax, DelayMax + 1, math.MaxInt64, math.MinInt64}
	rapid.Check(t, func(t *rapid.T) {
		number := func(name string) float64 { return rapid.SampledFrom(numbers).Draw(t, name) }
		duration := func(name string) time.Duration { return rapid.SampledFrom(durations).Draw(t, name) }
		ranks := rapid.IntRange(1, 5).Draw(t, "ranks")
		c := describe(ranks, rapid.IntRange(1, ranks).Draw(t, "hosts"))
		for _, change := range rapid.SliceOfN(rapid.IntRange(0, 7), 1, 3).Draw(t, "changes") {
			switch change {
			case 0:
				c.Oversub = number("oversubscription")
			case 1:
				c.Stragglers = map[int]float64{0: number("straggler")}
			case 2:
				c.Late = map[int]time.Duration{0: duration("late")}
			case 3:
				c.Inside = plan.Link{Latency: duration("inside latency"), Bandwidth: number("inside")}
			case 4:
				c.Outside = plan.Link{Latency: duration("outside latency"), Bandwidth: number("outside")}
			case 5:
				c.Combine = number("combine")
			case 6:
				c.Copy = number("copy")
			case 7:
				c.Cores = rapid.SampledFrom([]int{-1, 0, 1, math.MaxInt}).Draw(t, "cores")
			}
		}
		p := c.Problem(plan.Problem{
			Op:    plan.AllReduce,
			Count: rapid.SampledFrom([]int{0, 1, 1000, math.MaxInt >> 13}).Draw(t, "count"),
		}, 1)
		a := rapid.SampledFrom(plan.Algorithms).Draw(t, "algorithm")
		if a.Fits(p) != nil || p.Count > 1000 && a.Name != "recursive_doubling" && a.Name != "direct" {
			return // the steps of the others grow with the size
		}
		r, err := Run(t.Context(), c, a, p, 1, nil)
		if err == nil && (r.Time < 0 || r.Fastest < 0 || r.Fastest > r.Time || r.Time >= timeMax || r.Sent < 0 ||
			c.Bound(p.Count) < 0) {
			t.Fatalf("%s on %+v: %+v, bound %v", a.Name, c, r, c.Bound(p.Count))
		}
	})
}

// TestNoMemory checks the error of a simulation that needs more memory than is available.
func TestNoMemory(t *testing.T) {
	c := describe(200, 200)
	a, _ := plan.FindAlgorithm("recursive_doubling")
	r := newRun(&c, a, c.Problem(plan.Problem{Op: plan.AllReduce, Count: 1000}, 4), 4, nil)
	defer r.stop()
	r.memory = 1
	if _, err := r.run(t.Context()); err == nil || !strings.Contains(err.Error(), "need more memory than the") {
		t.Errorf("got %v, want an error about memory", err)
	}
}
