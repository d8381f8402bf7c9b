package train_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	"github.com/lockstep-ml/lockstep/internal/freeport"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train"
)

// wrongEnv makes TestWrongDataProcesses run as one of two workers, with this difference.
const wrongEnv = "LOCKSTEP_TEST_WRONG"

// job is what the workers of TestWrongDataProcesses train. It should be the same on each worker.
type job struct {
	examples       data.Batch // of images of 8x8
	shuffle        int64
	changes        int64     // seed of random changes of the images
	weights        []float32 // of a batch
	shard          func(data.Pipeline) data.Pipeline
	dropout, scale float64
	beta           float64
	deeper         bool
	callback       train.Callback
}

// wrong lists the differences of worker 1.
var wrong = []struct {
	name   string
	change func(j *job, trainer **train.Trainer)
	both   bool   // worker 0 does it too
	made   int    // steps that were made before it was found; -1: there is no trainer
	want   string // in both workers' errors
}{
	{
		"shuffle seed", func(j *job, _ **train.Trainer) { j.shuffle++ }, false, 0,
		"worker 1 read other inputs and labels than worker 0",
	},
	{"one pixel of one image", func(j *job, _ **train.Trainer) {
		tensor.Data[float32](j.examples.Inputs[0])[64*50] += 1.0 / 255
	}, false, -2, "worker 1 read other inputs than worker 0"},
	{"random labels", func(j *job, _ **train.Trainer) {
		for i := range tensor.Data[int32](j.examples.Labels[0]) {
			tensor.Data[int32](j.examples.Labels[0])[i] = rand.Int32N(10)
		}
	}, false, 0, "worker 1 read other labels"},
	{
		"weights", func(j *job, _ **train.Trainer) { j.weights = []float32{2, 1, 1, 1, 1, 1, 1, 1} }, false, 0,
		"worker 1 read other weights than worker 0",
	},
	{
		"random changes", func(j *job, _ **train.Trainer) { j.changes++ }, false, 0,
		"worker 1 read other inputs than worker 0",
	},
	{"a part of the data", func(j *job, _ **train.Trainer) {
		j.shard = func(p data.Pipeline) data.Pipeline { return p.Shard(worker(), 2) }
	}, true, 0, "Leave out Shard"},
	{"a part of the data, unseen", func(j *job, _ **train.Trainer) {
		j.shard = func(p data.Pipeline) data.Pipeline { return data.FromSeq(-1, p.Shard(worker(), 2).Iter) }
	}, true, 0, "worker 1 read other inputs and labels than worker 0"},
	{"dropout", func(j *job, _ **train.Trainer) { j.dropout = 0.4 }, false, -1, "0.4"},
	{"constant of a layer", func(j *job, _ **train.Trainer) { j.scale = 1.5 }, false, -1, "[1.5]"},
	{
		"a layer without weights", func(j *job, _ **train.Trainer) { j.deeper = true }, false, -1,
		"the workers have compiled different programs",
	},
	{"constant of the optimizer", func(j *job, _ **train.Trainer) { j.beta = 0.8 }, false, -1, "update 1 of 1"},
	{"a variable that is set", func(j *job, trainer **train.Trainer) {
		j.callback.OnStepEnd = func(_ context.Context, s train.Step) error {
			if s.Step != 2 {
				return nil
			}
			return (*trainer).SetVariable("/optimizers/learning_rate", tensor.From([]float32{0.5}).Reshape())
		}
	}, false, 2, "worker 1 last /optimizers/learning_rate, worker 0 none"},
	{"nothing", func(*job, **train.Trainer) {}, false, 8, ""},
}

func worker() int {
	if strings.Contains(os.Getenv("TF_CONFIG"), `"index":1`) {
		return 1
	}
	return 0
}

func newJob() *job {
	const n = 64
	r := rand.New(rand.NewPCG(1, 1))
	x, y := tensor.New(tensor.Float32, n, 64), tensor.New(tensor.Int32, n)
	for i := range tensor.Data[float32](x) {
		tensor.Data[float32](x)[i] = r.Float32()
	}
	for i := range tensor.Data[int32](y) {
		tensor.Data[int32](y)[i] = r.Int32N(10)
	}
	return &job{
		examples: data.Batch{Inputs: []*tensor.Tensor{x}, Labels: []*tensor.Tensor{y}}, shuffle: 1, changes: 1, dropout: 0.5,
		scale: 2, beta: 0.9,
		weights: []float32{1, 2, 1, 1, 1, 1, 1, 1},
		shard:   func(p data.Pipeline) data.Pipeline { return p },
	}
}

func (j *job) dataset() data.Dataset {
	p := fromTensors(j.examples).Shuffle(j.shuffle)
	p = j.shard(p).MapRandom(j.changes, func(_ context.Context, r *rand.Rand, e data.Element) (data.Element, error) {
		b := e.(data.Batch)
		x := b.Inputs[0].Clone()
		tensor.Data[float32](x)[r.IntN(64)] = 0
		return data.Batch{Inputs: []*tensor.Tensor{x}, Labels: b.Labels}, nil
	})
	return p.Batch(8).Map(func(_ context.Context, e data.Element) (data.Element, error) {
		b := e.(data.Batch)
		b.Weights = tensor.From(j.weights)
		return b, nil
	})
}

func (j *job) model() engine.Model {
	return &gomlx.Model{
		Forward: func(s *model.Scope, inputs []*graph.Node) []*graph.Node {
			x := layer.DenseRelu(s.In("hidden"), inputs[0], 16)
			x = graph.MulScalar(layers.DropoutStatic(s, x, j.dropout), j.scale)
			if j.deeper {
				x = graph.Tanh(x)
			}
			return []*graph.Node{layer.Dense(s.In("readout"), x, 10)}
		},
		Loss: gomlx.SparseCategoricalCrossEntropyLogits, Optimizer: optimizer.Adam().Betas(j.beta, 0.999).Done(),
	}
}

// train is one worker. It returns the steps that it made, or -1 without a trainer, and its error.
func (j *job) train(ctx context.Context, change func(*job, **train.Trainer)) (made int64, err error) {
	var trainer *train.Trainer
	change(j, &trainer)
	e, err := gomlx.Open("go", gomlx.Options{Devices: 1})
	if err != nil {
		return -1, err
	}
	s, err := distribute.NewMultiWorkerMirroredStrategy(distribute.MultiWorkerConfig{
		Engine:  e,
		Devices: []string{"CPU:0"},
	})
	if err != nil {
		return -1, err
	}
	defer func() { err = errors.Join(err, s.Close(), e.Close()) }()
	trainer, err = train.New(ctx, s, j.model(), train.Config{
		Inputs: []engine.Feature{{DType: tensor.Float32, Shape: []int{64}}}, Labels: []engine.Feature{{DType: tensor.Int32}},
		GlobalBatch: 8,
	})
	if err != nil {
		return -1, err
	}
	defer trainer.Close()
	_, err = trainer.Fit(ctx, j.dataset(), train.FitConfig{Callbacks: []train.Callback{j.callback}})
	return trainer.Steps(), err
}

// stepOf returns how many steps are made before the one with example i.
func (j *job) stepOf(t *testing.T, i int) int {
	t.Helper()
	step := 0
	for e, err := range fromTensors(tensor.From(indices(64))).Shuffle(j.shuffle).Batch(8).Iter(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		for _, k := range tensor.Data[int32](e.(*tensor.Tensor)) {
			if int(k) == i {
				return step
			}
		}
		step++
	}
	t.Fatalf("no step has example %d", i)
	return 0
}

func indices(n int) []int32 {
	list := make([]int32, n)
	for i := range list {
		list[i] = int32(i)
	}
	return list
}

// TestWrongDataProcesses checks that two processes, one of which trains on anything different, both end with an error
// that names the difference, in the first step that it affects, and that neither makes this step.
func TestWrongDataProcesses(t *testing.T) {
	t.Parallel()
	if name := os.Getenv(wrongEnv); name != "" {
		for _, c := range wrong {
			if c.name == name {
				if worker() == 0 && !c.both {
					c.change = func(*job, **train.Trainer) {}
				}
				made, err := newJob().train(t.Context(), c.change)
				fmt.Printf("made %d steps\nended with: %v\n", made, err)
			}
		}
		return
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range wrong {
		t.Run(c.name, func(t *testing.T) {
			if c.made == -2 {
				c.made = newJob().stepOf(t, 50)
			}
			ports := []int{freeport.Take(t, 1), freeport.Take(t, 1)}
			var commands []*exec.Cmd
			outs := make([]bytes.Buffer, 2)
			for w := range 2 {
				cmd := exec.CommandContext(t.Context(), exe, "-test.run=^TestWrongDataProcesses$")
				cmd.Env = append(os.Environ(), wrongEnv+"="+c.name,
					fmt.Sprintf(`TF_CONFIG={"cluster":{"worker":["127.0.0.1:%d","127.0.0.1:%d"]},"task":{"type":"worker","index":%d}}`,
						ports[0], ports[1], w))
				cmd.Stdout, cmd.Stderr = &outs[w], &outs[w]
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				commands = append(commands, cmd)
			}
			for w, cmd := range commands {
				err := cmd.Wait()
				out := outs[w].String()
				_, ended, _ := strings.Cut(out, "ended with: ")
				if err != nil || !strings.Contains(out, fmt.Sprintf("made %d steps\n", c.made)) ||
					!strings.Contains(ended, c.want) || (c.want == "") != strings.HasPrefix(ended, "<nil>") {
					t.Errorf("worker %d: %v\n%s\nwant %d steps, %q", w, err, out, c.made, c.want)
				}
			}
		})
	}
}
