package train_test

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/data/digits"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train"
)

// newGoMLX returns a trainer of a small MLP for the digits, on the pure-Go engine.
func newGoMLX(t *testing.T, replicas, globalBatch int, seed int64, opt optimizer.Interface) *train.Trainer {
	t.Helper()
	return newTrainer(t, "go", replicas, globalBatch, seed, opt, models.MLP{Hidden: []int{64}}.Forward)
}

// newTrainer returns a trainer of a model for the digits.
func newTrainer(t testing.TB, engineName string, replicas, globalBatch int, seed int64, opt optimizer.Interface,
	forward func(*model.Scope, []*graph.Node) []*graph.Node,
) *train.Trainer {
	t.Helper()
	return newTrainerOf(t, engineName, replicas, globalBatch, seed, unchanged, opt, forward)
}

func unchanged(m *gomlx.Model) engine.Model { return m }

// newTrainerOf is newTrainer with a function that wraps the model.
func newTrainerOf(t testing.TB, engineName string, replicas, globalBatch int, seed int64,
	around func(*gomlx.Model) engine.Model, opt optimizer.Interface,
	forward func(*model.Scope, []*graph.Node) []*graph.Node,
) *train.Trainer {
	t.Helper()
	cfg := train.Config{GlobalBatch: globalBatch, Seed: seed}
	return newTrainerWith(t, engineName, replicas, cfg, around, opt, forward)
}

// newTrainerWith is newTrainerOf with a configuration, to which it adds inputs and labels.
func newTrainerWith(t testing.TB, engineName string, replicas int, cfg train.Config,
	around func(*gomlx.Model) engine.Model, opt optimizer.Interface,
	forward func(*model.Scope, []*graph.Node) []*graph.Node,
) *train.Trainer {
	t.Helper()
	e, err := gomlx.Open(engineName, gomlx.Options{Devices: replicas})
	if err != nil {
		t.Fatal(err)
	}
	s, err := strategyOf(e, replicas)
	if err != nil {
		t.Fatal(err)
	}
	m := &gomlx.Model{
		Forward: forward, Loss: gomlx.SparseCategoricalCrossEntropyLogits,
		Optimizer: opt, Metrics: []gomlx.Metric{gomlx.SparseCategoricalAccuracy()},
	}
	cfg.Inputs = []engine.Feature{{DType: tensor.Float32, Shape: []int{8, 8, 1}}}
	cfg.Labels = []engine.Feature{{DType: tensor.Int32}}
	trainer, err := train.New(t.Context(), s, around(m), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, close := range []func() error{trainer.Close, s.Close, e.Close} {
			if err := close(); err != nil {
				t.Error(err)
			}
		}
	})
	return trainer
}

func sgd() optimizer.Interface {
	return optimizer.StochasticGradientDescent().WithDecay(false).WithLearningRate(0.1)
}

func loadDigits(t testing.TB) *data.Set {
	t.Helper()
	set, err := digits.Load()
	if err != nil {
		t.Fatal(err)
	}
	return set
}

// TestVariableOfAModel checks that a model's weights and optimizer slots can be read and written as variables of the
// strategy on both engines.
func TestVariableOfAModel(t *testing.T) {
	eachEngine(t, func(t *testing.T, engineName string) {
		trainer := newTrainer(t, engineName, 2, 30, 1, optimizer.Adam().Done(), forgetful)
		if _, err := trainer.Fit(t.Context(), loadDigits(t).Train.Take(60).Batch(30), train.FitConfig{}); err != nil {
			t.Fatal(err)
		}
		in, err := trainer.Strategy().Cross(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range trainer.Variables() {
			d := trainer.Variable(v.Name)
			old, err := d.Read(in)
			if err != nil {
				t.Fatal(err)
			}
			if (d.Kind() == "SyncOnReadVariable") != (v.Role == engine.Average) {
				t.Errorf("%s, a %v, is a %v", v.Name, v.Role, d.Kind())
			}
			if !v.DType.IsFloat() {
				continue
			}
			if err := d.AssignAdd(in, old); err != nil {
				t.Fatal(err)
			}
			for replica, value := range d.Values() {
				twice := value.(*tensor.Tensor).Float64s()
				for i, x := range old.Float64s() {
					if v.Role != engine.Average && twice[i] != 2*x {
						t.Errorf("%s on replica %d: element %d is %v, want %v", v.Name, replica, i, twice[i], 2*x)
						break
					}
				}
			}
		}
		if err := trainer.CheckMirrored(); err != nil {
			t.Error(err)
		}
	})
}

// TestReplicasAgree trains 30 steps of 100 examples, the last of them partial, on 1, 2 and 3 replicas: the same sums in
// another order.
func TestReplicasAgree(t *testing.T) {
	batches := loadDigits(t).Train.Take(2950).Shuffle(1).Batch(100)
	if batches.Len() != 30 {
		t.Fatalf("%d steps", batches.Len())
	}
	var first []train.Weight
	for replicas := 1; replicas <= 3; replicas++ {
		trainer := newGoMLX(t, replicas, 100, 1, sgd())
		h, err := trainer.Fit(t.Context(), batches, train.FitConfig{})
		if err != nil {
			t.Fatal(err)
		}
		weights, err := trainer.Weights(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if first == nil {
			first = weights
		}
		largest := 0.0
		for i, w := range weights {
			a, b := tensor.Data[float32](first[i].Value), tensor.Data[float32](w.Value)
			for j := range a {
				largest = max(largest, math.Abs(float64(a[j])-float64(b[j])))
			}
		}
		t.Logf("%d replicas: loss %v, largest difference of a weight %.2g", replicas, h.Epochs[0].Loss, largest)
		if h.Steps != 30 || h.Epochs[0].Examples != 2950 {
			t.Errorf("%d replicas: %d steps, %d examples", replicas, h.Steps, h.Epochs[0].Examples)
		}
		if !(largest <= 1e-5) {
			t.Errorf("%d replicas: a weight differs by %v from 1 replica's", replicas, largest)
		}
	}
}

// TestClosed checks the error of a closed trainer, and that it writes no batch into memory that its engine has freed.
func TestClosed(t *testing.T) {
	batches := loadDigits(t).Train.Take(20).Batch(10)
	trainer := newGoMLX(t, 1, 10, 1, sgd())
	if _, err := trainer.Evaluate(t.Context(), batches); err != nil {
		t.Fatal(err)
	}
	if err := trainer.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := trainer.Evaluate(t.Context(), batches); err == nil ||
		!strings.Contains(err.Error(), "memory for a batch of replica 0: gomlx: the program is closed") {
		t.Errorf("got %v", err)
	}
}

// TestFitLearns trains with more replicas than cores, a partial last batch, and Adam.
func TestFitLearns(t *testing.T) {
	set := loadDigits(t)
	trainer := newGoMLX(t, 3, 64, 1, optimizer.Adam().LearningRate(0.003).Done())
	h, err := trainer.Fit(t.Context(), set.Train.Shuffle(1).Batch(64),
		train.FitConfig{Epochs: 4, Validation: set.Test.Batch(64)})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range h.Epochs {
		t.Logf("epoch %d: loss %.4f, accuracy %.4f, on the test images %.4f", e.Epoch, e.Loss, e.Metrics["accuracy"],
			e.Validation.Metrics["accuracy"])
	}
	result, err := trainer.Evaluate(t.Context(), set.Test.Batch(50)) // other sizes, the same examples
	if err != nil {
		t.Fatal(err)
	}
	last := h.Epochs[3].Validation
	if math.Abs(result.Loss-last.Loss) > 1e-6 || result.Metrics["accuracy"] != last.Metrics["accuracy"] ||
		result.Examples != 1797 {
		t.Errorf("evaluated in batches of 50: %+v, of 64: %+v", result, *last)
	}
	if result.Metrics["accuracy"] < 0.9 {
		t.Errorf("test accuracy %v after 4 epochs, want 0.9", result.Metrics["accuracy"])
	}
	outputs, err := trainer.Predict(t.Context(), set.Test.Batch(64))
	if err != nil {
		t.Fatal(err)
	}
	if got := tensor.FormatShape(outputs[0].Shape()); got != "(1797, 10)" {
		t.Errorf("predictions of shape %s", got)
	}
}

// TestAccumulate takes one step with two halves of a batch, in a custom loop.
func TestAccumulate(t *testing.T) {
	all := loadDigits(t).Train
	whole, halves := newGoMLX(t, 2, 64, 1, sgd()), newGoMLX(t, 2, 32, 1, sgd())
	if _, err := whole.Fit(t.Context(), all.Take(64).Batch(64), train.FitConfig{}); err != nil {
		t.Fatal(err)
	}
	var sum []*tensor.Tensor
	for e, err := range all.Take(64).Batch(32).Iter(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		gradients, _, err := halves.Gradients(t.Context(), e.(data.Batch))
		if err != nil {
			t.Fatal(err)
		}
		if sum == nil {
			sum = make([]*tensor.Tensor, len(gradients))
			for i, g := range gradients {
				sum[i] = tensor.New(g.DType(), g.Shape()...)
			}
		}
		for i, g := range gradients {
			for j, x := range tensor.Data[float32](g) {
				tensor.Data[float32](sum[i])[j] += x / 2
			}
		}
	}
	if err := halves.ApplyGradients(t.Context(), sum); err != nil {
		t.Fatal(err)
	}
	a, err := whole.Weights(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	b, err := halves.Weights(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for i := range a {
		for j, x := range tensor.Data[float32](a[i].Value) {
			if y := tensor.Data[float32](b[i].Value)[j]; math.Abs(float64(x-y)) > 1e-6 {
				t.Fatalf("%s, element %d: %v of one batch, %v of two halves", a[i].Name, j, x, y)
			}
		}
	}
}

// TestSeeds checks that the same seed gives the same bits, and another seed other bits.
func TestSeeds(t *testing.T) {
	hashes := map[string]string{}
	for run, seed := range []int64{1, 1, 2} {
		trainer := newGoMLX(t, 2, 50, seed, sgd())
		if _, err := trainer.Fit(t.Context(), loadDigits(t).Train.Batch(50),
			train.FitConfig{Steps: 10, Epochs: 1}); err != nil {
			t.Fatal(err)
		}
		hash, err := trainer.WeightsHash(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		hashes[hash] += fmt.Sprintf("run %d with seed %d; ", run, seed)
	}
	if len(hashes) != 2 {
		t.Errorf("got %v, want one hash for each seed", hashes)
	}
}
