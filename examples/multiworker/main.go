// Command multiworker trains one model on all workers of a job, or in a single process. Only the launch differs:
//
//	multiworker -replicas 2                                   # one process of two replicas
//	lockstep run --nproc-per-node 2 -- multiworker            # two processes of one replica
//	TF_CONFIG='{"cluster": …, "task": …}' multiworker         # one of the processes that TF_CONFIG lists
//
// At the end it always prints the same hash of the weights. It also detects Slurm, mpirun, torchrun and Kubernetes.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
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

func main() {
	replicas := flag.Int("replicas", 1, "replicas of this process")
	flag.Parse()
	if err := run(context.Background(), os.Stdout, *replicas); err != nil {
		log.Fatal(err)
	}
}

// run trains on the replicas of this process and those of all other workers of the job.
func run(ctx context.Context, out io.Writer, replicas int) (err error) {
	e, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: replicas})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	devices := make([]string, replicas)
	for i := range devices {
		devices[i] = fmt.Sprintf("CPU:%d", i)
	}
	// Here the process joins its job: it waits for the other workers.
	s, err := distribute.NewMultiWorkerMirroredStrategy(distribute.MultiWorkerConfig{Engine: e, Devices: devices})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	batches := data.FromFunc(2000, dart).Shuffle(1).Batch(100) // over all workers
	t, err := train.New(ctx, s, network(), train.Config{Data: batches})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	if _, err := t.Fit(ctx, batches, train.FitConfig{Epochs: 3}); err != nil {
		return err
	}
	hash, err := t.WeightsHash(ctx)
	if err != nil {
		return err
	}
	if s.Properties().ShouldCheckpoint { // true on one worker, the chief
		fmt.Fprintf(out, "%d replicas, weights %s\n", s.NumReplicasInSync(), hash)
	}
	return nil
}

// dart returns example i: the point that a dart hit, and the ring of the target, 0 to 2.
func dart(_ context.Context, i int) (data.Element, error) {
	r := rand.New(rand.NewPCG(1, uint64(i)))
	x, y := r.Float64(), r.Float64()
	at, ring := tensor.Of([]float32{float32(x), float32(y)}), tensor.Scalar(int32(2*math.Hypot(x, y)))
	return data.Batch{Inputs: []*tensor.Tensor{at}, Labels: []*tensor.Tensor{ring}}, nil
}

// network is an ordinary GoMLX model.
func network() *gomlx.Model {
	return &gomlx.Model{
		Forward: func(s *model.Scope, inputs []*graph.Node) []*graph.Node {
			x := activation.Relu(layers.Dense(s.In("hidden"), inputs[0], true, 32))
			return []*graph.Node{layers.Dense(s.In("readout"), x, true, 3)}
		},
		Loss: gomlx.SparseCategoricalCrossEntropyLogits, Optimizer: optimizer.Adam().LearningRate(0.01).Done(),
	}
}
