package worker

import (
	"testing"
	"time"
)

// TestHeartbeatsOfAll: all nodes together send at most 1,000 reports a second, however many they are. Each has four
// opportunities within the heartbeat timeout, and a worker without a heartbeat timeout is never lost.
func TestHeartbeatsOfAll(t *testing.T) {
	for _, nodes := range []int{1, 2, 40, 1000, 3000, 20000} {
		for _, timeout := range []time.Duration{-1, 2 * time.Second, defaultHeartbeat} {
			cfg := Config{HeartbeatTimeout: timeout}
			b := cfg.heartbeats(nodes)
			if float64(nodes)/b.Every.Seconds() > nodeReportsMax || b.Min > b.Every {
				t.Errorf("%d nodes: %+v", nodes, b)
			}
			if timeout < 0 && b.Timeout != 0 || timeout > 0 && (b.Timeout < timeout || b.Timeout < 4*b.Every) {
				t.Errorf("%d nodes with a timeout of %v: %+v", nodes, timeout, b)
			}
		}
	}
}
