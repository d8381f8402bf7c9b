package simulate_test

import (
	"bytes"
	"context"
	"errors"
	"iter"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/simulate"
	"github.com/lockstep-ml/lockstep/timeline/timelinetest"
)

// cluster returns a cluster with round rates, in bytes per nanosecond: 1 between hosts, 10 inside, 100 while combining.
func cluster(ranks, hosts int, memory bool) simulate.Cluster {
	return simulate.Cluster{
		Ranks: ranks, Hosts: hosts, Memory: memory,
		Inside:  plan.Link{Latency: time.Microsecond, Bandwidth: 10e9},
		Outside: plan.Link{Latency: 10 * time.Microsecond, Bandwidth: 1e9},
		Combine: 100e9, Copy: 50e9,
	}
}

func algorithm(t *testing.T, name string) plan.Algorithm {
	t.Helper()
	a, ok := plan.FindAlgorithm(name)
	if !ok {
		t.Fatalf("no algorithm %s", name)
	}
	return a
}

// TestByHand compares two cases with times that are computed by hand.
func TestByHand(t *testing.T) {
	const bytes = 100_000
	c := cluster(2, 2, false)
	p := c.Problem(plan.Problem{Op: plan.AllReduce, Count: bytes / 4}, 4)
	r, err := simulate.Run(t.Context(), c, algorithm(t, "recursive_doubling"), p, 4, nil)
	// One frame each way, 100 us and its latency, then both vectors are combined; copied before and after, 2 us each.
	if want := 114*time.Microsecond + 2*bytes/100*time.Nanosecond; err != nil || r.Time.Round(time.Microsecond) != want ||
		r.Frames != 2 || r.Sent != bytes {
		t.Errorf("recursive_doubling: %+v, %v; want %v", r, err, want)
	}
	c.MTU = 1500 // the frame and its headers
	r, err = simulate.Run(t.Context(), c, algorithm(t, "recursive_doubling"), p, 4, nil)
	if want := 14*time.Microsecond + 2*bytes/100*time.Nanosecond + bytes*1538/1448; err != nil ||
		r.Time.Round(time.Microsecond) != want.Round(time.Microsecond) || r.Sent != bytes {
		t.Errorf("recursive_doubling with headers: %+v, %v; want %v", r, err, want)
	}
	c = cluster(4, 1, true)
	p = c.Problem(plan.Problem{Op: plan.AllReduce, Count: 64 * 400}, 4)
	r, err = simulate.Run(t.Context(), c, algorithm(t, "direct"), p, 4, nil)
	// Two synchronisations, and a quarter of four vectors is combined.
	if want := 2*time.Microsecond + 64*400*4/100*time.Nanosecond; err != nil || r.Time != want || r.Frames != 0 {
		t.Errorf("direct: %+v, %v; want %v", r, err, want)
	}
}

// TestBound checks that no algorithm is faster than the lower bound of a card.
func TestBound(t *testing.T) {
	for _, a := range plan.Algorithms {
		for _, c := range []simulate.Cluster{
			cluster(2, 2, false), cluster(6, 6, false), cluster(8, 8, false),
			cluster(8, 2, true), cluster(8, 4, true), cluster(5, 2, true),
		} {
			for _, order := range []plan.Order{plan.Canonical, plan.Any} {
				p := c.Problem(plan.Problem{Op: plan.AllReduce, Count: 1 << 20, Order: order}, 4)
				if a.Fits(p) != nil {
					continue
				}
				r, err := simulate.Run(t.Context(), c, a, p, 4, nil)
				if err != nil {
					t.Errorf("%s on %d ranks, %d hosts: %v", a.Name, c.Ranks, c.Hosts, err)
				} else if bound := c.Bound(4 << 20); r.Time < bound {
					t.Errorf("%s on %d ranks, %d hosts: %v, less than the bound of %v", a.Name, c.Ranks, c.Hosts, r.Time, bound)
				}
			}
		}
	}
}

// TestEffects checks that a worse cluster makes the collective slower.
func TestEffects(t *testing.T) {
	run := func(c simulate.Cluster) simulate.Result {
		p := c.Problem(plan.Problem{Op: plan.AllReduce, Count: 1 << 18}, 4)
		r, err := simulate.Run(t.Context(), c, algorithm(t, "recursive_doubling"), p, 4, nil)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	base := run(cluster(8, 8, false))
	for name, change := range map[string]func(*simulate.Cluster){
		"an oversubscribed switch": func(c *simulate.Cluster) { c.Oversub = 4 },
		"a straggler":              func(c *simulate.Cluster) { c.Stragglers = map[int]float64{3: 50} },
		"a late rank":              func(c *simulate.Cluster) { c.Late = map[int]time.Duration{5: time.Millisecond} },
		"two ranks on one card":    func(c *simulate.Cluster) { c.Hosts = 4 },
		"latency":                  func(c *simulate.Cluster) { c.Outside.Latency *= 2 },
	} {
		c := cluster(8, 8, false)
		change(&c)
		if r := run(c); r.Time <= base.Time {
			t.Errorf("%s: %v, not slower than %v", name, r.Time, base.Time)
		}
	}
	if again := run(cluster(8, 8, false)); again != base {
		t.Errorf("one cluster, two results: %+v and %+v", base, again)
	}
}

// TestChooses checks that the table of a cluster chooses an algorithm within a factor of 2 of the fastest in the
// simulation, and within 1.1 where the ranks of a host share a card that is as fast as their memory.
func TestChooses(t *testing.T) {
	fast := func(ranks, hosts int, memory bool) simulate.Cluster {
		c := cluster(ranks, hosts, memory)
		c.Private, c.Combine, c.Copy = memory, 30e9, 12e9
		c.Inside, c.Outside = plan.Link{Latency: time.Microsecond, Bandwidth: 10e9}, plan.Link{
			Latency:   25 * time.Microsecond,
			Bandwidth: 12.5e9,
		}
		return c
	}
	for _, test := range []struct {
		c      simulate.Cluster
		counts []int
		factor float64
	}{
		{cluster(4, 4, false), []int{1, 1 << 10, 1 << 20}, 2},
		{cluster(7, 7, false), []int{1, 1 << 10, 1 << 20}, 2},
		{cluster(16, 2, true), []int{1, 1 << 10, 1 << 20}, 2},
		{fast(8, 2, true), []int{1 << 10, 1 << 20, 25 << 20}, 1.1},
		{fast(16, 4, true), []int{1 << 10, 1 << 20, 25 << 20}, 1.1},
		{fast(32, 4, false), []int{1 << 20}, 1.1},
	} {
		for _, count := range test.counts {
			chosen, took, name, best := choice(t, test.c, count)
			if float64(took) > test.factor*float64(best) {
				t.Errorf("%d elements on %d ranks, %d hosts: chose %s, %v; %s takes %v", count, test.c.Ranks, test.c.Hosts, chosen,
					took, name, best)
			}
		}
	}
}

// choice returns the algorithm that the table chooses for an all-reduce, and the fastest one, with their times.
func choice(t *testing.T, c simulate.Cluster, count int) (chosen string, took time.Duration, fastest string,
	least time.Duration,
) {
	t.Helper()
	p := c.Problem(plan.Problem{Op: plan.AllReduce, Count: count}, 4)
	choice, err := c.Table().Choose(p, c.Where(4))
	if err != nil {
		t.Fatal(err)
	}
	least = 1 << 62
	for _, a := range plan.Algorithms {
		if a.Fits(p) != nil {
			continue
		}
		r, err := simulate.Run(t.Context(), c, a, p, 4, nil)
		if err != nil {
			t.Fatal(err)
		}
		if a.Name == choice.Name {
			took = r.Time
		}
		if r.Time < least {
			fastest, least = a.Name, r.Time
		}
	}
	return choice.Name, took, fastest, least
}

func TestTrace(t *testing.T) {
	var out bytes.Buffer
	trace := simulate.NewTrace(&out)
	c := cluster(3, 3, false)
	p := c.Problem(plan.Problem{Op: plan.AllReduce, Count: 1000}, 4)
	r, err := simulate.Run(t.Context(), c, algorithm(t, "recursive_doubling"), p, 4, trace.Write)
	if err := errors.Join(err, trace.Close()); err != nil {
		t.Fatal(err)
	}
	read, err := timelinetest.Read(&out)
	if err != nil {
		t.Fatal(err)
	}
	end, spans := 0.0, 0
	for _, e := range read.Events {
		if e.Phase != "X" {
			continue
		}
		spans++
		if *e.Process != *e.Thread {
			t.Errorf("event %+v", e)
		}
		end = max(end, e.End())
	}
	if spans != r.Steps {
		t.Errorf("%d events for %d steps", spans, r.Steps)
	}
	if got := time.Duration(end * 1e3); got < r.Time-time.Nanosecond || got > r.Time+time.Nanosecond {
		t.Errorf("the last event ends at %v, the collective at %v", got, r.Time)
	}
	broken := simulate.NewTrace(full{})
	for range 1000 {
		broken.Write(simulate.Event{Step: plan.Step{Kind: plan.Copy}})
	}
	if err := broken.Close(); err == nil || !strings.Contains(err.Error(), "disk full") {
		t.Errorf("a trace on a full disk: %v", err)
	}
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("disk full") }

func TestRefused(t *testing.T) {
	a := algorithm(t, "recursive_doubling")
	for _, test := range []struct {
		change func(*simulate.Cluster)
		text   string
	}{
		{func(c *simulate.Cluster) { c.Hosts = 5 }, "4 ranks on 5 hosts"},
		{func(c *simulate.Cluster) { c.Combine = 0 }, "not positive"},
		{func(c *simulate.Cluster) { c.Outside.Latency = -1 }, "negative"},
		{func(c *simulate.Cluster) { c.MTU = 40 }, "MTU of 40"},
		{func(c *simulate.Cluster) { c.Stragglers = map[int]float64{4: 2} }, "straggler 4"},
		{func(c *simulate.Cluster) { c.Late = map[int]time.Duration{-1: 2} }, "rank -1"},
	} {
		c := cluster(4, 4, false)
		p := c.Problem(plan.Problem{Op: plan.AllReduce, Count: 10}, 4)
		test.change(&c)
		if _, err := simulate.Run(t.Context(), c, a, p, 4, nil); err == nil || !strings.Contains(err.Error(), test.text) {
			t.Errorf("%v, want %q", err, test.text)
		}
	}
	c := cluster(4, 4, false)
	p := c.Problem(plan.Problem{Op: plan.AllReduce, Count: 10}, 4)
	if _, err := simulate.Run(t.Context(), c, algorithm(t, "direct"), p, 4, nil); err == nil {
		t.Error("direct was executed between hosts")
	}
	p.Size = 5
	if _, err := simulate.Run(t.Context(), c, a, p, 4, nil); err == nil {
		t.Error("a problem of another size was executed")
	}
	// Deadlocks are detected.
	p.Size = 4
	stuck := plan.Algorithm{
		Name: "stuck", Fits: func(plan.Problem) error { return nil },
		Steps: func(_ plan.Problem, rank int) iter.Seq[plan.Step] {
			return func(yield func(plan.Step) bool) {
				yield(plan.Step{Kind: plan.Exchange, To: -1, From: (rank + 1) % 4})
			}
		},
	}
	if _, err := simulate.Run(t.Context(), c, stuck, p, 4, nil); err == nil ||
		!strings.Contains(err.Error(), "4 ranks wait forever") {
		t.Errorf("a deadlock: %v", err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("enough"))
	if _, err := simulate.Run(ctx, c, a, p, 4, nil); err == nil || !strings.Contains(err.Error(), "enough") {
		t.Errorf("after its context was cancelled: %v", err)
	}
}

// TestLarge simulates thousands of ranks.
func TestLarge(t *testing.T) {
	c := cluster(4096, 512, false)
	p := c.Problem(plan.Problem{Op: plan.AllReduce, Count: 25 << 20}, 4)
	r, err := simulate.Run(t.Context(), c, algorithm(t, "recursive_doubling"), p, 4, nil)
	if err != nil || r.Frames != 12*4096 {
		t.Errorf("%+v, %v; want %d frames", r, err, 12*4096)
	}
}
