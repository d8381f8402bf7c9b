package tcp

import (
	"net"
	"time"
)

// limitSilence has the kernel end a connection whose other end does not answer any more, whether data is on its way or not.
func limitSilence(c net.Conn, cfg net.KeepAliveConfig) {
	t, ok := c.(*net.TCPConn)
	if !ok {
		return
	}
	t.SetNoDelay(true)
	t.SetKeepAliveConfig(cfg)
	if cfg.Enable && cfg.Idle > 0 && cfg.Interval > 0 && cfg.Count > 0 {
		limitUnacknowledged(t, int((cfg.Idle + cfg.Interval*time.Duration(cfg.Count)).Milliseconds()))
	}
}
