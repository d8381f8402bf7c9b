// Command mirrored trains a model of one's own on data of one's own, with one replica per core: a network that learns whether
// a point lies in a circle.
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"os"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/layers/activation"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train"
)

func main() {
	if err := run(context.Background(), os.Stdout); err != nil {
		log.Fatal(err)
	}
}

// network is an ordinary GoMLX model function.
func network(s *model.Scope, inputs []*graph.Node) []*graph.Node {
	x := activation.Relu(layers.Dense(s.In("hidden"), inputs[0], true, 32))
	return []*graph.Node{layers.Dense(s.In("readout"), x, true, 2)}
}

func run(ctx context.Context, out io.Writer) error {
	e, err := gomlx.OpenGo(gomlx.GoOptions{})
	if err != nil {
		return err
	}
	defer e.Close()
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: e})
	if err != nil {
		return err
	}
	defer s.Close()
	m := &gomlx.Model{
		Forward: network, Loss: gomlx.SparseCategoricalCrossEntropyLogits,
		Optimizer: optimizer.Adam().LearningRate(0.01).Done(), Metrics: []gomlx.Metric{gomlx.SparseCategoricalAccuracy()},
	}
	t, err := train.New(ctx, s, m, train.Config{
		Inputs:      []engine.Feature{{DType: tensor.Float32, Shape: []int{2}}},
		Labels:      []engine.Feature{{DType: tensor.Int32}},
		GlobalBatch: 100, Seed: 1,
	})
	if err != nil {
		return err
	}
	defer t.Close()
	progress := train.NewProgress(train.ProgressConfig{Out: out, Unit: "points"})
	if _, err := t.Fit(ctx, points(4000, 1).Shuffle(1).Batch(100), train.FitConfig{Epochs: 5, Callbacks: []train.Callback{progress}}); err != nil {
		return err
	}
	result, err := t.Evaluate(ctx, points(1000, 2).Batch(100))
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%v: accuracy %.1f %% on %d new points\n", s, 100*result.Metrics["accuracy"], result.Examples)
	return err
}

// points returns n random points of a square, with label 1 in a circle that covers half of it.
func points(n int, seed uint64) data.Pipeline {
	r := rand.New(rand.NewPCG(seed, 0))
	xy, inside := make([]float32, 2*n), make([]int32, n)
	for i := range inside {
		x, y := 2*r.Float32()-1, 2*r.Float32()-1
		xy[2*i], xy[2*i+1] = x, y
		if x*x+y*y < 2/3.14159 {
			inside[i] = 1
		}
	}
	return data.FromTensors(data.Batch{Inputs: []*tensor.Tensor{tensor.Of(xy, n, 2)}, Labels: []*tensor.Tensor{tensor.Of(inside)}})
}
