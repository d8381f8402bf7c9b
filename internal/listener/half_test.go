package listener

import (
	"net"
	"testing"
)

// fakeConn is a connection from an address; it records whether it was closed.
type fakeConn struct {
	net.Conn
	from   string
	closed bool
}

func (v *fakeConn) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.ParseIP(v.from), Port: 1} }

func (v *fakeConn) Close() error {
	v.closed = true
	return nil
}

// TestHalfOpen: a flood from one address evicts its own oldest connections, and no others.
func TestHalfOpen(t *testing.T) {
	var h halfOpen
	var flood []*fakeConn
	worker, other := &fakeConn{from: "10.0.0.1"}, &fakeConn{from: "10.0.0.2"}
	h.add(worker)
	for range 100 {
		v := &fakeConn{from: "10.9.9.9"}
		flood = append(flood, v)
		h.makeRoom(9)
		h.add(v)
	}
	h.makeRoom(9)
	h.add(other)
	if worker.closed || other.closed || len(h.all) != 10 {
		t.Errorf("%d connections are left; closed: worker %v, other %v", len(h.all), worker.closed, other.closed)
	}
	for i, v := range flood {
		if v.closed != (i < 92) {
			t.Errorf("connection %d of the flood: closed %v", i, v.closed)
		}
	}
	if !h.remove(worker) || h.remove(worker) || h.remove(flood[0]) || !h.remove(other) {
		t.Error("remove does not report which connections are in the set")
	}
	if h.makeRoom(0); len(h.all) != 0 || len(h.from) != 0 || worker.closed || !flood[99].closed {
		t.Errorf("%d connections of %d addresses are left", len(h.all), len(h.from))
	}
}
