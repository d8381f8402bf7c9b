package train

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestAccumulateEqualsLargeBatches checks that steps that accumulate batches have the losses, metrics, weights and
// gradient norms of steps whose batches have as many examples, for any number of replicas, weights and clipping.
func TestAccumulateEqualsLargeBatches(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		const rows = 4
		replicas := rapid.IntRange(1, 3).Draw(rt, "replicas")
		together := rapid.IntRange(1, 4).Draw(rt, "batches of a step")
		n := rapid.IntRange(1, 4*rows*together).Draw(rt, "examples")
		all := lineExamples(n)
		if rapid.Bool().Draw(rt, "weighted") {
			w := rapid.SliceOfN(rapid.SampledFrom([]float32{0, 0, 0.5, 1, 3}), n, n).Draw(rt, "weights")
			all.Weights = tensor.Of(w, n)
		}
		clip := rapid.SampledFrom([]Config{{}, {ClipNorm: 0.5}, {ClipVariableNorm: 0.5}, {ClipValue: 0.3}}).Draw(rt, "clip")
		fit := func(size, accumulate int) (*Trainer, *fakeProgram, *History, []Step) {
			cfg := fakeConfig(size)
			cfg.ClipNorm, cfg.ClipVariableNorm, cfg.ClipValue = clip.ClipNorm, clip.ClipVariableNorm, clip.ClipValue
			trainer, p := newFakeWith(t, replicas, cfg, fakeModel{})
			var steps []Step
			h, err := trainer.Fit(t.Context(), fromTensors(all).Batch(size), FitConfig{
				Epochs: 2, Accumulate: accumulate,
				Callbacks: []Callback{{OnStepEnd: stepsTo(&steps)}},
			})
			if err != nil {
				rt.Fatal(err)
			}
			return trainer, p, h, steps
		}
		trainer, p, h, steps := fit(rows, together)
		large, largeP, want, wantSteps := fit(rows*together, 1)
		if h.Steps != want.Steps || h.Skipped != want.Skipped || trainer.Steps() != large.Steps() ||
			len(steps) != len(wantSteps) {
			rt.Fatalf("%d steps, %d skipped, %d taken: want %d, %d, %d", h.Steps, h.Skipped, trainer.Steps(), want.Steps,
				want.Skipped, large.Steps())
		}
		for i, s := range steps {
			w := wantSteps[i]
			if s.Examples != w.Examples || s.Skipped != w.Skipped || !close64(s.Loss, w.Loss) ||
				!close64(s.GradientNorm, w.GradientNorm) || s.GradientNorm > 0 && (clip.ClipNorm == 0 || s.Skipped) {
				rt.Errorf("step %d: %+v, want %+v", i+1, s, w)
			}
		}
		for i, e := range h.Epochs {
			for _, name := range want.Epochs[i].names() {
				if !close64(e.Metrics[name], want.Epochs[i].Metrics[name]) || !close64(e.Loss, want.Epochs[i].Loss) {
					rt.Errorf("epoch %d: %v, want %v", i, e.Result, want.Epochs[i].Result)
				}
			}
			if _, ok := e.Metrics[normMetric]; ok != (clip.ClipNorm > 0) {
				rt.Errorf("epoch %d: metrics %v", i, e.Metrics)
			}
		}
		for variable := range 4 {
			for i, x := range p.replicas[0].now[variable] {
				if y := largeP.replicas[0].now[variable][i]; !close64(x, y) {
					rt.Errorf("%s is %v, want %v", fakeVariables[variable].Name, x, y)
				}
			}
		}
	})
}

// TestAccumulateRandomStates checks that the first batch of a step has the random state of a step of one batch, and
// that all batches of all steps, replicas and passes have their own.
func TestAccumulateRandomStates(t *testing.T) {
	seen := map[[3]uint64]string{}
	for step := range int64(4) {
		for pass := range int64(4) {
			for batch := range 4 {
				for replica := range 4 {
					name := fmt.Sprintf("step %d, pass %d, batch %d, replica %d", step, pass, batch, replica)
					state := randomState(1, step, pass, batch, replica)
					if other, ok := seen[state]; ok {
						t.Errorf("%s has the state of %s", name, other)
					}
					seen[state] = name
				}
			}
		}
	}
	trainer, p := newFake(t, 2, 2, fakeModel{})
	if _, err := trainer.Fit(t.Context(), sizes(lineExamples(6), 2, 2, 2), FitConfig{Accumulate: 3}); err != nil {
		t.Fatal(err)
	}
	if len(p.states) != 6 {
		t.Errorf("3 batches of 2 replicas have %d random states", len(p.states))
	}
	for replica := range 2 {
		if _, ok := p.states[randomState(3, 0, 0, 0, replica)]; !ok {
			t.Errorf("the first batch does not have the random state of a step of one batch on replica %d", replica)
		}
	}
}

// TestAccumulateNotFinite checks that a batch that is not finite is found among those of its step.
func TestAccumulateNotFinite(t *testing.T) {
	examples := lineExamples(12)
	tensor.Data[float64](examples.Inputs[0])[2*7] = math.NaN()
	trainer, p := newFake(t, 2, 2, fakeModel{})
	before := fmt.Sprint(p.snapshot())
	_, err := trainer.Fit(t.Context(), sizes(examples, 2, 2, 2, 2, 2, 2), FitConfig{Accumulate: 6})
	var e *NotFiniteError
	if !errors.As(err, &e) || e.Step != 1 || e.Replica != 1 || e.Example != 1 || e.Batch != 3 ||
		!strings.Contains(e.Detail, "example 1 (counted from 0) of batch 4 of the data: input 0 is not finite") {
		t.Errorf("got %v", err)
	}
	if after := fmt.Sprint(p.snapshot()); after != before {
		t.Errorf("the step changed variables: %v", after)
	}
}

// TestAccumulateDisagreement checks that workers whose steps have different batches get an error that names the first
// difference.
func TestAccumulateDisagreement(t *testing.T) {
	for _, c := range []struct {
		name       string
		accumulate int
		change     func(x []float64)
		want       string
	}{
		{
			"another example in the second batch", 3, func(x []float64) { x[2*5]++ },
			"read other inputs than worker 0 in batch 2 of pass 1",
		},
		{
			"another number of batches", 2, func([]float64) {},
			"worker 1 accumulates the gradients of 2 batches, worker 0 of 3. ",
		},
	} {
		for w, err := range overWorkers(t, []int{1, 2}, func(w int, s *distribute.Strategy) error {
			trainer, err := New(t.Context(), s, fakeModel{rate: 1}, fakeConfig(4))
			if err != nil {
				return err
			}
			defer trainer.Close()
			examples, accumulate := lineExamples(12), 3
			if w == 1 {
				c.change(tensor.Data[float64](examples.Inputs[0]))
				accumulate = c.accumulate
			}
			_, err = trainer.Fit(t.Context(), sizes(examples, 4, 4, 4), FitConfig{Accumulate: accumulate})
			// no replica may enter a model's own all-reduce for a batch that another worker does not have
			if used := trainer.program.(*fakeProgram).states; c.accumulate != 3 && len(used) > 0 {
				t.Errorf("%s: worker %d has computed gradients: %v", c.name, w, used)
			}
			return err
		}) {
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s: worker %d: %v, want %q", c.name, w, err, c.want)
			}
		}
	}
}

// TestGradientsOfSeveralBatches checks that Gradients of parts of a batch, and ApplyGradients, make the step of the
// whole batch, clipped or not.
func TestGradientsOfSeveralBatches(t *testing.T) {
	whole := lineExamples(10)
	part := func(lo, hi int) data.Batch {
		return data.Batch{
			Inputs: []*tensor.Tensor{whole.Inputs[0].Rows(lo, hi)}, Labels: []*tensor.Tensor{whole.Labels[0].Rows(lo, hi)},
		}
	}
	for _, clip := range []float64{0, 0.25} {
		cfg := fakeConfig(10)
		cfg.ClipNorm = clip
		fitted, want := newFakeWith(t, 2, cfg, fakeModel{})
		var norm float64
		if _, err := fitted.Fit(t.Context(), batches(whole), FitConfig{Callbacks: []Callback{{
			OnStepEnd: func(_ context.Context, s Step) error { norm = s.GradientNorm; return nil },
		}}}); err != nil {
			t.Fatal(err)
		}
		own, got := newFakeWith(t, 2, cfg, fakeModel{})
		gradients, result, err := own.Gradients(t.Context(), part(0, 4), part(4, 4), part(4, 10))
		if err != nil {
			t.Fatal(err)
		}
		if n, ok := result.Metrics[normMetric]; ok != (clip > 0) || ok && (!close64(n, norm) || n != GlobalNorm(gradients)) {
			t.Errorf("the norm is %v (%v), want %v", n, GlobalNorm(gradients), norm)
		}
		if err := own.ApplyGradients(t.Context(), gradients); err != nil {
			t.Fatal(err)
		}
		for variable := range 4 {
			for i, x := range got.replicas[1].now[variable] {
				if y := want.replicas[1].now[variable][i]; !close64(x, y) {
					t.Errorf("limit %v: %s is %v, want %v", clip, fakeVariables[variable].Name, x, y)
				}
			}
		}
	}
	trainer, _ := newFake(t, 2, 4, fakeModel{})
	if _, _, err := trainer.Gradients(t.Context(), part(0, 4), part(4, 10)); err == nil ||
		!strings.Contains(err.Error(), "batch 2 of 2: it has 6 examples") {
		t.Errorf("a batch that is too large: %v", err)
	}
	if _, _, err := trainer.Gradients(t.Context()); err == nil ||
		!strings.Contains(err.Error(), "0 examples add up to 0") {
		t.Errorf("no batch: %v", err)
	}
}

// stepsTo returns a callback that appends every step to a list.
func stepsTo(list *[]Step) func(context.Context, Step) error {
	return func(_ context.Context, s Step) error {
		*list = append(*list, s)
		return nil
	}
}
