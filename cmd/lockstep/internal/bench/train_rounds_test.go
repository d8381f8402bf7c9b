package bench

import (
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/setup"
	"github.com/lockstep-ml/lockstep/timeline"
)

// TestRounds checks how many steps are measured, and that the first round and what follows the last one are not.
func TestRounds(t *testing.T) {
	for name, c := range map[string]struct {
		steps int
		step  time.Duration
		want  int // steps of a round
	}{
		"fast":  {0, time.Millisecond, 1000},
		"slow":  {0, 100 * time.Millisecond, benchSteps},
		"given": {3, time.Millisecond, 3},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const count, examples = 2, 10
				recorder := timeline.NewRecorder()
				r := rounds{steps: c.steps, count: count, clock: &setup.StepClock{Recorder: recorder}}
				made := 0
				r.begin()
				for step := c.step + time.Second; !r.done(); step = c.step { // the first one compiles
					time.Sleep(step)
					made++
					recorder.AddStep(timeline.Step{Step: int64(made), End: recorder.Now(), Compute: step})
					r.add(examples)
				}
				r.add(examples) // too late
				warm := made - count*c.want
				if warm < 1 || warm > c.want || len(r.rates) != count || r.clock.Steps != count*c.want {
					t.Errorf("%d steps, %d of them measured, in %d rounds: want %d rounds of %d", made, r.clock.Steps, len(r.rates),
						count, c.want)
				}
				for _, rate := range r.rates {
					if want := examples / c.step.Seconds(); math.Abs(rate/want-1) > 1e-9 {
						t.Errorf("%v examples/s, want %v", rate, want)
					}
				}
				if got := r.clock.PerStep().Compute; got != c.step {
					t.Errorf("a step takes %v, want %v", got, c.step)
				}
			})
		})
	}
}
