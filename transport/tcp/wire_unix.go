//go:build unix

package tcp

import (
	"io"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// smallBytes is the largest size of data that is copied behind its head for a single write; larger data is written in
// place.
const smallBytes = 16 << 10

// socket is a wire directly on a socket: the calling goroutine makes non-blocking system calls, and waits use Go's
// poller. RawConn.Control keeps the descriptor open during a call.
type socket struct {
	conn net.Conn
	raw  syscall.RawConn

	// Arguments and results of the calls, of the reader and of the writer.
	in       [2][]byte
	inN      int
	inErr    error
	inCall   func(fd uintptr)
	readable func(fd uintptr) bool

	out      [2][]byte
	outN     int
	outErr   error
	outCall  func(fd uintptr)
	more     func() bool
	writable func(fd uintptr) bool
	joined   [headBytes + smallBytes]byte
}

// newSocket returns nil if the connection has no socket.
func newSocket(c net.Conn) wire {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return nil
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return nil
	}
	s := &socket{conn: c, raw: raw}
	s.inCall, s.outCall = s.readCall, s.writeCall
	s.readable = func(fd uintptr) bool {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return n != 0 || err != nil && err != unix.EINTR
	}
	s.writable = func(uintptr) bool { return s.more() }
	return s
}

func (s *socket) read(a, b []byte) (int, error) {
	s.in = [2][]byte{a, b}
	err := s.raw.Control(s.inCall)
	s.in = [2][]byte{}
	if err != nil {
		return 0, err
	}
	return s.inN, s.inErr
}

func (s *socket) held() bool { return false }

func (s *socket) readCall(fd uintptr) {
	for {
		n, err := readBoth(int(fd), &s.in)
		switch {
		case n > 0:
			s.inN, s.inErr = n, nil
			return
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN:
			s.inN, s.inErr = 0, errAgain
		case err != nil:
			s.inN, s.inErr = 0, os.NewSyscallError("read", err)
		default:
			s.inN, s.inErr = 0, io.EOF
		}
		return
	}
}

func (s *socket) write(a, b []byte) (int, error) {
	if len(a) > 0 && len(b) > 0 && len(a)+len(b) <= len(s.joined) {
		n := copy(s.joined[:], a)
		n += copy(s.joined[n:], b)
		a, b = s.joined[:n], nil
	} else if len(a) == 0 {
		a, b = b, nil
	}
	s.out = [2][]byte{a, b}
	err := s.raw.Control(s.outCall)
	s.out = [2][]byte{}
	if err != nil {
		return 0, err
	}
	return s.outN, s.outErr
}

func (s *socket) writeCall(fd uintptr) {
	for {
		n, err := writeBoth(int(fd), &s.out)
		switch {
		case n > 0:
			s.outN, s.outErr = n, nil
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN || err == nil:
			s.outN, s.outErr = 0, errAgain
		default:
			s.outN, s.outErr = 0, os.NewSyscallError("write", err)
		}
		return
	}
}

func (s *socket) flush() error { return nil }

func (s *socket) busy() bool { return false }

func (s *socket) awaitRead() { s.raw.Read(s.readable) }

func (s *socket) awaitWrite(more func() bool) {
	s.more = more
	s.raw.Write(s.writable)
}

func (s *socket) close() { s.conn.Close() }

func (s *socket) join() {}
