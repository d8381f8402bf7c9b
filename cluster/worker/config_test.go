package worker

import (
	"net"
	"testing"
	"time"
)

// TestKeepAlive: a connection between two workers may be silent for exactly the heartbeat timeout.
func TestKeepAlive(t *testing.T) {
	for _, timeout := range []time.Duration{time.Second, 3 * time.Second, 30 * time.Second, 100 * time.Millisecond} {
		k := (&Config{HeartbeatTimeout: timeout}).keepAlive()
		if got := k.Idle + time.Duration(k.Count)*k.Interval; got != timeout || !k.Enable || k.Idle <= 0 || k.Interval <= 0 {
			t.Errorf("%v of silence, want %v: %+v", got, timeout, k)
		}
	}
	if k := (&Config{HeartbeatTimeout: -1}).keepAlive(); k.Enable || k == (net.KeepAliveConfig{}) {
		t.Errorf("without a timeout: %+v, want one that is switched off, not the default", k)
	}
}
