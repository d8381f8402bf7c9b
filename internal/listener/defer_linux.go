package listener

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// untilDataComes has the kernel keep a connection to itself until something has come through it, or about a second is over: the one
// who dials speaks first. If the system does not do it, it is only dearer.
func untilDataComes(_, _ string, c syscall.RawConn) error {
	return c.Control(func(fd uintptr) {
		unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_DEFER_ACCEPT, 1)
	})
}
