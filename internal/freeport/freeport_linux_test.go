package freeport

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// TestTake checks that a reserved port can be bound repeatedly by sockets that allow the reuse of addresses, and not by
// sockets that want it exclusively; and that it is free again after the test.
func TestTake(t *testing.T) {
	// Without SO_REUSEADDR, as when the system assigns a port.
	own := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		if e := c.Control(func(fd uintptr) {
			err = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 0)
		}); e != nil {
			return e
		}
		return err
	}}
	const n = 3
	first := 0
	t.Run("held", func(t *testing.T) {
		first = Take(t, n)
		for port := first; port < first+n; port++ {
			at := fmt.Sprintf("127.0.0.1:%d", port)
			for range 2 {
				l, err := net.Listen("tcp", at)
				if err != nil {
					t.Fatal(err)
				}
				c, err := net.Dial("tcp", at)
				if err != nil {
					t.Fatal(err)
				}
				c.Close()
				l.Close()
			}
			if l, err := own.Listen(context.Background(), "tcp4", at); err == nil {
				l.Close()
				t.Errorf("port %d is not held", port)
			}
		}
	})
	for port := first; port < first+n; port++ { // another process may have one by now, but not all
		if l, err := own.Listen(context.Background(), "tcp4", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			l.Close()
			return
		}
	}
	t.Errorf("ports %d to %d are not free again", first, first+n-1)
}

const childEnv = "LOCKSTEP_FREEPORT_CHILD"

// TestNotAssigned checks in a network namespace with few ports that the system assigns a reserved port neither to
// listeners nor to connections.
func TestNotAssigned(t *testing.T) {
	if os.Getenv(childEnv) == "" {
		cmd := exec.Command("/bin/sh", "-c",
			`ip link set lo up && echo "50000 50100" > /proc/sys/net/ipv4/ip_local_port_range && `+
				`exec "$0" -test.run '^TestNotAssigned$'`, os.Args[0])
		cmd.Env = append(os.Environ(), childEnv+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		out, err := cmd.CombinedOutput()
		if err != nil && !strings.Contains(string(out), "FAIL") {
			t.Skipf("skipped: it needs root, network namespaces and iproute2: %v: %s", err, out)
		}
		if err != nil {
			t.Errorf("%v: %s", err, out)
		}
		return
	}
	first := Take(t, 2)
	given := map[int]bool{}
	var all []net.Listener
	for {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			break
		}
		given[l.Addr().(*net.TCPAddr).Port] = true
		all = append(all, l)
	}
	for _, l := range all {
		l.Close()
	}
	if len(given) < 90 || given[first] || given[first+1] {
		t.Errorf("%d ports were given to listeners: %v; %d and the next are held", len(given), given, first)
	}
	l, err := net.Listen("tcp", "127.0.0.2:40000")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	given = map[int]bool{}
	for {
		c, err := net.Dial("tcp", "127.0.0.2:40000")
		if err != nil {
			break
		}
		given[c.LocalAddr().(*net.TCPAddr).Port] = true
		defer c.Close()
	}
	if len(given) < 90 || given[first] || given[first+1] {
		t.Errorf("%d ports were given to connections: %v; %d and the next are held", len(given), given, first)
	}
}
