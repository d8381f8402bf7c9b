package tcp

import (
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// socketInfo reads the kernel's counters of a connection.
type socketInfo struct {
	socket *socket
	call   func(fd uintptr)
	info   unix.TCPInfo
	size   uint32
	err    syscall.Errno
}

// newSocketInfo returns nil if there is no socket.
func newSocketInfo(socket *socket) *socketInfo {
	if socket == nil {
		return nil
	}
	s := &socketInfo{socket: socket}
	s.call = s.get
	return s
}

// get makes the system call itself: that of package unix allocates its result.
func (s *socketInfo) get(fd uintptr) {
	s.size = uint32(unsafe.Sizeof(s.info))
	_, _, s.err = unix.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.IPPROTO_TCP, unix.TCP_INFO,
		uintptr(unsafe.Pointer(&s.info)), uintptr(unsafe.Pointer(&s.size)), 0)
}

// read returns the time that the connection has been sending (see [Traffic]) and the bytes that were acknowledged,
// since it was opened. ok is false if the kernel does not count them: before Linux 4.10.
func (s *socketInfo) read() (sending time.Duration, bytes int64, ok bool) {
	if s.socket.Control(s.call) != nil || s.err != 0 || uintptr(s.size) < unsafe.Offsetof(s.info.Sndbuf_limited) {
		return 0, 0, false
	}
	busy := max(s.info.Busy_time, s.info.Rwnd_limited) - s.info.Rwnd_limited
	return time.Duration(busy) * time.Microsecond, int64(s.info.Bytes_acked), true
}
