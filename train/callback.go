package train

import (
	"context"
	"errors"
	"time"

	"github.com/lockstep-ml/lockstep/timeline"
)

// ErrStop is returned by a callback to end training after the current step. It is not a failure: Fit returns
// the history with a nil error and sets History.Stopped. [Trainer.Evaluate] returns ErrStop if [Trainer.Stop]
// ended it.
var ErrStop = errors.New("train: stopped on request")

// Callback holds functions that [Trainer.Fit] calls between steps, on its own goroutine. Any of them may be
// nil. An error other than [ErrStop] ends Fit with that error.
//
// OnEpochEnd is called only for complete epochs: all steps were taken, and FitConfig.Validation, if set, was
// evaluated, so that Epoch.Validation is not nil. It is not called for an epoch that a stop or an error
// ended; History.Epochs includes that epoch too.
type Callback struct {
	OnTrainBegin func(ctx context.Context) error
	OnEpochBegin func(ctx context.Context, e EpochBegin) error
	OnStepEnd    func(ctx context.Context, s Step) error
	OnEpochEnd   func(ctx context.Context, e Epoch) error // after a complete epoch and its validation
	// OnTrainDone is called before Fit returns nil; its error becomes Fit's. The last callback's is called first, as
	// deferred calls are, but a Backup's before all others: what the others change then is not in its snapshot.
	OnTrainDone func(ctx context.Context, h *History) error
	OnTrainEnd  func(ctx context.Context, h *History, err error) // always called, with Fit's results but for a *TraceError

	// Name, Save and Load keep a callback's state in snapshots. Save returns the state when a snapshot is taken: on
	// several workers, the chief's is kept. Load gets it on every worker when Fit resumes, after OnTrainBegin; a
	// snapshot without a callback of this name calls nothing. The name is unique among the callbacks of a Fit.
	// Whatever follows from loss and metrics of earlier epochs needs no state: the history is in the snapshot.
	Name string
	Save func() []Weight
	Load func([]Weight) error

	last bool // called after the others between steps, so that its snapshot has what they change
}

// EpochBegin describes an epoch that is about to begin.
type EpochBegin struct {
	Epoch  int // from 0
	Epochs int // index at which Fit ends
	Steps  int // number of steps of the epoch, or -1 if unknown

	// Done and Elapsed are set for an epoch that resumes, from a snapshot or because replicas were placed anew: the steps
	// taken before, and their duration.
	Done    int
	Elapsed time.Duration
}

// Step describes the step that Fit has just taken.
type Step struct {
	EpochBegin

	Step     int           // within this epoch, from 1
	Examples int           // in the step's batch
	Loss     float64       // of the step's batch; with DiLoCo, of this worker's share
	Skipped  bool          // the weights added up to 0 (then Loss is 0), or NotFinite or Overflow is set
	Duration time.Duration // of the step, including the wait for its batch

	// GradientNorm is the global norm of the step's gradients before clipping, if Config.ClipNorm is set.
	GradientNorm float64
	// NotFinite describes the value that was not finite, if Config.NotFinite let training continue. It is nil
	// if loss and gradients are finite.
	NotFinite *NotFiniteError
	// Overflow reports that a gradient overflowed float16: see [LossScaling].
	Overflow bool
	// Validation is the result of the validation after this step, if FitConfig.ValidateEvery asks for one.
	Validation *Result

	// Outer reports that an outer step of [DiLoCo] followed, so that all workers have the same parameters.
	Outer bool

	// Straggler is the worker that slows the others down, on the chief of a job of several workers. Nil: none, or
	// another worker.
	Straggler *timeline.Straggler

	mean, round *mean
}

// Mean returns loss and metrics, averaged over the examples of the epoch so far. With DiLoCo, those since the last
// outer step are this worker's.
func (s Step) Mean() Result {
	if s.round == nil {
		return s.mean.result()
	}
	m := newMean(s.mean.metrics, s.mean.by)
	m.merge(s.mean)
	m.merge(s.round)
	return m.result()
}

// fire calls one function of every callback, even after an error. It returns the first error that is not
// ErrStop, or else ErrStop if any callback returned it.
func fire(callbacks []Callback, call func(Callback) error) error {
	var first error
	for _, c := range callbacks {
		first = moreSevere(first, call(c))
	}
	return first
}

// moreSevere returns the first of two errors, either of which may be nil. Any other error takes precedence
// over ErrStop.
func moreSevere(first, second error) error {
	if first == nil || second != nil && errors.Is(first, ErrStop) && !errors.Is(second, ErrStop) {
		return second
	}
	return first
}
