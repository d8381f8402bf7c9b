package main

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/gomlx/gomlx/ml/train/optimizer"
	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/tensor"
)

// classifiers holds functions that return a model function for inputs of a shape.
var classifiers = map[string]func(shape []int, classes int, hidden []int) models.Forward{
	"mlp": func(_ []int, classes int, hidden []int) models.Forward {
		return models.MLP{Hidden: hidden, Classes: classes}.Forward
	},
	"cnn": func(shape []int, classes int, _ []int) models.Forward {
		small := shape[0] < 16 // without padding, two stages would shrink the image to nothing
		return models.CNN{Same: small, Classes: classes}.Forward
	},
	"resnet": func(_ []int, classes int, _ []int) models.Forward { return models.ResNet{Classes: classes}.Forward },
}

// modelNames are the names of all models: the classifiers, and a GPT for sequences of tokens.
var modelNames = slices.Sorted(slices.Values(append(slices.Collect(maps.Keys(classifiers)), "gpt")))

// modelsFor returns the names of the models that can be trained on examples of a kind of data.
func modelsFor(data string) []string {
	switch data {
	case "text":
		return []string{"gpt"}
	case "csv", "parquet":
		return []string{"mlp"}
	}
	return sorted(classifiers)
}

// optimizerMaker makes an optimizer with a learning rate.
type optimizerMaker struct {
	rate float64 // by default
	make func(rate float64, o optimizerFlags) optimizer.Interface
}

var optimizers = map[string]optimizerMaker{
	"sgd": {0.1, func(rate float64, _ optimizerFlags) optimizer.Interface {
		return optimizer.StochasticGradientDescent().WithDecay(false).WithLearningRate(rate).Done()
	}},
	"adam": {0.003, func(rate float64, o optimizerFlags) optimizer.Interface {
		return o.adam().LearningRate(rate).Done()
	}},
	"adamax": {0.001, func(rate float64, o optimizerFlags) optimizer.Interface {
		return o.adam().Adamax().LearningRate(rate).Done()
	}},
	"adamw": {0.003, func(rate float64, o optimizerFlags) optimizer.Interface {
		return o.adam().WeightDecay(o.decay).LearningRate(rate).Done()
	}},
	"rmsprop": {0.001, func(rate float64, _ optimizerFlags) optimizer.Interface {
		return optimizer.RMSProp().LearningRate(rate).Done()
	}},
}

// optimizerFlags are the flags of Adam and its variants.
type optimizerFlags struct {
	beta1, beta2, decay float64
}

// defaultOptimizer has the values of the flags if they are not given.
var defaultOptimizer = optimizerFlags{beta1: 0.9, beta2: 0.999, decay: 0.004}

func (o *optimizerFlags) add(f *pflag.FlagSet) {
	f.Float64Var(&o.beta1, "beta1", defaultOptimizer.beta1, "share of the moving average of the gradients that a step of "+
		"adam, adamw or adamax keeps")
	f.Float64Var(&o.beta2, "beta2", defaultOptimizer.beta2, "the same of their squares or, for adamax, of the largest")
	f.Float64Var(&o.decay, "weight-decay", defaultOptimizer.decay, "weight decay of adamw: a step also subtracts so many "+
		"times the learning rate times the weights")
}

func (o *optimizerFlags) check(given func(flag string) bool, name string) error {
	for flag, beta := range map[string]float64{"beta1": o.beta1, "beta2": o.beta2} {
		switch {
		case given(flag) && !strings.HasPrefix(name, "adam"):
			return usagef("--%s is for --optimizer adam, adamw or adamax, not %s", flag, name)
		case !(beta >= 0 && beta < 1):
			return usagef("--%s %v: want at least 0 and less than 1", flag, beta)
		}
	}
	switch {
	case given("weight-decay") && name != "adamw":
		return usagef("--weight-decay is for --optimizer adamw, not %s", name)
	case !(o.decay >= 0 && o.decay <= math.MaxFloat32):
		return usagef("--weight-decay %v: want at least 0", o.decay)
	}
	return nil
}

// adam returns an Adam with the betas.
func (o *optimizerFlags) adam() *optimizer.AdamConfig {
	return optimizer.Adam().Betas(o.beta1, o.beta2)
}

// newClassifier returns the classifier of a name for inputs of a shape. The widths of the hidden layers are for mlp;
// nil: its default.
func newClassifier(name string, shape []int, classes int, hidden []int, opt optimizer.Interface) *gomlx.Model {
	return &gomlx.Model{
		Forward:   classifiers[name](shape, classes, hidden),
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
func newGPT(g *gptFlags, vocabulary int) models.GPT {
	return models.GPT{Vocabulary: vocabulary, Width: g.width, Heads: g.heads, Blocks: g.layers, Dropout: g.dropout}
}

// languageModel returns a GPT of the sizes in flags with its loss.
func languageModel(g *gptFlags, vocabulary int, opt optimizer.Interface) *gomlx.Model {
	return &gomlx.Model{
		Forward: newGPT(g, vocabulary).Forward, Loss: gomlx.SparseCategoricalCrossEntropyLogits, Optimizer: opt,
		Metrics: []gomlx.Metric{gomlx.SparseCategoricalAccuracy()},
	}
}

// newModel returns the model of the flags for the examples.
func (o *trainFlags) newModel(x *examples, opt optimizer.Interface) *gomlx.Model {
	var m *gomlx.Model
	switch {
	case x.text:
		m = languageModel(&o.gptFlags, x.classes, opt)
	case x.regression != nil:
		m = x.regression.model(o.hidden, opt)
	default:
		m = newClassifier(o.model, x.shape, x.classes, o.hidden, opt)
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
