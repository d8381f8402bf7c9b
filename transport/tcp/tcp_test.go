package tcp_test

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/internal/transport/transporttest"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/tcp"
)

// opened opens a group of n ranks on processes nodes, each configured by config.
func opened(t testing.TB, n, processes int, config func(process int) tcp.Config, change ...func(*tcp.Node),
) []transport.Endpoint {
	t.Helper()
	processes = min(processes, n)
	nodes := make([]*tcp.Node, processes)
	addrs, local := make([]string, n), make([][]int, processes)
	for p := range nodes {
		cfg := config(p)
		cfg.Logger = slog.New(slog.DiscardHandler)
		node, err := tcp.Listen(cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { node.Close() })
		for _, f := range change {
			f(node)
		}
		nodes[p] = node
	}
	for r := range n {
		p := r * processes / n
		addrs[r] = nodes[p].Addr()
		local[p] = append(local[p], r)
	}
	out := make([]transport.Endpoint, n)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	var wg sync.WaitGroup
	for p, node := range nodes {
		wg.Go(func() {
			ends, err := node.Group(ctx, tcp.GroupConfig{ID: 7, Epoch: 3, Addrs: addrs, Local: local[p]})
			if err != nil {
				t.Errorf("process %d: %v", p, err)
			}
			for i, e := range ends {
				out[local[p][i]] = e
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
	for _, mode := range []struct {
		name      string
		processes int
		cfg       tcp.Config
	}{
		{"a process per rank", 64, tcp.Config{}},
		{"one process", 1, tcp.Config{}},
		{"two processes", 2, tcp.Config{}},
	} {
		t.Run(mode.name, func(t *testing.T) {
			transporttest.Run(t, transporttest.Transport{
				Open: func(t *testing.T, n int) []transport.Endpoint {
					return opened(t, n, mode.processes, func(int) tcp.Config { return mode.cfg })
				},
				Buffers: true,
			})
		})
	}
}

// TestConformanceFewLinks: the same where few processes are linked from the start.
func TestConformanceFewLinks(t *testing.T) {
	transporttest.Run(t, transporttest.Transport{
		Open: func(t *testing.T, n int) []transport.Endpoint {
			return opened(t, n, 64, func(int) tcp.Config { return tcp.Config{} }, func(n *tcp.Node) { n.SetMeshMax(0) })
		},
		Buffers: true,
		Lazy:    true,
	})
}
