package shm_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/internal/transport/transporttest"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/shm"
)

type opener = func(context.Context, shm.Config) ([]transport.Endpoint, error)

// open creates a group of n ranks. Each call of Open acts as a process, with some of them.
func open(t *testing.T, open opener, n, perProcess int) []transport.Endpoint {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	out := make([]transport.Endpoint, n)
	name := rand.Text()
	var wg sync.WaitGroup
	for lo := 0; lo < n; lo += perProcess {
		cfg := shm.Config{Name: name, Job: t.Name(), Size: n, ArenaBytes: 64 << 20}
		for r := lo; r < min(lo+perProcess, n); r++ {
			cfg.Ranks = append(cfg.Ranks, r)
		}
		wg.Go(func() {
			ends, err := open(ctx, cfg)
			if err != nil {
				t.Errorf("ranks %v: %v", cfg.Ranks, err)
				return
			}
			for i, r := range cfg.Ranks {
				out[r] = ends[i]
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return out
}

func TestConformance(t *testing.T) {
	for _, per := range []int{1, 2} {
		t.Run(fmt.Sprintf("per process=%d", per), func(t *testing.T) {
			transporttest.Run(t, transporttest.Transport{
				Open:      func(t *testing.T, n int) []transport.Endpoint { return open(t, shm.Open, n, per) },
				Domain:    transporttest.OneDomain,
				Processes: true,
			})
		})
	}
}

// blocking is a context that reports when a wait blocks.
type blocking struct {
	context.Context
	blocks chan<- struct{}
}

func (b blocking) Park(ready <-chan struct{}) error {
	select {
	case b.blocks <- struct{}{}:
	default: // reported before
	}
	return transport.Park(b.Context, ready)
}

// TestLeftBeforeThePart checks that a rank that waits in a part is notified when the awaited rank closes its endpoint
// of the whole group, and so will never join the part, although the process of that rank continues.
func TestLeftBeforeThePart(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	ends := open(t, shm.Open, 3, 2) // 0 and 1 are one process
	part, err := ends[2].Split(7, []int{0, 2})
	if err != nil {
		t.Fatal(err)
	}
	m, blocks, done := part, make(chan struct{}, 1), make(chan error, 1)
	m.Memory().Publish(&transport.Slot{})
	if err := m.Memory().Signal(0); err != nil {
		t.Fatal(err)
	}
	go func() { done <- m.Memory().Await(blocking{ctx, blocks}, 0, 0) }()
	<-blocks
	if err := ends[0].Close(); err != nil {
		t.Fatal(err)
	}
	var down *transport.PeerDown
	if err := <-done; !errors.As(err, &down) || down.Rank != 0 || !errors.Is(err, transport.ErrClosed) {
		t.Errorf("got %v, want that rank 0 has closed its end", err)
	}
	select {
	case d := <-part.Down():
		if d.Rank != 0 || !errors.Is(d.Err, transport.ErrClosed) {
			t.Errorf("Down reports %v", &d)
		}
	case <-ctx.Done():
		t.Error("Down reports nothing")
	}
	for _, e := range append(ends[1:], part) {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
}
