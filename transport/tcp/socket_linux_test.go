package tcp

import (
	"errors"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// socketPair returns a socket on one end of a connection over loopback, and the other end.
func socketPair(t *testing.T) (*socket, net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	dialed, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	accepted, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { accepted.Close() })
	p := &poller{notify: func() {}}
	w := newSocket(dialed, p)
	if w == nil {
		t.Fatal("no socket")
	}
	t.Cleanup(func() { w.close(); p.close() })
	return w.socket(), accepted
}

// TestClosedSocket: the number of a closed socket may belong to another file, which no method of the socket touches. A
// system call in progress keeps the number.
func TestClosedSocket(t *testing.T) {
	s, _ := socketPair(t)
	var waiting sockets
	if !waiting.add(s, true, false) {
		t.Fatal("the socket cannot be waited for")
	}
	s.close()
	if _, err := unix.FcntlInt(uintptr(s.fd), unix.F_GETFD, 0); err != nil {
		t.Errorf("the number was released during a wait: %v", err)
	}
	if !waiting.wait(time.Minute) {
		t.Error("close did not end the wait")
	}
	waiting.done()

	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[1])
	if pair[0] != s.fd { // tests may run at the same time
		if err := unix.Dup3(pair[0], s.fd, unix.O_CLOEXEC); err != nil {
			t.Fatal(err)
		}
		unix.Close(pair[0])
	}
	defer unix.Close(s.fd)
	if _, err := s.read(make([]byte, 1), nil); !errors.Is(err, net.ErrClosed) {
		t.Errorf("read after close: %v", err)
	}
	if _, err := s.write([]byte{1}, nil); !errors.Is(err, net.ErrClosed) {
		t.Errorf("write after close: %v", err)
	}
	if waiting.add(s, true, true) {
		t.Error("a closed socket can be waited for")
	}
	s.watch(true, true)
	s.close()
	if _, err := unix.Write(pair[1], []byte{1}); err != nil {
		t.Errorf("the other file was closed: %v", err)
	}
	if n, err := unix.Read(s.fd, make([]byte, 2)); n != 1 || err != nil {
		t.Errorf("read %d bytes from the other file, %v, want 1", n, err)
	}
}

// TestHalfClosedSocket: what a peer sent before it ended its half can be read, and the other half can still be written.
func TestHalfClosedSocket(t *testing.T) {
	s, peer := socketPair(t)
	if _, err := peer.Write([]byte("abc")); err != nil {
		t.Fatal(err)
	}
	peer.(*net.TCPConn).CloseWrite()
	var got []byte
	var err error
	for since := time.Now(); err == nil || err == errAgain; {
		var n int
		b := make([]byte, 2)
		n, err = s.read(b, nil)
		if got = append(got, b[:n]...); time.Since(since) > time.Minute {
			t.Fatal("no end")
		}
	}
	if string(got) != "abc" || err.Error() != "EOF" {
		t.Errorf("read %q and %v, want abc and EOF", got, err)
	}
	if n, err := s.write([]byte("de"), []byte("f")); n != 3 || err != nil {
		t.Errorf("write: %d, %v", n, err)
	}
	if n, err := peer.Read(make([]byte, 4)); n != 3 || err != nil {
		t.Errorf("the peer read %d bytes, %v", n, err)
	}
	peer.(*net.TCPConn).SetLinger(0) // a reset
	peer.Close()
	for since := time.Now(); ; {
		if _, err = s.write([]byte("g"), nil); err != nil && err != errAgain {
			break
		}
		if time.Since(since) > time.Minute {
			t.Fatal("a reset was not reported")
		}
	}
	if !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
		t.Errorf("write after a reset: %v", err)
	}
}
