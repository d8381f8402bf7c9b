package tcp

import (
	"context"
	"errors"
	"sync"
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
		e.waiter.Look(time.Now())
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
