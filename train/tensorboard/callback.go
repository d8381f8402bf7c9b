package tensorboard

import (
	"context"
	"errors"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/train"
)

// Config configures [New].
type Config struct {
	// Dir is the run's folder. As in Keras, its folders train and validation hold the event files.
	Dir string
	// EverySteps is the number of steps between two records of a step's loss, learning rate and gradients' norm (Keras'
	// update_freq). 0: only after every epoch.
	EverySteps int
	// HistogramEvery is the number of epochs between two histograms of all weights (Keras' histogram_freq). 0: none.
	HistogramEvery int
	// Gradients adds histograms of the gradients of the first step of these epochs, under the variable's name and
	// /gradient; see [train.Trainer.KeepGradients] for what that step does differently. With a sharded optimizer it is
	// an error.
	Gradients bool
	// HParams are the hyperparameters of the run: numbers, booleans and strings. Nil: none.
	HParams map[string]any
}

// flushEvery is how long events may stay in memory.
const flushEvery = 5 * time.Second

// New returns a callback that writes event files (Keras' TensorBoard, with its tags). After an epoch it writes
// epoch_loss, epoch_accuracy, … into train and, of the validation, into validation. Every EverySteps steps it writes
// batch_loss, batch_learning_rate, batch_gradient_norm, and batch_gradient_noise_scale of the epoch so far; and after
// validations between steps evaluation_loss_vs_iterations, …. The horizontal axis is always the number of steps; Keras'
// epoch_loss has that of epochs. Every worker needs the callback; the chief writes.
// A training that resumes writes new files, and TensorBoard drops what an earlier process wrote after that step.
func New(t *train.Trainer, cfg Config) (train.Callback, error) {
	switch {
	case cfg.Dir == "":
		return train.Callback{}, errors.New("tensorboard: Config.Dir is empty: want a folder")
	case cfg.Gradients && cfg.HistogramEvery == 0:
		return train.Callback{}, errors.New("tensorboard: Config.Gradients is for histograms: set HistogramEvery")
	case cfg.EverySteps < 0 || cfg.HistogramEvery < 0:
		return train.Callback{}, errors.New("tensorboard: Config.EverySteps and HistogramEvery: want 0 or more")
	case cfg.Gradients && t.Sharded():
		return train.Callback{}, errors.New("tensorboard: Config.Gradients: the optimizer is sharded, so no worker has all " +
			"gradients: leave out Config.Gradients, or set train.Config.Exchange to train.AllReduce")
	}
	for name, x := range cfg.HParams {
		if _, _, err := protoValue(x); err != nil {
			return train.Callback{}, errors.New("tensorboard: Config.HParams: " + name + ": " + err.Error())
		}
	}
	b := &board{t: t, cfg: cfg}
	return train.Callback{
		OnEpochBegin: b.begin, OnStepEnd: b.step, OnEpochEnd: b.epoch,
		OnTrainDone: func(context.Context, *train.History) error { return b.close() },
		OnTrainEnd:  func(context.Context, *train.History, error) { _ = b.close() }, // after an error, which is reported
	}, nil
}

// board is the state of a callback.
type board struct {
	t       *train.Trainer
	cfg     Config
	writers [2]*Writer // of training and validation, on the chief
	resumed int64      // steps before this Fit
	flushed time.Time
}

// writer returns one of the writers, which it opens on first use.
func (b *board) writer(i int) (*Writer, error) {
	if b.writers[i] == nil {
		w, err := NewWriter(filepath.Join(b.cfg.Dir, [...]string{"train", "validation"}[i]))
		if err != nil {
			return nil, err
		}
		b.writers[i] = w
		if b.resumed > 0 {
			return w, w.Restart(b.resumed + 1)
		}
	}
	return b.writers[i], nil
}

// histograms reports whether those of an epoch are written.
func (b *board) histograms(epoch int) bool {
	return b.cfg.HistogramEvery > 0 && (epoch+1)%b.cfg.HistogramEvery == 0
}

func (b *board) begin(_ context.Context, e train.EpochBegin) error {
	if !b.t.IsChief() {
		return nil
	}
	if b.cfg.Gradients && b.histograms(e.Epoch) {
		if err := b.t.KeepGradients(); err != nil {
			return err
		}
	}
	if b.writers[0] != nil {
		return nil
	}
	b.resumed = 0
	if e.Epoch > 0 || e.Done > 0 {
		b.resumed = b.t.Steps()
	}
	w, err := b.writer(0)
	if err != nil {
		return err
	}
	if b.cfg.HParams != nil {
		tags := []string{"epoch_loss"}
		for _, name := range b.t.Metrics() {
			tags = append(tags, "epoch_"+name)
		}
		err = w.HParams(b.cfg.HParams, tags)
	}
	return errors.Join(err, w.Flush())
}

func (b *board) step(_ context.Context, s train.Step) error {
	if !b.t.IsChief() {
		return nil
	}
	var err error
	for _, g := range b.t.KeptGradients() {
		err = errors.Join(err, b.writers[0].Histogram(b.t.Steps(), tag(g.Name)+"/gradient", g.Value.Float64s()))
	}
	if at := b.t.Steps(); b.cfg.EverySteps > 0 && at%int64(b.cfg.EverySteps) == 0 && !s.Skipped {
		w := b.writers[0]
		err = errors.Join(err, w.Scalar(at, "batch_loss", s.Loss))
		if rate, ok := b.t.LearningRate(); ok {
			err = errors.Join(err, w.Scalar(at, "batch_learning_rate", rate))
		}
		if s.GradientNorm > 0 {
			err = errors.Join(err, w.Scalar(at, "batch_gradient_norm", s.GradientNorm))
		}
		if x, ok := s.Mean().Metrics["gradient_noise_scale"]; ok {
			err = errors.Join(err, w.Scalar(at, "batch_gradient_noise_scale", x))
		}
	}
	if s.Validation != nil {
		w, e := b.writer(1)
		if e != nil {
			return e
		}
		err = errors.Join(err, scalars(w, b.t.Steps(), "evaluation_", "_vs_iterations", *s.Validation))
	}
	if time.Since(b.flushed) > flushEvery {
		err = errors.Join(err, b.flush())
	}
	return err
}

// tag returns a variable's name without the first slash.
func tag(name string) string { return strings.TrimPrefix(name, "/") }

// scalars writes loss and metrics.
func scalars(w *Writer, step int64, before, after string, r train.Result) error {
	err := w.Scalar(step, before+"loss"+after, r.Loss)
	for _, name := range slices.Sorted(maps.Keys(r.Metrics)) {
		err = errors.Join(err, w.Scalar(step, before+name+after, r.Metrics[name]))
	}
	return err
}

func (b *board) epoch(ctx context.Context, e train.Epoch) error {
	var weights []train.Weight
	if b.histograms(e.Epoch) {
		var err error
		if weights, err = b.t.Weights(ctx); err != nil { // on every worker: averages are combined
			return err
		}
	}
	if !b.t.IsChief() {
		return nil
	}
	w, at := b.writers[0], b.t.Steps()
	err := scalars(w, at, "epoch_", "", e.Result)
	if rate, ok := b.t.LearningRate(); ok {
		err = errors.Join(err, w.Scalar(at, "epoch_learning_rate", rate))
	}
	for _, v := range weights {
		err = errors.Join(err, w.Histogram(at, tag(v.Name), v.Value.Float64s()))
	}
	if e.Validation != nil {
		held, e2 := b.writer(1)
		if e2 != nil {
			return e2
		}
		err = errors.Join(err, scalars(held, at, "epoch_", "", *e.Validation))
	}
	return errors.Join(err, b.flush())
}

func (b *board) flush() (err error) {
	b.flushed = time.Now()
	for _, w := range b.writers {
		if w != nil {
			err = errors.Join(err, w.Flush())
		}
	}
	return err
}

func (b *board) close() (err error) {
	for i, w := range b.writers {
		if w != nil {
			err = errors.Join(err, w.Close())
		}
		b.writers[i] = nil
	}
	return err
}
