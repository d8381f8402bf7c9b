//go:build !unix

package tcp

import "net"

const smallBytes = 16 << 10

// newSocket returns nil: this system has no non-blocking access to sockets.
func newSocket(net.Conn) wire { return nil }
