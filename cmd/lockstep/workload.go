package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/tensor"
)

// classifiers holds functions that return a model function for inputs of a shape.
var classifiers = map[string]func(shape []int, classes int) models.Forward{
	"mlp": func(_ []int, classes int) models.Forward { return models.MLP{Classes: classes}.Forward },
	"cnn": func(shape []int, classes int) models.Forward {
		small := shape[0] < 16 // without padding, two stages would shrink the image to nothing
		return models.CNN{Same: small, Classes: classes}.Forward
	},
	"resnet": func(_ []int, classes int) models.Forward { return models.ResNet{Classes: classes}.Forward },
}

// modelNames are the names of all models: the classifiers, and a GPT for sequences of tokens.
var modelNames = slices.Sorted(slices.Values(append(slices.Collect(maps.Keys(classifiers)), "gpt")))

// modelsFor returns the names of the models that can be trained on examples of a kind of data.
func modelsFor(data string) []string {
	switch data {
	case "text":
		return []string{"gpt"}
	case "csv":
		return []string{"mlp"}
	}
	return sorted(classifiers)
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

// newClassifier returns the classifier of a name for inputs of a shape.
func newClassifier(name string, shape []int, classes int, opt optimizer.Interface) *gomlx.Model {
	return &gomlx.Model{
		Forward:   classifiers[name](shape, classes),
		Loss:      gomlx.SparseCategoricalCrossEntropyLogits,
		Optimizer: opt,
		Metrics:   []gomlx.Metric{gomlx.SparseCategoricalAccuracy()},
	}
}

// classifierFeatures returns one row of a classifier's input and label.
func classifierFeatures(shape []int) (inputs, labels []engine.Feature) {
	return []engine.Feature{{DType: tensor.Float32, Shape: shape}}, []engine.Feature{{DType: tensor.Int32}}
}

// newGPT returns a GPT of the sizes in flags.
func newGPT(g *gptFlags, vocabulary int, opt optimizer.Interface) *gomlx.Model {
	gpt := models.GPT{Vocabulary: vocabulary, Width: g.width, Heads: g.heads, Blocks: g.layers}
	return &gomlx.Model{
		Forward: gpt.Forward, Loss: gomlx.SparseCategoricalCrossEntropyLogits, Optimizer: opt,
		Metrics: []gomlx.Metric{gomlx.SparseCategoricalAccuracy()},
	}
}

// newModel returns the model of the flags for the examples.
func (o *trainFlags) newModel(x *examples, opt optimizer.Interface) *gomlx.Model {
	m := newGPT(&o.gptFlags, x.classes, opt)
	if !x.text {
		m = newClassifier(o.model, x.shape, x.classes, opt)
	}
	m.Precision = gomlx.Precision(o.step.precision)
	return m
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
