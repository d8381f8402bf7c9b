package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/data/digits"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/tensor"
)

// dataSet is a data set for training, with its default options.
type dataSet struct {
	load     func(dir string) (*data.Set, error)
	needsDir bool
	epochs   int
	batch    int // global
	shift    int // pixels
	side     int // of its images, pixels
}

var dataSets = map[string]dataSet{
	"digits": {load: func(string) (*data.Set, error) { return digits.Load() }, epochs: 25, batch: 64, shift: 1, side: 8},
	"mnist":  {load: data.MNIST, needsDir: true, epochs: 3, batch: 128, side: 28},
}

// modelsByName holds functions that return a model function for images of a shape.
var modelsByName = map[string]func(shape []int, classes int) models.Forward{
	"mlp": func(_ []int, classes int) models.Forward { return models.MLP{Classes: classes}.Forward },
	"cnn": func(shape []int, classes int) models.Forward {
		small := shape[0] < 16 // without padding, two stages would shrink the image to nothing
		return models.CNN{Same: small, Classes: classes}.Forward
	},
}

// optimizerMaker makes an optimizer with a learning rate.
type optimizerMaker struct {
	rate float64 // by default
	make func(rate float64) optimizer.Interface
}

var optimizers = map[string]optimizerMaker{
	"sgd": {0.1, func(rate float64) optimizer.Interface {
		return optimizer.StochasticGradientDescent().WithDecay(false).WithLearningRate(rate).Done()
	}},
	"adam": {0.003, func(rate float64) optimizer.Interface { return optimizer.Adam().LearningRate(rate).Done() }},
	"adamax": {0.001, func(rate float64) optimizer.Interface {
		return optimizer.Adam().Adamax().LearningRate(rate).Done()
	}},
	"adamw": {0.003, func(rate float64) optimizer.Interface {
		return optimizer.Adam().WeightDecay(0.004).LearningRate(rate).Done()
	}},
	"rmsprop": {0.001, func(rate float64) optimizer.Interface { return optimizer.RMSProp().LearningRate(rate).Done() }},
}

// newClassifier returns the model of a name for images of a shape.
func newClassifier(name string, shape []int, classes int, opt optimizer.Interface) *gomlx.Model {
	return &gomlx.Model{
		Forward:   modelsByName[name](shape, classes),
		Loss:      gomlx.SparseCategoricalCrossEntropyLogits,
		Optimizer: opt,
		Metrics:   []gomlx.Metric{gomlx.SparseCategoricalAccuracy()},
	}
}

// classifierFeatures returns one row of a classifier's input and label.
func classifierFeatures(shape []int) (inputs, labels []engine.Feature) {
	return []engine.Feature{{DType: tensor.Float32, Shape: shape}}, []engine.Feature{{DType: tensor.Int32}}
}

func sorted[T any](table map[string]T) []string { return slices.Sorted(maps.Keys(table)) }

func names[T any](table map[string]T) string { return strings.Join(sorted(table), ", ") }

// precisions lists the names of the precisions.
func precisions() []string {
	list := make([]string, len(gomlx.Precisions))
	for i, p := range gomlx.Precisions {
		list[i] = string(p)
	}
	return list
}

// learningRates lists the optimizers' default learning rates.
func learningRates() string {
	var list []string
	for _, name := range sorted(optimizers) {
		list = append(list, fmt.Sprintf("%s %v", name, optimizers[name].rate))
	}
	return strings.Join(list, ", ")
}
