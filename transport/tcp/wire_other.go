//go:build !unix

package tcp

import "net"

const smallBytes = 16 << 10

// newSocket returns nil: a socket cannot be used without blocking here.
func newSocket(net.Conn) wire { return nil }
