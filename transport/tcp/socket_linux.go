package tcp

import (
	"io"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// socket is a wire directly on a socket: the calling goroutine makes non-blocking system calls. The socket is not
// registered with Go's poller, which would wake one of the process' threads for all data that arrives while the rank
// reads it. Naps are system calls of the rank's thread ([sockets.wait]); for longer ones the poller is armed.
type socket struct {
	fd     int
	users  atomic.Int64 // system calls in progress, plus closedSocket
	ended  atomic.Bool  // close was called
	poller *poller

	in, out vectors // of the reader, and of the writer
}

// vectors is the argument of a system call that moves up to two slices.
type vectors struct {
	h   unix.Msghdr
	iov [2]unix.Iovec
}

// closedSocket is added to socket.users by close.
const closedSocket = 1 << 32

// newSocket returns nil if the connection has no socket, or the system has no resources for the poller. It takes over
// the connection.
func newSocket(c net.Conn, p *poller) wire {
	sc, ok := c.(syscall.Conn)
	if !ok || !p.open() {
		return nil
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return nil
	}
	fd := -1
	if raw.Control(func(old uintptr) { fd, err = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 0) }) != nil || err != nil {
		return nil
	}
	s := &socket{fd: fd, poller: p}
	if unix.EpollCtl(p.fd, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLONESHOT}) != nil {
		unix.Close(fd)
		return nil
	}
	c.Close() // removes it from Go's poller
	return s
}

// acquire keeps the descriptor open until release. It returns false once the socket is closed.
func (s *socket) acquire() bool {
	if s.users.Add(1) < closedSocket {
		return true
	}
	s.release()
	return false
}

func (s *socket) release() {
	if s.users.Add(-1) == closedSocket && s.users.CompareAndSwap(closedSocket, 2*closedSocket) {
		unix.Close(s.fd)
	}
}

// close ends the connection and the system calls that wait for it.
func (s *socket) close() {
	if s.ended.Swap(true) {
		return
	}
	s.users.Add(1)
	if s.users.Add(closedSocket) > closedSocket+1 {
		unix.Shutdown(s.fd, unix.SHUT_RDWR)
	}
	s.release()
}

func (s *socket) join() {}

// Control calls f with the descriptor.
func (s *socket) Control(f func(fd uintptr)) error {
	if !s.acquire() {
		return net.ErrClosed
	}
	f(uintptr(s.fd))
	s.release()
	return nil
}

// call makes the system call recvmsg or sendmsg. It does not block, so Go's scheduler is not involved: it would take
// the processor from this thread after 20 µs, and the largest pieces take longer.
func (s *socket) call(trap uintptr, m *vectors, a, b []byte, flags uintptr) (n int, errno syscall.Errno) {
	if len(a) == 0 {
		a, b = b, nil
	}
	m.iov[0].Base, m.iov[1].Base = unsafe.SliceData(a), unsafe.SliceData(b)
	m.iov[0].SetLen(len(a))
	m.iov[1].SetLen(len(b))
	m.h.Iov = &m.iov[0]
	m.h.SetIovlen(1)
	if len(b) > 0 {
		m.h.SetIovlen(2)
	}
	for errno = unix.EINTR; errno == unix.EINTR; {
		var r uintptr
		r, _, errno = unix.RawSyscall(trap, uintptr(s.fd), uintptr(unsafe.Pointer(&m.h)), flags|unix.MSG_DONTWAIT)
		n = int(r)
	}
	m.iov[0].Base, m.iov[1].Base = nil, nil
	return n, errno
}

func (s *socket) read(a, b []byte) (int, error) {
	if !s.acquire() {
		return 0, net.ErrClosed
	}
	n, errno := s.call(unix.SYS_RECVMSG, &s.in, a, b, 0)
	s.release()
	switch {
	case errno == unix.EAGAIN:
		return 0, errAgain
	case errno != 0:
		return 0, os.NewSyscallError("recvmsg", errno)
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}

func (s *socket) write(a, b []byte) (int, error) {
	if !s.acquire() {
		return 0, net.ErrClosed
	}
	n, errno := s.call(unix.SYS_SENDMSG, &s.out, a, b, unix.MSG_NOSIGNAL)
	s.release()
	switch {
	case errno == unix.EAGAIN || errno == 0 && n == 0:
		return 0, errAgain
	case errno != 0:
		return 0, os.NewSyscallError("sendmsg", errno)
	}
	return n, nil
}

func (s *socket) held() bool { return false }

func (s *socket) flush() error { return nil }

func (s *socket) busy() bool { return false }

func (s *socket) socket() *socket { return s }

func (s *socket) watch(in, out bool) {
	var event unix.EpollEvent
	event.Events = unix.EPOLLONESHOT
	if in {
		event.Events |= unix.EPOLLIN
	}
	if out {
		event.Events |= unix.EPOLLOUT
	}
	if (in || out) && s.acquire() {
		// A poller that is closed meanwhile is harmless: no other file that has its number knows this socket.
		unix.EpollCtl(s.poller.fd, unix.EPOLL_CTL_MOD, s.fd, &event)
		s.release()
	}
}

// poller wakes the rank of an endpoint that waits for long: an epoll instance, which is registered with Go's poller. A
// socket reports to it once each time it is armed.
type poller struct {
	notify func()
	file   *os.File // nil before open
	raw    syscall.RawConn
	fd     int
	events [16]unix.EpollEvent
	done   chan struct{}
}

// open reports whether the poller is open. It opens it, unless it is.
func (p *poller) open() bool {
	if p.file != nil {
		return true
	}
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return false
	}
	unix.SetNonblock(fd, true) // so that os registers it with Go's poller
	p.fd, p.file = fd, os.NewFile(uintptr(fd), "epoll")
	if p.raw, err = p.file.SyscallConn(); err == nil {
		err = p.file.SetReadDeadline(time.Time{}) // it fails where the file is not registered
	}
	if err != nil {
		p.file.Close()
		p.file = nil
		return false
	}
	p.done = make(chan struct{})
	go p.run()
	return true
}

// close ends the poller. The sockets must be closed.
func (p *poller) close() {
	if p.file != nil {
		p.file.Close()
		<-p.done
	}
}

func (p *poller) run() {
	defer close(p.done)
	ready := func(fd uintptr) bool {
		n, err := unix.EpollWait(int(fd), p.events[:], 0)
		return n != 0 || err != nil && err != unix.EINTR
	}
	for p.raw.Read(ready) == nil {
		p.notify()
	}
}

// sockets are those that a rank waits for.
type sockets struct {
	polled []unix.PollFd
	held   []*socket
}

// add adds a wire and what is awaited of it. It returns false if the wire is not a socket, or is closed.
func (w *sockets) add(x wire, in, out bool) bool {
	s := x.socket()
	if s == nil || !s.acquire() {
		return false
	}
	fd := unix.PollFd{Fd: int32(s.fd)}
	if in {
		fd.Events |= unix.POLLIN
	}
	if out {
		fd.Events |= unix.POLLOUT
	}
	w.polled, w.held = append(w.polled, fd), append(w.held, s)
	return true
}

// wait blocks this thread until one of the sockets is ready or the time is over, and reports whether one is ready.
func (w *sockets) wait(limit time.Duration) bool {
	if len(w.polled) == 0 {
		return false
	}
	left := unix.NsecToTimespec(int64(limit))
	n, _, errno := unix.Syscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&w.polled[0])), uintptr(len(w.polled)),
		uintptr(unsafe.Pointer(&left)), 0, 0, 0)
	return n > 0 && errno == 0 || errno == unix.EINTR
}

// done ends the use of the sockets.
func (w *sockets) done() {
	for _, s := range w.held {
		s.release()
	}
	clear(w.held)
	w.polled, w.held = w.polled[:0], w.held[:0]
}
