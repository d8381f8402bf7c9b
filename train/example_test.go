package train_test

import (
	"context"
	"fmt"
	"log"

	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/data/digits"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/train"
)

func Example() {
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
	images, err := digits.Load()
	if err != nil {
		log.Fatal(err)
	}
	kept, held := images.Train.Split(0.1, 1)
	batches := kept.Shuffle(1).Batch(64)
	t, err := train.New(ctx, s, &gomlx.Model{
		Forward:   models.MLP{Hidden: []int{64}, Classes: images.Classes}.Forward,
		Loss:      gomlx.SparseCategoricalCrossEntropyLogits,
		Optimizer: optimizer.Adam().LearningRate(0.003).Done(),
		Metrics:   []gomlx.Metric{gomlx.SparseCategoricalAccuracy()},
	}, train.Config{Data: batches, Seed: 1})
	if err != nil {
		log.Fatal(err)
	}
	defer t.Close()

	// Training ends when three epochs have not made the loss on the examples held back smaller. The best weights are kept.
	stop, err := train.NewEarlyStopping(t, train.EarlyStoppingConfig{Patience: 3, RestoreBest: true})
	if err != nil {
		log.Fatal(err)
	}
	history, err := t.Fit(ctx, batches, train.FitConfig{
		Epochs: 100, Validation: held.Batch(64), Callbacks: []train.Callback{stop},
	})
	if err != nil {
		log.Fatal(err)
	}
	result, err := t.Evaluate(ctx, images.Test.Batch(64))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("stopped early:", history.Stopped)
	fmt.Println("test images:", result.Examples)
	fmt.Println("more than 90 % right:", result.Metrics["accuracy"] > 0.9)
	// Output:
	// stopped early: true
	// test images: 1797
	// more than 90 % right: true
}
