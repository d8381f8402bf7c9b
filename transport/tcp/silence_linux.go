package tcp

import (
	"net"

	"golang.org/x/sys/unix"
)

// limitUnacknowledged bounds how long data may stay unacknowledged: keep-alive is silent while there is any.
func limitUnacknowledged(t *net.TCPConn, milliseconds int) {
	if raw, err := t.SyscallConn(); err == nil {
		raw.Control(func(fd uintptr) {
			unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, milliseconds)
		})
	}
}
