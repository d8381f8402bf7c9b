//go:build !linux

package tcp

import "net"

// limitUnacknowledged does nothing: the system determines how long sent data may stay unacknowledged.
func limitUnacknowledged(*net.TCPConn, int) {}
