package train

import (
	"context"
	"errors"
	"time"
)

// ErrStop is what a callback returns to end training after the current step. It is no failure: Fit returns the history
// without an error, with History.Stopped set. [Trainer.Evaluate] returns it if [Trainer.Stop] has ended it.
var ErrStop = errors.New("train: stopped on request")

// Callback is called by [Trainer.Fit] between steps, on Fit's goroutine. Functions may be nil. An error other than [ErrStop]
// ends Fit with that error.
//
// OnEpochEnd is called for an epoch only if all its steps were made and its validation, if FitConfig.Validation
// is set: then Epoch.Validation is not nil. It is not called for an epoch that a stop or an error has ended;
// History.Epochs has that one, too.
type Callback struct {
	OnTrainBegin func(ctx context.Context) error
	OnEpochBegin func(ctx context.Context, e EpochBegin) error
	OnStepEnd    func(ctx context.Context, s Step) error
	OnEpochEnd   func(ctx context.Context, e Epoch) error         // of a finished epoch, after validation
	OnTrainDone  func(ctx context.Context, h *History) error      // Fit is about to return without an error: the last chance to find one
	OnTrainEnd   func(ctx context.Context, h *History, err error) // always called, with what Fit will return
}

// EpochBegin describes an epoch that is about to begin.
type EpochBegin struct {
	Epoch  int // from 0
	Epochs int // at which Fit ends
	Steps  int // that the epoch will have, or -1 if that is not known

	// Of an epoch that a snapshot was taken in, and that goes on: the steps that were made before, and their time.
	Done    int
	Elapsed time.Duration
}

// Step describes a step that was just made.
type Step struct {
	EpochBegin

	Step     int           // of this epoch, from 1
	Examples int           // in the step's batch
	Loss     float64       // of the step's batch
	Skipped  bool          // no variable changed: the weights added up to 0, and Loss is 0; or see NotFinite
	Duration time.Duration // of the step, with the wait for its batch

	// NotFinite says what was not finite, if anything was, and Config.NotFinite has let training go on. Nil:
	// loss and gradients are finite.
	NotFinite *NotFiniteError

	mean *mean
}

// Mean returns loss and metrics over the examples of the epoch so far.
func (s Step) Mean() Result { return s.mean.result() }

// fire calls one function of every callback, so that all see every event. It returns the first error that is not ErrStop, else
// ErrStop if any callback returned it.
func fire(callbacks []Callback, call func(Callback) error) error {
	var first error
	for _, c := range callbacks {
		first = graver(first, call(c))
	}
	return first
}

// graver returns the first of two errors, either of which may be nil; but ErrStop gives way to any other.
func graver(first, second error) error {
	if first == nil || second != nil && errors.Is(first, ErrStop) && !errors.Is(second, ErrStop) {
		return second
	}
	return first
}
