// Package freeport finds TCP ports for tests whose servers get a fixed port to listen on.
//
// A port that was free before may be taken when it is used, because tests of other packages run concurrently and every
// dialed connection takes a port. So the port is reserved for the test: the system does not assign it to sockets that
// request any free port, but a socket can bind to it explicitly.
package freeport

import (
	"net"
	"strconv"
)

// tries bounds the search for consecutive ports.
const tries = 1000

// Test is the part of [testing.TB] that Take needs.
type Test interface {
	Helper()
	Cleanup(f func())
	Fatalf(format string, args ...any)
}

// Take returns the first of n consecutive TCP ports. Until the test ends, the system does not assign them to sockets
// that request any free port, but a server can listen on them at any IPv4 address of this host. On systems other than
// Linux the ports are only free at the time of the call.
func Take(t Test, n int) (first int) {
	t.Helper()
	for range tries {
		held, ok := hold(n)
		if !ok {
			continue
		}
		t.Cleanup(held.release)
		return held.first
	}
	t.Fatalf("no %d consecutive ports are free", n)
	return 0
}

// listenable reports whether n ports can be listened on.
func listenable(first, n int) bool {
	for port := first; port < first+n; port++ {
		l, err := net.Listen("tcp4", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err != nil {
			return false
		}
		l.Close()
	}
	return true
}
