package launch

import (
	"time"

	"github.com/lockstep-ml/lockstep/cluster/failure"
)

// restartDelays decides how long to wait before a restart. What makes workers fail at once, such as a full disk, often
// lasts for some seconds, and would use up all restarts.
type restartDelays struct {
	first     time.Duration // the first delay; the next ones double
	furthest  int64         // the last step of all attempts, -1 before the first
	fruitless int           // attempts in a row without progress
}

// restartDelayMax bounds a delay.
const restartDelayMax = time.Minute

// next returns the delay after an attempt; failed is nil if a node was lost.
func (r *restartDelays) next(failed *failure.Report) time.Duration {
	if failed == nil || r.first <= 0 {
		return 0
	}
	step := failed.Root.Step
	for _, o := range failed.Others {
		step = max(step, o.Step)
	}
	if step > r.furthest {
		r.furthest, r.fruitless = step, 0
		return 0
	}
	d := r.first
	for range r.fruitless {
		d = min(2*d, max(restartDelayMax, r.first))
	}
	r.fruitless++
	return d
}
