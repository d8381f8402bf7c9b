package listener

import (
	"net"
	"os"
	"runtime"
	"testing"
)

// fakeConn is a connection from an address; it records whether it was closed.
type fakeConn struct {
	net.Conn
	from   string
	closed bool
}

func (v *fakeConn) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.ParseIP(v.from), Port: 1} }

func (v *fakeConn) LocalAddr() net.Addr { return nil }

func (v *fakeConn) Close() error {
	v.closed = true
	return nil
}

// TestConns: a flood from one address evicts its own oldest connections, and no others.
func TestConns(t *testing.T) {
	var h Conns
	var flood []*fakeConn
	worker, other := &fakeConn{from: "10.0.0.1"}, &fakeConn{from: "10.0.0.2"}
	h.Add(worker)
	for range 100 {
		v := &fakeConn{from: "10.9.9.9"}
		flood = append(flood, v)
		h.MakeRoom(9)
		h.Add(v)
	}
	h.MakeRoom(9)
	h.Add(other)
	if worker.closed || other.closed || len(h.all) != 10 {
		t.Errorf("%d connections are left; closed: worker %v, other %v", len(h.all), worker.closed, other.closed)
	}
	for i, v := range flood {
		if v.closed != (i < 92) {
			t.Errorf("connection %d of the flood: closed %v", i, v.closed)
		}
	}
	if !h.Remove(worker) || h.Remove(worker) || h.Remove(flood[0]) || !h.Remove(other) {
		t.Error("remove does not report which connections are in the set")
	}
	if h.MakeRoom(0); len(h.all) != 0 || len(h.from) != 0 || worker.closed || !flood[99].closed {
		t.Errorf("%d connections of %d addresses are left", len(h.all), len(h.from))
	}
}

// TestConnsOfUsers: connections of other users of this host are closed before those of this process' user.
func TestConnsOfUsers(t *testing.T) {
	for _, address := range []string{"127.0.0.1:0", "[::1]:0", ":0"} {
		t.Run(address, func(t *testing.T) { connsOfUsers(t, address) })
	}
}

func connsOfUsers(t *testing.T, address string) {
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Skip("this host has no such address: ", err)
	}
	defer l.Close()
	host, port, _ := net.SplitHostPort(l.Addr().String())
	if host == "::" {
		host = "127.0.0.1"
	}
	s := Conns{Users: true}
	accept := func() net.Conn {
		d, err := net.Dial("tcp", net.JoinHostPort(host, port))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { d.Close() })
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	for range 5 {
		s.Add(accept())
	}
	first := s.all[0].conn
	own, known := userOf(unmapped(first.RemoteAddr().(*net.TCPAddr)), unmapped(first.LocalAddr().(*net.TCPAddr)))
	if known && own != os.Getuid() || !known && runtime.GOOS == "linux" {
		t.Errorf("user %d, known: %v", own, known)
	}
	stranger := &fakeConn{from: "127.0.0.1"} // whose user is not known
	s.Add(stranger)
	s.MakeRoom(5)
	if len(s.all) != 5 || stranger.closed != known {
		t.Errorf("%d connections are left; the stranger's is closed: %v, users are known: %v", len(s.all), stranger.closed,
			known)
	}
	s.MakeRoom(0)
}
