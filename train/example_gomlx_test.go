package train_test

import (
	"context"
	"fmt"
	"log"
	"math"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/model"
	gomlxtrain "github.com/gomlx/gomlx/ml/train"
	"github.com/gomlx/gomlx/ml/train/loss"
	"github.com/gomlx/gomlx/ml/train/metric"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train"
)

// Loss, metric and optimizer of a GoMLX program, as they are, on two replicas.
func Example_goMLX() {
	ctx := context.Background()
	e, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: 2})
	if err != nil {
		log.Fatal(err)
	}
	defer e.Close()
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: e})
	if err != nil {
		log.Fatal(err)
	}
	defer s.Close()
	var lossFn gomlxtrain.LossFn = loss.BinaryCrossentropyLogits
	accuracy := metric.NewMeanBinaryLogitsAccuracy("accuracy", "acc")

	x, y := tensor.New(tensor.Float32, 100, 2), tensor.New(tensor.Float32, 100, 1) // is the first number larger?
	for i := range 100 {
		a, b := float32(math.Sin(float64(i))), float32(math.Cos(float64(3*i)))
		copy(tensor.Data[float32](x)[2*i:], []float32{a, b})
		if a > b {
			tensor.Data[float32](y)[i] = 1
		}
	}
	all, err := data.FromTensors(data.Batch{Inputs: []*tensor.Tensor{x}, Labels: []*tensor.Tensor{y}})
	if err != nil {
		log.Fatal(err)
	}
	batches := all.Shuffle(1).Batch(32)
	t, err := train.New(ctx, s, &gomlx.Model{
		Forward: func(s *model.Scope, inputs []*graph.Node) []*graph.Node {
			return []*graph.Node{layers.Dense(s.In("dense"), inputs[0], true, 1)}
		},
		Loss: gomlx.Loss(lossFn), Metrics: []gomlx.Metric{gomlx.MetricFrom(accuracy)},
		Optimizer: optimizer.Adam().LearningRate(0.1).Done(),
	}, train.Config{Data: batches, Seed: 1})
	if err != nil {
		log.Fatal(err)
	}
	defer t.Close()
	history, err := t.Fit(ctx, batches, train.FitConfig{Epochs: 20})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("accuracy above 95 %%: %v\n", history.Epochs[19].Metrics["accuracy"] > 0.95)
	// Output: accuracy above 95 %: true
}
