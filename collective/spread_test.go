package collective_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// allFail fails the test unless every rank has an error of that kind whose text contains all the words.
func allFail(t *testing.T, errs []error, kind error, words ...string) {
	t.Helper()
	for rank, err := range errs {
		var e *collective.Error
		if !errors.Is(err, kind) || !errors.As(err, &e) {
			t.Errorf("rank %d: got %v, want a *collective.Error that is %q", rank, err, kind)
			continue
		}
		for _, word := range words {
			if !strings.Contains(err.Error(), word) {
				t.Errorf("rank %d: %q\ndoes not contain %q", rank, err, word)
			}
		}
	}
}

// eachPlacement runs a test in every placement, with groups that have a deadline, which no test reaches.
func eachPlacement(t *testing.T, n int, run func(t *testing.T, w *world)) {
	for _, p := range placements {
		t.Run(p.name, func(t *testing.T) {
			start := time.Now()
			w := p.world(t, n, collective.Config{Timeout: 5 * time.Minute})
			defer w.close(t)
			run(t, w)
			if waited := time.Since(start); waited > 4*time.Minute {
				t.Errorf("it took %v: a call waited for the deadline", waited)
			}
		})
	}
}

// thenBarriers makes a call, and some barriers: a rank that had done its part before a mistake was detected gets the
// error in one of these.
func thenBarriers(c collective.Communicator, call *collective.Call) error {
	err := c.Do(background, call)
	for i := 0; err == nil && i < 10; i++ {
		err = c.Do(background, barrier())
	}
	return err
}

// TestMismatchEverywhere checks that different calls are an error on every rank, in any placement, that names the field
// and the deviating rank, with the texts of the hashes; also if no frame is sent, because all ranks wait to receive.
func TestMismatchEverywhere(t *testing.T) {
	t.Parallel()
	vector := func(n int) tensor.Memory { return tensor.New(tensor.Float32, n).Memory() }
	call := func(op collective.Op, name string) *collective.Call {
		c := &collective.Call{
			Op: op, Type: tensor.Float32, Src: vector(20), Dst: vector(20), Manifest: &collective.Manifest{Name: name},
		}
		if op == collective.AllGather || op == collective.Gather {
			c.Src = vector(5)
		}
		return c
	}
	rooted := func(op collective.Op, root int) *collective.Call {
		c := call(op, "w")
		c.Root = root
		return c
	}
	counts := func(counts ...int) *collective.Call {
		c := call(collective.AllGather, "w")
		c.Counts, c.Src = counts, vector(5)
		return c
	}
	for _, test := range []struct {
		name      string
		odd, rest *collective.Call
		says      []string
	}{
		{
			"operation", call(collective.Reduce, "w"), call(collective.AllReduce, "w"),
			[]string{"the operations differ", "reduce SUM float32 [20]"},
		},
		{
			"name", call(collective.AllReduce, "b"), call(collective.AllReduce, "w"),
			[]string{"the names differ", `of "b"`, `of "w"`},
		},
		{"crossed roots", rooted(collective.Broadcast, 0), rooted(collective.Broadcast, 3), []string{"the roots differ"}},
		{
			"roots of a reduction", rooted(collective.Reduce, 0), rooted(collective.Reduce, 3),
			[]string{"reduce SUM float32 [20]"},
		},
		{
			"counts by rank", counts(4, 6, 5, 5), counts(6, 4, 5, 5),
			[]string{"the counts by rank differ", "in parts of [4 6 5 5]"},
		},
		{
			"gather or all_gather", call(collective.Gather, "w"), call(collective.AllGather, "w"),
			[]string{"the operations differ"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			const n, odd = 4, 3
			eachPlacement(t, n, func(t *testing.T, w *world) {
				errs := w.each(func(c collective.Communicator) error {
					if err := c.Do(background, barrier()); err != nil {
						return err
					}
					own := *test.rest
					if c.Rank() == odd {
						own = *test.odd
					}
					own.Src, own.Dst = vector(own.Src.Bytes/4), vector(own.Dst.Bytes/4)
					if own.Op == collective.AllGather && own.Counts != nil {
						own.Src = vector(own.Counts[c.Rank()])
					}
					return thenBarriers(c, &own)
				})
				allFail(t, errs, collective.ErrMismatch, append([]string{"rank"}, test.says...)...)
			})
		})
	}
}

// TestAbortEverywhere checks that Abort on one rank ends the calls of all ranks, with the text of its cause.
func TestAbortEverywhere(t *testing.T) {
	eachPlacement(t, 4, func(t *testing.T, w *world) {
		errs := w.each(func(c collective.Communicator) error {
			for i := 0; ; i++ {
				if c.Rank() == 2 && i == 3 {
					c.Abort(errors.New("the disk is full"))
				}
				if err := c.Do(background, barrier()); err != nil {
					return err
				}
			}
		})
		allFail(t, errs, collective.ErrAborted, "the disk is full")
	})
}

// slowNotifier is an endpoint that is slow to notify the peers of its rank's failure.
type slowNotifier struct {
	transport.Endpoint
	notified *atomic.Bool
}

func (s slowNotifier) Fail(reason []byte) {
	time.Sleep(50 * time.Millisecond)
	s.Endpoint.Fail(reason)
	s.notified.Store(true)
}

// TestPeersAreNotifiedFirst checks that a call returns a failure only after the peers have been notified of it.
// Otherwise, if a rank closes its endpoint at once, the peers would get only that.
func TestPeersAreNotifiedFirst(t *testing.T) {
	ends := mem.NewPipes(2)
	notified := &atomic.Bool{}
	ends[0] = slowNotifier{ends[0], notified}
	var comms []collective.Communicator
	for _, end := range ends {
		g, err := collective.Open([]transport.Endpoint{end}, collective.Config{Timeout: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		comms = append(comms, g.Local()...)
	}
	time.AfterFunc(10*time.Millisecond, func() { comms[0].Abort(errors.New("the disk is full")) })
	if err := comms[0].Do(background, barrier()); err == nil || !notified.Load() {
		t.Errorf("got %v; the peer was notified before: %v", err, notified.Load())
	}
	if err := comms[0].Close(); err != nil {
		t.Error(err)
	}
	if err := comms[1].Do(background, barrier()); err == nil || !strings.Contains(err.Error(), "the disk is full") {
		t.Errorf("the peer got %v", err)
	}
	if err := comms[1].Close(); err != nil {
		t.Error(err)
	}
}

// TestCloseEverywhere checks that a rank that leaves is lost for all others, including those that do not wait for it
// themselves.
func TestCloseEverywhere(t *testing.T) {
	eachPlacement(t, 4, func(t *testing.T, w *world) {
		errs := w.each(func(c collective.Communicator) error {
			for i := 0; ; i++ {
				if c.Rank() == 2 && i == 3 {
					return c.Close()
				}
				if err := c.Do(background, barrier()); err != nil {
					return err
				}
			}
		})
		if errs[2] != nil {
			t.Errorf("Close: %v", errs[2])
		}
		errs[2] = errs[1]
		allFail(t, errs, collective.ErrPeerLost, "rank 2")
	})
}

// TestStuckEverywhere checks that a rank that makes no call causes a timeout on all others, whose error names it and
// its last call.
func TestStuckEverywhere(t *testing.T) {
	t.Parallel()
	for _, p := range placements {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			w := p.world(t, 4, collective.Config{})
			defer w.close(t)
			stuck := make(chan struct{})
			var others sync.WaitGroup
			others.Add(3)
			go func() { others.Wait(); close(stuck) }()
			errs := w.each(func(c collective.Communicator) error {
				if err := c.Do(background, named(barrier(), "before")); err != nil {
					return err
				}
				if c.Rank() == 0 {
					<-stuck
					return thenBarriers(c, barrier()) // what the others sent before they gave up is enough for one
				}
				defer others.Done()
				call := barrier()
				if c.Rank() == 3 {
					call.Options = &collective.Options{Timeout: 300 * time.Millisecond}
				}
				return c.Do(background, call)
			})
			allFail(t, errs, collective.ErrTimeout, "waited ", `rank 0 last entered call 0, barrier of "before"`)
			allFail(t, errs, context.DeadlineExceeded)
		})
	}
}

// rebuild rebuilds the groups of all processes concurrently, and returns the world of the new ones.
func (w *world) rebuild(t *testing.T) *world {
	next := &world{}
	var mu sync.Mutex
	var rebuilding sync.WaitGroup
	next.comms = make([]collective.Communicator, len(w.comms))
	for _, g := range w.groups {
		rebuilding.Go(func() {
			g, err := g.Rebuild(background)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			next.groups = append(next.groups, g)
			for _, c := range g.Local() {
				next.comms[c.Rank()] = c
			}
		})
	}
	rebuilding.Wait()
	return next
}

// TestSplitAndRebuildEverywhere checks parts, and the same ranks at the next epoch, over every transport.
func TestSplitAndRebuildEverywhere(t *testing.T) {
	eachPlacement(t, 5, func(t *testing.T, w *world) {
		check := func(c collective.Communicator) error {
			part, err := c.Split(background, c.Rank()%2, -c.Rank())
			if err != nil {
				return err
			}
			x := []float32{float32(c.Rank()), 1}
			if err := part.Do(background, sum(x, x)); err != nil {
				return err
			}
			if want := []float32{6, 4}[c.Rank()%2]; x[0] != want || x[1] != float32(part.Size()) {
				return fmt.Errorf("the part's sum is %v, want %v", x, want)
			}
			return errors.Join(c.Do(background, barrier()), part.Close())
		}
		for rank, err := range w.each(check) {
			if err != nil {
				t.Fatalf("rank %d: %v", rank, err)
			}
		}
		w.comms[3].Abort(errors.New("enough"))
		next := w.rebuild(t)
		if t.Failed() {
			return
		}
		w.groups = next.groups // to be closed
		for rank, err := range next.each(check) {
			if err != nil {
				t.Fatalf("rank %d, rebuilt: %v", rank, err)
			}
		}
	})
}

// refusing is an endpoint whose first Split fails.
type refusing struct {
	transport.Endpoint
	refused bool
}

var errRefused = errors.New("no more endpoints")

func (e *refusing) Split(id uint64, ranks []int) (transport.Endpoint, error) {
	if !e.refused {
		e.refused = true
		return nil, errRefused
	}
	return e.Endpoint.Split(id, ranks)
}

// TestRebuildAgainEverywhere checks that a Rebuild works after one that failed on the last rank of every process, when
// the ranks before it had endpoints already.
func TestRebuildAgainEverywhere(t *testing.T) {
	for _, p := range placements {
		t.Run(p.name, func(t *testing.T) {
			refuses := placement{p.name, func(t testing.TB, n int) [][]transport.Endpoint {
				processes := p.open(t, n)
				for _, ends := range processes {
					last := len(ends) - 1
					ends[last] = &refusing{Endpoint: ends[last]}
				}
				return processes
			}}
			w := refuses.world(t, 6, collective.Config{Timeout: time.Minute})
			defer func() { w.close(t) }()
			for _, g := range w.groups {
				if _, err := g.Rebuild(background); !errors.Is(err, errRefused) {
					t.Errorf("the first Rebuild returned %v, want %v", err, errRefused)
				}
			}
			next := w.rebuild(t)
			if t.Failed() {
				return
			}
			w.groups = next.groups // to be closed
			for rank, err := range next.each(func(c collective.Communicator) error { return c.Do(background, barrier()) }) {
				if err != nil {
					t.Errorf("rank %d, rebuilt: %v", rank, err)
				}
			}
		})
	}
}

// TestTwoCommunicators makes 1,000 calls from each of two goroutines of every rank, each on a separate communicator
// over the same endpoints, and checks that the communicators do not mix.
func TestTwoCommunicators(t *testing.T) {
	calls := 1000
	if testing.Short() {
		calls = 200 // for time: it shows the same
	}
	eachPlacement(t, 4, func(t *testing.T, w *world) {
		errs := w.each(func(c collective.Communicator) error {
			var parts [2]collective.Communicator
			for i := range parts {
				var err error
				if parts[i], err = c.Split(background, 0, c.Rank()); err != nil {
					return err
				}
				defer parts[i].Close()
			}
			results := make(chan error, 2)
			for i, part := range parts {
				go func() {
					results <- func() error {
						x := make([]float32, 3)
						for k := range calls {
							for j := range x {
								x[j] = float32(i*100_000 + k)
							}
							if err := part.Do(background, sum(x, x)); err != nil {
								return err
							}
							if want := float32(4 * (i*100_000 + k)); x[0] != want || x[2] != want {
								return fmt.Errorf("call %d of communicator %d gave %v, want %v", k, i, x, want)
							}
						}
						return nil
					}()
				}()
			}
			return errors.Join(<-results, <-results, c.Do(background, barrier()))
		})
		for rank, err := range errs {
			if err != nil {
				t.Errorf("rank %d: %v", rank, err)
			}
		}
	})
}
