package train_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"strings"
	"sync"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/cluster"
	clusterworker "github.com/lockstep-ml/lockstep/cluster/worker"
	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train"
)

// line is a table with y = 2x + 1.
const line = "x,y\n0,1\n1,3\n2,5\n3,7\n4,9\n5,11\n"

// linear is a model with one weight and one bias.
func linear(s *model.Scope, inputs []*graph.Node) []*graph.Node {
	return []*graph.Node{layers.Dense(s, inputs[0], true, 1)}
}

// lines returns the table as batches of 6 examples.
func lines() data.Pipeline {
	table, err := data.ReadCSV(strings.NewReader(line), data.CSV{})
	if err != nil {
		log.Fatal(err)
	}
	x, err := table.Floats("x")
	if err != nil {
		log.Fatal(err)
	}
	y, err := table.Floats("y")
	if err != nil {
		log.Fatal(err)
	}
	all, err := data.FromTensors(data.Batch{Inputs: []*tensor.Tensor{x}, Labels: []*tensor.Tensor{y}})
	if err != nil {
		log.Fatal(err)
	}
	return all.Batch(6)
}

// onTwoReplicas makes a trainer of the linear model on two replicas. close releases everything.
func onTwoReplicas(ctx context.Context, loss gomlx.Loss) (t *train.Trainer, close func()) {
	e, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: 2})
	if err != nil {
		log.Fatal(err)
	}
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: e})
	if err != nil {
		log.Fatal(err)
	}
	t, err = train.New(ctx, s, &gomlx.Model{
		Forward: linear, Loss: loss, Optimizer: optimizer.Adam().LearningRate(0.1).Done(),
	}, train.Config{Data: lines(), Seed: 1})
	if err != nil {
		log.Fatal(err)
	}
	return t, func() { t.Close(); s.Close(); e.Close() }
}

// From a CSV table to predictions.
func ExampleTrainer_Predict() {
	ctx := context.Background()
	t, done := onTwoReplicas(ctx, gomlx.MeanSquaredError)
	defer done()
	if _, err := t.Fit(ctx, lines(), train.FitConfig{Epochs: 400}); err != nil {
		log.Fatal(err)
	}
	unknown, err := data.FromTensors(data.Batch{Inputs: []*tensor.Tensor{tensor.From([]float32{10, 20}, 2, 1)}})
	if err != nil {
		log.Fatal(err)
	}
	outputs, err := t.Predict(ctx, unknown.Batch(2))
	if err != nil {
		log.Fatal(err)
	}
	for i, y := range tensor.Data[float32](outputs[0]) {
		fmt.Printf("x = %d: y = %.0f\n", 10*(i+1), y)
	}
	// Output:
	// x = 10: y = 21
	// x = 20: y = 41
}

// A loss of your own: the Huber loss, one number for each example. It must not average over the batch; the trainer
// does, over the examples of all replicas.
func ExampleNew_customLoss() {
	ctx := context.Background()
	huber := func(labels, predictions []*graph.Node) *graph.Node {
		off := graph.Abs(graph.Sub(predictions[0], labels[0]))
		one := graph.OnesLike(off)
		loss := graph.Where(graph.LessThan(off, one), graph.MulScalar(graph.Square(off), 0.5), graph.AddScalar(off, -0.5))
		return graph.ReduceMean(loss, 1) // [rows, 1] to [rows]
	}
	t, done := onTwoReplicas(ctx, huber)
	defer done()
	history, err := t.Fit(ctx, lines(), train.FitConfig{Epochs: 400})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("the loss became small:", history.Epochs[399].Loss < 0.01)
	// Output: the loss became small: true
}

// A training ends after 5 of 10 epochs. Another process continues it from the newest snapshot, and ends with the same
// bits as a training that was not interrupted.
func ExampleNewBackup() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	fit := func(dir string, epochs int) string {
		t, done := onTwoReplicas(ctx, gomlx.MeanSquaredError)
		defer done()
		var callbacks []train.Callback
		if dir != "" {
			backup, err := train.NewBackup(t, train.BackupConfig{Dir: dir})
			if err != nil {
				log.Fatal(err)
			}
			callbacks = append(callbacks, backup.Callback())
		}
		if _, err := t.Fit(ctx, lines(), train.FitConfig{Epochs: epochs, Callbacks: callbacks}); err != nil {
			log.Fatal(err)
		}
		hash, err := t.WeightsHash(ctx)
		if err != nil {
			log.Fatal(err)
		}
		return hash
	}
	fit(dir, 5)
	fmt.Println("equal bits:", fit(dir, 10) == fit("", 10))
	// Output: equal bits: true
}

// Two workers with a replica each train one model. Here both are goroutines of one process, and the job is described in
// the program; a real worker is a process and leaves Join empty: then the strategy finds its job in the environment.
func ExampleNew_severalWorkers() {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	hashes := make([]string, 2)
	var workers sync.WaitGroup
	for i := range hashes {
		workers.Go(func() {
			ctx := context.Background()
			e, err := gomlx.OpenGo(gomlx.GoOptions{})
			if err != nil {
				log.Fatal(err)
			}
			defer e.Close()
			w, err := clusterworker.Join(ctx, clusterworker.Config{
				Job: &cluster.Job{ID: "example", Worker: i, Workers: len(hashes), Store: "file://" + dir},
			})
			if err != nil {
				log.Fatal(err)
			}
			defer w.Close()
			s, err := distribute.NewMultiWorkerMirroredStrategy(distribute.MultiWorkerConfig{Engine: e, Worker: w})
			if err != nil {
				log.Fatal(err)
			}
			defer s.Close()
			t, err := train.New(ctx, s, &gomlx.Model{
				Forward: linear, Loss: gomlx.MeanSquaredError, Optimizer: optimizer.Adam().Done(),
			}, train.Config{Data: lines()})
			if err != nil {
				log.Fatal(err)
			}
			defer t.Close()
			if _, err := t.Fit(ctx, lines(), train.FitConfig{Epochs: 3}); err != nil {
				log.Fatal(err)
			}
			if hashes[i], err = t.WeightsHash(ctx); err != nil {
				log.Fatal(err)
			}
		})
	}
	workers.Wait()
	fmt.Println("equal weights:", hashes[0] == hashes[1])
	// Output: equal weights: true
}
