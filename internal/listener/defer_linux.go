package listener

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// deferAccept makes the kernel deliver a connection only after data has arrived on it, or after about a second: the
// dialer sends first. A failure of the option only costs time, so it is ignored.
func deferAccept(_, _ string, c syscall.RawConn) error {
	return c.Control(func(fd uintptr) {
		unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_DEFER_ACCEPT, 1)
	})
}
