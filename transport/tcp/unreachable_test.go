package tcp

import (
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
	var nodes []*Node
	var addrs []string
	for range 2 {
		n, err := Listen(Config{Job: "unreachable"})
		if err != nil {
			t.Fatal(err)
		}
		defer n.Close()
		nodes, addrs = append(nodes, n), append(addrs, n.Addr())
	}
	ends := make([]*endpoint, 2)
	var opening sync.WaitGroup
	for rank, n := range nodes {
		opening.Go(func() {
			all, err := n.Group(t.Context(), GroupConfig{Addrs: addrs, Local: []int{rank}})
			if err != nil {
				t.Error(err)
				return
			}
			ends[rank] = all[0].(*endpoint)
		})
	}
	opening.Wait()
	if t.Failed() {
		t.FailNow()
	}
	defer ends[1].Close()
	defer ends[0].Close()
	ends[0].broke(1, nil, os.NewSyscallError("read", syscall.ETIMEDOUT))
	for ends[0].peers[1].fate.Load().gone == nil {
		time.Sleep(time.Millisecond)
	}
	if err := ends[0].verdict(1, false); err == nil || !strings.Contains(err.Error(), "rank 1 is down: its host cannot be reached: read: ") {
		t.Errorf("got %v", err)
	}
}
