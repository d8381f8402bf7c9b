package worker

import (
	"testing"
	"time"
)

// TestProgressLimit: a worker that makes no progress is lost when the workers that wait for it have timed out,
// unless configured otherwise. Phases that are slow have that long in any case.
func TestProgressLimit(t *testing.T) {
	const long = defaultDeadline + defaultHeartbeat
	for _, c := range []struct {
		progress, deadline, heartbeat time.Duration
		phase                         string
		want                          time.Duration
	}{
		{0, 0, defaultHeartbeat, "compute", long},
		{0, 0, -1, "compute", defaultDeadline},
		{0, time.Minute, defaultHeartbeat, "compute", time.Minute + defaultHeartbeat},
		{0, -1, defaultHeartbeat, "compute", -1},
		{time.Minute, 0, defaultHeartbeat, "compute", time.Minute},
		{time.Minute, 0, defaultHeartbeat, "compile", long},
		{time.Minute, -1, defaultHeartbeat, "snapshot", -1},
		{time.Hour, 0, defaultHeartbeat, "snapshot", time.Hour},
		{time.Minute, 0, defaultHeartbeat, "restore", time.Minute},
		{-1, 0, defaultHeartbeat, "compute", -1},
	} {
		cfg := Config{ProgressTimeout: c.progress, HeartbeatTimeout: c.heartbeat}
		cfg.Collective.Timeout = c.deadline
		if got := cfg.progressLimit(c.phase); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
}
