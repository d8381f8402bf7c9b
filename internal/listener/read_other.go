//go:build !unix

package listener

import "net"

// readAvailable reads nothing on this system; the connection's goroutine reads.
func readAvailable(net.Conn, []byte) (n int, ended bool) { return 0, false }
