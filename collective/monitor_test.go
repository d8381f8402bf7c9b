package collective_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
)

// recorder is a monitor that records its calls.
type recorder struct {
	mu       sync.Mutex
	events   []string
	refuse   error // what Park returns
	explains int
	children map[string]*recorder
	released []string
}

func (r *recorder) note(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, fmt.Sprintf(format, args...))
}

func (r *recorder) of(rank int) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []string
	for _, e := range r.events {
		if e[0] == byte('0'+rank) {
			out = append(out, e[2:])
		}
	}
	return out
}

func (r *recorder) Enter(rank int, seq uint64, call *collective.Call) {
	r.note("%d enter %d %v", rank, seq, call.Op)
}

func (r *recorder) Park(rank int, seq uint64, _ *collective.Call) error {
	r.note("%d park %d", rank, seq)
	return r.refuse
}

func (r *recorder) Unpark(rank int) { r.note("%d unpark", rank) }

func (r *recorder) Leave(rank int, seq uint64, _ *collective.Call, err error) {
	r.note("%d leave %d %v", rank, seq, err)
}

var errExplained = errors.New("explained")

func (r *recorder) Explain(_ int, err error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.explains++
	return fmt.Errorf("%w: %w", errExplained, err)
}

func (r *recorder) Split(name string, ranks []int, _ func(error)) (collective.Monitor, func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	name = fmt.Sprintf("%s %v", name, ranks)
	child := &recorder{}
	if r.children[name] != nil {
		panic("Split called twice for " + name)
	}
	if r.children == nil {
		r.children = map[string]*recorder{}
	}
	r.children[name] = child
	return child, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.released = append(r.released, name)
	}
}

func TestMonitorOrder(t *testing.T) {
	eachMode(t, func(t *testing.T, m mode) {
		synctest.Test(t, func(t *testing.T) {
			r := &recorder{}
			g := m.open(t, 2, collective.Config{Monitor: r})
			defer shut(t, g)
			mustEach(t, g, func(c collective.Communicator) error {
				time.Sleep(time.Duration(c.Rank()) * time.Second)
				if err := c.Do(background, sum(nil, nil)); err != nil {
					return err
				}
				// rank 0 waits for rank 1 again: a call that has ended parks no rank
				time.Sleep(time.Duration(10+c.Rank()) * time.Second)
				h, err := c.Start(background, barrier())
				if err != nil {
					return err
				}
				return h.Wait(background)
			})
			got := r.of(0)
			want := []string{
				"enter 0 all_reduce", "park 0", "unpark", "leave 0 <nil>", "enter 1 barrier", "park 1", "unpark", "leave 1 <nil>",
			}
			if !slices.Equal(got, want) {
				t.Errorf("rank 0:\n got %q\nwant %q", got, want)
			}
			if got := r.of(1); got[0] != "enter 0 all_reduce" || got[len(got)-1] != "leave 1 <nil>" {
				t.Errorf("rank 1: %q", got)
			}
		})
	})
}

// TestMonitorExplains checks that Explain runs once, before any rank is notified, and that every rank returns its
// result.
func TestMonitorExplains(t *testing.T) {
	causes := map[string]func(collective.Communicator) error{
		"mismatch": func(c collective.Communicator) error {
			if c.Rank() == 1 {
				return c.Do(background, barrier())
			}
			return c.Do(background, sum(nil, nil))
		},
		"deadline": func(c collective.Communicator) error {
			if c.Rank() == 1 {
				time.Sleep(time.Hour)
			}
			return c.Do(background, barrier())
		},
		"context": func(c collective.Communicator) error {
			ctx, cancel := context.WithTimeout(background, time.Second)
			defer cancel()
			if c.Rank() == 1 {
				time.Sleep(time.Hour)
			}
			return c.Do(ctx, barrier())
		},
		"wrong call": func(c collective.Communicator) error { return c.Do(background, &collective.Call{}) },
		"peer lost": func(c collective.Communicator) error {
			if c.Rank() == 1 {
				c.Close()
				return c.Err()
			}
			return c.Do(background, barrier())
		},
	}
	for name, cause := range causes {
		t.Run(name, func(t *testing.T) {
			eachMode(t, func(t *testing.T, m mode) {
				synctest.Test(t, func(t *testing.T) {
					r := &recorder{}
					g := m.open(t, 3, collective.Config{Monitor: r})
					defer shut(t, g)
					errs := each(g, cause)
					if name == "peer lost" {
						errs = slices.Delete(errs, 1, 2)
					}
					same(t, errs, errExplained)
					if r.explains != 1 {
						t.Errorf("explained %d times, want once", r.explains)
					}
				})
			})
		})
	}
}

// TestMonitorRefuses checks that the call returns the error of Park unchanged.
func TestMonitorRefuses(t *testing.T) {
	eachMode(t, func(t *testing.T, m mode) {
		for _, async := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				refusal := &collective.Error{Kind: collective.ErrDesync, Rank: -1, Err: errors.New("proven")}
				r := &recorder{refuse: refusal}
				g := m.open(t, 2, collective.Config{Monitor: r})
				defer shut(t, g)
				errs := each(g, func(c collective.Communicator) error {
					if c.Rank() == 1 {
						time.Sleep(time.Hour)
					}
					if async {
						h, err := c.Start(background, barrier())
						if err != nil {
							return err
						}
						return h.Wait(background)
					}
					return c.Do(background, barrier())
				})
				same(t, errs, collective.ErrDesync, "proven")
				if errs[0] != refusal || r.explains != 0 {
					t.Errorf("got %v after %d explanations, want the error of the monitor and none", errs[0], r.explains)
				}
			})
		}
	})
}

func TestMonitorSplits(t *testing.T) {
	r := &recorder{children: map[string]*recorder{}}
	g := modes[0].opened(t, 3, collective.Config{Monitor: r})
	mustEach(t, g, func(c collective.Communicator) error {
		sub, err := c.Split(background, c.Rank()%2, -c.Rank())
		if err != nil {
			return err
		}
		return errors.Join(sub.Do(background, barrier()), sub.Close())
	})
	slices.Sort(r.released)
	want := []string{"world/1.0 [2 0]", "world/1.1 [1]"}
	if !slices.Equal(r.released, want) {
		t.Errorf("released %q, want %q", r.released, want)
	}
	if got := r.children[want[0]].of(1); len(got) == 0 || got[0] != "enter 0 barrier" {
		t.Errorf("the part's monitor recorded %q of its rank 1", got)
	}
}

// TestWatchPairs checks that a monitor that is attached later watches calls of two ranks too.
func TestWatchPairs(t *testing.T) {
	g := modes[0].opened(t, 2, collective.Config{})
	r := &recorder{}
	g.Watch(r)
	mustEach(t, g, func(c collective.Communicator) error {
		call := &collective.Call{Op: collective.Send, Type: tensor.Float32, Peer: 1 - c.Rank()}
		if c.Rank() == 1 {
			call.Op = collective.Recv
		}
		return c.Do(background, call)
	})
	for rank, op := range []string{"send", "recv"} {
		want := []string{"enter 0 " + op, "leave 0 <nil>"}
		// Whether a rank must wait for the other depends on which of them is first.
		got := slices.DeleteFunc(r.of(rank), func(event string) bool { return strings.Contains(event, "park") })
		if !slices.Equal(got, want) {
			t.Errorf("rank %d: got %q, want %q", rank, got, want)
		}
	}
}
