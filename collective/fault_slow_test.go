package collective_test

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/internal/transport/simnet"
	"github.com/lockstep-ml/lockstep/transport"
)

// slowWorld is a set of ranks on separate hosts. Some are too slow to answer a probe in time, and some make no call.
type slowWorld struct {
	n            int
	slow, absent []int
	first        int // the rank whose deadline is first, by minutes: it is neither slow nor absent
	config       collective.Config
}

func drawSlowWorld(random *rand.Rand) slowWorld {
	n := 4 + random.IntN(6)
	order := random.Perm(n)
	slow, absent := 2+random.IntN(min(n-3, 4)), 1
	if n > slow+2 && random.IntN(2) == 0 {
		absent = 2
	}
	w := slowWorld{n: n, first: order[0], slow: order[1 : 1+slow], absent: order[1+slow : 1+slow+absent]}
	slices.Sort(w.absent)
	w.config = collective.Config{Algorithm: plan.Algorithms[random.IntN(len(plan.Algorithms))].Name, Stall: -1}
	return w
}

// play makes the call on all ranks that take part. It returns the error of the first rank, and how long after its
// deadline it returned.
func (w *slowWorld) play(t *testing.T, calls []*collective.Call) (late time.Duration, err error) {
	const patience = time.Minute
	slow := map[int]float64{}
	for _, r := range w.slow {
		slow[r] = 30_000
	}
	net, err := simnet.New(simnet.Config{
		Places: simnet.Uniform(w.n, 1, false), Network: simnet.Link{Latency: 10 * time.Microsecond, Bandwidth: 1e12},
		Slow: slow,
	})
	if err != nil {
		t.Fatal(err)
	}
	w.config.Logger = slog.New(slog.DiscardHandler)
	var groups []collective.Group
	for _, end := range net.Ends() {
		w.config.Timeout = time.Hour
		if len(groups) == w.first {
			w.config.Timeout = patience
		}
		g, err := collective.Open([]transport.Endpoint{end}, w.config)
		if err != nil {
			t.Fatal(err)
		}
		groups = append(groups, g)
	}
	var all sync.WaitGroup
	over := make(chan struct{})
	for r, g := range groups {
		all.Go(func() {
			c := g.Local()[0]
			if e := c.Do(background, named(barrier(), "before")); e != nil {
				t.Errorf("rank %d: %v", r, e)
			}
			if slices.Contains(w.absent, r) {
				<-over
				return
			}
			begin := time.Now()
			if e := c.Do(background, calls[r]); r == w.first {
				err, late = e, time.Since(begin)-patience
				close(over)
			}
		})
	}
	<-over
	for _, g := range groups {
		g.Local()[0].Abort(errors.New("enough"))
	}
	all.Wait()
	for _, g := range groups {
		if e := g.Close(); e != nil {
			t.Errorf("Close: %v", e)
		}
	}
	return late, err
}

// TestFaultAmongTheSlow checks that the error names only ranks that made no call and none that waits, although several
// ranks are too slow to answer, and that the search ends.
func TestFaultAmongTheSlow(t *testing.T) {
	random := seeded(t)
	for range 60 {
		w := drawSlowWorld(random)
		calls := anyCall(random, collective.AllReduce, w.n)
		synctest.Test(t, func(t *testing.T) {
			late, err := w.play(t, calls)
			got := blamed(t, err)
			// not all, if the time is up
			if len(got) == 0 || slices.ContainsFunc(got, func(r int) bool { return !slices.Contains(w.absent, r) }) {
				t.Errorf("%s: rank %d of %d names %v, want of %v; slow are %v: %v", w.config.Algorithm, w.first, w.n, got, w.absent,
					w.slow, err)
			}
			if most := 5 * time.Second; late > most {
				t.Errorf("%s: rank %d of %d had its error %v after its deadline, want %v at most", w.config.Algorithm, w.first, w.n,
					late, most)
			}
		})
		if t.Failed() {
			return
		}
	}
}

// reports records when each message is logged.
type reports struct {
	slog.Handler // discards

	mu sync.Mutex
	at []time.Time
}

func (r *reports) Enabled(context.Context, slog.Level) bool { return true }

func (r *reports) Handle(context.Context, slog.Record) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.at = append(r.at, time.Now())
	return nil
}

// TestStallReportIsShort checks that if every answer takes 400 ms, the report of a long wait probes two of nine ranks
// only: the call may complete meanwhile.
func TestStallReportIsShort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n, stall, most = 9, time.Minute, time.Second
		net, err := simnet.New(simnet.Config{
			Places: simnet.Uniform(n, 1, false), Network: simnet.Link{Latency: 200 * time.Millisecond, Bandwidth: 1e10},
		})
		if err != nil {
			t.Fatal(err)
		}
		log := &reports{Handler: slog.DiscardHandler}
		var all sync.WaitGroup
		var begun sync.WaitGroup
		begun.Add(n)
		var groups []collective.Group
		for r, end := range net.Ends() {
			g, err := collective.Open([]transport.Endpoint{end},
				collective.Config{Stall: stall, Timeout: time.Hour, Logger: slog.New(log)})
			if err != nil {
				t.Fatal(err)
			}
			groups = append(groups, g)
			all.Go(func() {
				c := g.Local()[0]
				err := c.Do(background, named(barrier(), "before"))
				begun.Done()
				begun.Wait() // all begin now
				if r == n-1 {
					time.Sleep(2 * stall)
				} else if e := c.Do(background, receive(r+1, make([]float32, 1))); e != nil {
					err = e
				}
				if r > 0 && err == nil {
					err = c.Do(background, send(r-1, []float32{1}))
				}
				if err != nil {
					t.Errorf("rank %d: %v", r, err)
				}
			})
		}
		begun.Wait()
		begin := time.Now()
		all.Wait()
		for _, g := range groups {
			if err := g.Close(); err != nil {
				t.Errorf("Close: %v", err)
			}
		}
		if len(log.at) != n-1 {
			t.Errorf("%d reports, want one of each of the %d ranks that wait", len(log.at), n-1)
		}
		for _, at := range log.at {
			if took := at.Sub(begin) - stall; took < 0 || took > most {
				t.Errorf("a report took %v, want %v at most", took, most)
			}
		}
	})
}
