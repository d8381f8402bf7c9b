package train

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// fitted returns what a training and what is done with its model give, as text.
func fitted(ctx context.Context, s *distribute.Strategy) (string, error) {
	trainer, err := New(ctx, s, fakeModel{rate: 1.0 / 64}, fakeConfig(7))
	if err != nil {
		return "", err
	}
	examples := lineExamples(16)
	fit, err := trainer.Fit(ctx, sizes(examples, 7, 7, 2), FitConfig{Epochs: 3})
	if err != nil {
		return "", errors.Join(err, trainer.Close())
	}
	evaluated, err := trainer.Evaluate(ctx, sizes(examples, 7, 1))
	if err != nil {
		return "", errors.Join(err, trainer.Close())
	}
	outputs, err := trainer.Predict(ctx, sizes(examples, 7, 1, 3))
	if err != nil {
		return "", errors.Join(err, trainer.Close())
	}
	weights, err := trainer.Weights(ctx)
	last := fit.Epochs[len(fit.Epochs)-1]
	return fmt.Sprintf("%v\n%v\n%v\n%v", last.Result, evaluated, outputs, weights), errors.Join(err, trainer.Close())
}

// Three replicas train to the same bits on one worker, on three, and on two of different sizes; a last batch leaves replicas
// without examples.
func TestTrainOverWorkers(t *testing.T) {
	one, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: fakeEngine{3}})
	if err != nil {
		t.Fatal(err)
	}
	defer one.Close()
	want, err := fitted(t.Context(), one)
	if err != nil {
		t.Fatal(err)
	}
	for _, layout := range [][]int{{1, 1, 1}, {1, 2}, {2, 1}} {
		t.Run(fmt.Sprint(layout), func(t *testing.T) {
			ends := mem.NewPipes(3)
			var tasks []string
			for w := range layout {
				tasks = append(tasks, fmt.Sprintf("host%d:1", w))
			}
			spec := cluster.NewSpec(map[string][]string{"worker": tasks})
			var done, all sync.WaitGroup
			all.Add(len(layout))
			for w, n := range layout {
				group, err := collective.Open(ends[:n], collective.Config{})
				if err != nil {
					t.Fatal(err)
				}
				ends = ends[n:]
				done.Go(func() {
					s, err := distribute.NewMultiWorkerMirroredStrategy(distribute.MultiWorkerConfig{
						Resolver: &cluster.Simple{Cluster: spec, This: &cluster.Task{Type: "worker", Index: w}},
						Devices:  []string{"CPU:0", "CPU:1"}[:n], Group: group, Engine: fakeEngine{n},
					})
					if err != nil {
						t.Error(err)
						group.Close()
						all.Done()
						return
					}
					got, err := fitted(t.Context(), s)
					if err != nil || got != want {
						t.Errorf("worker %d: got\n%s, %v, want\n%s", w, got, err, want)
					}
					all.Done()
					if err == nil {
						all.Wait() // nobody leaves while others need it
					}
					if err := s.Close(); err != nil {
						t.Error(err)
					}
				})
			}
			done.Wait()
		})
	}
}
