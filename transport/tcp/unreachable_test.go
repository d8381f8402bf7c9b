package tcp

import (
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// TestUnreachable: a connection that the system gives up says that the host cannot be reached, whichever of those with a process it is, and
// however much later another says so.
func TestUnreachable(t *testing.T) {
	ends := twoEnds(t)
	ends[0].broke(1, nil, os.NewSyscallError("read", syscall.ETIMEDOUT))
	awaitLost(t, ends[0], "rank 1 is down: its host cannot be reached: read: ")
}

// TestReset: a connection that is reset says so, and not that the process is gone: it may live.
func TestReset(t *testing.T) {
	ends := twoEnds(t)
	raw := ends[1].group.world.links[0].a.raw
	if err := raw.(*net.TCPConn).SetLinger(0); err != nil {
		t.Fatal(err)
	}
	raw.Close()
	awaitLost(t, ends[0],
		"rank 1 is down: its connection was reset: its process has ended, or something between the hosts cut the connection: ")
}

// awaitLost waits until an end has lost rank 1, and wants it to say why.
func awaitLost(t *testing.T, e *endpoint, want string) {
	t.Helper()
	for e.peers[1].fate.Load().gone == nil {
		time.Sleep(time.Millisecond)
	}
	if err := e.verdict(1, false); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v, want %s", err, want)
	}
}

// twoEnds are two ranks with a node of their own each, which end with the test.
func twoEnds(t *testing.T) [2]*endpoint {
	t.Helper()
	var nodes []*Node
	var addrs []string
	for range 2 {
		n, err := Listen(Config{Job: "unreachable"})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { n.Close() })
		nodes, addrs = append(nodes, n), append(addrs, n.Addr())
	}
	var ends [2]*endpoint
	var opening sync.WaitGroup
	for rank, n := range nodes {
		opening.Go(func() {
			all, err := n.Group(t.Context(), GroupConfig{Addrs: addrs, Local: []int{rank}})
			if err != nil {
				t.Error(err)
				return
			}
			ends[rank] = all[0].(*endpoint)
			t.Cleanup(func() { ends[rank].Close() })
		})
	}
	opening.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return ends
}
