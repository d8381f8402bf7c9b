package tcp_test

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"testing"

	"github.com/lockstep-ml/lockstep/internal/race"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/tcp"
)

// TestPeerMemory: a process that has sent nothing to a peer yet keeps at most 7 KiB for it if they are linked: 2 KiB of
// data and the stack of a goroutine that reads; otherwise a small part of that.
func TestPeerMemory(t *testing.T) {
	if race.Enabled {
		t.Skip("the race detector needs memory too")
	}
	for _, c := range []struct{ n, mesh, limit int }{{40, 40, 7 << 10}, {40, 16, 2 << 10}, {128, 16, 1 << 10}} {
		t.Run(fmt.Sprintf("%d of %d", c.mesh, c.n), func(t *testing.T) { peerMemory(t, c.n, c.mesh, c.limit) })
	}
}

func peerMemory(t *testing.T, n, mesh, limit int) {
	nodes, addrs := make([]*tcp.Node, n), make([]string, n)
	for i := range nodes {
		node, err := tcp.Listen(tcp.Config{Job: "memory", HalfOpen: n})
		if err != nil {
			t.Fatal(err)
		}
		defer node.Close()
		node.SetMeshMax(mesh)
		nodes[i], addrs[i] = node, node.Addr()
	}
	before := memoryBytes()
	ends := make([][]transport.Endpoint, n)
	var work sync.WaitGroup
	for i, node := range nodes {
		work.Go(func() {
			var err error
			if ends[i], err = node.Group(context.Background(), tcp.GroupConfig{Addrs: addrs, Local: []int{i}}); err != nil {
				t.Error(err)
			}
		})
	}
	work.Wait()
	each := (memoryBytes() - before) / (n * (n - 1))
	t.Logf("%d bytes for each of %d peers of %d processes", each, n-1, n)
	if each > limit {
		t.Errorf("%d bytes for each peer, more than %d", each, limit)
	}
	runtime.KeepAlive(ends)
}

// memoryBytes returns the bytes of live objects and of stacks.
func memoryBytes() int {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc + m.StackInuse)
}
