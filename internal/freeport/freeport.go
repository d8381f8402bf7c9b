// Package freeport finds TCP ports for tests whose servers are told where to listen before they do.
//
// A port that was free a moment ago may be another's by the time that it is wanted: tests of other packages run beside, and every connection
// that is dialed takes a port. So a port is held for the test, in a way that keeps everybody from it who asks for any port, and nobody
// who asks for that one.
package freeport

import (
	"net"
	"strconv"
)

// tries bounds the search for ports that follow one another.
const tries = 1000

// Test is what a port is held for: a [testing.TB], or what has as much of one.
type Test interface {
	Helper()
	Cleanup(f func())
	Fatalf(format string, args ...any)
}

// Take returns the first of n TCP ports that follow one another. Until the test ends the system gives none of them to who asks for any;
// who asks for one of them can listen there, at any of this host's addresses of IPv4. Where the system has no such thing (on others than Linux) they
// are free now, and no more than that.
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
	t.Fatalf("no %d ports that follow one another are free", n)
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
