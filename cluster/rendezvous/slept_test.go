package rendezvous

import (
	"testing"
	"time"
)

// TestSlept: the time in which this process did not run counts as no worker's silence, and no receive time is in the
// future.
func TestSlept(t *testing.T) {
	w := NewWatch(nil, "pulse", 2)
	now := time.Now()
	w.states[0].received, w.states[0].advanced = now.Add(-10*time.Second), now.Add(-20*time.Second)
	w.states[1].received, w.states[1].advanced = now, now.Add(-8*time.Second) // read since
	w.slept(now, 9*time.Second)
	for i, want := range [][2]time.Duration{{-time.Second, -11 * time.Second}, {0, 0}} {
		if v := &w.states[i]; !v.received.Equal(now.Add(want[0])) || !v.advanced.Equal(now.Add(want[1])) {
			t.Errorf("worker %d: received %v, advanced %v after now, want %v", i, v.received.Sub(now), v.advanced.Sub(now), want)
		}
	}
}
