package train

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/compress"
)

// TestNotFiniteOverWorkers checks that every worker ends with the same error, or skips the same batches, whichever
// worker computes the example.
func TestNotFiniteOverWorkers(t *testing.T) {
	type outcome struct {
		err            string
		steps, skipped int
		made           int64
		hash           string
	}
	for _, layout := range [][]int{{4}, {1, 3}, {2, 1, 1}} {
		for _, policy := range []NotFinitePolicy{FailNotFinite, WarnNotFinite, SkipNotFinite} {
			t.Run(fmt.Sprint(layout, policy), func(t *testing.T) {
				b := lineExamples(24)
				tensor.Data[float64](b.Inputs[0])[2*(8+5)+1] = math.Inf(1) // replica 2's in batch 2
				outcomes := make([]outcome, len(layout))
				errs := overWorkers(t, layout, func(w int, s *distribute.Strategy) error {
					cfg := fakeConfig(8)
					cfg.NotFinite, cfg.Logger = policy, slog.New(slog.NewTextHandler(io.Discard, nil))
					trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64}, cfg)
					if err != nil {
						return err
					}
					h, err := trainer.Fit(t.Context(), sizes(b, 8, 8, 8), FitConfig{Epochs: 2})
					outcomes[w] = outcome{
						err: fmt.Sprint(err), steps: h.Steps, skipped: h.Skipped,
						made: trainer.Steps(),
					}
					if outcomes[w].hash, err = trainer.WeightsHash(t.Context()); err != nil {
						return err
					}
					return trainer.Close()
				})
				if err := errors.Join(errs...); err != nil {
					t.Fatal(err)
				}
				want := map[NotFinitePolicy]outcome{
					FailNotFinite: {
						steps: 1, made: 1,
						err: "train: epoch 1, step 2: the loss of step 2 is +Inf: on replica 2 " +
							"example 5 (counted from 0) of batch 2 of the data: input 0 is not finite: element (1,) " +
							"is +Inf: fix the data, or leave the example out",
					},
					WarnNotFinite: {steps: 6, made: 6, err: "<nil>"},
					SkipNotFinite: {steps: 6, made: 4, skipped: 2, err: "<nil>"},
				}[policy]
				want.hash = outcomes[0].hash
				for w, got := range outcomes {
					if got != want {
						t.Errorf("worker %d: got %+v, want %+v", w, got, want)
					}
				}
			})
		}
	}
}

// TestNotFiniteSkipIsExact checks that a skipped step changes no variable of any replica, including averages and slots.
func TestNotFiniteSkipIsExact(t *testing.T) {
	trainer, p := newFake(t, 3, 6, fakeModel{})
	trainer.config.NotFinite, trainer.config.Logger = SkipNotFinite, slog.New(slog.NewTextHandler(io.Discard, nil))
	if _, err := trainer.Fit(t.Context(), batches(lineExamples(6)), FitConfig{Epochs: 2}); err != nil {
		t.Fatal(err)
	}
	before := p.snapshot()
	b := lineExamples(6)
	tensor.Data[float64](b.Labels[0])[4] = math.NaN()
	h, err := trainer.Fit(t.Context(), batches(b), FitConfig{Epochs: 3})
	if err != nil || h.Skipped != 3 || h.Steps != 3 || trainer.Steps() != 2 {
		t.Errorf("%+v, %v, %d steps made", h, err, trainer.Steps())
	}
	if got := p.snapshot(); !reflect.DeepEqual(got, before) {
		t.Errorf("skipped steps changed variables:\n%v, were\n%v", got, before)
	}
}

// TestNotFiniteConclusion checks that the first cause of the first replica with one is reported, and an overflow of a
// sum only if there is no other cause.
func TestNotFiniteConclusion(t *testing.T) {
	none := finding{Cause: causeNone, Example: -1, Sum: -1}
	label := finding{Cause: causeLabel, Example: 3, Detail: "label", Sum: -1}
	loss := finding{Cause: causeLoss, Example: 1, Detail: "loss", Sum: 0}
	variable := finding{Cause: causeVariable, Example: -1, Detail: "variable", Sum: 1}
	sum := finding{Cause: causeNone, Example: -1, Sum: 1}
	const overflow = "each replica's gradient of b is finite, but their sum overflows float16"
	const asOne = "the engine computed the step as one program; gradients and loss computed again"
	parameters := []engine.Variable{{Name: "a", DType: tensor.Float16}, {Name: "b", DType: tensor.Float16}}
	for _, c := range []struct {
		findings         []finding
		replica, example int
		detail           string
		persists, whole  bool
	}{
		{[]finding{none, loss, label, label}, 2, 3, "label", false, false},
		{[]finding{none, loss, none, variable}, 3, -1, "variable", true, false},
		{[]finding{none, sum}, -1, -1, overflow, false, false},
		{[]finding{sum}, -1, -1, overflow, false, false},
		{[]finding{sum}, -1, -1, asOne, false, true},
		{[]finding{none}, -1, -1, asOne, false, true},
		{[]finding{loss}, 0, 1, "loss", false, true},
		{[]finding{none, none}, -1, -1, "every replica's share is finite", false, false},
	} {
		e := &NotFiniteError{Loss: 0.25, Step: 3}
		e.conclude(c.findings, parameters, compress.Codec{}, "", c.whole)
		if e.Replica != c.replica || e.Example != c.example || !strings.HasPrefix(e.Detail, c.detail) ||
			e.persists != c.persists {
			t.Errorf("%+v: got %+v", c.findings, e)
		}
		if !strings.HasPrefix(e.Error(), "a gradient of step 3 is not finite, though its loss is 0.25: ") {
			t.Errorf("got %v", e)
		}
	}
}

// TestNotFiniteEvaluateOften checks that an evaluation that only warns searches for the cause only where it logs: the
// 1st, 2nd and 4th of 6 times.
func TestNotFiniteEvaluateOften(t *testing.T) {
	for _, policy := range []NotFinitePolicy{WarnNotFinite, SkipNotFinite} {
		reads := 0
		trainer, _ := newFake(t, 1, 4, fakeModel{fail: func(phase string, _ int) error {
			if phase == "read" {
				reads++
			}
			return nil
		}})
		var log strings.Builder
		trainer.config.NotFinite, trainer.config.Logger = policy, slog.New(slog.NewTextHandler(&log, nil))
		evaluate := func(b data.Batch) int {
			reads = 0
			if _, err := trainer.Evaluate(t.Context(), batches(b, b, b, b, b, b)); err != nil {
				t.Fatal(err)
			}
			return reads
		}
		finite := evaluate(lineExamples(4))
		b := lineExamples(4)
		tensor.Data[float64](b.Labels[0])[1] = math.NaN()
		if got, want := evaluate(b), finite+3*len(fakeVariables); got != want {
			t.Errorf("%v: an evaluation reads %d variables, want %d", policy, got, want)
		}
		if lines := strings.Count(log.String(), "the evaluation continues"); lines != 3 || trainer.notFinite != 6 {
			t.Errorf("%v: %d lines, %d counted: want 3, 6\n%s", policy, lines, trainer.notFinite, log.String())
		}
	}
}

// TestNotFinitePolicyDiffers checks that workers with different policies fail before the first step.
func TestNotFinitePolicyDiffers(t *testing.T) {
	errs := overWorkers(t, []int{1, 1}, func(w int, s *distribute.Strategy) error {
		cfg := fakeConfig(8)
		cfg.NotFinite = NotFinitePolicy(w)
		trainer, err := New(t.Context(), s, fakeModel{}, cfg)
		if err == nil {
			trainer.Close()
		}
		return err
	})
	for w, err := range errs {
		if err == nil || !strings.Contains(err.Error(), `policy "warn"`) {
			t.Errorf("worker %d: %v", w, err)
		}
	}
	cfg := fakeConfig(8)
	cfg.NotFinite = 3
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: fakeEngine{1}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := New(t.Context(), s, fakeModel{}, cfg); err == nil || !strings.Contains(err.Error(),
		"want FailNotFinite, WarnNotFinite or SkipNotFinite") {
		t.Errorf("policy 3: %v", err)
	}
}
