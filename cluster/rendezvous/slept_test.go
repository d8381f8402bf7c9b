package rendezvous

import (
	"testing"
	"time"
)

// TestSlept: the time in which this process did not run is nobody's silence, and nobody is heard in the future.
func TestSlept(t *testing.T) {
	w := NewWatch(nil, "pulse", 2)
	now := time.Now()
	w.vitals[0].beat, w.vitals[0].moved = now.Add(-10*time.Second), now.Add(-20*time.Second)
	w.vitals[1].beat, w.vitals[1].moved = now, now.Add(-8*time.Second) // read since
	w.slept(now, 9*time.Second)
	for i, want := range [][2]time.Duration{{-time.Second, -11 * time.Second}, {0, 0}} {
		if v := &w.vitals[i]; !v.beat.Equal(now.Add(want[0])) || !v.moved.Equal(now.Add(want[1])) {
			t.Errorf("worker %d: heard %v, moved %v after now, want %v", i, v.beat.Sub(now), v.moved.Sub(now), want)
		}
	}
}
