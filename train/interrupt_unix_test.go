//go:build unix

package train

import (
	"context"
	"os"
	"syscall"
	"testing"
	"time"
)

// TestStopOnInterrupt checks that an interrupt ends training after the current step.
func TestStopOnInterrupt(t *testing.T) {
	trainer, _ := newFake(t, 1, 7, fakeModel{})
	release := StopOnInterrupt(trainer)
	defer release()
	h, err := trainer.Fit(t.Context(), sizes(lineExamples(7), 7), FitConfig{Epochs: 1 << 20, Callbacks: []Callback{{
		OnStepEnd: func(_ context.Context, s Step) error {
			if s.Epoch == 2 {
				return syscall.Kill(os.Getpid(), syscall.SIGINT)
			}
			time.Sleep(time.Millisecond)
			return nil
		},
	}}})
	if err != nil || !h.Stopped || h.Steps < 3 {
		t.Errorf("%d steps, stopped %v: %v", h.Steps, h.Stopped, err)
	}
	release() // again
}
