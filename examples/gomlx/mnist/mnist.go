// Package mnist has the parts of a GoMLX program that classifies handwritten digits, in the shape of GoMLX's own
// example: hyperparameters, datasets in memory, and a CNN of GoMLX's layers. The commands plain and distributed train
// it by GoMLX's train.Trainer and train.Loop: one process, and the workers of a job.
package mnist

import (
	"context"
	"math/rand"

	"github.com/gomlx/compute"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/dataset"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/layers/activation"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/data/digits"
	"github.com/lockstep-ml/lockstep/tensor"
)

// NewStore returns a store with the hyperparameters.
func NewStore() *model.Store {
	store := model.NewStore()
	store.SetParams(map[string]any{
		optimizer.ParamOptimizer:    "adamw",
		optimizer.ParamLearningRate: 1e-2,
		"cnn_dropout_rate":          0.25,
	})
	return store
}

// NewDatasets returns the training images, shuffled and repeated without end, and the test images. The seed of the
// shuffle is fixed, so every process reads the same order.
func NewDatasets(b compute.Backend, batch int) (trainDS, testDS *dataset.InMemoryDataset, err error) {
	set, err := digits.Load()
	if err != nil {
		return nil, nil, err
	}
	if trainDS, err = inMemory(b, "train", set.Train); err != nil {
		return nil, nil, err
	}
	if testDS, err = inMemory(b, "test", set.Test); err != nil {
		return nil, nil, err
	}
	trainDS.WithRand(rand.New(rand.NewSource(1))).Shuffle().Infinite(true).BatchSize(batch, true)
	return trainDS, testDS.BatchSize(batch, false), nil
}

// inMemory copies images and labels to the backend.
func inMemory(b compute.Backend, name string, images data.Pipeline) (*dataset.InMemoryDataset, error) {
	for e, err := range images.Batch(images.Len()).Iter(context.Background()) {
		if err != nil {
			return nil, err
		}
		x, y := e.(data.Batch).Inputs[0], e.(data.Batch).Labels[0]
		return dataset.InMemoryFromData(b, name,
			[]any{tensors.FromFlatDataAndDimensions(tensor.Data[float32](x), x.Shape()...)},
			[]any{tensors.FromFlatDataAndDimensions(tensor.Data[int32](y), y.Len(), 1)})
	}
	return nil, nil
}

// Model is the model function: two convolutions, each with a pooling, and a dense layer. It returns logits.
func Model(s *model.Scope, images *graph.Node) *graph.Node {
	rows := images.Shape().Dim(0)
	x := images
	for i, channels := range []int{8, 16} {
		x = layers.Convolution(s.In("%03d_conv", i), x).Channels(channels).KernelSize(3).PadSame().Done()
		x = graph.MaxPool(activation.Relu(x)).Window(2).Done()
	}
	x = graph.Reshape(x, rows, -1)
	x = layers.DropoutStatic(s.In("dropout"), x, model.GetParamOr(s, "cnn_dropout_rate", 0.0))
	return layers.Dense(s.In("readout"), x, true, 10)
}
