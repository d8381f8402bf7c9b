package tcp

import (
	"net"

	"golang.org/x/sys/unix"
)

// limitUnacknowledged bounds how long sent data may stay unacknowledged: the kernel sends no keep-alive probes
// meanwhile.
func limitUnacknowledged(t *net.TCPConn, milliseconds int) {
	if raw, err := t.SyscallConn(); err == nil {
		raw.Control(func(fd uintptr) {
			unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, milliseconds)
		})
	}
}
