// Command plain trains a CNN on handwritten digits, by GoMLX alone.
package main

import (
	"flag"
	"fmt"
	"log"

	"github.com/gomlx/compute"
	_ "github.com/gomlx/compute/gobackend"
	"github.com/gomlx/gomlx/ml/model/checkpoint"
	"github.com/gomlx/gomlx/ml/train"
	"github.com/gomlx/gomlx/ml/train/loss"
	"github.com/gomlx/gomlx/ml/train/metric"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/examples/gomlx/mnist"
)

func main() {
	steps := flag.Int("steps", 300, "training steps")
	batch := flag.Int("batch", 32, "images of a batch")
	dir := flag.String("checkpoint", "", "folder for checkpoints")
	flag.Parse()

	backend := must(compute.NewWithConfig("go"))
	store := mnist.NewStore()
	trainDS, testDS, err := mnist.NewDatasets(backend, *batch)
	if err != nil {
		log.Fatal(err)
	}
	trainer := train.NewTrainer(backend, store, mnist.Model, loss.SparseCategoricalCrossEntropyLogits,
		optimizer.FromStore(store),
		[]metric.Interface{metric.NewMovingAverageSparseCategoricalAccuracy("accuracy", "~acc", 0.01)},
		[]metric.Interface{metric.NewSparseCategoricalAccuracy("accuracy", "#acc")})
	loop := train.NewLoop(trainer)
	var saver *checkpoint.Handler
	if *dir != "" {
		saver = must(checkpoint.Build(store).Dir(*dir).Keep(3).Done())
	}
	must(loop.RunSteps(trainDS, *steps))
	result := must(trainer.Eval(testDS))
	fmt.Printf("test loss %.3f, accuracy %.3f\n", result[0].Value(), result[1].Value())
	if err := saver.Save(); err != nil {
		log.Fatal(err)
	}
}

func must[T any](x T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return x
}
