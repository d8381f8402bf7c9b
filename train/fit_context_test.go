package train

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// TestContextEnd: the end of Fit's context requests a stop and bounds the step that runs. It bounds no snapshot, and
// has no effect on the next Fit.
func TestContextEnd(t *testing.T) {
	reason := errors.New("the service ends")
	for name, c := range map[string]struct {
		step   time.Duration // -1: training ends before the context
		byIt   bool
		during error
	}{
		"a short step":          {time.Second, true, nil},
		"a step without an end": {time.Hour, true, reason},
		"after training":        {-1, false, nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				trainer := &Trainer{}
				ctx, cancel := context.WithCancelCause(t.Context())
				longer, end := trainer.stopAtEnd(ctx, 10*time.Second)
				var byIt bool
				if c.step < 0 {
					byIt = end.trained()
					cancel(reason)
				} else {
					cancel(reason)
					synctest.Wait()
					if !trainer.stopping.Load() {
						t.Error("no stop is requested")
					}
					time.Sleep(c.step)
					byIt = end.trained()
				}
				time.Sleep(time.Hour) // the last snapshot
				if trainer.stopping.Load() {
					t.Error("the request is left for the next Fit")
				}
				if byIt != c.byIt || context.Cause(longer) != c.during {
					t.Errorf("by the context: %v, cause %v; want %v, %v", byIt, context.Cause(longer), c.byIt, c.during)
				}
				if end.release(); longer.Err() == nil {
					t.Error("the context outlives Fit")
				}
			})
		})
	}
}
