package train

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// dilocoOracle is DiLoCo of a fakeModel in plain Go, in float64.
type dilocoOracle struct {
	cfg      DiLoCo
	rate     float64
	layout   []int // replicas of each worker
	workers  []dilocoWorker
	start    [3]float64 // of the round: bias and weights
	momentum [3]float64 // of the outer steps
	steps    int        // in the round
}

type dilocoWorker struct{ now, momentum [3]float64 }

// step takes an inner step on examples of which each replica has per.
func (o *dilocoOracle) step(b data.Batch, per int) {
	if o.steps == 0 {
		o.start = o.workers[0].now
	}
	x, y := tensor.Data[float64](b.Inputs[0]), tensor.Data[float64](b.Labels[0])
	lo := 0
	for w := range o.workers {
		one := &o.workers[w]
		hi := min(lo+per*o.layout[w], len(y))
		var gradient [3]float64
		for i := lo; i < hi; i++ {
			d := one.now[0] + one.now[1]*x[2*i] + one.now[2]*x[2*i+1] - y[i]
			for k, in := range []float64{1, x[2*i], x[2*i+1]} {
				gradient[k] += 2 * d * in / float64(hi-lo)
			}
		}
		if hi > lo {
			for k, g := range gradient {
				one.momentum[k] = 0.5*one.momentum[k] + g
				one.now[k] -= o.rate * one.momentum[k]
			}
		}
		lo = hi
	}
	if o.steps++; o.steps == o.cfg.InnerSteps {
		o.outer()
	}
}

// outer takes an outer step, unless the round has no inner steps.
func (o *dilocoOracle) outer() {
	if o.steps == 0 {
		return
	}
	for k := range o.start {
		sum, n := 0.0, 0
		for w, one := range o.workers {
			sum += float64(o.layout[w]) * (o.start[k] - one.now[k])
			n += o.layout[w]
		}
		mean := sum / float64(n)
		mu := max(o.cfg.Momentum, 0)
		o.momentum[k] = mu*o.momentum[k] + mean
		o.start[k] -= o.cfg.LearningRate * (mean + mu*o.momentum[k])
	}
	for w := range o.workers {
		o.workers[w].now = o.start
	}
	o.steps = 0
}

// differs describes how a replica's parameters and momentum differ from the oracle's, or returns "".
func (o *dilocoOracle) differs(worker int, values fakeValues) string {
	one := o.workers[worker]
	for _, c := range []struct {
		name      string
		want, got []float64
	}{
		{"parameters", one.now[:], slices.Concat(values[0], values[1])},
		{"slots", one.momentum[:], slices.Concat(values[2], values[3])},
	} {
		for k := range c.want {
			if !(math.Abs(c.want[k]-c.got[k]) <= 1e-12*max(1, math.Abs(c.want[k]))) {
				return fmt.Sprintf("%s %v, want %v", c.name, c.got, c.want)
			}
		}
	}
	return ""
}

// TestDiLoCoIsThePapers compares every step of several workers with an oracle: also rounds that an epoch ends early,
// and a batch of which only the first workers have examples.
func TestDiLoCoIsThePapers(t *testing.T) {
	rows := []int{8, 8, 8, 2, 8, 8, 5}
	examples := lineExamples(47)
	for _, layout := range [][]int{{1, 1}, {2, 2}, {1, 1, 1}, {1, 3}, {3}, {1}} {
		for _, cfg := range []DiLoCo{
			{InnerSteps: 3},
			{InnerSteps: 2, LearningRate: 1, Momentum: -1},
			{InnerSteps: 100, Momentum: 0.5},
		} {
			replicas := 0
			for _, n := range layout {
				replicas += n
			}
			train := func(worker int, s *distribute.Strategy) error {
				c := dilocoConfig()
				given := cfg
				c.Exchange = given
				trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64}, c)
				if err != nil {
					return err
				}
				defer trainer.Close()
				if given != cfg {
					return fmt.Errorf("New has changed the configuration to %+v", given)
				}
				o := &dilocoOracle{
					cfg: *trainer.config.diloco(), rate: 1.0 / 64, layout: layout, workers: make([]dilocoWorker, len(layout)),
				}
				for w := range o.workers {
					o.workers[w].now = [3]float64{0, 3, 0}
				}
				p := trainer.program.(*fakeProgram)
				check := func(at string) error {
					for replica, values := range p.snapshot() {
						if why := o.differs(worker, values); why != "" {
							return fmt.Errorf("%v %+v: %s: worker %d, replica %d: %s", layout, cfg, at, worker, replica, why)
						}
					}
					return nil
				}
				lo, outer := 0, 0
				h, err := trainer.Fit(t.Context(), sizes(examples, rows...), FitConfig{Epochs: 3, Callbacks: []Callback{{
					OnEpochBegin: func(context.Context, EpochBegin) error { lo = 0; return nil },
					OnStepEnd: func(_ context.Context, step Step) error {
						n := rows[step.Step-1]
						b := data.Batch{
							Inputs: []*tensor.Tensor{examples.Inputs[0].Rows(lo, lo+n)},
							Labels: []*tensor.Tensor{examples.Labels[0].Rows(lo, lo+n)},
						}
						lo += n
						o.step(b, (8+replicas-1)/replicas)
						if step.Outer != (o.steps == 0) || step.Outer == (trainer.diloco.checkEqual() != nil) {
							return fmt.Errorf("step %d: Outer is %v after %d inner steps", step.Step, step.Outer, o.steps)
						}
						if step.Outer {
							outer++
						}
						if m := step.Mean(); !finite(m.Loss) || m.Examples != int64(lo) {
							return fmt.Errorf("step %d: the mean is %+v", step.Step, m)
						}
						return check(fmt.Sprintf("step %d", step.Step))
					},
					OnEpochEnd: func(context.Context, Epoch) error { o.outer(); return check("the end of an epoch") },
				}}})
				if err != nil {
					return err
				}
				if trainer.Steps() != 21 || h.Skipped != 0 || cfg.InnerSteps == 3 && outer != 6 {
					return fmt.Errorf("%d steps, %d skipped, %d outer ones in epochs", trainer.Steps(), h.Skipped, outer)
				}
				for _, e := range h.Epochs {
					if e.Examples != 47 || !finite(e.Loss) {
						return fmt.Errorf("the history has %+v", e.Result)
					}
				}
				return nil
			}
			var errs []error
			if len(layout) == 1 {
				s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: fakeEngine{layout[0]}})
				if err != nil {
					t.Fatal(err)
				}
				errs = append(errs, train(0, s), s.Close())
			} else {
				errs = overWorkers(t, layout, train)
			}
			if err := errors.Join(errs...); err != nil {
				t.Error(err)
			}
		}
	}
}

// dilocoFit trains a fake model with DiLoCo over workers, each with its own configuration.
func dilocoFit(t *testing.T, layout []int, cfg DiLoCo, ds func(worker int) data.Dataset,
	fit func(worker int, trainer *Trainer) FitConfig,
) (histories []*History, hashes []string, errs []error) {
	t.Helper()
	histories, hashes = make([]*History, len(layout)), make([]string, len(layout))
	errs = overWorkers(t, layout, func(w int, s *distribute.Strategy) error {
		c := dilocoConfig()
		c.Exchange = cfg
		trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64, shift: 1.0 / 16}, c)
		if err != nil {
			return err
		}
		defer trainer.Close()
		histories[w], err = trainer.Fit(t.Context(), ds(w), fit(w, trainer))
		timeless(histories[w])
		if err != nil {
			return err
		}
		hashes[w], err = trainer.WeightsHash(t.Context())
		return err
	})
	return histories, hashes, errs
}

// dilocoConfig is fakeConfig without the warning of a single worker.
func dilocoConfig() Config {
	c := fakeConfig(8)
	c.Logger = slog.New(slog.DiscardHandler)
	return c
}

func dilocoData(int) data.Dataset { return sizes(lineExamples(47), 8, 8, 8, 2, 8, 8, 5) }

// TestDiLoCoWorkersAgree: all workers have the same history, also that of validation, and weights.
func TestDiLoCoWorkersAgree(t *testing.T) {
	histories, hashes, errs := dilocoFit(t, []int{2, 1}, DiLoCo{InnerSteps: 4}, dilocoData, func(int, *Trainer) FitConfig {
		return FitConfig{Epochs: 2, Validation: sizes(lineExamples(9), 8, 1), ValidateEvery: 3}
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	if fmt.Sprintf("%+v", *histories[0].Epochs[1].Validation) != fmt.Sprintf("%+v", *histories[1].Epochs[1].Validation) ||
		fmt.Sprint(histories[0].Epochs[1].Result) != fmt.Sprint(histories[1].Epochs[1].Result) || hashes[0] != hashes[1] {
		t.Errorf("got %+v and %+v, weights %v", histories[0].Epochs[1], histories[1].Epochs[1], hashes)
	}
	for w, h := range histories {
		var steps []int
		for _, v := range h.Validations {
			steps = append(steps, v.Step)
		}
		if !slices.Equal(steps, []int{4, 7, 11, 14}) { // due after 3 and 6, 9 and 12; the epochs end after 7 and 14
			t.Errorf("worker %d validated after steps %v", w, steps)
		}
	}
}

// TestDiLoCoValidations: callbacks act on the validations at the ends of epochs that are shorter than a round.
func TestDiLoCoValidations(t *testing.T) {
	stopped := 0
	histories, _, errs := dilocoFit(t, []int{1, 1}, DiLoCo{InnerSteps: 10}, func(int) data.Dataset {
		return sizes(lineExamples(32), 8, 8, 8, 8)
	}, func(_ int, trainer *Trainer) FitConfig {
		stop, err := NewEarlyStopping(trainer, EarlyStoppingConfig{Patience: 1, MinDelta: 1e9})
		if err != nil {
			t.Error(err)
		}
		return FitConfig{
			Epochs: 9, Validation: sizes(lineExamples(8), 8), ValidateEvery: 3, Callbacks: []Callback{stop},
		}
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	for w, h := range histories {
		if len(h.Validations) < 2 || len(h.Validations) > 3 || h.Validations[1].Step != 8 {
			t.Errorf("worker %d has the validations %+v", w, h.Validations)
		}
		if h.Stopped {
			stopped++
		}
	}
	if stopped != 2 {
		t.Errorf("%d of 2 workers stopped early", stopped)
	}
}

// TestDiLoCoStops: a request in the middle of a round takes effect after its outer step, on all workers; one after an
// outer step, or after an epoch, before the next inner step.
func TestDiLoCoStops(t *testing.T) {
	for _, c := range []struct{ at, want int }{{2, 3}, {3, 3}, {4, 6}, {6, 6}} {
		for _, layout := range [][]int{{1, 1}, {2}} {
			fit := func(w int, trainer *Trainer) FitConfig {
				return FitConfig{Epochs: 2, Callbacks: []Callback{{OnStepEnd: func(context.Context, Step) error {
					if w == len(layout)-1 && trainer.Steps() == int64(c.at) {
						return ErrStop
					}
					return nil
				}}}}
			}
			var histories []*History
			if len(layout) > 1 {
				var errs []error
				if histories, _, errs = dilocoFit(t, layout, DiLoCo{InnerSteps: 3}, dilocoData, fit); errors.Join(errs...) != nil {
					t.Fatal(errors.Join(errs...))
				}
			} else {
				cfg := dilocoConfig()
				cfg.Exchange = DiLoCo{InnerSteps: 3}
				trainer, _ := newFakeWith(t, layout[0], cfg, fakeModel{})
				h, err := trainer.Fit(t.Context(), dilocoData(0), fit(0, trainer))
				if err != nil {
					t.Fatal(err)
				}
				histories = []*History{h}
			}
			for w, h := range histories {
				if !h.Stopped || h.Steps != c.want {
					t.Errorf("%v: stop after step %d: worker %d stopped (%v) after %d steps, want %d", layout, c.at, w, h.Stopped,
						h.Steps, c.want)
				}
			}
		}
	}
}

// TestDiLoCoComparesWorkers: workers that read other data in the middle of a round get an error that says where.
func TestDiLoCoComparesWorkers(t *testing.T) {
	_, _, errs := dilocoFit(t, []int{1, 1, 1}, DiLoCo{InnerSteps: 4}, func(w int) data.Dataset {
		b := lineExamples(32)
		if w == 1 {
			tensor.Data[float64](b.Inputs[0])[20*2] = 17 // in batch 3
		}
		return sizes(b, 8, 8, 8, 8)
	}, func(int, *Trainer) FitConfig { return FitConfig{} })
	for w, err := range errs {
		if err == nil || !strings.Contains(err.Error(), "worker 1 read other inputs than workers 0, 2 in batch 3 of pass 1") {
			t.Errorf("worker %d: %v", w, err)
		}
	}
}

// TestDiLoCoFails: a failure in an inner step of one worker ends the training of all, and names the cause. All workers
// then have the parameters of the last outer step, and the next Fit continues from there.
func TestDiLoCoFails(t *testing.T) {
	for name, call := range map[string]int{"the first step of a round": 4, "a later step": 6} {
		t.Run(name, func(t *testing.T) { testDiLoCoFails(t, call) })
	}
}

func testDiLoCoFails(t *testing.T, call int) {
	failed := make([]error, 2)
	weights := make([]string, 2)
	errs := overWorkers(t, []int{1, 1}, func(w int, s *distribute.Strategy) error {
		calls := 0
		m := fakeModel{rate: 1.0 / 64, fail: func(phase string, _ int) error {
			if phase != "gradients" {
				return nil
			}
			if calls++; w == 1 && calls == call {
				return errors.New("worker 1 has no power")
			}
			return nil
		}}
		c := dilocoConfig()
		c.Exchange = DiLoCo{InnerSteps: 4}
		trainer, err := New(t.Context(), s, m, c)
		if err != nil {
			return err
		}
		defer trainer.Close()
		var outer fakeValues
		remember := Callback{OnStepEnd: func(_ context.Context, step Step) error {
			if step.Outer {
				outer = trainer.program.(*fakeProgram).snapshot()[0]
			}
			return nil
		}}
		_, failed[w] = trainer.Fit(t.Context(), dilocoData(0), FitConfig{Callbacks: []Callback{remember}})
		now := trainer.program.(*fakeProgram).snapshot()[0]
		if got, want := fmt.Sprint(now[:2]), fmt.Sprint(outer[:2]); got != want || trainer.Steps() != 4 {
			return fmt.Errorf("after %d steps the parameters are %s, want those of the outer step after 4: %s",
				trainer.Steps(), got, want)
		}
		if _, err := trainer.Fit(t.Context(), dilocoData(0), FitConfig{}); err != nil {
			return err
		}
		weights[w] = fmt.Sprint(trainer.program.(*fakeProgram).snapshot()[0][:2])
		return nil
	})
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
	for w, err := range failed {
		if err == nil || !strings.Contains(err.Error(), "worker 1 has no power") {
			t.Errorf("worker %d: %v", w, err)
		}
	}
	if weights[0] != weights[1] {
		t.Errorf("after the second Fit the workers have the weights %v", weights)
	}
}

// TestDiLoCoNotFinite: an inner step that is not finite names the replica among those of all workers; the sum of
// changes is checked too.
func TestDiLoCoNotFinite(t *testing.T) {
	_, _, errs := dilocoFit(t, []int{1, 2}, DiLoCo{InnerSteps: 2}, func(int) data.Dataset {
		b := lineExamples(32)
		tensor.Data[float64](b.Inputs[0])[2*(8+7)] = math.NaN() // the last example of batch 2
		return sizes(b, 8, 8, 8, 8)
	}, func(int, *Trainer) FitConfig { return FitConfig{} })
	var e *NotFiniteError
	if !errors.As(errs[1], &e) || e.Replica != 2 || e.Example != 7 || e.Step != 2 {
		t.Errorf("got %+v: %v", e, errs[1])
	}
	if errs[0] == nil {
		t.Error("the other worker has not failed")
	}
	cfg := dilocoConfig()
	cfg.Exchange = DiLoCo{InnerSteps: 2}
	trainer, p := newFakeWith(t, 2, cfg, fakeModel{})
	b := lineExamples(32)
	for i := range 32 {
		tensor.Data[float64](b.Inputs[0])[2*i+1] = 0 // the loss does not depend on the second weight
	}
	_, err := trainer.Fit(t.Context(), sizes(b, 8, 8, 8, 8), FitConfig{Callbacks: []Callback{{
		OnStepEnd: func(context.Context, Step) error {
			for _, r := range p.replicas {
				r.now[1][1], r.next[1][1] = math.MaxFloat64, math.MaxFloat64
			}
			return nil
		},
	}}})
	if err == nil || !strings.Contains(err.Error(), "not finite") {
		t.Errorf("an overflow of the sum of changes: %v", err)
	}
}

// TestDiLoCoBetweenRounds: what needs equal parameters is an error in a round, and a custom loop always.
func TestDiLoCoBetweenRounds(t *testing.T) {
	cfg := dilocoConfig()
	cfg.Exchange = DiLoCo{InnerSteps: 2}
	trainer, _ := newFakeWith(t, 2, cfg, fakeModel{})
	_, err := trainer.Fit(t.Context(), dilocoData(0), FitConfig{Callbacks: []Callback{{
		OnStepEnd: func(ctx context.Context, s Step) error {
			_, snapshot := trainer.Snapshot(ctx)
			_, evaluate := trainer.Evaluate(ctx, dilocoData(0))
			_, predict := trainer.Predict(ctx, dilocoData(0))
			for _, err := range []error{snapshot, evaluate, predict} {
				if s.Outer != (err == nil) || err != nil && !strings.Contains(err.Error(), "after 1 of 2 inner steps") {
					return fmt.Errorf("step %d: %w", s.Step, err)
				}
			}
			return nil
		},
	}}})
	if err != nil {
		t.Error(err)
	}
	_, _, err = trainer.Gradients(t.Context(), lineExamples(4))
	if err == nil || !strings.Contains(err.Error(), "only Fit") {
		t.Error(err)
	}
	g := []*tensor.Tensor{tensor.New(tensor.Float64), tensor.New(tensor.Float64, 2)}
	if err := trainer.ApplyGradients(t.Context(), g); err == nil || !strings.Contains(err.Error(), "only Fit") {
		t.Error(err)
	}
}

// TestDiLoCoAlone: a single worker gets a warning that it exchanges nothing.
func TestDiLoCoAlone(t *testing.T) {
	var log bytes.Buffer
	c := dilocoConfig()
	c.Exchange, c.Logger = DiLoCo{InnerSteps: 3}, slog.New(slog.NewTextHandler(&log, nil))
	newFakeWith(t, 2, c, fakeModel{})
	if !strings.Contains(log.String(), "DiLoCo on a single worker exchanges nothing") {
		t.Errorf("logged %q", log.String())
	}
}

func TestDiLoCoConfig(t *testing.T) {
	for text, change := range map[string]func(*Config, *fakeModel){
		"InnerSteps is 0": func(c *Config, _ *fakeModel) { c.Exchange = DiLoCo{} },
		"LearningRate is NaN": func(c *Config, _ *fakeModel) {
			c.Exchange = DiLoCo{InnerSteps: 2, LearningRate: math.NaN()}
		},
		"LearningRate is -1":      func(c *Config, _ *fakeModel) { c.Exchange = DiLoCo{InnerSteps: 2, LearningRate: -1} },
		"Momentum is 1":           func(c *Config, _ *fakeModel) { c.Exchange = DiLoCo{InnerSteps: 2, Momentum: 1} },
		`Config.NotFinite "skip"`: func(c *Config, _ *fakeModel) { c.NotFinite = SkipNotFinite },
		"compute in bfloat16":     func(_ *Config, m *fakeModel) { m.limit = 100 },
	} {
		cfg, m := dilocoConfig(), fakeModel{rate: 1}
		cfg.Exchange = DiLoCo{InnerSteps: 2}
		change(&cfg, &m)
		s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: fakeEngine{2}})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := New(t.Context(), s, m, cfg); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("got %v, want %q", err, text)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	errs := overWorkers(t, []int{1, 1}, func(w int, s *distribute.Strategy) error {
		cfg := fakeConfig(4)
		cfg.Exchange = DiLoCo{InnerSteps: 2 + w}
		_, err := New(t.Context(), s, fakeModel{}, cfg)
		return err
	})
	if err := errors.Join(errs...); err == nil || !strings.Contains(err.Error(), "inner step") {
		t.Errorf("workers with different inner steps: %v", err)
	}
}
