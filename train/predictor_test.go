package train_test

import (
	"context"
	"math"
	"strings"
	"sync"
	"testing"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// predicted has an average, which predictions use, and dropout, which they do not.
func predicted() *gomlx.Model {
	return &gomlx.Model{
		Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
			x := layer.BatchNorm(s.In("norm"), layers.Dense(s.In("hidden"), in[0], true, 5))
			x = layers.DropoutStatic(s.In("dropout"), graph.Tanh(x), 0.5)
			return []*graph.Node{layers.Dense(s.In("readout"), x, true, 3), graph.ReduceSum(x, -1)}
		},
		Loss: gomlx.SparseCategoricalCrossEntropyLogits, Optimizer: optimizer.Adam().Done(),
	}
}

// TestPredictorOfSnapshot checks that a snapshot's weights, with a moving average of each replica, predict what the
// trainer does.
func TestPredictorOfSnapshot(t *testing.T) {
	e, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: 2})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: e})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	inputs := []engine.Feature{{DType: tensor.Float32, Shape: []int{4}}}
	m := predicted()
	m.Loss = func(labels, predictions []*graph.Node) *graph.Node {
		return gomlx.SparseCategoricalCrossEntropyLogits(labels, predictions[:1])
	}
	trainer, err := train.New(t.Context(), s, m, train.Config{
		GlobalBatch: 8, Inputs: inputs, Labels: []engine.Feature{{DType: tensor.Int32}}, Seed: 3,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer trainer.Close()
	x := tensor.New(tensor.Float32, 8, 4)
	for i := range tensor.Data[float32](x) {
		tensor.Data[float32](x)[i] = float32(i%5) - 2
	}
	ds := fromTensors(data.Batch{
		Inputs: []*tensor.Tensor{x}, Labels: []*tensor.Tensor{tensor.New(tensor.Int32, 8)},
	}).Batch(8)
	dir := t.TempDir()
	backup, err := train.NewBackup(trainer, train.BackupConfig{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer backup.Close()
	fit := train.FitConfig{Callbacks: []train.Callback{backup.Callback()}}
	if _, err := trainer.Fit(t.Context(), ds, fit); err != nil {
		t.Fatal(err)
	}
	all, err := checkpoint.List(dir)
	if err != nil || len(all) != 1 {
		t.Fatal(all, err)
	}
	weights, err := train.LoadWeights(all[0])
	if err != nil {
		t.Fatal(err)
	}
	if l, err := trainer.LoadWeights(weights, train.LoadOptions{}); err != nil {
		t.Errorf("the trainer loaded %+v, %v", l, err)
	}
	p, err := train.NewPredictor(t.Context(), &gomlx.Model{Forward: m.Forward}, train.PredictorConfig{
		Engine: e, Inputs: inputs, Weights: weights, Load: train.LoadOptions{Partial: true},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	got, err := p.Predict(t.Context(), x)
	if err != nil {
		t.Fatal(err)
	}
	want, err := trainer.Predict(t.Context(), ds)
	if err != nil {
		t.Fatal(err)
	}
	for i, w := range tensor.Data[float32](want[0]) {
		if g := tensor.Data[float32](got[0])[i]; math.Abs(float64(g-w)) > 1e-5 {
			t.Errorf("logit %d is %v, want %v", i, g, w)
		}
	}
}

// TestPredictor compares predictions for several numbers of rows with those of the trainer, whose weights it has.
func TestPredictor(t *testing.T) {
	e, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: e})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	inputs := []engine.Feature{{DType: tensor.Float32, Shape: []int{4}}}
	m := predicted()
	m.Loss = func(labels, predictions []*graph.Node) *graph.Node {
		return gomlx.SparseCategoricalCrossEntropyLogits(labels, predictions[:1])
	}
	trainer, err := train.New(t.Context(), s, m, train.Config{
		GlobalBatch: 8, Inputs: inputs, Labels: []engine.Feature{{DType: tensor.Int32}}, Seed: 3,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer trainer.Close()
	weights, err := trainer.Weights(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	p, err := train.NewPredictor(t.Context(), &gomlx.Model{Forward: m.Forward}, train.PredictorConfig{
		Engine: e, Inputs: inputs, Batch: 8, Weights: weights, Load: train.LoadOptions{Partial: true},
	})
	if err != nil {
		t.Fatal(err)
	}
	if l := p.Loaded(); len(l.Missing) > 0 || len(l.Set) != len(p.Variables()) {
		t.Errorf("loaded %+v", l)
	}
	var wg sync.WaitGroup
	for _, rows := range []int{1, 7, 8, 9, 30} {
		wg.Go(func() {
			x := tensor.New(tensor.Float32, rows, 4)
			for i := range tensor.Data[float32](x) {
				tensor.Data[float32](x)[i] = float32(i%7) - 2
			}
			got, err := p.Predict(t.Context(), x)
			if err != nil || len(got) != 2 {
				t.Errorf("%d rows: %v", rows, err)
				return
			}
			for lo := 0; lo < rows; lo++ {
				row, err := p.Predict(t.Context(), x.Rows(lo, lo+1))
				if err != nil {
					t.Error(err)
					return
				}
				for i := range got {
					if !row[i].Equal(got[i].Rows(lo, lo+1)) {
						t.Errorf("%d rows: row %d of result %d is %v alone, %v with the others", rows, lo, i, row[i],
							got[i].Rows(lo, lo+1))
					}
				}
			}
		})
	}
	wg.Wait()
	x := tensor.New(tensor.Float32, 8, 4)
	for i := range tensor.Data[float32](x) {
		tensor.Data[float32](x)[i] = float32(i%5) - 2
	}
	got, err := p.Predict(t.Context(), x)
	if err != nil {
		t.Fatal(err)
	}
	want, err := trainer.Predict(t.Context(), fromTensors(data.Batch{
		Inputs: []*tensor.Tensor{x}, Labels: []*tensor.Tensor{tensor.New(tensor.Int32, 8)},
	}).Batch(8))
	if err != nil {
		t.Fatal(err)
	}
	for i := range got {
		if !got[i].Equal(want[i]) {
			t.Errorf("result %d: got %v, want the trainer's %v", i, got[i], want[i])
		}
	}
	for want, in := range map[string][]*tensor.Tensor{
		"0 inputs":           {},
		"missing":            {nil},
		"float32(2, 3)":      {tensor.New(tensor.Float32, 2, 3)},
		"want at least one":  {tensor.New(tensor.Float32, 0, 4)},
		"got float64(2, 4),": {tensor.New(tensor.Float64, 2, 4)},
	} {
		if _, err := p.Predict(t.Context(), in...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q in it", err, want)
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := p.Predict(ended, x); err == nil {
		t.Error("Predict ignores its context")
	}
	for range 2 {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := p.Predict(t.Context(), x); err == nil || !strings.Contains(err.Error(), "closed") {
		t.Errorf("after Close: %v", err)
	}
	for want, cfg := range map[string]train.PredictorConfig{
		"Engine is nil":   {Inputs: inputs},
		"Inputs is empty": {Engine: e},
		"Batch is -1":     {Engine: e, Inputs: inputs, Batch: -1},
		"no weight has":   {Engine: e, Inputs: inputs},
		"no device CPU:7": {Engine: e, Inputs: inputs, Device: engine.Device{Kind: "CPU", Index: 7}},
	} {
		if _, err := train.NewPredictor(t.Context(), m, cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q in it", err, want)
		}
	}
}
