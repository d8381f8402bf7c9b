package tcp

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/internal/affinity"
	"github.com/lockstep-ml/lockstep/transport"
)

// crowdedPair returns two ranks that take turns, as with more ranks than processors.
func crowdedPair(t *testing.T) [2]*endpoint {
	t.Helper()
	_, ends := pair(t, Config{})
	for _, e := range ends {
		e.group.world.block, e.group.world.crowded = true, true
		e.group.world.room = affinity.NewRoom(affinity.ListMax + 1)
		t.Cleanup(func() { e.Close() })
	}
	works(t, ends)
	return ends
}

// TestTurns checks that ranks that take turns exchange frames of all sizes, including those that fill the send buffers
// of both, and that a wait for a peer that sends nothing ends by its context.
func TestTurns(t *testing.T) {
	ends := crowdedPair(t)
	var all sync.WaitGroup
	for i, e := range ends {
		all.Go(func() {
			for round, bytes := range []int{0, 1, 4, 1000, smallBytes, 100_000, 3 << 20, 5} {
				out, in := make([]byte, bytes), make([]byte, bytes)
				for at := range out {
					out[at] = byte(at*7 + round + i)
				}
				if err := e.Exchange(t.Context(), 1-i, transport.Frame{Data: out}, 1-i, in); err != nil {
					t.Errorf("rank %d, %d bytes: %v", i, bytes, err)
					return
				}
				for at := range in {
					if want := byte(at*7 + round + 1 - i); in[at] != want {
						t.Errorf("rank %d, %d bytes: got %d at %d, want %d", i, bytes, in[at], at, want)
						return
					}
				}
			}
		})
	}
	all.Wait()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := ends[0].Exchange(ctx, -1, transport.Frame{}, 1, make([]byte, 4)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a wait for a frame that is not sent: %v, want %v", err, context.DeadlineExceeded)
	}
}

// TestNoTurns checks that a rank that shares its processor with a goroutine that computes takes no turns with it for a
// while, and still receives frames.
func TestNoTurns(t *testing.T) {
	ends := crowdedPair(t)
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	var stop atomic.Bool
	var others sync.WaitGroup
	others.Go(func() {
		for !stop.Load() {
			for since := time.Now(); time.Since(since) < 2*turnsTime; {
			}
			runtime.Gosched()
		}
	})
	e, began, in := ends[0], time.Now(), make([]byte, 4)
	if err := e.begin(-1, transport.Frame{}, 1, in); err != nil {
		t.Fatal(err)
	}
	e.yielded = time.Time{} // the next wait lets other goroutines run
	if done, err := e.takeTurns(&e.posts[e.first]); done || err != nil {
		t.Errorf("done: %v, %v, before the frame was sent", done, err)
	}
	if !e.turnsAt.After(began) {
		t.Error("the rank takes turns with a goroutine that computes")
	}
	others.Go(func() {
		if err := ends[1].Exchange(t.Context(), 0, transport.Frame{Data: []byte("abcd")}, -1, nil); err != nil {
			t.Error(err)
		}
	})
	if err := e.Complete(t.Context()); err != nil || string(in) != "abcd" {
		t.Errorf("got %q, %v, want abcd", in, err)
	}
	stop.Store(true)
	others.Wait()
}
