//go:build unix

package listener

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// readAvailable reads the data that has arrived on a new connection, without blocking. ended reports that there is none
// and will be none.
func readAvailable(c net.Conn, b []byte) (n int, ended bool) {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return 0, false
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return 0, false
	}
	raw.Read(func(fd uintptr) bool {
		n, err = unix.Read(int(fd), b)
		return true
	})
	if n > 0 {
		return n, false
	}
	return 0, err != unix.EAGAIN && err != unix.EINTR
}
