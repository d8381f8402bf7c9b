package train

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/lockstep-ml/lockstep/data"
)

// FitConfig says how long [Trainer.Fit] trains. The zero value makes one epoch.
type FitConfig struct {
	// Epochs is the epoch to end at, counted from 0; default InitialEpoch + 1.
	Epochs int
	// InitialEpoch is the epoch to begin with, for training that goes on.
	InitialEpoch int
	// StepsPerEpoch ends an epoch after so many steps; the next one goes on where it stopped, and reads the dataset again
	// when that ends. Default: an epoch is the dataset, once.
	StepsPerEpoch int
	// Steps ends training after so many steps in all, also inside an epoch; those made before [Trainer.Restore] count. Default: no limit.
	Steps int
	// Validation is evaluated after every epoch, if it is not nil. (data.Pipeline.Split holds a part of the training data.)
	Validation data.Dataset
	// Callbacks are called in their order.
	Callbacks []Callback
}

// Fit trains on ds, which yields global batches: every [data.Batch] has at most Config.GlobalBatch examples. Epoch e reads ds under
// data.WithEpoch(ctx, e), so that a shuffled pipeline has its order of that epoch.
//
// On an error (which counts epochs and steps from 1, as the progress line does), or at the end of ctx, the history holds what
// was done until then, and all variables have their values of after the last whole step. Fit ends with
// [Trainer.CheckMirrored], over all workers.
//
// With several workers all of them call Fit, with the same data and configuration but for the callbacks. A callback that asks to stop on
// any of them ends training on all after the same step: the one after which it asked, as with one worker. The others learn of it from
// the next step's reduction, and that step is taken back. If there is no next step, training has ended anyway, and History.Stopped
// remains false. Any other error of a callback, or of the data, ends the others' Fit with an error as well.
//
// A model whose learning-rate schedule spans the whole training (in GoMLX cosineschedule.NumCycles) gets the number of
// the last step from FitConfig and the dataset's length. Without a length, FitConfig must have StepsPerEpoch or Steps.
//
// After [Trainer.Restore], also in OnTrainBegin, Fit goes on where the Fit of the snapshot stood, with its history: batches that were trained
// on are left out, and the rest comes in the same order, with the same random numbers.
func (t *Trainer) Fit(ctx context.Context, ds data.Dataset, cfg FitConfig) (*History, error) {
	if !t.fits.CompareAndSwap(false, true) {
		return &History{}, errors.New("train: Fit is called while another Fit of this trainer runs: want one after the other, and none in a callback")
	}
	defer t.fits.Store(false)
	if cfg.Epochs == 0 {
		cfg.Epochs = cfg.InitialEpoch + 1
	}
	f := &fit{t: t, ds: ds, cfg: cfg, history: &History{}, stand: stand{epoch: cfg.InitialEpoch, next: place{pass: cfg.InitialEpoch}}}
	t.fitting = f
	defer func() { t.fitting = nil }()
	err := cfg.validate()
	switch {
	case err == nil && ds == nil:
		err = f.unfed(ctx, errNoDataset)
	case err == nil:
		err = f.run(ctx)
	}
	if errors.Is(err, ErrStop) {
		f.history.Stopped, err = true, nil
		t.stopping.Store(false)
	}
	t.wish = false
	f.history.Speed = f.speed.result(len(t.parts))
	if err == nil {
		err = t.checkAll(ctx)
	}
	if err == nil {
		err = f.done(ctx)
	}
	for _, c := range cfg.Callbacks {
		if c.OnTrainEnd != nil {
			c.OnTrainEnd(ctx, f.history, err)
		}
	}
	return f.history, err
}

func (c *FitConfig) validate() error {
	switch {
	case c.InitialEpoch < 0 || c.Epochs < c.InitialEpoch:
		return fmt.Errorf("train: FitConfig asks for the epochs from %d up to %d: want 0 <= InitialEpoch <= Epochs", c.InitialEpoch, c.Epochs)
	case c.StepsPerEpoch < 0:
		return fmt.Errorf("train: FitConfig.StepsPerEpoch is %d: want at least 1, or 0 for the whole dataset", c.StepsPerEpoch)
	case c.Steps < 0:
		return fmt.Errorf("train: FitConfig.Steps is %d: want at least 1, or 0 for no limit", c.Steps)
	}
	return nil
}

// fit is one call of Fit.
type fit struct {
	t       *Trainer
	ds      data.Dataset
	cfg     FitConfig
	history *History
	speed   stopwatch
	stand   stand
}

func (f *fit) run(ctx context.Context) (err error) {
	err = f.fire(ctx, func(c Callback) error {
		if c.OnTrainBegin == nil {
			return nil
		}
		return c.OnTrainBegin(ctx)
	})
	if err != nil {
		return err
	}
	if err := f.goOn(); err != nil {
		return err
	}
	if err := f.setLastStep(); err != nil {
		return f.unfed(ctx, err)
	}
	var stream *feeder // with StepsPerEpoch: one for all epochs
	if n := f.cfg.StepsPerEpoch; n > 0 {
		limit := n*(f.cfg.Epochs-f.stand.epoch) - f.stand.step
		if left := f.left(); left >= 0 {
			limit = min(limit, left)
		}
		stream, err = f.t.feed(ctx, f.ds, feedConfig{epoch: f.stand.next.pass, skip: f.stand.next.batch, repeat: true, limit: max(limit, 0), labels: true})
		if err != nil {
			return f.unfed(ctx, err)
		}
		defer func() { err = f.t.closeFeed(ctx, stream, err) }()
	}
	for f.stand.epoch < f.cfg.Epochs && (f.left() != 0 || f.stand.open()) {
		if err := f.epoch(ctx, stream); err != nil {
			return err
		}
		if f.stand.cut {
			return nil
		}
	}
	return nil
}

// unfed is the end of a Fit that cannot read its dataset: the other workers learn of it.
func (f *fit) unfed(ctx context.Context, err error) error {
	f.t.tellOthers(ctx, err)
	return fmt.Errorf("train: %w", err)
}

// left returns how many steps the limit allows; negative: there is none.
func (f *fit) left() int {
	if f.cfg.Steps == 0 {
		return -1
	}
	return max(f.cfg.Steps-f.history.Steps, 0)
}

func (f *fit) epoch(ctx context.Context, stream *feeder) (end error) {
	number, done := f.stand.epoch, f.stand.step
	begin := EpochBegin{Epoch: number, Epochs: f.cfg.Epochs, Steps: f.cfg.StepsPerEpoch, Done: done}
	if stream == nil {
		begin.Steps = f.ds.Len()
		own, err := f.t.feed(ctx, f.ds, feedConfig{epoch: number, skip: done, limit: f.left(), labels: true})
		if err != nil {
			return f.unfed(ctx, err)
		}
		stream = own
		defer func() { end = f.t.closeFeed(ctx, own, end) }()
	}
	if left := f.left(); left >= 0 && (begin.Steps < 0 || done+left < begin.Steps) {
		begin.Steps = done + left
	}
	if done > 0 {
		begin.Elapsed = f.history.Epochs[len(f.history.Epochs)-1].Duration
	}
	err := f.fire(ctx, func(c Callback) error {
		if c.OnEpochBegin == nil {
			return nil
		}
		return c.OnEpochBegin(ctx, begin)
	})
	if err != nil {
		return err
	}
	if done == 0 {
		f.stand.mean = newMean(f.t.metrics)
		f.history.Epochs = append(f.history.Epochs, Epoch{Epoch: number})
	}
	epoch := &f.history.Epochs[len(f.history.Epochs)-1]
	err = f.steps(ctx, begin, stream, epoch)
	epoch.Result = f.stand.mean.result()
	if errors.Is(err, ErrStop) && epoch.Steps == 0 { // asked for before the epoch began, on another worker perhaps
		f.history.Epochs = f.history.Epochs[:len(f.history.Epochs)-1]
		return err
	}
	if err != nil && !errors.Is(err, ErrStop) {
		return err
	}
	if f.cfg.Validation != nil && err == nil {
		var result Result
		if result, err = f.t.Evaluate(ctx, f.cfg.Validation); err == nil {
			epoch.Validation = &result
		} else if !errors.Is(err, ErrStop) {
			return fmt.Errorf("train: epoch %d, validation: %w", number+1, err)
		}
	}
	if err != nil && !f.ended(begin) {
		return err
	}
	f.endEpoch()
	return graver(err, f.fire(ctx, func(c Callback) error {
		if c.OnEpochEnd == nil {
			return nil
		}
		return c.OnEpochEnd(ctx, *epoch)
	}))
}

// ended reports whether an epoch that [ErrStop] has ended is finished all the same: it was asked for after the
// last step, and no validation is left out. With other workers it is not asked: they go on to the next step, to
// agree.
func (f *fit) ended(begin EpochBegin) bool {
	return f.cfg.Validation == nil && begin.Steps >= 0 && f.stand.step >= begin.Steps
}

// steps makes the steps of one epoch.
func (f *fit) steps(ctx context.Context, begin EpochBegin, stream *feeder, epoch *Epoch) error {
	mean := f.stand.mean
	for step := begin.Done + 1; f.cfg.StepsPerEpoch == 0 || step <= f.cfg.StepsPerEpoch; step++ {
		before := f.t.strategy.Stats()
		start := time.Now()
		f.t.at(PhaseData)
		g, err := stream.next(ctx)
		if err != nil {
			f.t.tellOthers(ctx, err)
			return fmt.Errorf("train: epoch %d, step %d: %w", begin.Epoch+1, step, err)
		}
		if g == nil {
			return nil
		}
		var made bool
		var problem *NotFiniteError
		if g.weightSum > 0 {
			var stop bool
			if made, stop, problem, err = f.t.step(ctx, g); err != nil {
				return fmt.Errorf("train: epoch %d, step %d: %w", begin.Epoch+1, step, err)
			}
			if stop {
				return ErrStop
			}
		}
		info := Step{
			EpochBegin: begin, Step: step, Examples: g.examples, Skipped: !made, NotFinite: problem,
			Duration: time.Since(start), mean: mean,
		}
		if !made {
			f.history.Skipped++
		}
		if g.weightSum > 0 {
			info.Loss, _ = f.t.scalars()
		}
		if made || g.weightSum == 0 {
			mean.add(g, f.t)
		}
		f.stand.step, f.stand.next = step, place{g.place.pass, g.place.batch + 1}
		stream.release(g)
		f.speed.add(info, before, f.t.strategy.Stats())
		f.history.Steps++
		epoch.Steps = step
		epoch.Duration += info.Duration
		err = f.fire(ctx, func(c Callback) error {
			if c.OnStepEnd == nil {
				return nil
			}
			return c.OnStepEnd(ctx, info)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// fire calls one function of every callback, and returns what ends training now. With several workers a wish to stop does not: they
// agree on it in the next reduction.
func (f *fit) fire(ctx context.Context, call func(Callback) error) error {
	f.t.at(PhaseBetween)
	err := fire(f.cfg.Callbacks, call)
	if err == nil && f.t.stopping.Load() {
		err = ErrStop
	}
	switch {
	case err == nil || !f.t.others():
		return err
	case errors.Is(err, ErrStop):
		f.t.wish = true
		return nil
	}
	f.t.tellOthers(ctx, err)
	return err
}
