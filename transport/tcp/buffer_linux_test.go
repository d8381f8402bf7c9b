package tcp

import (
	"net"
	"testing"

	"golang.org/x/sys/unix"
)

// TestLocalBuffers checks that the send buffers of data connections within this host are bounded at both ends, and that
// addresses of other hosts are not taken for this one.
func TestLocalBuffers(t *testing.T) {
	_, ends := pair(t, Config{})
	works(t, ends) // so both are connected
	most := 2 * localSendBytes
	if ends[0].group.world.crowded {
		most = 2 * crowdedSendBytes
	}
	for rank, e := range ends {
		size := 0
		e.peers[1-rank].stream.w.socket().Control(func(fd uintptr) {
			size, _ = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF)
		})
		if size <= 0 || size > most {
			t.Errorf("rank %d: the send buffer has %d bytes, want at most %d", rank, size, most)
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
	at := func(ip string, port int) net.Addr { return &net.TCPAddr{IP: net.ParseIP(ip), Port: port} }
	for _, c := range []struct {
		a, b net.Addr
		same bool
	}{
		{at("127.0.0.1", 1), at("127.0.0.1", 2), true},
		{at("::ffff:10.0.0.1", 1), at("10.0.0.1", 2), true},
		{at("10.0.0.1", 1), at("10.0.0.2", 1), false},
		{at("10.0.0.1", 1), &net.UnixAddr{Name: "a"}, false},
	} {
		if got := sameAddress(c.a, c.b); got != c.same {
			t.Errorf("sameAddress(%v, %v) = %v, want %v", c.a, c.b, got, c.same)
		}
	}
}
