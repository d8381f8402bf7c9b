package train

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// scaled trains a model whose gradients overflow at some loss scales, and describes each step and the end. With
// resume, a new trainer continues after each snapshot.
func scaled(ctx context.Context, s *distribute.Strategy, resume bool) (text string, err error) {
	cfg := fakeConfig(4)
	cfg.LossScaling = LossScaling{Initial: 1 << 12, GrowthSteps: 3}
	m := fakeModel{rate: 1.0 / 64, limit: 1 << 8}
	var trainer *Trainer
	open := func() error {
		trainer, err = New(ctx, s, m, cfg)
		return err
	}
	if err := open(); err != nil {
		return "", err
	}
	examples := sizes(lineExamples(16), 4, 4, 4, 4)
	var b strings.Builder
	want, good, overflows := float64(1<<12), 0, 0
	for round := range 4 {
		before := overflows
		callback := Callback{OnStepEnd: func(_ context.Context, info Step) error {
			switch {
			case info.Overflow:
				want, good, overflows = want/2, 0, overflows+1
			case good == 2:
				want, good = want*2, 0
			default:
				good++
			}
			scale, n := trainer.LossScale()
			if scale != want || n != overflows || info.Skipped != info.Overflow || info.NotFinite != nil ||
				!finite(info.Loss) {
				return fmt.Errorf("scale %v after %d overflows, want %v and %d, after the step %+v", scale, n, want,
					overflows, info)
			}
			fmt.Fprintln(&b, info.Loss, scale)
			return nil
		}}
		h, err := trainer.Fit(ctx, examples, FitConfig{Epochs: 1, Callbacks: []Callback{callback}})
		if err != nil {
			return "", errors.Join(err, trainer.Close())
		}
		if h.Skipped != overflows-before {
			return "", fmt.Errorf("%d steps were skipped, %d overflowed", h.Skipped, overflows-before)
		}
		if round == 3 {
			break
		}
		snapshot, err := trainer.Snapshot(ctx)
		if err != nil {
			return "", err
		}
		if snapshot != nil {
			c, err := snapshot.Contents()
			if err != nil {
				return "", err
			}
			if snapshot, err = SnapshotOf(c); err != nil {
				return "", err
			}
		}
		if resume {
			if err := errors.Join(trainer.Close(), open()); err != nil {
				return "", err
			}
		}
		r, err := trainer.Restore(ctx, snapshot)
		if err != nil || len(r.Differ) > 0 {
			return "", errors.Join(fmt.Errorf("restored: %v", r), err)
		}
	}
	if overflows < 3 || want == math.Ldexp(1, 12-overflows) {
		return "", fmt.Errorf("%d overflows and then a scale of %v: want several, and a scale that grew", overflows, want)
	}
	w, err := trainer.Weights(ctx)
	fmt.Fprintln(&b, w, trainer.Steps())
	return b.String(), errors.Join(err, trainer.Close())
}

// TestLossScale checks that a step whose gradients overflow on any replica is skipped on all and halves the loss scale,
// that the scale grows after good steps, and that snapshots hold it: one training on any workers, resumed or not.
func TestLossScale(t *testing.T) {
	one, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: fakeEngine{2}})
	if err != nil {
		t.Fatal(err)
	}
	defer one.Close()
	want, err := scaled(t.Context(), one, false)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := scaled(t.Context(), one, true); err != nil || got != want {
		t.Errorf("resumed: got\n%s, %v, want\n%s", got, err, want)
	}
	errs := overWorkers(t, []int{1, 1}, func(w int, s *distribute.Strategy) error {
		got, err := scaled(t.Context(), s, true)
		if err != nil || got != want {
			t.Errorf("worker %d: got\n%s, %v, want\n%s", w, got, err, want)
		}
		return nil
	})
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
}

// TestLossScaleEnds checks that overflows at a scale of 1, and losses that are not finite, are errors as without a loss
// scale.
func TestLossScaleEnds(t *testing.T) {
	cfg := fakeConfig(4)
	cfg.LossScaling = LossScaling{Initial: 4}
	trainer, _ := newFakeWith(t, 2, cfg, fakeModel{limit: 1e-9})
	h, err := trainer.Fit(t.Context(), sizes(lineExamples(16), 4, 4, 4, 4), FitConfig{Epochs: 1})
	var bad *NotFiniteError
	if !errors.As(err, &bad) || !strings.Contains(bad.Detail, "use a wider type than float16") || h.Steps != 2 ||
		h.Skipped != 2 {
		t.Errorf("after %d steps, %d of them skipped: %v", h.Steps, h.Skipped, err)
	}
	examples := lineExamples(4)
	tensor.Data[float64](examples.Labels[0])[1] = math.NaN()
	trainer, _ = newFakeWith(t, 2, cfg, fakeModel{limit: 1e9})
	_, err = trainer.Fit(t.Context(), sizes(examples, 4), FitConfig{Epochs: 1})
	if !errors.As(err, &bad) || bad.Example != 1 {
		t.Errorf("a label that is NaN: %v", err)
	}
	if scale, overflows := trainer.LossScale(); scale != 4 || overflows != 0 {
		t.Errorf("a label that is NaN: scale %v after %d overflows", scale, overflows)
	}
	plain, _ := newFake(t, 1, 4, fakeModel{})
	if scale, overflows := plain.LossScale(); scale != 1 || overflows != 0 {
		t.Errorf("a model of float64 has scale %v after %d overflows", scale, overflows)
	}
}

// TestLossScaleOfGradients checks that Trainer.Gradients computes gradients that overflow again with a lower scale.
func TestLossScaleOfGradients(t *testing.T) {
	b := lineExamples(4)
	plain, _ := newFake(t, 2, 4, fakeModel{})
	want, _, err := plain.Gradients(t.Context(), b)
	if err != nil {
		t.Fatal(err)
	}
	trainer, _ := newFake(t, 2, 4, fakeModel{limit: 1 << 10})
	got, _, err := trainer.Gradients(t.Context(), b)
	if err != nil {
		t.Fatal(err)
	}
	for i := range want {
		if !got[i].Equal(want[i]) {
			t.Errorf("gradient %d is %v, want %v", i, got[i].Float64s(), want[i].Float64s())
		}
	}
	if scale, overflows := trainer.LossScale(); overflows == 0 || scale != initialScale/math.Pow(2, float64(overflows)) {
		t.Errorf("scale %v after %d overflows", scale, overflows)
	}
}

// TestLossScaleRefuses checks the errors of configurations and snapshots, and the note of another precision.
func TestLossScaleRefuses(t *testing.T) {
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: fakeEngine{1}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for _, bad := range []LossScaling{
		{Initial: 3}, {Initial: -2}, {Initial: 0.5}, {Initial: math.Inf(1)}, {GrowthSteps: -1},
	} {
		cfg := fakeConfig(4)
		cfg.LossScaling = bad
		_, err := New(t.Context(), s, fakeModel{}, cfg)
		if err == nil || !strings.Contains(err.Error(), "Config.LossScaling.") {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	trainer, _ := newFake(t, 1, 4, fakeModel{limit: 1})
	snapshot, err := trainer.Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	other, _ := newFake(t, 1, 4, fakeModel{})
	r, err := other.Restore(t.Context(), snapshot)
	const want = "the snapshot's model computed in float16, this one computes in the type of its inputs"
	if err != nil || len(r.Differ) != 1 || r.Differ[0] != want {
		t.Errorf("restored %+v, %v", r, err)
	}
	snapshot.state.LossScale.Scale = 0
	c, err := snapshot.Contents()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := SnapshotOf(c); err == nil || !strings.Contains(err.Error(), "loss scale 0") {
		t.Errorf("a scale of 0: %v", err)
	}
}
