package tcp

import "net"

// The send buffers of connections within a host, which bound the data in flight in one direction. The system's own
// buffers grow to megabytes, and then every byte leaves the second-level caches between the sender's copy and the
// receiver's. Linux allows these sizes without privileges, and doubles them for its own accounting.
// docs/experiments.md has the measurements.
const (
	localSendBytes = 104 << 10
	// with more ranks than processors: a rank shall not stop to send because its peer is not running
	crowdedSendBytes = 208 << 10
)

// limitLocal bounds the send buffer of a data connection whose both ends are on this host. It leaves others to the
// system, which adapts their buffers to the delay of the link.
func limitLocal(c net.Conn, crowded bool) {
	t, ok := c.(*net.TCPConn)
	if !ok || !sameAddress(t.LocalAddr(), t.RemoteAddr()) {
		return
	}
	bytes := localSendBytes
	if crowded {
		bytes = crowdedSendBytes
	}
	t.SetWriteBuffer(bytes)
}

// sameAddress reports whether two TCP addresses differ only in their ports.
func sameAddress(a, b net.Addr) bool {
	x, ok := a.(*net.TCPAddr)
	y, also := b.(*net.TCPAddr)
	return ok && also && x.IP.Equal(y.IP)
}
