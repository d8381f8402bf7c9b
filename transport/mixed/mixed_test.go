package mixed_test

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mixed"
	"github.com/lockstep-ml/lockstep/transport/tcp"
	"github.com/lockstep-ml/lockstep/transport/transporttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// open makes a group of n ranks, each process of which has so many, or fewer.
func open(t testing.TB, n, each int) []transport.Endpoint {
	t.Helper()
	processes := (n + each - 1) / each
	exchanges := mixed.InProcess(processes)
	out := make([]transport.Endpoint, n)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	var wg sync.WaitGroup
	for p := range processes {
		wg.Go(func() {
			cfg := mixed.Config{Size: n, Epoch: 5, Exchange: exchanges[p], TCP: tcp.Config{Job: "test", Logger: slog.New(slog.DiscardHandler)}}
			for r := p * each; r < min(n, (p+1)*each); r++ {
				cfg.Ranks = append(cfg.Ranks, r)
			}
			ends, err := mixed.Open(ctx, cfg)
			if err != nil {
				t.Errorf("process %d: %v", p, err)
			}
			copy(out[p*each:], ends)
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return out
}

func TestConformance(t *testing.T) {
	for _, mode := range []struct {
		name   string
		each   int
		domain func(n, rank int) int
	}{
		{"pairs", 2, transporttest.Pairs},
		{"alone", 1, nil},
		{"together", 8, transporttest.OneDomain},
	} {
		t.Run(mode.name, func(t *testing.T) {
			transporttest.Run(t, transporttest.Transport{
				Open:    func(t *testing.T, n int) []transport.Endpoint { return open(t, n, mode.each) },
				Domain:  mode.domain,
				Buffers: true,
			})
		})
	}
}
