package train_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/data/digits"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/engine/gomlx/optimizer"
	"github.com/lockstep-ml/lockstep/train"
	"github.com/lockstep-ml/lockstep/train/tensorboard"
)

// A learning rate that rises and falls, averages of the weights, early stopping, event files for TensorBoard, and a
// Ctrl-C that ends the training after its step.
func ExampleNewEarlyStopping() {
	ctx := context.Background()
	logs, err := os.MkdirTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(logs)
	e, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: 2})
	if err != nil {
		log.Fatal(err)
	}
	defer e.Close()
	strategy, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: e})
	if err != nil {
		log.Fatal(err)
	}
	defer strategy.Close()
	images, err := digits.Load()
	if err != nil {
		log.Fatal(err)
	}
	kept, held := images.Train.Split(0.1, 1)
	batches := kept.Shuffle(1).Batch(64) // 54 steps an epoch
	schedule := optimizer.LinearWarmup(0, 0.003, 50, optimizer.CosineDecay(0.003, 1000, 0.1))
	t, err := train.New(ctx, strategy, &gomlx.Model{
		Forward: models.MLP{Hidden: []int{64}, Classes: images.Classes}.Forward,
		Loss:    gomlx.SparseCategoricalCrossEntropyLogits,
		Metrics: []gomlx.Metric{gomlx.SparseCategoricalAccuracy()},
		Optimizer: optimizer.EMA( // of engine/gomlx/optimizer
			optimizer.Adam().Schedule(schedule).Done(), optimizer.EMAConfig{Momentum: 0.9}),
	}, train.Config{Data: batches, Seed: 1})
	if err != nil {
		log.Fatal(err)
	}
	defer t.Close()
	stop, err := train.NewEarlyStopping(t, train.EarlyStoppingConfig{
		Monitor: "val_accuracy", Patience: 2, RestoreBest: true,
	})
	if err != nil {
		log.Fatal(err)
	}
	board, err := tensorboard.New(t, tensorboard.Config{Dir: logs, HistogramEvery: 1})
	if err != nil {
		log.Fatal(err)
	}
	defer train.StopOnInterrupt(t)()
	history, err := t.Fit(ctx, batches, train.FitConfig{
		Epochs: 100, Validation: held.Batch(64), EMA: true, // validate by the averages
		Callbacks: []train.Callback{stop, board},
	})
	if err != nil {
		log.Fatal(err)
	}
	last := history.Epochs[len(history.Epochs)-1]
	fmt.Println("stopped early:", history.Stopped)
	fmt.Println("more than 90 % right:", last.Validation.Metrics["accuracy"] > 0.9)
	files, _ := filepath.Glob(filepath.Join(logs, "*", "events.out.tfevents.*"))
	fmt.Println("event files:", len(files))
	// Output:
	// stopped early: true
	// more than 90 % right: true
	// event files: 2
}

// TestPageShowsExample checks that docs/callbacks.md shows the code of ExampleNewEarlyStopping.
func TestPageShowsExample(t *testing.T) {
	source, err := os.ReadFile("example_callbacks_test.go")
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile("../docs/callbacks.md")
	if err != nil {
		t.Fatal(err)
	}
	_, code, found := strings.Cut(string(source), "\tschedule := ")
	code, _, ended := strings.Cut("\tschedule := "+code, "\tlast := ")
	code = strings.ReplaceAll("\n"+code, "\n\t", "\n")
	if !found || !ended || !strings.Contains(string(page), "```go"+code+"```") {
		t.Errorf("docs/callbacks.md lacks:\n%s", code)
	}
}
