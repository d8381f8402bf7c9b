package waiting

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/internal/affinity"
)

// peer is the awaited rank of a test.
type peer struct {
	polls    int    // until the wait is over; -1: never
	moves    uint64 // progress of each poll
	progress uint64
	each     time.Duration // of a poll
	count    int           // of polls
	naps     bool
	slept    func() // called by naps and parks, if not nil
	calls    []string
	err      error
}

func (p *peer) Poll() bool {
	if p.count++; p.each > 0 {
		time.Sleep(p.each)
	}
	if p.progress += p.moves; p.polls > 0 {
		p.polls--
	}
	return p.polls == 0
}

func (p *peer) Progress() uint64 { return p.progress }

func (p *peer) sleep(how string) {
	p.calls = append(p.calls, how)
	if p.slept != nil {
		p.slept()
	}
}

func (p *peer) Nap(time.Duration) bool {
	if p.naps {
		p.sleep("nap")
	}
	return p.naps
}

func (p *peer) Park(context.Context) error {
	p.sleep("park")
	return p.err
}

func in(room Room) func(time.Time) Room { return func(time.Time) Room { return room } }

// TestSleeps checks by what calls a wait sleeps until its condition becomes true. Polling takes no time.
func TestSleeps(t *testing.T) {
	for _, c := range []struct {
		name string
		cfg  Config
		naps bool
		each time.Duration // of a sleep
		want []string
	}{
		{"without room", Config{Room: in(None)}, true, time.Millisecond, []string{"park", "park", "park"}},
		{"without CPU time", Config{Room: in(None), Nap: NapMost}, true, time.Millisecond, []string{"nap", "nap", "nap"}},
		{"with CPUs", Config{Room: in(Own), Nap: NapMost}, true, time.Millisecond, []string{"nap", "nap", "nap"}},
		{"shared CPUs", Config{Room: in(Shared), Nap: NapMost}, true, time.Millisecond, []string{"nap", "nap", "nap"}},
		{"no naps", Config{Room: in(Own), Goroutines: true}, true, time.Millisecond, []string{"park", "park", "park"}},
		{"naps fail", Config{Room: in(Own), Nap: NapMost}, false, time.Millisecond, []string{"park", "park", "park"}},
		{"long naps", Config{Room: in(Own), Nap: NapMost}, true, parkEvery * 2 / 3, []string{"nap", "nap", "park"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c.cfg.Batch = 1
				w := New(c.cfg)
				p := &peer{polls: -1, naps: c.naps}
				p.slept = func() {
					if time.Sleep(c.each); len(p.calls) == len(c.want) {
						p.polls = 1
					}
				}
				if err := w.Wait(t.Context(), p); err != nil || !slices.Equal(p.calls, c.want) {
					t.Errorf("it sleeps by %v (%v), want %v", p.calls, err, c.want)
				}
			})
		})
	}
}

// TestPolls checks that a wait polls without sleeping, if there is room, and ends with the error of Park.
func TestPolls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &peer{polls: batchesFirst + roundsStill}
		w := New(Config{Room: in(Own), Batch: 1, Nap: NapMost})
		if err := w.Wait(t.Context(), p); err != nil || p.calls != nil {
			t.Errorf("a wait with CPUs ends with %v after %v, want neither", err, p.calls)
		}
		p = &peer{polls: roundsStill}
		w = New(Config{Room: in(None), Batch: 1, Nap: NapMost})
		p.err = errors.New("down")
		if err := w.Wait(t.Context(), p); err != p.err || p.polls != roundsStill-1 {
			t.Errorf("a wait without room ends with %v and %d polls, want %v and one", err, roundsStill-p.polls, p.err)
		}
	})
}

// TestExhaust checks that polling goes on while that makes progress.
func TestExhaust(t *testing.T) {
	if p := (&peer{polls: 100, moves: 1}); !Exhaust(p) {
		t.Errorf("it ended %d polls early, while each makes progress", p.polls)
	}
	if p := (&peer{polls: 100}); Exhaust(p) || p.polls != 99 {
		t.Errorf("%d polls without progress, want one", 100-p.polls)
	}
}

// TestHandovers checks which waits count as handovers of the processor: those that end with the first poll after a
// yield, in succession.
func TestHandovers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := New(Config{Room: in(Own), Batch: 1, Goroutines: true})
		for i, c := range []struct{ polls, want int }{
			{batchesFirst, 0},
			{batchesFirst + batchesOwn, 0},
			{batchesFirst + batchesOwn + 1, 1},
			{batchesOwn + 1, 2}, // the first polls are left out
			{2*(batchesOwn+1) - 1, 0},
			{batchesFirst + 2*(batchesOwn+1), 1},
			{2 * (batchesOwn + 1), 2},
			{1, 0},
		} {
			if err := w.Wait(t.Context(), &peer{polls: c.polls}); err != nil || w.handovers != c.want {
				t.Errorf("wait %d, of %d polls: %d handovers (%v), want %d", i, c.polls, w.handovers, err, c.want)
			}
		}
	})
}

// TestLook checks that a change of the room is noticed.
func TestLook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		room := None
		w := New(Config{Room: func(time.Time) Room { return room }, Batch: 1})
		for _, room = range []Room{Own, Shared, None, Own} {
			for range lookEvery {
				w.Wait(t.Context(), &peer{polls: batchesFirst + 1})
			}
			if w.room != room {
				t.Errorf("the room is %v, want %v", w.room, room)
			}
		}
	})
}

// TestNoTurns checks that a rank takes no turns for a while where a yielded CPU did not return soon.
func TestNoTurns(t *testing.T) {
	if !affinity.CanYield {
		t.Skip("this system has no yield")
	}
	synctest.Test(t, func(t *testing.T) {
		w := New(Config{Room: in(Shared), Batch: 1, Pause: time.Second})
		wait := func(each time.Duration) (polls int) {
			p := &peer{polls: -1, each: each}
			p.slept = func() { polls, p.polls, p.each = p.count, 1, 0 }
			if err := w.Wait(t.Context(), p); err != nil {
				t.Error(err)
			}
			return polls
		}
		const turns = 2*(roundsStill+1) + 1
		if got := wait(0); got != turns {
			t.Errorf("%d polls before it sleeps, want %d", got, turns)
		}
		if got := wait(turnsTime + 1); got != 3 {
			t.Errorf("%d polls before it sleeps, as others compute, want 3", got)
		}
		time.Sleep(time.Second - (turnsTime + 1) - 1) // the last poll has slept, too
		if got := wait(0); got != 1 {
			t.Errorf("%d polls before it sleeps, in the pause, want 1", got)
		}
		time.Sleep(time.Nanosecond)
		if got := wait(0); got != turns {
			t.Errorf("%d polls before it sleeps, after the pause, want %d", got, turns)
		}
	})
}

func TestIsSlow(t *testing.T) {
	for _, c := range []struct {
		what  string
		bytes uint64
		slept time.Duration
		want  bool
	}{
		{"1 Gbit/s", 64 << 10, 524 * time.Microsecond, true},
		{"10 Gbit/s", 256 << 10, 210 * time.Microsecond, false},
		{"a short pause", 4, 50 * time.Microsecond, false},
		{"nothing arrived", 0, 5 * time.Millisecond, true},
		{"a fast peer that began late", 256 << 10, 500 * time.Microsecond, false},
	} {
		if got := isSlow(c.bytes, c.slept); got != c.want {
			t.Errorf("%s: %d bytes in %v are slow: %v, want %v", c.what, c.bytes, c.slept, got, c.want)
		}
	}
}
