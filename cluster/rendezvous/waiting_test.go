package rendezvous_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// reports collects the reported waits.
type reports struct {
	mu  sync.Mutex
	all []string
}

func (r *reports) add(w rendezvous.Waiting) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, fmt.Sprintf("%v: %v", w.Waited, w))
}

// take returns what was reported since the last call.
func (r *reports) take() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := r.all
	r.all = nil
	return out
}

// TestWaiting: a wait for others is reported after 2 seconds and then ever more rarely, with the workers that are still
// missing.
func TestWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := rendezvous.NewMemory()
		var r reports
		ctx, cancel := context.WithTimeout(rendezvous.WithWaiting(t.Context(), r.add), time.Minute)
		defer cancel()
		var work sync.WaitGroup
		joinAll := func(ctx context.Context, worker int) {
			work.Go(func() {
				_, err := rendezvous.Join(ctx, m.Open(), rendezvous.Registration{Worker: worker, Workers: 3})
				if joiner := (*rendezvous.JoinError)(nil); !errors.As(err, &joiner) ||
					joiner.Kind != rendezvous.Missing {
					t.Errorf("worker %d: %v", worker, err)
				}
			})
		}
		joinAll(ctx, 0)
		time.Sleep(5 * time.Second)
		joinAll(t.Context(), 2) // which reports nothing
		work.Wait()
		want := []string{
			"2s: waiting for workers 1 and 2 (1 of 3 joined)", "4s: waiting for workers 1 and 2 (1 of 3 joined)",
			"8s: waiting for worker 1 (2 of 3 joined)",
			"16s: waiting for worker 1 (2 of 3 joined)", "32s: waiting for worker 1 (2 of 3 joined)",
		}
		if got := r.take(); !slices.Equal(got, want) {
			t.Errorf("reported %q, want %q", got, want)
		}
		ctx, cancel = context.WithTimeout(rendezvous.WithWaiting(t.Context(), r.add), 5*time.Second)
		defer cancel()
		if _, err := rendezvous.Exchange(ctx, m.Open(), "b", 0, 2, nil); err == nil {
			t.Error("a barrier of one of two")
		}
		if err := rendezvous.Leave(ctx, m.Open(), rendezvous.Registration{Workers: 2}); err == nil {
			t.Error("Leave returned before the other worker left")
		}
		want = []string{"2s: waiting for worker 1 (1 of 2 arrived)", "4s: waiting for worker 1 (1 of 2 arrived)"}
		if got := r.take(); !slices.Equal(got, want) {
			t.Errorf("reported %q, want %q", got, want)
		}
	})
}

// TestWaitingForStore: a wait for a store that does not answer is reported too.
func TestWaitingForStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r reports
		ctx, cancel := context.WithTimeout(rendezvous.WithWaiting(t.Context(), r.add), 5*time.Second)
		defer cancel()
		_, err := rendezvous.Open(ctx, "tcp://10.0.0.1:7", rendezvous.Config{Dial: func(context.Context, string,
			string,
		) (net.Conn, error) {
			return nil, errors.New("no listener")
		}})
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
		want := []string{
			"2s: waiting for the store tcp://10.0.0.1:7, which does not answer",
			"4s: waiting for the store tcp://10.0.0.1:7, which does not answer",
		}
		if got := r.take(); !slices.Equal(got, want) {
			t.Errorf("reported %q, want %q", got, want)
		}
	})
}
