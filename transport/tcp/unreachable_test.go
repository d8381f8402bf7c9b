package tcp

import (
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestUnreachable: when the system gives up any connection with a process, the error states that the host cannot be
// reached, even if the other connections fail much later.
func TestUnreachable(t *testing.T) {
	ends := twoEnds(t)
	ends[0].broke(1, nil, os.NewSyscallError("read", syscall.ETIMEDOUT))
	awaitLost(t, ends[0], "rank 1 is down: its host cannot be reached: read: ")
}

// TestReset checks that the error of a reset connection states both possible causes: the process may still run.
func TestReset(t *testing.T) {
	ends := twoEnds(t)
	raw := ends[1].group.world.links[0].a.raw
	if err := raw.(*net.TCPConn).SetLinger(0); err != nil {
		t.Fatal(err)
	}
	raw.Close()
	awaitLost(t, ends[0],
		"rank 1 is down: its connection was reset: "+
			"its process has ended, or something between the hosts cut the connection: ")
}

// awaitLost waits until an endpoint has lost rank 1, and verifies the error.
func awaitLost(t *testing.T, e *endpoint, want string) {
	t.Helper()
	for e.peers[1].state.Load().gone == nil {
		time.Sleep(time.Millisecond)
	}
	if err := e.peerDown(1, false); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v, want %s", err, want)
	}
}

// twoEnds returns two ranks with a node each, which are closed when the test ends.
func twoEnds(t *testing.T) []*endpoint {
	t.Helper()
	return openedPair(t, [][]int{{0}, {1}}, [2]Config{})
}
