//go:build unix

package listener

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// look reads what has come through a fresh connection already, without waiting. ended: nothing, and nothing will.
func look(c net.Conn, b []byte) (n int, ended bool) {
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
