// Command quickstart trains a classifier of handwritten digits, with one replica per core. The digits are embedded.
package main

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/data/digits"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/train"
)

func main() {
	ctx := context.Background()
	engine := must(gomlx.OpenGo(gomlx.GoOptions{})) // pure Go, one device per core
	strategy := must(distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: engine}))
	images := must(digits.Load())
	batches := images.Train.Shuffle(1).Batch(64) // 64 examples a step, over all replicas
	model := &gomlx.Model{
		Forward:   models.MLP{Hidden: []int{64}, Classes: images.Classes}.Forward,
		Loss:      gomlx.SparseCategoricalCrossEntropyLogits,
		Optimizer: optimizer.Adam().LearningRate(0.003).Done(),
		Metrics:   []gomlx.Metric{gomlx.SparseCategoricalAccuracy()},
	}
	trainer := must(train.New(ctx, strategy, model, train.Config{Data: batches, Seed: 1}))
	defer trainer.Close()
	progress := train.NewProgress(train.ProgressConfig{Out: os.Stdout})
	must(trainer.Fit(ctx, batches, train.FitConfig{Epochs: 10, Callbacks: []train.Callback{progress}}))
	result := must(trainer.Evaluate(ctx, images.Test.Batch(64)))
	fmt.Printf("%v: test accuracy %.1f %%\n", strategy, 100*result.Metrics["accuracy"])
}

func must[T any](value T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return value
}
