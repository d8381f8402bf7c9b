package bench

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/setup"
	"github.com/lockstep-ml/lockstep/train"
)

// roundTime is the least time of a round whose number of steps is not given. A step of a small model on XLA takes 1 ms:
// 20 of them end before its threads and the processor's clock are steady.
const roundTime = time.Second

// rounds measures rounds of steps. The first one is a warm-up.
type rounds struct {
	steps int              // of a round; 0: at least [benchSteps], and roundTime
	count int              // rounds to measure
	clock *setup.StepClock // reset after the first round
	rates []float64        // examples per second of each measured round

	taken          atomic.Int64 // steps, also those that are not measured
	warm           bool
	start          time.Time
	made, examples int // in this round
}

// callback measures the steps of a Fit. With rounds by time the chief ends it.
func (r *rounds) callback(chief bool) train.Callback {
	return train.Callback{
		OnEpochBegin: func(context.Context, train.EpochBegin) error { r.begin(); return nil },
		OnStepEnd: func(_ context.Context, e train.Step) error {
			r.taken.Add(1)
			if r.add(e.Examples); r.done() && r.steps == 0 && chief {
				return train.ErrStop
			}
			return nil
		},
	}
}

// begin starts a round.
func (r *rounds) begin() { r.start, r.made, r.examples = time.Now(), 0, 0 }

// done reports whether all rounds are measured.
func (r *rounds) done() bool { return len(r.rates) >= r.count }

// add counts a step that just ended, and ends the round if it is complete.
func (r *rounds) add(examples int) {
	if r.done() {
		return
	}
	r.clock.Add()
	r.made, r.examples = r.made+1, r.examples+examples
	elapsed := time.Since(r.start)
	switch {
	case r.steps > 0 && r.made < r.steps, r.steps == 0 && (r.made < benchSteps || elapsed < roundTime):
		return
	case !r.warm:
		r.warm = true
		r.clock.Reset()
	default:
		r.rates = append(r.rates, float64(r.examples)/elapsed.Seconds())
	}
	r.begin()
}
