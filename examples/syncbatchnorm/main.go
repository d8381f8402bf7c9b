// Command syncbatchnorm trains one network with batch normalisation on one replica and on four. With the ordinary
// layer, each of the four replicas normalises by its eight examples, so the model differs. The synchronised layer
// all-reduces its statistics in the forward and the backward pass, so four replicas train the same model as one.
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"math"
	"os"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/data/digits"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train"
)

func main() {
	if err := run(context.Background(), os.Stdout); err != nil {
		log.Fatal(err)
	}
}

type norm func(*model.Scope, *graph.Node) *graph.Node

func run(ctx context.Context, out io.Writer) error {
	for _, l := range []struct {
		name string
		norm norm
	}{{"BatchNorm", layer.BatchNorm}, {"SyncBatchNorm", layer.SyncBatchNorm}} {
		one, err := loss(ctx, 1, l.norm)
		if err != nil {
			return err
		}
		four, err := loss(ctx, 4, l.norm)
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "%-13s  loss on 1 replica and on 4 within 1e-5: %v\n", l.name, math.Abs(one-four) < 1e-5)
	}
	return nil
}

// loss returns the mean loss of 20 steps.
func loss(ctx context.Context, replicas int, norm norm) (float64, error) {
	e, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: replicas})
	if err != nil {
		return 0, err
	}
	defer e.Close()
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: e})
	if err != nil {
		return 0, err
	}
	defer s.Close()
	m := &gomlx.Model{
		Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
			x := graph.Reshape(in[0], in[0].Shape().Dim(0), -1)
			for i := range 2 {
				s := s.In("hidden_%d", i)
				x = layer.Relu(norm(s, layer.Dense(s, x, 32)))
			}
			return []*graph.Node{layer.Dense(s.In("readout"), x, 10)}
		},
		Loss:      gomlx.SparseCategoricalCrossEntropyLogits,
		Optimizer: optimizer.StochasticGradientDescent().WithDecay(false).WithLearningRate(0.1),
	}
	trainer, err := train.New(ctx, s, m, train.Config{
		Inputs:      []engine.Feature{{DType: tensor.Float32, Shape: []int{8, 8, 1}}},
		Labels:      []engine.Feature{{DType: tensor.Int32}},
		GlobalBatch: 32, Seed: 1,
	})
	if err != nil {
		return 0, err
	}
	defer trainer.Close()
	set, err := digits.Load()
	if err != nil {
		return 0, err
	}
	h, err := trainer.Fit(ctx, set.Train.Take(20*32).Batch(32), train.FitConfig{})
	if err != nil {
		return 0, err
	}
	return h.Epochs[0].Loss, nil
}
