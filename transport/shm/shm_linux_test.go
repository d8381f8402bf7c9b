package shm_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/shm"
	"github.com/lockstep-ml/lockstep/transport/transporttest"
)

type opener = func(context.Context, shm.Config) ([]transport.Endpoint, error)

// open makes a group of n ranks, of which each call of Open, which stands for a process, has some.
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
