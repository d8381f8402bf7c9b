package train_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// A model starts from a layer of PyTorch: its names differ, its matrix has the shape (out, in), and the readout is new.
func ExampleTrainer_LoadWeights() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	// In Python: safetensors.torch.save_file(model.state_dict(), "pretrained.safetensors")
	file := filepath.Join(dir, "pretrained.safetensors")
	err = checkpoint.Save(file, []checkpoint.Tensor{
		{Name: "fc1.weight", Value: tensor.New(tensor.Float32, 16, 4)},
		{Name: "fc1.bias", Value: tensor.New(tensor.Float32, 16)},
		{Name: "fc2.bias", Value: tensor.New(tensor.Float32, 1000)},
	}, nil)
	if err != nil {
		log.Fatal(err)
	}

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
	t, err := train.New(ctx, s, &gomlx.Model{
		Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
			x := graph.Tanh(layers.Dense(s.In("hidden"), in[0], true, 16))
			return []*graph.Node{layers.Dense(s.In("readout"), x, true, 3)}
		},
		Loss: gomlx.SparseCategoricalCrossEntropyLogits, Optimizer: optimizer.Adam().Done(),
	}, train.Config{
		GlobalBatch: 8, Inputs: []engine.Feature{{DType: tensor.Float32, Shape: []int{4}}},
		Labels: []engine.Feature{{DType: tensor.Int32}},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer t.Close()

	weights, err := train.LoadWeights(file)
	if err != nil {
		log.Fatal(err)
	}
	names, err := checkpoint.ParseNameMap(`
		fc1.weight  /hidden/dense/weights  transpose
		fc1.bias    /hidden/dense/biases
		fc2.{rest}  -
	`)
	if err != nil {
		log.Fatal(err)
	}
	loaded, err := t.LoadWeights(weights, train.LoadOptions{Names: names, Partial: true})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("set:", loaded.Set)
	fmt.Println("new:", loaded.Missing)
	// Output:
	// set: [/hidden/dense/biases /hidden/dense/weights]
	// new: [/readout/dense/biases /readout/dense/weights]
}
