package collective_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/flight"
	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// alarm is a context whose deadline expires when the test requests it.
type alarm struct {
	context.Context
	done chan struct{}
}

func newAlarm() *alarm { return &alarm{background, make(chan struct{})} }

func (a *alarm) Done() <-chan struct{} { return a.done }

func (a *alarm) Err() error {
	select {
	case <-a.done:
		return context.DeadlineExceeded
	default:
		return nil
	}
}

// scene is a set of ranks that make one call each, except for some that make none.
type scene struct {
	*world
	calls  []*collective.Call // by rank; nil: it makes no call
	alarms []*alarm
	absent chan struct{} // closed: they may continue
	late   int           // a rank that enters last, when the others wait; -1: none
}

// cast opens a group whose calls wait forever, unless their alarms expire.
func (p placement) cast(t *testing.T, n int, cfg collective.Config) *scene {
	cfg.Timeout, cfg.Logger = -1, slog.New(slog.DiscardHandler)
	s := &scene{world: p.world(t, n, cfg), calls: make([]*collective.Call, n), absent: make(chan struct{}), late: -1}
	for range n {
		s.alarms = append(s.alarms, newAlarm())
	}
	return s
}

// waiting returns the ranks that wait in their call, and whether all others have completed theirs, or the first ones if
// they make no more.
func (s *scene) waiting() (waiting []int, settled bool) {
	settled = true
	for _, g := range s.groups {
		for _, r := range g.Flights() {
			last := len(r.Calls) - 1
			switch {
			case s.calls[r.Rank] == nil || r.Rank == s.late:
				if _, over, _ := s.comms[r.Rank].Progress(); over < 2 {
					settled = false // a rank that is still in the previous call is not late
				}
			case last < 2: // these are the first calls
				settled = false
			case r.Calls[last].State == flight.Waiting:
				waiting = append(waiting, r.Rank)
			case r.Calls[last].State == flight.Running:
				settled = false
			}
		}
	}
	return waiting, settled
}

// connect makes every two ranks exchange a message: otherwise a rank could wait for a connection, and no rank would be
// at fault.
func (s *scene) connect(c collective.Communicator) error {
	x := func() tensor.Memory { return tensor.HostMemory(make([]float32, c.Size())) }
	return c.Do(background, &collective.Call{Op: collective.AllToAll, Type: tensor.Float32, Src: x(), Dst: x()})
}

// play synchronizes all ranks once, and then makes their calls. When no call progresses any more, who returns the rank
// whose deadline expires. It returns the errors by rank; nil if no rank waits.
func (s *scene) play(t *testing.T, who func(waiting []int) int) []error {
	late := make(chan struct{})
	var over sync.WaitGroup
	errs, ended := make([]error, len(s.comms)), make([]chan struct{}, len(s.comms))
	for r, c := range s.comms {
		ended[r] = make(chan struct{})
		over.Go(func() {
			defer close(ended[r])
			errs[r] = errors.Join(s.connect(c), c.Do(background, named(barrier(), "before")))
			if errs[r] != nil || s.calls[r] == nil {
				<-s.absent
				return
			}
			if r == s.late {
				<-late
			}
			errs[r] = c.Do(s.alarms[r], s.calls[r])
		})
	}
	var waiting []int
	first := s.late
	for still := 0; still < 10; { // a frame may be in transit
		time.Sleep(time.Millisecond)
		now, settled := s.waiting()
		if still++; !settled || !slices.Equal(now, waiting) {
			still = 0
		}
		waiting = now
	}
	switch {
	case s.late >= 0:
		close(late)
	case len(waiting) == 0:
		close(s.absent)
		over.Wait()
		for r, err := range errs {
			if err != nil {
				t.Errorf("rank %d: %v", r, err)
			}
		}
		return nil
	default:
		first = who(waiting)
		close(s.alarms[first].done)
	}
	<-ended[first]
	for _, r := range waiting {
		if errs[first] == nil { // the frame that it waited for was in transit
			break
		}
		<-ended[r] // it is notified
	}
	for _, c := range s.comms {
		c.Abort(errors.New("the scene is over")) // a rank that no other rank needs keeps waiting
	}
	close(s.absent)
	over.Wait()
	return errs
}

// blamed returns the ranks that an error names.
func blamed(t *testing.T, err error) []int {
	t.Helper()
	e := (*collective.Error)(nil)
	if !errors.As(err, &e) || !errors.Is(err, collective.ErrTimeout) {
		t.Fatalf("got %v, want a deadline", err)
	}
	return e.Peers
}

// alonePlacement has ranks of one process that share only messages.
var alonePlacement = placement{"mem alone", func(_ testing.TB, n int) [][]transport.Endpoint {
	return perProcess(mem.New(n), 1)
}}

// anyCall returns a call of an operation for each rank.
func anyCall(random *rand.Rand, op collective.Op, n int) []*collective.Call {
	count, root := n*(1+random.IntN(40)), random.IntN(n)
	if random.IntN(8) == 0 {
		count = n * 9000 // several segments
	}
	calls := make([]*collective.Call, n)
	for r := range calls {
		all := func() tensor.Memory { return tensor.New(tensor.Float32, count).Memory() }
		own := tensor.New(tensor.Float32, count/n).Memory()
		calls[r] = &collective.Call{Op: op, Type: tensor.Float32, Root: root, Src: all(), Dst: all()}
		switch op {
		case collective.Barrier:
			calls[r] = named(barrier(), "late")
		case collective.AllGather, collective.Gather:
			calls[r].Src = own
		case collective.ReduceScatter, collective.Scatter:
			calls[r].Dst = own
		}
	}
	return calls
}

// TestFault checks, for every plan and transport, that whichever rank's deadline expires first, the error of every rank
// names exactly those that have not entered the call.
func TestFault(t *testing.T) {
	t.Parallel()
	scenes := 24
	if testing.Short() {
		scenes = 3 // each draws another plan
	}
	for _, p := range append(slices.Clone(placements), alonePlacement) {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			random := seeded(t)
			for range scenes {
				n := 2 + random.IntN(8)
				op := collective.AllReduce + collective.Op(random.IntN(int(collective.AllToAll)))
				cfg := collective.Config{Algorithm: plan.Algorithms[random.IntN(len(plan.Algorithms))].Name}
				s := p.cast(t, n, cfg)
				s.calls = anyCall(random, op, n)
				absent := random.Perm(n)[:1+random.IntN(min(2, n-1))]
				slices.Sort(absent)
				for _, r := range absent {
					s.calls[r] = nil
				}
				first := -1
				errs := s.play(t, func(waiting []int) int {
					first = waiting[random.IntN(len(waiting))]
					return first
				})
				what := fmt.Sprintf("%v by %s among %d, without %v, first %d", op, cfg.Algorithm, n, absent, first)
				if errs == nil && !op.Rooted() {
					t.Fatalf("%s: no rank waits", what)
				}
				for r, err := range errs {
					if s.calls[r] == nil || err == nil || strings.Contains(err.Error(), "the scene is over") {
						continue
					}
					got := blamed(t, err)
					if op.Rooted() && len(got) > 0 &&
						!slices.ContainsFunc(got, func(r int) bool { return !slices.Contains(absent, r) }) {
						continue // no other rank may need one of them
					}
					if !slices.Equal(got, absent) {
						t.Fatalf("%s: rank %d names %v: %v", what, r, got, err)
					}
				}
				s.close(t)
			}
		})
	}
}

// TestFaultOfChain checks that if each rank receives from the next, and the last one never sends, the errors of all
// ranks name the last one.
func TestFaultOfChain(t *testing.T) {
	t.Parallel()
	for _, p := range append(slices.Clone(placements), alonePlacement) {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			random := seeded(t)
			for range 4 {
				n := 3 + random.IntN(7)
				order := random.Perm(n)
				s := p.cast(t, n, collective.Config{})
				for i, r := range order[:n-1] {
					s.calls[r] = receive(order[i+1], make([]float32, 3))
				}
				first := order[random.IntN(n-1)]
				errs := s.play(t, func([]int) int { return first })
				if got := blamed(t, errs[first]); !slices.Equal(got, order[n-1:]) {
					t.Fatalf("%v: rank %d names %v: %v", order, first, got, errs[first])
				}
				s.close(t)
			}
		})
	}
}

// TestFaultOfCycle checks that ranks that all wait for each other are all named, and that the error states the cycle.
func TestFaultOfCycle(t *testing.T) {
	t.Parallel()
	for _, p := range append(slices.Clone(placements), alonePlacement) {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			const n = 5
			s := p.cast(t, n, collective.Config{})
			for r := range n - 1 { // 0 to 3 wait in a cycle, 4 waits for 0
				s.calls[r] = receive((r+1)%(n-1), make([]float32, 3))
			}
			s.calls[n-1] = receive(0, make([]float32, 3))
			errs := s.play(t, func([]int) int { return n - 1 })
			if got := blamed(t, errs[n-1]); !slices.Equal(got, []int{0, 1, 2, 3}) ||
				!strings.Contains(errs[n-1].Error(), "they wait for each other") {
				t.Errorf("rank %d names %v: %v", n-1, got, errs[n-1])
			}
			s.close(t)
		})
	}
}

// TestFaultAtTimeout checks that the error of the call's own deadline names the ranks at fault, with the chain of
// waits.
func TestFaultAtTimeout(t *testing.T) {
	t.Parallel()
	for _, p := range append(slices.Clone(placements), alonePlacement) {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			s := p.cast(t, 4, collective.Config{})
			for r := range 3 {
				s.calls[r] = receive(r+1, make([]float32, 3))
			}
			s.late = 0
			s.calls[0].Options = &collective.Options{Timeout: 100 * time.Millisecond}
			errs := s.play(t, nil)
			const says = `for rank 1, which waits for rank 2, which waits for rank 3 in recv float32 [3] from rank 1, ` +
				`rank 3 last entered call 1, barrier of "before"`
			if got := blamed(t, errs[0]); !slices.Equal(got, []int{3}) || !strings.Contains(errs[0].Error(), says) {
				t.Errorf("rank 0 names %v: %v", got, errs[0])
			}
			s.close(t)
		})
	}
}

// TestStallNamesRankAtFault checks the same for the report of a call that waits long.
func TestStallNamesRankAtFault(t *testing.T) {
	eachMode(t, func(t *testing.T, m mode) {
		synctest.Test(t, func(t *testing.T) {
			var log bytes.Buffer
			g := m.open(t, 4,
				collective.Config{Stall: time.Minute, Timeout: time.Hour, Logger: slog.New(slog.NewTextHandler(&log, nil))})
			defer shut(t, g)
			mustEach(t, g, func(c collective.Communicator) error {
				r := c.Rank()
				time.Sleep(time.Duration(r) * time.Second) // rank 0 reports first
				if r == 3 {
					time.Sleep(2 * time.Minute)
					return c.Do(background, send(2, []float32{1}))
				}
				if err := c.Do(background, receive(r+1, make([]float32, 1))); err != nil || r == 0 {
					return err
				}
				return c.Do(background, send(r-1, []float32{1}))
			})
			if got := strings.Count(log.String(), `waits_for="rank 3"`); got != 3 {
				t.Errorf("%d of 3 ranks name rank 3:\n%s", got, log.String())
			}
			if !strings.Contains(log.String(),
				"rank 0 waited 1m0s for rank 1, which waits for rank 2, which waits for rank 3 in recv") {
				t.Errorf("the chain of waits is not reported:\n%s", log.String())
			}
		})
	})
}
