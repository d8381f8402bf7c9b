package train_test

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/metric"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	"github.com/lockstep-ml/lockstep/train"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// forgetful is a model with state that a snapshot could omit: averages that differ per replica, and masks from random
// numbers.
func forgetful(s *model.Scope, in []*graph.Node) []*graph.Node {
	x := layer.Relu(layer.BatchNorm(s.In("first"), layer.Conv2D(s.In("conv"), in[0], 2, 3, true)))
	x = graph.Reshape(x, x.Shape().Dim(0), -1)
	x = layers.DropoutStatic(s, layer.DenseRelu(s.In("hidden"), x, 12), 0.5)
	return []*graph.Node{layer.Dense(s.In("readout"), layer.BatchNorm(s.In("second"), x), 10)}
}

// left formats the results of a training: history, weights, and every variable on every replica.
func left(t *testing.T, trainer *train.Trainer, h *train.History) string {
	t.Helper()
	text := fmt.Sprintf("%d steps, %s", h.Steps, hash(t, trainer))
	for _, e := range h.Epochs {
		text += fmt.Sprintf("\nepoch %d, %d steps, %v, validation %v", e.Epoch, e.Steps, e.Result, *e.Validation)
	}
	s, err := trainer.Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range s.Variables {
		text += fmt.Sprintf("\n%s %v", v.Name, v.Value.Float64s())
	}
	return text
}

// withStreams adds metrics that depend on the order of the batches.
func withStreams(m *gomlx.Model) engine.Model {
	mean := func(_ *model.Scope, _, p []*graph.Node) *graph.Node { return graph.ReduceAllMean(p[0]) }
	for _, x := range []metric.Interface{
		metric.NewExponentialMovingAverageMetric("moving", "", "", mean, nil, 0.4),
		metric.NewMedianMetric("median", "", "", mean, nil).WithSampleSize(2),
		metric.NewBaseMetric("last", "", "", mean, nil),
		metric.NewMeanMetric("batches", "", "", mean, nil).WithDynamicBatch(false),
	} {
		m.Metrics = append(m.Metrics, gomlx.MetricFrom(x))
	}
	return m
}

// TestResumeModel checks that a real model, with dropout, averages, Adam, shuffled and shifted images and partial
// batches, resumes from the snapshot of any step to the bits and the history of an uninterrupted training.
func TestResumeModel(t *testing.T) {
	all := loadDigits(t).Train
	batches := all.Take(45).Shuffle(3).Batch(20).MapRandom(5, data.RandomShift(1))
	cfg := train.FitConfig{Epochs: 2, Validation: all.Skip(100).Take(25).Batch(20)}
	eachEngine(t, func(t *testing.T, engine string) {
		for replicas := 1; replicas <= 4; replicas++ {
			open := func() *train.Trainer {
				return newTrainerOf(t, engine, replicas, 20, 1, withStreams, optimizer.Adam().LearningRate(0.01).Done(), forgetful)
			}
			var taken []*checkpoint.Contents
			trainer := open()
			watched := cfg
			watched.Callbacks = []train.Callback{{OnStepEnd: func(ctx context.Context, _ train.Step) error {
				s, err := trainer.Snapshot(ctx)
				if err != nil {
					return err
				}
				c, err := s.Contents()
				taken = append(taken, c)
				return err
			}}}
			h, err := trainer.Fit(t.Context(), batches, watched)
			if err != nil {
				t.Fatal(err)
			}
			want := left(t, trainer, h)
			if replicas == 2 { // taking snapshots changes nothing
				plain := open()
				h, err := plain.Fit(t.Context(), batches, cfg)
				if err != nil {
					t.Fatal(err)
				}
				if got := left(t, plain, h); got != want {
					t.Errorf("without snapshots\n%s\nwith them\n%s", got, want)
				}
			}
			if testing.Short() {
				t.Log("-short: two snapshots only")
				taken = slices.Concat(taken[1:2], taken[3:4])
			}
			for _, c := range taken {
				again := open()
				s, err := train.SnapshotOf(c)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := again.Restore(t.Context(), s); err != nil {
					t.Fatal(err)
				}
				h, err := again.Fit(t.Context(), batches, cfg)
				if err != nil {
					t.Fatal(err)
				}
				if got := left(t, again, h); got != want {
					t.Errorf("%d replicas, from step %d: got\n%s\nwant\n%s", replicas, c.Step, got, want)
				}
			}
		}
	})
}
