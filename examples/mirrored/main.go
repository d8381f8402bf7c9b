// Command mirrored trains a model of one's own on data of one's own, with one replica per core: which ring of a target did
// the dart hit?
package main

import (
	"context"
	"fmt"
	"log"
	"math"
	"math/rand/v2"
	"os"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/layers/activation"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train"
)

// dart is example i: where it hit, and the ring, 0 to 2.
func dart(_ context.Context, i int) (data.Element, error) {
	r := rand.New(rand.NewPCG(1, uint64(i)))
	x, y := r.Float64(), r.Float64()
	at, ring := tensor.Of([]float32{float32(x), float32(y)}), tensor.Scalar(int32(2*math.Hypot(x, y)))
	return data.Batch{Inputs: []*tensor.Tensor{at}, Labels: []*tensor.Tensor{ring}}, nil
}

// network is an ordinary GoMLX model function.
func network(s *model.Scope, inputs []*graph.Node) []*graph.Node {
	x := activation.Relu(layers.Dense(s.In("hidden"), inputs[0], true, 32))
	return []*graph.Node{layers.Dense(s.In("readout"), x, true, 3)}
}

// A program that does not end here closes the trainer, the strategy and the engine.
func main() {
	ctx := context.Background()
	s := must(distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: must(gomlx.OpenGo(gomlx.GoOptions{}))}))
	m := &gomlx.Model{
		Forward: network, Loss: gomlx.SparseCategoricalCrossEntropyLogits,
		Optimizer: optimizer.Adam().LearningRate(0.01).Done(), Metrics: []gomlx.Metric{gomlx.SparseCategoricalAccuracy()},
	}
	kept, held := data.FromFunc(5000, dart).Split(0.2, 1)
	batches := kept.Shuffle(1).Batch(100)
	t := must(train.New(ctx, s, m, train.Config{Data: batches}))
	progress := train.NewProgress(train.ProgressConfig{Out: os.Stdout, Unit: "darts"})
	must(t.Fit(ctx, batches, train.FitConfig{Epochs: 10, Callbacks: []train.Callback{progress}}))
	result := must(t.Evaluate(ctx, held.Batch(100)))
	fmt.Printf("%v: accuracy %.1f %% on %d new darts\n", s, 100*result.Metrics["accuracy"], result.Examples)
}

func must[T any](value T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return value
}
