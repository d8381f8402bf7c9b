package tcp

import (
	"net"
	"time"
)

// limitSilence has the kernel end a control connection whose other end does not answer any more, whether data is on its way
// or not: a host that vanished is noticed there.
func limitSilence(c net.Conn, cfg net.KeepAliveConfig) {
	keepAlive(c, cfg)
	if t, ok := c.(*net.TCPConn); ok && cfg.Enable && cfg.Idle > 0 && cfg.Interval > 0 && cfg.Count > 0 {
		limitUnacknowledged(t, int((cfg.Idle + cfg.Interval*time.Duration(cfg.Count)).Milliseconds()))
	}
}

// keepAlive sets up a connection that may be idle for long. Of a data connection nothing more is asked: where more waits than
// the sockets hold, since the receiver is still computing, the kernel would take that for silence.
func keepAlive(c net.Conn, cfg net.KeepAliveConfig) {
	if t, ok := c.(*net.TCPConn); ok {
		t.SetNoDelay(true)
		t.SetKeepAliveConfig(cfg)
	}
}
