package train_test

import (
	"context"
	"errors"
	"math"
	"os"
	"testing"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train"
)

// eachEngine runs a test on the Go engine, and on XLA if this build contains it and the plugin is set.
func eachEngine(t *testing.T, f func(t *testing.T, engine string)) {
	t.Helper()
	for _, name := range gomlx.Names {
		t.Run(name, func(t *testing.T) {
			if name == "xla" && (!builtWithXLA || os.Getenv(gomlx.PluginEnv) == "") {
				t.Skipf("no XLA: built with it: %v, $%s is %q", builtWithXLA, gomlx.PluginEnv, os.Getenv(gomlx.PluginEnv))
			}
			f(t, name)
		})
	}
}

// normalised is a network with a normalization before and after a dense layer.
func normalised(norm func(*model.Scope, *graph.Node) *graph.Node) func(*model.Scope, []*graph.Node) []*graph.Node {
	return func(s *model.Scope, in []*graph.Node) []*graph.Node {
		x := norm(s.In("first"), layer.Conv2D(s.In("conv"), in[0], 4, 3, true))
		x = graph.Reshape(layer.Relu(x), x.Shape().Dim(0), -1)
		x = layer.Relu(norm(s.In("second"), layer.Dense(s.In("hidden"), x, 16)))
		return []*graph.Node{layer.Dense(s.In("readout"), x, 10)}
	}
}

// trained holds the results of some steps.
type trained struct {
	losses    []float64 // of each step
	gradients [][]float64
	weights   map[string][]float64
	hash      string
	evaluated float64
}

// trainNormalised makes ten steps of 30 examples, the last with 7, and computes the gradients of one more batch.
func trainNormalised(t *testing.T, engineName string, replicas int,
	norm func(*model.Scope, *graph.Node) *graph.Node,
) trained {
	t.Helper()
	trainer := newTrainer(t, engineName, replicas, 30, 1, sgd(), normalised(norm))
	all := loadDigits(t).Train
	var out trained
	record := train.Callback{OnStepEnd: func(_ context.Context, s train.Step) error {
		out.losses = append(out.losses, s.Loss)
		return nil
	}}
	if _, err := trainer.Fit(t.Context(), all.Take(277).Batch(30),
		train.FitConfig{Callbacks: []train.Callback{record}}); err != nil {
		t.Fatal(err)
	}
	for e, err := range all.Take(290).Batch(29).Iter(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		gradients, _, err := trainer.Gradients(t.Context(), e.(data.Batch))
		if err != nil {
			t.Fatal(err)
		}
		for _, g := range gradients {
			out.gradients = append(out.gradients, g.Float64s())
		}
		break
	}
	weights, err := trainer.Weights(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	out.weights = map[string][]float64{}
	for _, w := range weights {
		out.weights[w.Name] = w.Value.Float64s()
	}
	if out.hash, err = trainer.WeightsHash(t.Context()); err != nil {
		t.Fatal(err)
	}
	result, err := trainer.Evaluate(t.Context(), all.Take(77).Batch(30))
	if err != nil {
		t.Fatal(err)
	}
	out.evaluated = result.Loss
	return out
}

// farthest returns the largest difference, over losses of steps and of evaluation, of gradients, and of weights and
// moving averages.
func farthest(a, b trained) (loss, gradient, weight float64) {
	loss = math.Max(apart(a.losses, b.losses), math.Abs(a.evaluated-b.evaluated))
	for i, g := range a.gradients {
		gradient = math.Max(gradient, apart(g, b.gradients[i]))
	}
	for name, w := range a.weights {
		weight = math.Max(weight, apart(w, b.weights[name]))
	}
	return loss, gradient, weight
}

func apart(a, b []float64) (most float64) {
	if len(a) != len(b) {
		return math.Inf(1)
	}
	for i := range a {
		most = math.Max(most, math.Abs(a[i]-b[i]))
	}
	return most
}

// TestSyncBatchNorm checks that with synchronised normalization 2 and 4 replicas train like one, with batches that do
// not divide evenly, and that with ordinary normalization they do not.
func TestSyncBatchNorm(t *testing.T) {
	eachEngine(t, func(t *testing.T, engineName string) {
		replicas := []int{2, 4}
		if engineName == "xla" || testing.Short() {
			replicas = []int{4} // XLA compiles for seconds each time
		}
		one := trainNormalised(t, engineName, 1, layer.SyncBatchNorm)
		if plain := trainNormalised(t, engineName, 1, layer.BatchNorm); plain.hash != one.hash {
			t.Errorf("one replica with SyncBatchNorm differs from one with BatchNorm")
		}
		for _, n := range replicas {
			many := trainNormalised(t, engineName, n, layer.SyncBatchNorm)
			loss, gradient, weight := farthest(one, many)
			t.Logf("%d replicas: loss differs by %.1e, gradients by %.1e, weights by %.1e", n, loss, gradient, weight)
			if !(loss < 1e-5 && gradient < 1e-5 && weight < 1e-5) {
				t.Errorf("%d replicas: loss differs by %v, gradients by %v, weights by %v", n, loss, gradient, weight)
			}
			loss, gradient, _ = farthest(one, trainNormalised(t, engineName, n, layer.BatchNorm))
			t.Logf("%d replicas with BatchNorm: loss differs by %.1e, gradients by %.1e", n, loss, gradient)
			if loss < 1e-2 || gradient < 1e-2 {
				t.Errorf("%d replicas: with BatchNorm the loss differs by %v only, the gradients by %v", n, loss, gradient)
			}
			if again := trainNormalised(t, engineName, n, layer.SyncBatchNorm); again.hash != many.hash {
				t.Errorf("%d replicas: another run has other bits", n)
			}
		}
	})
}

// BenchmarkSyncBatchNorm makes steps of 64 examples on two replicas.
func BenchmarkSyncBatchNorm(b *testing.B) {
	for _, l := range []struct {
		name string
		norm func(*model.Scope, *graph.Node) *graph.Node
	}{{"BatchNorm", layer.BatchNorm}, {"SyncBatchNorm", layer.SyncBatchNorm}} {
		b.Run(l.name, func(b *testing.B) {
			trainer := newTrainer(b, "go", 2, 64, 1, sgd(), normalised(l.norm))
			batches := loadDigits(b).Train.Take(64).Batch(64).Repeat(-1)
			b.ResetTimer()
			if _, err := trainer.Fit(b.Context(), batches, train.FitConfig{Steps: b.N, Epochs: 1}); err != nil {
				b.Fatal(err)
			}
		})
	}
}

// faulty is a model whose replica 1 fails at one of its all-reduces.
type faulty struct {
	*gomlx.Model
	calls *int // until it fails
}

var errFaulty = errors.New("the memory of replica 1 is worn out")

func (m faulty) Compile(ctx context.Context, e engine.Engine, s engine.Spec) (engine.Program, error) {
	sum := s.Sum
	s.Sum = func(ctx context.Context, replica int, dst, src []*tensor.Tensor, names []string) error {
		if replica == 1 {
			if *m.calls--; *m.calls == 0 {
				return errFaulty
			}
		}
		return sum(ctx, replica, dst, src, names)
	}
	return m.Model.Compile(ctx, e, s)
}

// TestFailureInside checks that a replica that fails at any all-reduce of a step ends the others, which wait for it
// there, and that no variable changes.
func TestFailureInside(t *testing.T) {
	for calls := 1; calls <= 4; calls++ { // two layers, forward and back
		left := calls
		trainer := newTrainerOf(t, "go", 3, 30, 1, func(m *gomlx.Model) engine.Model { return faulty{m, &left} }, sgd(),
			normalised(layer.SyncBatchNorm))
		before := hash(t, trainer)
		_, err := trainer.Fit(t.Context(), loadDigits(t).Train.Take(30).Batch(30), train.FitConfig{})
		if !errors.Is(err, errFaulty) {
			t.Fatalf("call %d: error %v, want %v", calls, err, errFaulty)
		}
		if after := hash(t, trainer); after != before {
			t.Errorf("call %d: the failed step changed variables", calls)
		}
	}
}

func hash(t *testing.T, trainer *train.Trainer) string {
	t.Helper()
	h, err := trainer.WeightsHash(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return h
}
