package train

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/timeline"
)

// MaxAccumulate is the largest number of batches that a step can accumulate.
const MaxAccumulate = 1 << 16

// FitConfig configures [Trainer.Fit]. The zero value trains for one epoch.
type FitConfig struct {
	// Epochs is the index at which training ends: Fit trains epochs InitialEpoch to Epochs-1 (Keras' epochs: not
	// a count if InitialEpoch > 0). Default: InitialEpoch + 1.
	Epochs int
	// InitialEpoch is the index of the first epoch, from 0. It is for training that continues from given
	// weights.
	InitialEpoch int
	// StepsPerEpoch is the number of steps of an epoch. The next epoch continues where the last one stopped,
	// and starts the dataset again when it ends. Default: an epoch is one pass over the dataset.
	StepsPerEpoch int
	// Steps is the total number of steps after which training ends, even inside an epoch. Steps before a
	// [Trainer.Restore] count. Default: no limit.
	Steps int
	// StopGrace is how long a step may still take after the end of Fit's context before it is abandoned, and with it the
	// snapshot of a [Backup]. Default 10 seconds; negative: no limit.
	StopGrace time.Duration
	// Accumulate is the number of batches of the dataset whose gradients one step accumulates (Keras'
	// gradient_accumulation_steps). A step computes the gradients of its batches one after the other, all-reduces their
	// sum once and updates the variables once, with the loss of all examples of these batches: it equals a step with one
	// batch of that many examples, except for rounding and for layers that compute over a batch, such as batch
	// normalization. The last step of an epoch may have fewer batches. A step reads its batches before it begins, so up
	// to 2*Accumulate+1 are in memory.
	//
	// Everything that counts steps counts these: StepsPerEpoch, Steps, callbacks, the history, [Trainer.Steps], snapshots
	// and learning-rate schedules. (Keras counts batches.) Default: 1. At most [MaxAccumulate].
	Accumulate int
	// Validation, if not nil, is evaluated after every epoch. data.Pipeline.Split can hold out a part of the
	// training data.
	Validation data.Dataset
	// Unit names what the examples are, such as "images", in live displays (timeline.Training). Default: examples.
	Unit string
	// Settings describe the training on the live page, besides what the trainer knows: names and values, such as "model"
	// and "resnet18". They must not change while Fit runs.
	Settings map[string]string
	// ValidateEvery is the number of steps, counted over all epochs, after which Validation is evaluated too (with
	// DiLoCo, at the next outer step, which may be that at the end of the epoch). The results are Step.Validation, or
	// Epoch.Validation at the end of an epoch, and History.Validations. [NewEarlyStopping],
	// [NewReduceLROnPlateau] and [NewModelCheckpoint] then act after these, and not after epochs. Default: only after
	// every epoch.
	ValidateEvery int
	// EMA validates by the exponential moving averages of the parameters, which an optimizer wrapped by
	// optimizer.EMA of engine/gomlx/optimizer keeps. [NewModelCheckpoint] then writes the averages. (Keras'
	// SwapEMAWeights.)
	EMA bool
	// Callbacks are called in the order given. Only the callback of a [Backup] is called after all others, so that a
	// snapshot has what they change between two steps.
	Callbacks []Callback
}

// Fit trains on ds, which yields global batches: every [data.Batch] has at most Config.GlobalBatch examples.
// Epoch e reads ds with data.WithEpoch(ctx, e), so a shuffled pipeline has a new order in every epoch. Fit
// returns an error if another Fit of this trainer is running, so a callback cannot call it.
//
// If ctx ends, training stops as by [Trainer.Stop]: after the current step, on all workers, with the snapshot that a
// [Backup] writes. Fit then returns an error with the cause of ctx, on the other workers nil and History.Stopped. A
// step that takes longer than FitConfig.StopGrace is abandoned. To stop without an error, call Stop.
//
// On an error, or if ctx ends, the history holds the epochs and steps until then, and all variables have the values of
// the last complete step; with DiLoCo the parameters have those of the last outer step. Error texts count epochs and
// steps from 1, as the progress line does. Fit ends with [Trainer.CheckMirrored] over all workers. An error that is a
// *[TraceError] itself means that only the trace is missing: training is complete.
//
// With several workers, every worker calls Fit with the same data and configuration; the callbacks may
// differ. If a callback on any worker requests a stop, training ends on all workers after the same step: the
// step after which the callback ran, as with one worker. The stop request is sent with the next step's
// all-reduce, and that step is then rolled back on every worker. If no step follows, training has ended
// anyway, and History.Stopped stays false. Any other error of a callback, or of the data, ends Fit with an
// error on all workers.
//
// A model whose learning-rate schedule spans the whole training (in GoMLX cosineschedule.NumCycles) gets the
// number of the last step from FitConfig and the dataset's length. If the length is unknown, set
// StepsPerEpoch or Steps.
//
// After [Trainer.Restore], which OnTrainBegin may call, Fit resumes at the snapshot's position with the
// snapshot's history. It skips the batches already trained on; the rest follow in the same order, with the
// same random numbers.
func (t *Trainer) Fit(ctx context.Context, ds data.Dataset, cfg FitConfig) (*History, error) {
	if cfg.Epochs == 0 {
		cfg.Epochs = cfg.InitialEpoch + 1
	}
	if cfg.Accumulate == 0 {
		cfg.Accumulate = 1
	}
	cfg.Callbacks = slices.Clone(cfg.Callbacks)
	slices.SortStableFunc(cfg.Callbacks, func(a, b Callback) int {
		switch {
		case a.last == b.last:
			return 0
		case a.last:
			return 1
		}
		return -1
	})
	start := fitPosition{epoch: cfg.InitialEpoch, next: batchPosition{pass: cfg.InitialEpoch}}
	f := &fit{t: t, ds: ds, cfg: cfg, history: &History{}, position: start}
	if !t.fitting.CompareAndSwap(nil, f) {
		return &History{}, errors.New("train: Fit was called while another Fit of this trainer is running: " +
			"call one after the other, and none in a callback")
	}
	defer t.fitting.Store(nil)
	var end *contextEnd
	cause := ctx
	if ctx.Err() == nil {
		ctx, end = t.stopAtEnd(ctx, cmp.Or(cfg.StopGrace, stopGrace))
		defer end.release()
	}
	var tr *tracing
	err := cfg.validate()
	if cfg.EMA && err == nil {
		if _, err = t.ema(); err != nil {
			err = fmt.Errorf("train: FitConfig.EMA is set, and %w", err)
		}
	}
	switch {
	case err != nil:
		t.failOthers(ctx, err)
	case ds == nil:
		err = f.dataFailed(ctx, errNoDataset)
	default:
		if tr, err = t.startTrace(ctx, cfg.Accumulate); err == nil {
			err = f.run(ctx)
		}
	}
	byContext := end.trained()
	if errors.Is(err, ErrStop) {
		f.history.Stopped, err = true, nil
		t.stopping.Store(false)
	}
	t.stopRequested = false
	if err != nil {
		err = errors.Join(err, t.diloco.drop())
	}
	f.history.Speed = f.speed.result(len(t.local))
	if err == nil {
		err = t.checkAll(ctx)
	}
	var trace *TraceError
	if e := t.endTrace(ctx, tr, err); !errors.As(e, &trace) {
		err = moreSevere(err, e)
	}
	if err == nil {
		err = f.done(ctx)
	}
	if err == nil && f.history.Stopped && byContext {
		err = fmt.Errorf("train: stopped by the context in step %d: %w", f.history.Steps, context.Cause(cause))
	}
	for _, c := range cfg.Callbacks {
		if c.OnTrainEnd != nil {
			c.OnTrainEnd(ctx, f.history, err)
		}
	}
	switch {
	case trace == nil:
		return f.history, err
	case err == nil:
		return f.history, trace
	}
	return f.history, errors.Join(err, trace)
}

// stopGrace is the default of FitConfig.StopGrace.
const stopGrace = 10 * time.Second

// contextEnd stops training when the context of Fit ends.
type contextEnd struct {
	t         *Trainer
	cancel    context.CancelCauseFunc // of the longer context
	unwatch   func() bool
	mu        sync.Mutex // guards the fields below
	abandon   *time.Timer
	over      bool // training has ended: from now on the end of the context has no effect
	requested bool // the context ended before
}

// stopAtEnd returns a context with the values of ctx. When ctx ends, it requests a stop, and a step that still runs
// after grace is abandoned: the returned context ends. The caller must call trained and release.
func (t *Trainer) stopAtEnd(ctx context.Context, grace time.Duration) (context.Context, *contextEnd) {
	longer, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	e := &contextEnd{t: t, cancel: cancel}
	e.unwatch = context.AfterFunc(ctx, func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.over {
			return
		}
		e.requested = true
		t.Stop()
		if grace > 0 {
			e.abandon = time.AfterFunc(grace, func() { cancel(context.Cause(ctx)) })
		}
	})
	return longer, e
}

// trained ends the watch: the last snapshot may take as long as it needs. It reports whether the context has stopped
// training, and withdraws the request, which the next Fit must not see.
func (e *contextEnd) trained() bool {
	if e == nil {
		return false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.over = true
	if e.abandon != nil {
		e.abandon.Stop()
	}
	if e.requested {
		e.t.stopping.Store(false)
	}
	return e.requested
}

func (e *contextEnd) release() {
	e.unwatch()
	e.cancel(nil)
}

func (c *FitConfig) validate() error {
	switch {
	case c.InitialEpoch < 0 || c.Epochs < c.InitialEpoch:
		return fmt.Errorf("train: FitConfig asks for the epochs from %d up to %d: want 0 <= InitialEpoch <= Epochs",
			c.InitialEpoch, c.Epochs)
	case c.StepsPerEpoch < 0:
		return fmt.Errorf("train: FitConfig.StepsPerEpoch is %d: want at least 1, or 0 for the whole dataset",
			c.StepsPerEpoch)
	case c.Accumulate < 0 || c.Accumulate > MaxAccumulate:
		return fmt.Errorf("train: FitConfig.Accumulate is %d: want the number of batches of a step, 1 to %d (a step reads "+
			"all of them first: for larger steps, use larger batches)", c.Accumulate, MaxAccumulate)
	case c.Steps < 0:
		return fmt.Errorf("train: FitConfig.Steps is %d: want at least 1, or 0 for no limit", c.Steps)
	case c.ValidateEvery < 0:
		return fmt.Errorf("train: FitConfig.ValidateEvery is %d: want a number of steps, or 0 for after every epoch",
			c.ValidateEvery)
	case c.ValidateEvery > 0 && c.Validation == nil:
		return fmt.Errorf("train: FitConfig.ValidateEvery is %d, and Validation is not set: set the dataset to evaluate",
			c.ValidateEvery)
	}
	names := map[string]bool{}
	for _, callback := range c.Callbacks {
		switch {
		case callback.Name == "" && (callback.Save != nil || callback.Load != nil):
			return errors.New("train: FitConfig.Callbacks has a callback with Save or Load, and without a Name: the name " +
				"finds its state in a snapshot")
		case callback.Name != "" && names[callback.Name]:
			return fmt.Errorf("train: FitConfig.Callbacks has two callbacks named %q: give each a name", callback.Name)
		}
		names[callback.Name] = true
	}
	return nil
}

// fit is one call of Fit.
type fit struct {
	t         *Trainer
	ds        data.Dataset
	cfg       FitConfig
	history   *History
	speed     stopwatch
	published time.Duration // when the recorder's Training was set, by its clock
	measured  []timeline.Measurement
	settings  map[string]string
	position  fitPosition
	stream    *feeder // that reads ds; nil: none
	mean      *mean   // over the steps of the epoch in progress
	// When it began, and when it published the progress first, by the recorder's clock; the steps until then.
	began, first time.Duration
	firstSteps   int
	// validationDue: FitConfig.ValidateEvery asks for a validation, with DiLoCo after the next outer step.
	validationDue bool
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
	joins := f.t.placementDue() && !f.t.others()
	if joins {
		if err := f.replace(ctx, errPlace); err != nil {
			return err
		}
	}
	if err := f.resumePosition(); err != nil {
		f.t.failOthers(ctx, err)
		return err
	}
	if err := f.setLastStep(); err != nil {
		return f.dataFailed(ctx, err)
	}
	f.began, f.settings = f.t.Timeline().Now(), f.describe()
	if err := f.checkValidation(ctx); err != nil {
		return f.dataFailed(ctx, fmt.Errorf("FitConfig.Validation, batch 0: %w", err))
	}
	if !joins { // else the others are in the middle of theirs
		if err := f.compareWorkers(ctx); err != nil {
			return err
		}
	}
	for f.position.epoch < f.cfg.Epochs && (f.left() != 0 || f.position.open()) {
		if f.stream == nil {
			if err := f.openFeed(ctx); err != nil {
				return f.dataFailed(ctx, err)
			}
		}
		err := f.epoch(ctx)
		if f.cfg.StepsPerEpoch == 0 || err != nil {
			err = f.closeFeed(ctx, err)
		}
		if err != nil {
			if err = f.replace(ctx, err); err == nil && f.t.resume != nil { // this worker was behind
				*f.history = History{}
				err = f.resumePosition()
			}
		}
		if err != nil || f.position.truncated {
			return err
		}
	}
	return f.closeFeed(ctx, nil)
}

// openFeed starts to read the dataset at Fit's position: with StepsPerEpoch for all epochs, else for one.
func (f *fit) openFeed(ctx context.Context) (err error) {
	cfg := feedConfig{
		epoch: f.position.epoch, skip: f.position.next.batch, limit: f.batches(f.left()), labels: true,
		together: f.cfg.Accumulate,
	}
	if n := f.cfg.StepsPerEpoch; n > 0 {
		limit := n*(f.cfg.Epochs-f.position.epoch) - f.position.step
		if left := f.left(); left >= 0 {
			limit = min(limit, left)
		}
		cfg.epoch, cfg.repeat, cfg.limit = f.position.next.pass, true, f.batches(max(limit, 0))
	}
	f.stream, err = f.t.feed(ctx, f.ds, cfg)
	return err
}

// closeFeed stops to read the dataset. It returns err, or otherwise the error of closing.
func (f *fit) closeFeed(ctx context.Context, err error) error {
	stream := f.stream
	if f.stream = nil; stream == nil {
		return err
	}
	return f.t.closeFeed(ctx, stream, err)
}

// checkValidation returns an error if the first batch of FitConfig.Validation does not fit: it would be found only
// after an epoch. A stream is not read for this: its batch size counts if package data knows it.
func (f *fit) checkValidation(ctx context.Context) error {
	if f.cfg.Validation == nil {
		return nil
	}
	r, err := data.Open(data.WithEpoch(ctx, 0), f.cfg.Validation)
	if err == nil && r == nil {
		return f.checkValidationStream()
	}
	if err != nil || r.Len() == 0 {
		return err
	}
	e, err := r.At(ctx, 0)
	if err != nil {
		return err
	}
	b, ok := e.(data.Batch)
	if !ok || len(b.Inputs) == 0 || b.Inputs[0] == nil || b.Inputs[0].Rank() == 0 {
		return nil // reading it says what is wrong
	}
	g := &globalBatch{batchShape: f.t.shapeOf(b, b.Rows(), true, true), t: f.t, labels: true, evaluation: true}
	if err := g.check(b, b.Rows()); err != nil {
		return f.t.noShapeError(err)
	}
	return nil
}

func (f *fit) checkValidationStream() error {
	rows, full, _ := data.BatchSize(f.cfg.Validation)
	most := f.t.config.EvaluationBatch
	for _, s := range f.t.config.Shapes {
		most = max(most, s.GlobalBatch)
	}
	if rows <= most || !full && f.cfg.Validation.Len() < 2 { // the only batch may be smaller
		return nil
	}
	return fmt.Errorf("its batches have %d examples: want at most the global batch of %d "+
		"that the model was compiled for, or a larger Config.EvaluationBatch", rows, most)
}

// batches returns the number of batches of so many full steps, and stepsOf the number of steps over so many
// batches. A negative number, which means an unknown one or no limit, stays.
func (f *fit) batches(steps int) int { return max(steps, -1) * f.cfg.Accumulate }

func (f *fit) stepsOf(batches int) int {
	if batches < 0 {
		return -1
	}
	return ceilDiv(batches, f.cfg.Accumulate)
}

// dataFailed reports to the other workers that Fit cannot read its dataset, and returns the error that ends
// Fit.
func (f *fit) dataFailed(ctx context.Context, err error) error {
	f.t.failOthers(ctx, err)
	return fmt.Errorf("train: %w", err)
}

// left returns how many more steps FitConfig.Steps allows; negative: no limit.
func (f *fit) left() int {
	if f.cfg.Steps == 0 {
		return -1
	}
	return max(f.cfg.Steps-f.history.Steps, 0)
}

func (f *fit) epoch(ctx context.Context) error {
	number, done := f.position.epoch, f.position.step
	begin := EpochBegin{Epoch: number, Epochs: f.cfg.Epochs, Steps: f.cfg.StepsPerEpoch, Done: done}
	if begin.Steps == 0 {
		begin.Steps = f.stepsOf(f.ds.Len())
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
		f.mean = f.t.newMean()
		f.history.Epochs = append(f.history.Epochs, Epoch{Epoch: number})
	}
	epoch := &f.history.Epochs[len(f.history.Epochs)-1]
	if err = f.steps(ctx, begin, epoch); err == nil {
		if err = f.t.diloco.endEpoch(ctx, f.mean); err != nil {
			err = fmt.Errorf("train: epoch %d: %w", number+1, err)
		}
	}
	epoch.Result = f.mean.result()
	// A stop may have been requested before the epoch began, perhaps on another worker, and with another placement the
	// epoch begins again.
	if (errors.Is(err, ErrStop) || err != nil && f.t.config.placements != nil) && epoch.Steps == 0 {
		f.history.Epochs = f.history.Epochs[:len(f.history.Epochs)-1]
		return err
	}
	if err != nil && !errors.Is(err, ErrStop) {
		return err
	}
	if f.cfg.Validation != nil && err == nil {
		due := f.validationDue // by a step of a round that the end of the epoch has ended
		f.validationDue = false
		if done := f.history.Validations; len(done) > 0 && done[len(done)-1].Step == f.history.Steps {
			epoch.Validation = new(done[len(done)-1].Result)
		} else if result, e := f.validate(ctx); e == nil {
			epoch.Validation = &result
			if due {
				f.history.Validations = append(f.history.Validations, Validation{
					Result: result, Epoch: number, Step: f.history.Steps, Training: epoch.Result,
				})
			}
		} else if err = e; !errors.Is(err, ErrStop) {
			return fmt.Errorf("train: epoch %d, validation: %w", number+1, err)
		}
		if epoch.Validation != nil {
			f.publishResult(begin, epoch.Steps, epoch.Result, epoch.Validation)
		}
	}
	if err != nil && !f.ended(begin) {
		return err
	}
	f.endEpoch()
	return moreSevere(err, f.fire(ctx, func(c Callback) error {
		if c.OnEpochEnd == nil {
			return nil
		}
		return c.OnEpochEnd(ctx, *epoch)
	}))
}

// validate evaluates FitConfig.Validation. Meanwhile the training's reader fills the batches of the last step.
func (f *fit) validate(ctx context.Context) (result Result, err error) {
	if f.t.feeding != nil {
		f.t.feeding.refill()
	}
	if !f.cfg.EMA {
		return f.t.Evaluate(ctx, f.cfg.Validation)
	}
	err = f.t.WithEMA(ctx, func() (err error) {
		result, err = f.t.Evaluate(ctx, f.cfg.Validation)
		return err
	})
	return result, err
}

// validateStep validates after the step that was just taken, if this is due. It returns ErrStop if a stop ended it.
func (f *fit) validateStep(ctx context.Context, info *Step) error {
	if f.cfg.ValidateEvery > 0 && f.history.Steps%f.cfg.ValidateEvery == 0 {
		f.validationDue = true
	}
	if !f.validationDue || f.t.diloco.checkEqual() != nil {
		return nil
	}
	f.validationDue = false
	result, err := f.validate(ctx)
	switch {
	case errors.Is(err, ErrStop):
		return ErrStop
	case err != nil:
		return fmt.Errorf("train: epoch %d, step %d, validation: %w", info.Epoch+1, info.Step, err)
	}
	info.Validation = &result
	f.history.Validations = append(f.history.Validations, Validation{
		Result: result, Epoch: info.Epoch, Step: f.history.Steps, Training: info.Mean(),
	})
	return nil
}

// ended reports whether an epoch that [ErrStop] ended is complete: the stop was requested after its last
// step, and no validation was skipped. It is not used with several workers: they continue to the next step to
// agree on the stop.
func (f *fit) ended(begin EpochBegin) bool {
	return f.cfg.Validation == nil && begin.Steps >= 0 && f.position.step >= begin.Steps
}

// steps runs the steps of one epoch.
func (f *fit) steps(ctx context.Context, begin EpochBegin, epoch *Epoch) error {
	mean, stream := f.mean, f.stream
	var b stepBatches
	for step := begin.Done + 1; f.cfg.StepsPerEpoch == 0 || step <= f.cfg.StepsPerEpoch; step++ {
		if f.t.placementAgreed() {
			return errPlace
		}
		f.t.strategy.ReadStats(&f.speed.before)
		start := time.Now()
		f.t.enter(PhaseData)
		err := stream.step(ctx, &b, f.cfg.Accumulate)
		if err != nil {
			f.t.failOthers(ctx, err)
			return fmt.Errorf("train: epoch %d, step %d: %w", begin.Epoch+1, step, err)
		}
		if len(b.list) == 0 {
			return nil
		}
		result, err := f.t.fitStep(ctx, &b, mean)
		if err != nil {
			return fmt.Errorf("train: epoch %d, step %d: %w", begin.Epoch+1, step, err)
		}
		if result.stop {
			return ErrStop
		}
		info := Step{
			EpochBegin: begin, Step: step, Examples: b.examples, Skipped: !result.taken, NotFinite: result.problem,
			Duration: time.Since(start), mean: mean, round: result.round, Outer: result.outer,
			Overflow:  !result.taken && result.problem == nil && b.weightSum > 0,
			Straggler: f.t.strategy.Worker().Straggler(),
		}
		if !result.taken {
			f.history.Skipped++
		}
		if b.weightSum > 0 {
			info.Loss, _ = f.t.scalars()
			if f.t.config.ClipNorm > 0 {
				info.GradientNorm = f.t.norm
			}
		}
		last := b.list[len(b.list)-1].position
		f.position.step, f.position.next = step, batchPosition{last.pass, last.batch + 1}
		stream.release(b.list...)
		f.t.strategy.ReadStats(&f.speed.after)
		f.speed.add(info, f.t.waited)
		f.history.Steps++
		epoch.Steps = step
		epoch.Duration += info.Duration
		stopped := f.validateStep(ctx, &info)
		if stopped != nil && !errors.Is(stopped, ErrStop) {
			return stopped
		}
		f.publish(&info)
		err = f.fire(ctx, func(c Callback) error {
			if c.OnStepEnd == nil {
				return nil
			}
			return c.OnStepEnd(ctx, info)
		})
		if err = moreSevere(stopped, err); err != nil {
			return err
		}
	}
	return nil
}

// fire calls one function of every callback and returns the error that ends training now. With several
// workers, a stop request does not end it yet: the workers agree on it in the next reduction.
func (f *fit) fire(ctx context.Context, call func(Callback) error) error {
	f.t.enter(PhaseBetween)
	err := fire(f.cfg.Callbacks, call)
	if err == nil && f.t.stopping.Load() {
		err = ErrStop
	}
	switch {
	case err == nil || !f.t.others() && !(errors.Is(err, ErrStop) && f.t.diloco.checkEqual() != nil):
		return err
	case errors.Is(err, ErrStop):
		f.t.stopRequested = true
		return nil
	}
	f.t.failOthers(ctx, err)
	return err
}
