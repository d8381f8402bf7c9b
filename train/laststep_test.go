package train_test

import (
	"context"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer/cosineschedule"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train"
)

const lastStep = "/trainer/train_last_global_step"

// inCycles is a linear model whose learning rate decreases in two cycles over the whole training.
func inCycles(s *model.Scope, in []*graph.Node) []*graph.Node {
	cosineschedule.New(s, in[0].Graph(), dtypes.Float32).LearningRate(0.1).NumCycles(2).Done()
	return []*graph.Node{layer.Dense(s.In("readout"), graph.Reshape(in[0], in[0].Shape().Dim(0), -1), 10)}
}

// ofUnknownLength hides a dataset's length.
type ofUnknownLength struct{ data.Dataset }

func (ofUnknownLength) Len() int { return -1 }

// rates is a callback that records the learning rate of every step.
func rates(t *testing.T, trainer *train.Trainer, to *[]float64) train.Callback {
	return train.Callback{OnStepEnd: func(ctx context.Context, _ train.Step) error {
		*to = append(*to, variableOf(t, trainer, "/optimizers/learning_rate").Float64s()[0])
		return nil
	}}
}

// variableOf returns the value of a variable, from a snapshot.
func variableOf(t *testing.T, trainer *train.Trainer, name string) *tensor.Tensor {
	t.Helper()
	s, err := trainer.Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range s.Variables {
		if v.Name == name {
			return v.Value
		}
	}
	t.Fatalf("no variable %s", name)
	return nil
}

// holdCycles compares the learning rates of steps with two cycles over a number of steps.
func holdCycles(t *testing.T, got []float64, steps int) {
	t.Helper()
	if len(got) != steps {
		t.Fatalf("%d steps, want %d", len(got), steps)
	}
	for i, rate := range got {
		at := math.Mod(float64(i), float64(steps)/2) / (float64(steps) / 2)
		if want := 0.1 * (1 + math.Cos(math.Pi*at)) / 2; math.Abs(rate-want) > 1e-6 {
			t.Errorf("learning rate %v in step %d of %d, want %v", rate, i+1, steps, want)
		}
	}
}

// TestCyclesOverTraining checks that a schedule over the whole training gets the number of steps from Fit, in whichever
// way it is configured.
func TestCyclesOverTraining(t *testing.T) {
	batches := loadDigits(t).Train.Take(58).Batch(10) // 6 of them
	for _, test := range []struct {
		name  string
		ds    data.Dataset
		cfg   train.FitConfig
		steps int
	}{
		{"the dataset's length", batches, train.FitConfig{Epochs: 2}, 12},
		{"later epochs", batches, train.FitConfig{InitialEpoch: 2, Epochs: 4}, 12},
		{"steps per epoch", ofUnknownLength{batches}, train.FitConfig{Epochs: 2, StepsPerEpoch: 4}, 8},
		{"a limit", batches, train.FitConfig{Epochs: 3, Steps: 14}, 14},
		{"a limit without a length", ofUnknownLength{batches}, train.FitConfig{Epochs: 3, Steps: 14}, 14},
		{"a limit above", batches, train.FitConfig{Epochs: 2, Steps: 100}, 12},
	} {
		for _, replicas := range []int{1, 2} {
			t.Run(fmt.Sprintf("%s/%d", test.name, replicas), func(t *testing.T) {
				trainer := newTrainer(t, "go", replicas, 10, 1, sgd(), inCycles)
				var got []float64
				test.cfg.Callbacks = []train.Callback{rates(t, trainer, &got)}
				if _, err := trainer.Fit(t.Context(), test.ds, test.cfg); err != nil {
					t.Fatal(err)
				}
				holdCycles(t, got, test.steps)
				weights, err := trainer.Weights(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				for _, w := range weights {
					if w.Name == lastStep {
						t.Error("the number of the last step is one of the weights")
					}
				}
			})
		}
	}
}

// TestCyclesResume checks that a training that resumes from a snapshot, after a batch of weight 0, keeps the schedule
// of the whole training.
func TestCyclesResume(t *testing.T) {
	var list []data.Element
	for i, b := range digitBatches(t, 6, 10) {
		if i == 1 {
			b.Weights = tensor.New(tensor.Float32, 10)
		}
		list = append(list, b)
	}
	batches := data.FromFunc(len(list), func(_ context.Context, i int) (data.Element, error) { return list[i], nil })
	cfg := func(c ...train.Callback) train.FitConfig { return train.FitConfig{Epochs: 2, Callbacks: c} }
	cycled := func() *train.Trainer { return newTrainer(t, "go", 1, 10, 1, sgd(), inCycles) }
	whole, first, second := cycled(), cycled(), cycled()
	if _, err := whole.Fit(t.Context(), batches, cfg()); err != nil {
		t.Fatal(err)
	}
	var s *train.Snapshot
	stop := train.Callback{OnStepEnd: func(ctx context.Context, step train.Step) (err error) {
		if step.Step == 4 {
			s, err = first.Snapshot(ctx)
		}
		if err == nil && s != nil {
			err = train.ErrStop
		}
		return err
	}}
	if _, err := first.Fit(t.Context(), batches, cfg(stop)); err != nil {
		t.Fatal(err)
	}
	if _, err := second.Restore(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	if _, err := second.Fit(t.Context(), batches, cfg()); err != nil {
		t.Fatal(err)
	}
	if a, b := hash(t, whole), hash(t, second); a != b {
		t.Errorf("weights %s of a resumed training, %s of an uninterrupted one", b, a)
	}
	if got := variableOf(t, second, lastStep).Format(); got != "12" {
		t.Errorf("the last step is %s, want 12", got)
	}
}

// TestCyclesUnknown checks the error of a schedule that needs the number of steps if it is unknown.
func TestCyclesUnknown(t *testing.T) {
	batches := loadDigits(t).Train.Take(40).Batch(10)
	trainer := newTrainer(t, "go", 1, 10, 1, sgd(), inCycles)
	_, err := trainer.Fit(t.Context(), ofUnknownLength{batches}, train.FitConfig{Epochs: 2})
	want := "the dataset does not know its length: set FitConfig.StepsPerEpoch or FitConfig.Steps"
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("Fit over a dataset of unknown length: %v", err)
	}
	b := digitBatches(t, 1, 10)[0]
	_, _, err = trainer.Gradients(t.Context(), b)
	want = `set it by SetVariable("` + lastStep + `", tensor.Scalar(int64(steps)))`
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("Gradients: %v, want %q in it", err, want)
	}
	if err := trainer.SetVariable(lastStep, tensor.Scalar(int64(8))); err != nil {
		t.Fatal(err)
	}
	var got []float64
	for range 8 {
		gradients, _, err := trainer.Gradients(t.Context(), b)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, variableOf(t, trainer, "/optimizers/learning_rate").Float64s()[0])
		if err := trainer.ApplyGradients(t.Context(), gradients); err != nil {
			t.Fatal(err)
		}
	}
	holdCycles(t, got, 8)
}
