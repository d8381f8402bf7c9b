package collective_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/flight"
)

// separate opens the groups of n ranks, each of which is a process to the others.
func separate(t *testing.T, n int, cfg func(rank int) collective.Config) []collective.Group {
	t.Helper()
	groups := make([]collective.Group, n)
	for r, ends := range openMixed(t, n, 1, 0) {
		g, err := collective.Open(ends, cfg(r))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { g.Close() })
		groups[r] = g
	}
	return groups
}

// TestDescribe checks that the rank that finds a failure describes the ranks concerned, and that the notified ranks get
// this description and the sender. Ranks of a communicator made by Split are described by their numbers in the first
// communicator.
func TestDescribe(t *testing.T) {
	for _, split := range []bool{false, true} {
		t.Run(fmt.Sprintf("split %v", split), func(t *testing.T) {
			var asked [3]atomic.Int32
			groups := separate(t, 3, func(rank int) collective.Config {
				return collective.Config{
					Stall: -1,
					Describe: func(e *collective.Error) string {
						asked[rank].Add(1)
						if e.Rank == rank {
							return fmt.Sprintf("rank %d asks who %v are", rank, e.Peers)
						}
						return fmt.Sprintf("rank %d was notified by %d", rank, e.Rank)
					},
				}
			})
			comms := make([]collective.Communicator, 3)
			for r, g := range groups {
				comms[r] = g.Local()[0]
			}
			if split { // the last becomes the first
				var wg sync.WaitGroup
				for r, c := range comms {
					wg.Go(func() {
						part, err := c.Split(context.Background(), 0, -r)
						if err != nil {
							t.Error(err)
							return
						}
						comms[r] = part
						t.Cleanup(func() { part.Close() })
					})
				}
				wg.Wait()
				if t.Failed() {
					t.FailNow()
				}
			}
			// Rank 2 makes no call. The deadline is when both others wait: earlier each might miss the other.
			errs, late := make([]error, 2), newAlarm()
			var wg sync.WaitGroup
			for r := range errs {
				wg.Go(func() { errs[r] = comms[r].Do(late, barrier()) })
			}
			for r := range errs {
				for !waitsInCall(groups[r]) {
					time.Sleep(time.Millisecond)
				}
			}
			close(late.done)
			wg.Wait()
			for r, err := range errs {
				var e *collective.Error
				if !errors.As(err, &e) || !strings.Contains(e.Who, "asks who [2] are") ||
					!strings.Contains(err.Error(), "\n  rank ") {
					t.Errorf("rank %d: %v", r, err)
					continue
				}
				if asked[r].Load() != 1 {
					t.Errorf("rank %d was queried %d times", r, asked[r].Load())
				}
			}
		})
	}
}

// TestDescribeLate checks that a slow description does not delay the failure on other ranks: they return without it and
// request their own description. The rank that found the failure gets the slow description.
func TestDescribeLate(t *testing.T) {
	reported := make(chan struct{})
	var late atomic.Bool
	groups := separate(t, 3, func(rank int) collective.Config {
		return collective.Config{Stall: -1, Describe: func(e *collective.Error) string {
			if rank != 0 {
				return fmt.Sprintf("rank %d was notified by %d", rank, e.Rank)
			}
			select {
			case <-reported:
			case <-time.After(20 * time.Second):
				late.Store(true)
			}
			return "found at last"
		}}
	})
	errs := make([]error, 2)
	alarm := newAlarm() // of rank 0: rank 2 makes no call
	contexts := []context.Context{alarm, context.Background()}
	var found, other sync.WaitGroup
	found.Go(func() { errs[0] = groups[0].Local()[0].Do(contexts[0], barrier()) })
	other.Go(func() { errs[1] = groups[1].Local()[0].Do(contexts[1], barrier()) })
	for _, g := range groups[:2] {
		for !waitsInCall(g) {
			time.Sleep(time.Millisecond)
		}
	}
	close(alarm.done)
	other.Wait()
	close(reported)
	found.Wait()
	if late.Load() {
		t.Error("rank 1 waited for rank 0's description")
	}
	for r, want := range []string{"found at last", "rank 1 was notified by 0"} {
		var e *collective.Error
		if !errors.As(errs[r], &e) || e.Who != want || e.Kind != collective.ErrTimeout {
			t.Errorf("rank %d: %v, want %q", r, errs[r], want)
		}
	}
}

// waitsInCall reports whether the only rank of a group waits for others.
func waitsInCall(g collective.Group) bool {
	return slices.ContainsFunc(g.Flights(), func(r flight.Rank) bool {
		n := len(r.Calls)
		return n > 0 && r.Calls[n-1].State == flight.Waiting
	})
}

// TestProgress checks that Progress returns, to any goroutine, how many calls a rank has made and which one it is in.
func TestProgress(t *testing.T) {
	groups := separate(t, 2, func(int) collective.Config { return collective.Config{Stall: -1} })
	first, second := groups[0].Local()[0], groups[1].Local()[0]
	if begun, over, call := first.Progress(); begun != 0 || over != 0 || call != "" {
		t.Errorf("before the first call: %d, %d, %q", begun, over, call)
	}
	done := make(chan error)
	go func() {
		done <- first.Do(context.Background(), named(sum(make([]float32, 3), make([]float32, 3)), "w", 3))
	}()
	for {
		begun, over, call := first.Progress()
		if begun == 1 && over == 0 && strings.Contains(call, `all_reduce SUM float32 [3] of "w"`) {
			break
		}
		if begun > 1 || over > 0 {
			t.Fatalf("in the first call: %d, %d, %q", begun, over, call)
		}
		time.Sleep(time.Millisecond)
	}
	if err := second.Do(context.Background(), named(sum(make([]float32, 3), make([]float32, 3)), "w", 3)); err != nil {
		t.Error(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	if begun, over, call := first.Progress(); begun != 1 || over != 1 || call != "" {
		t.Errorf("after the first call: %d, %d, %q", begun, over, call)
	}
}
