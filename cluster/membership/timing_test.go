package membership_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/membership"
)

// TestTiming: all nodes together send at most 1,000 reports a second, however many they are. Each has four
// opportunities within the heartbeat timeout, and a member without a heartbeat timeout is never lost.
func TestTiming(t *testing.T) {
	for _, nodes := range []int{1, 2, 40, 1000, 3000, 20000} {
		for _, timeout := range []time.Duration{-1, 0, time.Second, 2 * time.Second, 30 * time.Second} {
			b := membership.NewTiming(timeout, nodes)
			if float64(nodes)/b.Every.Seconds() > 1000 || b.Min > b.Every || b.Min <= 0 {
				t.Errorf("%d nodes: %+v", nodes, b)
			}
			if timeout <= 0 && b.Timeout != 0 || timeout > 0 && (b.Timeout < timeout || b.Timeout < 4*b.Every) {
				t.Errorf("%d nodes with a timeout of %v: %+v", nodes, timeout, b)
			}
			if timeout > 0 && nodes <= 1000 && timeout >= 4*time.Second && b.Timeout != timeout {
				t.Errorf("%d nodes: the timeout is %v instead of %v", nodes, b.Timeout, timeout)
			}
		}
	}
}

// TestShortTimeout: workers whose timeout is shorter than their agent's interval keep their leases while all is well,
// and are lost soon after they are silent.
func TestShortTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := start(t, 2, 2, membership.NewTiming(time.Second, 2), &usual)
		defer c.stop()
		time.Sleep(time.Minute)
		c.agree(t, nil, time.Time{}, 0)
		began := time.Now()
		c.members[3].gate.stop()
		bound := 4*usual.Every + 3*usual.Every + time.Second
		time.Sleep(bound)
		c.agree(t, []int{3}, began, bound)
	})
}
