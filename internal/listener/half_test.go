package listener

import (
	"net"
	"testing"
)

// visitor is a connection from an address, which may be closed.
type visitor struct {
	net.Conn
	from   string
	closed bool
}

func (v *visitor) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.ParseIP(v.from), Port: 1} }

func (v *visitor) Close() error {
	v.closed = true
	return nil
}

// TestHalfOpen: a flood from one address pushes out its own oldest, and nobody else.
func TestHalfOpen(t *testing.T) {
	var h halfOpen
	var flood []*visitor
	worker, other := &visitor{from: "10.0.0.1"}, &visitor{from: "10.0.0.2"}
	h.add(worker)
	for range 100 {
		v := &visitor{from: "10.9.9.9"}
		flood = append(flood, v)
		h.makeRoom(9)
		h.add(v)
	}
	h.makeRoom(9)
	h.add(other)
	if worker.closed || other.closed || len(h.all) != 10 {
		t.Errorf("%d are left, the worker's closed: %v, %v", len(h.all), worker.closed, other.closed)
	}
	for i, v := range flood {
		if v.closed != (i < 92) {
			t.Errorf("number %d of the flood: closed %v", i, v.closed)
		}
	}
	if !h.remove(worker) || h.remove(worker) || h.remove(flood[0]) || !h.remove(other) {
		t.Error("who is there is not known")
	}
	if h.makeRoom(0); len(h.all) != 0 || len(h.from) != 0 || worker.closed || !flood[99].closed {
		t.Errorf("%d are left, of %d addresses", len(h.all), len(h.from))
	}
}
