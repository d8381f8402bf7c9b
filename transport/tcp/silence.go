package tcp

import (
	"net"
	"time"
)

// limitSilence makes the kernel close a control connection whose other end no longer responds, whether or not sent data
// is unacknowledged. This detects hosts that vanished.
func limitSilence(c net.Conn, cfg net.KeepAliveConfig) {
	keepAlive(c, cfg)
	if t, ok := c.(*net.TCPConn); ok && cfg.Enable && cfg.Idle > 0 && cfg.Interval > 0 && cfg.Count > 0 {
		limitUnacknowledged(t, int((cfg.Idle + cfg.Interval*time.Duration(cfg.Count)).Milliseconds()))
	}
}

// keepAlive enables keep-alive on a connection that may be idle for long. Data connections get no further limit: while
// the receiver computes, the socket buffers may be full, which the kernel would treat as no response.
func keepAlive(c net.Conn, cfg net.KeepAliveConfig) {
	if t, ok := c.(*net.TCPConn); ok {
		t.SetNoDelay(true)
		t.SetKeepAliveConfig(cfg)
	}
}
