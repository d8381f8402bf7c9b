package train_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"testing"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer/cosineschedule"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train"
)

// stateful is a model whose forward pass changes all kinds of state: moving averages, the counter and the rate of a
// schedule, and random numbers.
func stateful(s *model.Scope, in []*graph.Node) []*graph.Node {
	cosineschedule.New(s, in[0].Graph(), dtypes.Float32).LearningRate(0.1).PeriodSteps(5).Done()
	x := graph.Reshape(in[0], in[0].Shape().Dim(0), -1)
	x = layer.BatchNorm(s.In("norm"), layer.Dense(s.In("hidden"), x, 16))
	x = layers.DropoutStatic(s.In("dropout"), layer.Relu(x), 0.5)
	return []*graph.Node{layer.Dense(s.In("readout"), x, 10)}
}

// digitBatches returns the first batches of the training images.
func digitBatches(t *testing.T, n, size int) (out []data.Batch) {
	t.Helper()
	for e, err := range loadDigits(t).Train.Take(n * size).Batch(size).Iter(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, e.(data.Batch))
	}
	return out
}

// fitAndOwnLoop returns two trainers of the stateful model after the same batches: one by Fit, one by a loop of
// Gradients and ApplyGradients.
func fitAndOwnLoop(t *testing.T, engineName string, replicas int) (fitted, own *train.Trainer) {
	t.Helper()
	fitted = newTrainer(t, engineName, replicas, 30, 1, sgd(), stateful)
	own = newTrainer(t, engineName, replicas, 30, 1, sgd(), stateful)
	if _, err := fitted.Fit(t.Context(), loadDigits(t).Train.Take(7*30).Batch(30), train.FitConfig{}); err != nil {
		t.Fatal(err)
	}
	for _, b := range digitBatches(t, 7, 30) {
		gradients, _, err := own.Gradients(t.Context(), b)
		if err != nil {
			t.Fatal(err)
		}
		if err := own.ApplyGradients(t.Context(), gradients); err != nil {
			t.Fatal(err)
		}
	}
	return fitted, own
}

// TestOwnLoopKeepsState checks that a loop of Gradients and ApplyGradients over a model with batch normalization, a
// schedule and dropout makes Fit's steps, bit for bit.
func TestOwnLoopKeepsState(t *testing.T) {
	for replicas := 1; replicas <= 3; replicas++ {
		fitted, own := fitAndOwnLoop(t, "go", replicas)
		want, err := fitted.Snapshot(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		got, err := own.Snapshot(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for i, v := range want.Variables {
			if !got.Variables[i].Value.Equal(v.Value) {
				t.Errorf("%d replicas: %s is %v after a loop of Gradients and ApplyGradients, %v after Fit",
					replicas, v.Name, got.Variables[i].Value, v.Value)
			}
		}
	}
}

// TestPassesOfAStep checks that each call of Gradients in a step draws other random numbers and updates the averages,
// that a failed call does neither, and that a snapshot between two calls resumes with the next.
func TestPassesOfAStep(t *testing.T) {
	b := digitBatches(t, 1, 30)[0]
	gradients := func(trainer *train.Trainer) []*tensor.Tensor {
		out, _, err := trainer.Gradients(t.Context(), b)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	weight := func(trainer *train.Trainer, name string) float64 {
		weights, err := trainer.Weights(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, w := range weights {
			if w.Name == name {
				return w.Value.Float64s()[0]
			}
		}
		t.Fatalf("no weight %s", name)
		return 0
	}
	trainer := newTrainer(t, "go", 2, 30, 1, sgd(), stateful)
	var means []float64
	seen := map[string]int{}
	var snapshot *train.Snapshot
	var last []*tensor.Tensor
	for pass := range 4 {
		if pass == 2 {
			if _, _, err := trainer.Gradients(t.Context(), data.Batch{}); err == nil {
				t.Fatal("gradients of an empty batch: no error")
			}
		}
		if pass == 3 {
			var err error
			if snapshot, err = trainer.Snapshot(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		last = gradients(trainer)
		if first, ok := seen[fmt.Sprint(last[1])]; ok {
			t.Errorf("passes %d and %d of one step over one batch have the same gradients: the same dropout masks", first, pass)
		}
		seen[fmt.Sprint(last[1])] = pass
		means = append(means, weight(trainer, "/norm/batch_normalization/mean"))
		if step := weight(trainer, "/optimizers/cosine_schedule/step"); step != float64(pass+1) {
			t.Errorf("the schedule's counter is %v after %d passes", step, pass+1)
		}
	}
	// A moving average towards m with momentum 0.99: m (1 - 0.99^n).
	for i, mean := range means {
		n := float64(i + 1)
		if want := means[0] * (1 - math.Pow(0.99, n)) / 0.01; math.Abs(mean-want) > 1e-4*math.Abs(want) {
			t.Errorf("moving mean %v after %v passes over one batch, want %v", mean, n, want)
		}
	}
	restored := newTrainer(t, "go", 2, 30, 1, sgd(), stateful)
	if _, err := restored.Restore(t.Context(), throughContents(t, snapshot)); err != nil {
		t.Fatal(err)
	}
	for i, g := range gradients(restored) {
		if !g.Equal(last[i]) {
			t.Errorf("gradient %d of the pass after a snapshot differs from the one without", i)
		}
	}
	if err := trainer.ApplyGradients(t.Context(), last); err != nil {
		t.Fatal(err)
	}
	if step := trainer.Steps(); step != 1 {
		t.Errorf("%d steps, want 1", step)
	}
}

// throughContents returns a snapshot after writing and reading it.
func throughContents(t *testing.T, s *train.Snapshot) *train.Snapshot {
	t.Helper()
	c, err := s.Contents()
	if err != nil {
		t.Fatal(err)
	}
	if s, err = train.SnapshotOf(c); err != nil {
		t.Fatal(err)
	}
	return s
}

// TestWholeStep checks that a replica alone, whose step some engines compute as one program, makes the steps of a loop
// of Gradients and ApplyGradients: except for rounding, and with the same policy for values that are not finite.
func TestWholeStep(t *testing.T) {
	eachEngine(t, func(t *testing.T, engineName string) {
		fitted, own := fitAndOwnLoop(t, engineName, 1)
		a, err := fitted.Weights(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		b, err := own.Weights(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for k, x := range a {
			want := b[k].Value.Float64s()
			for i, v := range x.Value.Float64s() {
				if w := want[i]; math.Abs(v-w) > 1e-4*math.Max(1, math.Abs(w)) {
					t.Fatalf("%s: element %d is %v after Fit, %v after a loop of Gradients and ApplyGradients", x.Name, i, v, w)
				}
			}
		}
		before := hash(t, fitted)
		bad := digitBatches(t, 1, 30)[0]
		tensor.Data[float32](bad.Inputs[0])[3] = float32(math.NaN())
		var notFinite *train.NotFiniteError
		one := data.FromFunc(1, func(context.Context, int) (data.Element, error) { return bad, nil })
		_, err = fitted.Fit(t.Context(), one, train.FitConfig{})
		if !errors.As(err, &notFinite) || notFinite.Example != 0 {
			t.Errorf("an input that is not finite: %v", err)
		}
		if after := hash(t, fitted); after != before {
			t.Error("a step that failed changed the weights")
		}
	})
}
