package train

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
)

// Mode specifies when a monitored number is better.
type Mode uint8

// The modes.
const (
	ModeAuto Mode = iota // ModeMin if the number's name ends with "loss", "error" or "perplexity", else ModeMax
	ModeMin              // when it is smaller
	ModeMax              // when it is larger
)

// String returns Keras' name: auto, min, max.
func (m Mode) String() string {
	if names := [...]string{"auto", "min", "max"}; int(m) < len(names) {
		return names[m]
	}
	return fmt.Sprintf("Mode(%d)", uint8(m))
}

// larger reports whether a larger number is better.
func (m Mode) larger(name string) bool {
	if m != ModeAuto {
		return m == ModeMax
	}
	for _, suffix := range []string{"loss", "error", "perplexity"} {
		if strings.HasSuffix(name, suffix) {
			return false
		}
	}
	return true
}

// point is what callbacks compare: an epoch, or a validation between steps (FitConfig.ValidateEvery).
type point struct {
	epoch, step int // the step counts over all epochs
	numbers     map[string]float64
}

// String describes the point in messages, with numbers from 1.
func (p point) String() string {
	if p.step > 0 {
		return fmt.Sprintf("step %d", p.step)
	}
	return fmt.Sprintf("epoch %d", p.epoch+1)
}

// points lists all points so far, including those before a restore.
func (f *fit) points() (list []point) {
	if f.cfg.ValidateEvery > 0 {
		for _, v := range f.history.Validations {
			list = append(list, point{v.Epoch, v.Step, numbersOf(v.Training, &v.Result)})
		}
		return list
	}
	for _, e := range f.history.Epochs {
		if e.Epoch < f.position.epoch || f.position.truncated { // it is complete
			list = append(list, point{epoch: e.Epoch, numbers: numbersOf(e.Result, e.Validation)})
		}
	}
	return list
}

// numbersOf returns loss and metrics by their names in Keras' logs.
func numbersOf(r Result, validation *Result) map[string]float64 {
	out := map[string]float64{"loss": r.Loss}
	maps.Copy(out, r.Metrics)
	if validation != nil {
		out["val_loss"] = validation.Loss
		for name, x := range validation.Metrics {
			out["val_"+name] = x
		}
	}
	return out
}

// known returns the names of the numbers of all points, and whether each of them will exist.
func (f *fit) known() map[string]bool {
	validated := f.cfg.Validation != nil
	out := map[string]bool{"loss": true, "val_loss": validated}
	for name := range f.t.newMean().result().Metrics {
		out[name] = true
	}
	for name := range newMean(f.t.metrics, f.t.config.LossReduction).result().Metrics {
		out["val_"+name] = validated
	}
	return out
}

// monitor follows one number over the points of a Fit. All state follows from the history, which is equal on all
// workers and part of snapshots: at its beginning a resumed Fit shows the callback the points before.
type monitor struct {
	t       *Trainer
	of      string // the type of the configuration, in errors
	name    string // of the number
	mode    Mode
	min     float64 // difference that counts as better
	seen    int     // points
	best    float64
	hasBest bool
}

// reset begins a Fit. It returns an error if the number will not exist.
func (m *monitor) reset() error {
	m.seen, m.hasBest = 0, false
	if m.name == "" {
		m.name = "val_loss"
	}
	if m.mode > ModeMax {
		return fmt.Errorf("train: %s.Mode is %v: want ModeAuto, ModeMin or ModeMax", m.of, m.mode)
	}
	known := m.t.fitting.Load().known()
	switch there, ok := known[m.name]; {
	case !ok:
		return fmt.Errorf("train: %s.Monitor is %s: the model has no such metric: want one of %s", m.of, m.name,
			strings.Join(slices.Sorted(maps.Keys(known)), ", "))
	case !there:
		return fmt.Errorf("train: %s.Monitor is %s, and FitConfig.Validation is not set", m.of, m.name)
	}
	return nil
}

// better reports whether x is better than another number, by more than the difference that counts.
func (m *monitor) better(x, than float64) bool {
	if m.mode.larger(m.name) {
		return x-m.min > than
	}
	return x+m.min < than
}

// improves reports whether a point is the best so far.
func (m *monitor) improves(p point) bool {
	x := p.numbers[m.name]
	if math.IsNaN(x) || m.hasBest && !m.better(x, m.best) {
		return false
	}
	m.best, m.hasBest = x, true
	return true
}

// watch returns a callback that calls each for every point, in order. In a resumed Fit it calls each for the points
// before it, with now false.
func (m *monitor) watch(begin func() error, each func(ctx context.Context, i int, p point, now bool) error) Callback {
	show := func(ctx context.Context, live bool) (err error) {
		points := m.t.fitting.Load().points()
		for ; m.seen < len(points); m.seen++ {
			// a point that ended an earlier Fit does not end this one, unless it is the last
			if err = each(ctx, m.seen, points[m.seen], live && m.seen == len(points)-1); err != nil && !errors.Is(err, ErrStop) {
				return err
			}
		}
		return err
	}
	return Callback{
		OnTrainBegin: func(context.Context) error {
			if err := m.reset(); err != nil {
				return err
			}
			return begin()
		},
		OnEpochBegin: func(ctx context.Context, _ EpochBegin) error { return show(ctx, false) },
		OnStepEnd: func(ctx context.Context, s Step) error {
			if s.Validation == nil {
				return nil
			}
			return show(ctx, true)
		},
		OnEpochEnd: func(ctx context.Context, _ Epoch) error { return show(ctx, true) },
		// a Fit that is resumed at its end begins no epoch
		OnTrainDone: func(ctx context.Context, _ *History) error { return show(ctx, false) },
	}
}
