// Command csv trains your own model on your own data: it reads a table of flowers (made up for this example), trains a
// small network on most of it, evaluates it on the rest after every epoch, writes the weights, and classifies new
// flowers.
package main

import (
	"context"
	_ "embed"
	"flag"
	"fmt"
	"log"
	"os"
	"strings"

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

//go:embed flowers.csv
var flowers string

// network is an ordinary GoMLX model function: four measurements in, a score for each of three kinds out.
func network(s *model.Scope, inputs []*graph.Node) []*graph.Node {
	x := activation.Relu(layers.Dense(s.In("hidden"), inputs[0], true, 16))
	return []*graph.Node{layers.Dense(s.In("readout"), x, true, 3)}
}

func main() {
	out := flag.String("out", "", "write the weights to this file")
	flag.Parse()
	ctx := context.Background()
	engine := must(gomlx.OpenGo(gomlx.GoOptions{}))
	strategy := must(distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: engine}))

	table := must(data.ReadCSV(strings.NewReader(flowers), data.CSV{})) // data.LoadCSV reads a file
	inputs := must(table.Floats("sepal_length", "sepal_width", "petal_length", "petal_width"))
	labels := must(table.Ints("kind"))
	all := must(data.FromTensors(data.Batch{Inputs: []*tensor.Tensor{inputs}, Labels: []*tensor.Tensor{labels}}))
	training, validation := all.Split(0.2, 1) // a fifth is held back, at random
	batches := training.Shuffle(1).Batch(16)

	trainer := must(train.New(ctx, strategy, &gomlx.Model{
		Forward:   network,
		Loss:      gomlx.SparseCategoricalCrossEntropyLogits,
		Optimizer: optimizer.Adam().LearningRate(0.01).Done(),
		Metrics:   []gomlx.Metric{gomlx.SparseCategoricalAccuracy()},
	}, train.Config{Data: batches, Seed: 1}))
	defer trainer.Close()
	must(trainer.Fit(ctx, batches, train.FitConfig{
		Epochs: 20, Validation: validation.Batch(16),
		Callbacks: []train.Callback{train.NewProgress(train.ProgressConfig{Out: os.Stdout, Unit: "flowers"})},
	}))
	if *out != "" {
		if err := trainer.Export(ctx, *out, map[string]string{"data": "flowers.csv"}); err != nil {
			log.Fatal(err)
		}
	}

	found := tensor.From([]float32{5.1, 3.5, 1.4, 0.2, 6.7, 3.1, 5.6, 2.4}, 2, 4) // two new flowers
	unknown := must(data.FromTensors(data.Batch{Inputs: []*tensor.Tensor{found}}))
	scores := must(trainer.Predict(ctx, unknown.Batch(2)))
	for i := range 2 {
		s := tensor.Data[float32](scores[0])[3*i : 3*i+3]
		best := 0
		for kind := range s {
			if s[kind] > s[best] {
				best = kind
			}
		}
		fmt.Printf("flower %d is of kind %d\n", i, best)
	}
}

func must[T any](value T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return value
}
