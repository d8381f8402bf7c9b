package train_test

import (
	"context"
	"fmt"
	"log"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/data/digits"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/engine/gomlx/optimizer"
	"github.com/lockstep-ml/lockstep/train"
)

// A custom training loop: each step accumulates the gradients of four batches, with one all-reduce, and clips them by a
// limit that falls during training.
func ExampleTrainer_Gradients() {
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
	batches := images.Train.Shuffle(1).Batch(32)
	t, err := train.New(ctx, s, &gomlx.Model{
		Forward:   models.MLP{Hidden: []int{32}, Classes: images.Classes}.Forward,
		Loss:      gomlx.SparseCategoricalCrossEntropyLogits,
		Optimizer: optimizer.SGD().LearningRate(0.5).Momentum(0.9).Done(),
		Metrics:   []gomlx.Metric{gomlx.SparseCategoricalAccuracy()},
	}, train.Config{Data: batches, Seed: 1})
	if err != nil {
		log.Fatal(err)
	}
	defer t.Close()

	limit, clipped := 1.0, 0
	var parts []data.Batch
	for element, err := range batches.Iter(ctx) {
		if err != nil {
			log.Fatal(err)
		}
		if parts = append(parts, element.(data.Batch)); len(parts) < 4 {
			continue
		}
		gradients, _, err := t.Gradients(ctx, parts...)
		if err != nil {
			log.Fatal(err)
		}
		if norm := train.ClipByGlobalNorm(gradients, limit); norm > limit {
			clipped++
		}
		if err := t.ApplyGradients(ctx, gradients); err != nil {
			log.Fatal(err)
		}
		parts, limit = parts[:0], 0.98*limit
	}
	result, err := t.Evaluate(ctx, images.Test.Batch(32))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("steps:", t.Steps())
	fmt.Println("some were clipped:", clipped > 0)
	fmt.Println("more than 80 % right:", result.Metrics["accuracy"] > 0.8)
	// Output:
	// steps: 30
	// some were clipped: true
	// more than 80 % right: true
}
