package library_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/flight"
	"github.com/lockstep-ml/lockstep/collective/library"
	"github.com/lockstep-ml/lockstep/internal/librarytest"
)

// stuckSplit is a driver whose Split returns an error or, if it is nil, waits for the end of its context.
type stuckSplit struct {
	library.Driver
	err error
}

func (d stuckSplit) Split(ctx context.Context, _ bool, _ int) (library.Driver, error) {
	if d.err != nil {
		return nil, d.err
	}
	<-ctx.Done()
	return nil, context.Cause(ctx)
}

// TestSplitFails checks that a Split of the driver that fails, or never ends, fails the communicator on all local
// ranks, with one cause.
func TestSplitFails(t *testing.T) {
	enough := errors.New("enough")
	for name, c := range map[string]struct {
		err  error // of the driver
		end  func(cancel context.CancelCauseFunc, m collective.Communicator)
		kind error
		says string
	}{
		"error": {
			errors.New("no more communicators"), func(context.CancelCauseFunc, collective.Communicator) {},
			collective.ErrPeerLost, "splitting: no more communicators",
		},
		"deadline": {nil, func(context.CancelCauseFunc, collective.Communicator) {}, collective.ErrTimeout, "splitting"},
		"context": {
			nil, func(cancel context.CancelCauseFunc, _ collective.Communicator) { cancel(enough) }, enough, "enough",
		},
		"abort": {
			nil, func(_ context.CancelCauseFunc, m collective.Communicator) { m.Abort(enough) }, enough, "enough",
		},
		"close": {
			nil, func(_ context.CancelCauseFunc, m collective.Communicator) { go m.Close() }, collective.ErrClosed, "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				drivers, err := librarytest.Drivers(1)
				if err != nil {
					t.Fatal(err)
				}
				g, err := library.Open(library.Setup{
					Driver: stuckSplit{drivers[0], c.err}, Ranks: [][]int{{0, 1, 2}},
					Config: collective.Config{Timeout: 10 * time.Second},
				})
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithCancelCause(t.Context())
				defer cancel(nil)
				time.AfterFunc(time.Second, func() { c.end(cancel, g.Local()[1]) })
				errs := make(chan error)
				for _, m := range g.Local() {
					go func() {
						_, err := m.Split(ctx, 0, 0)
						errs <- err
					}()
				}
				first := <-errs
				for range 2 {
					if err := <-errs; err != first {
						t.Errorf("two errors: %v, %v", first, err)
					}
				}
				if !errors.Is(first, c.kind) || !strings.Contains(first.Error(), c.says) || g.Local()[0].Err() == nil {
					t.Errorf("%v, want %v with %q", first, c.kind, c.says)
				}
				g.Close()
			})
		})
	}
}

// TestSplitContextEnds checks the kind of the failure when the context of one rank ends while the driver splits:
// the rank that splits the driver, or one that waits for it.
func TestSplitContextEnds(t *testing.T) {
	for end, kind := range map[error]error{
		context.Canceled: collective.ErrAborted, context.DeadlineExceeded: collective.ErrTimeout,
	} {
		for rank := range 3 {
			synctest.Test(t, func(t *testing.T) {
				drivers, err := librarytest.Drivers(1)
				if err != nil {
					t.Fatal(err)
				}
				g, err := library.Open(library.Setup{
					Driver: stuckSplit{drivers[0], nil}, Ranks: [][]int{{0, 1, 2}},
					Config: collective.Config{Timeout: 10 * time.Second},
				})
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				if end == context.Canceled {
					time.AfterFunc(time.Second/2, cancel)
				}
				var ranks sync.WaitGroup
				for i, m := range g.Local() {
					ranks.Go(func() {
						own := t.Context()
						if i == rank {
							own = ctx
						}
						_, err := m.Split(own, 0, 0)
						e := (*collective.Error)(nil)
						if !errors.As(err, &e) || e.Kind != kind || e.Rank != rank || !errors.Is(err, end) {
							t.Errorf("the context of rank %d ends with %v: rank %d returns %v, want %v", rank, end, i, err, kind)
						}
					})
				}
				ranks.Wait()
				g.Close()
			})
		}
	}
}

// countedSplit is a driver that counts its parts that are open. before is called before each split.
type countedSplit struct {
	library.Driver
	before func(number int) error
	open   *int
	splits int
}

func (d *countedSplit) Split(_ context.Context, member bool, key int) (library.Driver, error) {
	d.splits++
	if err := d.before(d.splits); err != nil {
		return nil, err
	}
	part, err := d.Driver.Split(context.Background(), member, key)
	if err != nil || part == nil {
		return nil, err
	}
	*d.open++
	return &countedPart{part, d.open}, nil
}

type countedPart struct {
	library.Driver
	open *int
}

func (d *countedPart) Close(ctx context.Context, sound bool) error {
	*d.open--
	return d.Driver.Close(ctx, sound)
}

// TestSplitFailsLater checks that no part stays open after a Split that has made some of them, or whose result some
// ranks did not wait for.
func TestSplitFailsLater(t *testing.T) {
	enough := errors.New("enough")
	for name, c := range map[string]struct {
		color  func(rank int) int
		before func(number int) error
		early  bool // the ranks' contexts end while the driver splits
		says   string
	}{
		"at the third color": {
			color: func(rank int) int { return rank },
			before: func(number int) error {
				if number == 3 {
					return enough
				}
				return nil
			},
			says: "enough",
		},
		"one color": {
			color:  func(int) int { return 0 },
			before: func(int) error { time.Sleep(2 * time.Second); return nil },
			early:  true, says: "context canceled",
		},
		"two colors": {
			color:  func(rank int) int { return rank % 2 },
			before: func(int) error { time.Sleep(2 * time.Second); return nil },
			early:  true, says: "context canceled",
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				drivers, err := librarytest.Drivers(1)
				if err != nil {
					t.Fatal(err)
				}
				open := 0
				g, err := library.Open(library.Setup{
					Driver: &countedSplit{Driver: drivers[0], before: c.before, open: &open}, Ranks: [][]int{{0, 1, 2}},
					Config: collective.Config{Timeout: 10 * time.Second},
				})
				if err != nil {
					t.Fatal(err)
				}
				var ranks sync.WaitGroup
				for i, m := range g.Local() {
					ranks.Go(func() {
						ctx, cancel := context.WithCancel(t.Context())
						defer cancel()
						if c.early {
							time.AfterFunc(time.Second, cancel)
						}
						if _, err := m.Split(ctx, c.color(i), 0); err == nil || !strings.Contains(err.Error(), c.says) {
							t.Errorf("rank %d: %v, want an error with %q", i, err, c.says)
						}
					})
				}
				ranks.Wait()
				if !c.early && open != 0 {
					t.Errorf("%d parts are open after the failed Split, want none", open)
				}
				g.Close()
				if open != 0 {
					t.Errorf("%d parts are open after the group, want none", open)
				}
			})
		})
	}
}

// TestNextCallDuringRound checks that no rank uses the call of another one that has returned: the race detector
// would report it.
func TestNextCallDuringRound(t *testing.T) {
	groups := openGroups(t, []int{16}, collective.Config{})
	stop, read := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(read)
		for {
			select {
			case <-stop:
				return
			case <-time.After(100 * time.Microsecond):
				groups[0].Flights()
			}
		}
	}()
	var ranks sync.WaitGroup
	for _, m := range groups[0].Local() {
		ranks.Go(func() {
			for range 2000 {
				if err := m.Do(context.Background(), &collective.Call{Op: collective.Barrier}); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	ranks.Wait()
	close(stop)
	<-read
	closeAll(t, groups)
}

// TestWaitsFor checks that a waiting rank's record lists the local ranks that are still missing, and no rank once
// all of them wait for another process.
func TestWaitsFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		groups := openGroups(t, []int{3, 1}, collective.Config{})
		g := groups[0]
		check := func(arrived int, want []int, state flight.State) {
			for _, r := range g.Flights()[:arrived] {
				c := r.Calls[len(r.Calls)-1]
				if c.State != state || !slices.Equal(c.WaitsFor, want) {
					t.Errorf("%d ranks have arrived: rank %d is %s for ranks %v, want %s for %v",
						arrived, r.Rank, c.State, c.WaitsFor, state, want)
				}
			}
		}
		do := func(m collective.Communicator) {
			go func() { _ = m.Do(context.Background(), sum(1)) }() // may end with Abort
			synctest.Wait()
		}
		for i, want := range [][]int{{1, 2}, {2}, nil} {
			do(g.Local()[i])
			check(i+1, want, flight.Waiting)
		}
		do(groups[1].Local()[0])
		check(3, nil, flight.Done)
		for i, want := range [][]int{{1, 2}, {2}} {
			do(g.Local()[i])
			check(i+1, want, flight.Waiting)
		}
		for _, g := range groups {
			g.Local()[0].Abort(nil)
		}
		synctest.Wait()
		check(2, []int{2}, flight.Failed)
		for _, g := range groups {
			g.Close()
		}
	})
}
