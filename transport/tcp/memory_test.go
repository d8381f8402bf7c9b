package tcp_test

import (
	"context"
	"runtime"
	"sync"
	"testing"

	"github.com/lockstep-ml/lockstep/internal/race"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/tcp"
)

// TestPeerMemory: a process that has sent nothing to a peer yet keeps at most 7 KiB for it: 2 KiB of data and
// the stack of a goroutine that reads.
func TestPeerMemory(t *testing.T) {
	if race.Enabled {
		t.Skip("the race detector needs memory too")
	}
	const n, limit = 40, 7 << 10
	nodes, addrs := make([]*tcp.Node, n), make([]string, n)
	for i := range nodes {
		node, err := tcp.Listen(tcp.Config{Job: "memory", HalfOpen: n})
		if err != nil {
			t.Fatal(err)
		}
		defer node.Close()
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
