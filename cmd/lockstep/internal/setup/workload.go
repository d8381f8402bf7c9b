package setup

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gomlx/gomlx/ml/train/optimizer"
	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
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

// ModelNames are the names of all models: the classifiers, and a GPT for sequences of tokens.
var ModelNames = slices.Sorted(slices.Values(append(slices.Collect(maps.Keys(classifiers)), "gpt")))

// ModelsFor returns the names of the models that can be trained on examples of a kind of data.
func ModelsFor(data string) []string {
	switch data {
	case "text":
		return []string{"gpt"}
	case "csv", "parquet":
		return []string{"mlp"}
	}
	return cli.Sorted(classifiers)
}

// optimizerMaker makes an optimizer with a learning rate.
type optimizerMaker struct {
	Rate float64 // by default
	Make func(rate float64, o OptimizerFlags) optimizer.Interface
}

// Optimizers are the values of --optimizer.
var Optimizers = map[string]optimizerMaker{
	"sgd": {0.1, func(rate float64, _ OptimizerFlags) optimizer.Interface {
		return optimizer.StochasticGradientDescent().WithDecay(false).WithLearningRate(rate).Done()
	}},
	"adam": {0.003, func(rate float64, o OptimizerFlags) optimizer.Interface {
		return o.adam().LearningRate(rate).Done()
	}},
	"adamax": {0.001, func(rate float64, o OptimizerFlags) optimizer.Interface {
		return o.adam().Adamax().LearningRate(rate).Done()
	}},
	"adamw": {0.003, func(rate float64, o OptimizerFlags) optimizer.Interface {
		return o.adam().WeightDecay(o.decay).LearningRate(rate).Done()
	}},
	"rmsprop": {0.001, func(rate float64, _ OptimizerFlags) optimizer.Interface {
		return optimizer.RMSProp().LearningRate(rate).Done()
	}},
}

// OptimizerFlags are the flags of Adam and its variants.
type OptimizerFlags struct {
	beta1, beta2, decay float64
}

// DefaultOptimizer has the values of the flags if they are not given.
var DefaultOptimizer = OptimizerFlags{beta1: 0.9, beta2: 0.999, decay: 0.004}

// Add adds the flags.
func (o *OptimizerFlags) Add(f *pflag.FlagSet) {
	f.Float64Var(&o.beta1, "beta1", DefaultOptimizer.beta1, "of adam, adamw and adamax")
	f.Float64Var(&o.beta2, "beta2", DefaultOptimizer.beta2, "of adam, adamw and adamax")
	f.Float64Var(&o.decay, "weight-decay", DefaultOptimizer.decay, "of adamw")
	cli.Limit(f, "[0,1)", "beta1", "beta2")
	cli.Limit(f, "[0,3.4e38]", "weight-decay") // as a float32
}

// Check validates the flags for the optimizer of a name.
func (o *OptimizerFlags) Check(given func(flag string) bool, name string) error {
	for _, flag := range []string{"beta1", "beta2"} {
		if given(flag) && !strings.HasPrefix(name, "adam") {
			return cli.Usagef("--%s is for --optimizer adam, adamw or adamax, not %s", flag, name)
		}
	}
	if given("weight-decay") && name != "adamw" {
		return cli.Usagef("--weight-decay is for --optimizer adamw, not %s", name)
	}
	return nil
}

// adam returns an Adam with the betas.
func (o *OptimizerFlags) adam() *optimizer.AdamConfig {
	return optimizer.Adam().Betas(o.beta1, o.beta2)
}

// NewClassifier returns the classifier of a name for inputs of a shape. The widths of the hidden layers are for mlp;
// nil: its default.
func NewClassifier(name string, shape []int, classes int, hidden []int, opt optimizer.Interface) *gomlx.Model {
	return &gomlx.Model{
		Forward:   classifiers[name](shape, classes, hidden),
		Loss:      gomlx.SparseCategoricalCrossEntropyLogits,
		Optimizer: opt,
		Metrics:   []gomlx.Metric{gomlx.SparseCategoricalAccuracy()},
	}
}

// ClassifierFeatures returns one row of a classifier's input and label.
func ClassifierFeatures(shape []int) (inputs, labels []engine.Feature) {
	return []engine.Feature{{DType: tensor.Float32, Shape: shape}}, []engine.Feature{{DType: tensor.Int32}}
}

// NewGPT returns a GPT of the sizes in flags.
func NewGPT(g *GPTFlags, vocabulary int) models.GPT {
	return models.GPT{Vocabulary: vocabulary, Width: g.Width, Heads: g.Heads, Blocks: g.Layers, Dropout: g.dropout}
}

// LanguageModel returns a GPT of the sizes in flags with its loss.
func LanguageModel(g *GPTFlags, vocabulary int, opt optimizer.Interface) *gomlx.Model {
	return &gomlx.Model{
		Forward: NewGPT(g, vocabulary).Forward, Loss: gomlx.SparseCategoricalCrossEntropyLogits, Optimizer: opt,
		Metrics: []gomlx.Metric{gomlx.SparseCategoricalAccuracy()},
	}
}

// LearningRates lists the optimizers' default learning rates.
func LearningRates() string {
	var list []string
	for _, name := range cli.Sorted(Optimizers) {
		list = append(list, fmt.Sprintf("%s %v", name, Optimizers[name].Rate))
	}
	return strings.Join(list, ", ")
}

// GPTFlags are the sizes of the model gpt.
type GPTFlags struct {
	Layers, Width, Heads, Positions, Vocabulary int
	dropout                                     float64
	GPTSet                                      *pflag.FlagSet
}

// Add adds the flags. The vocabulary is a flag only for random tokens.
func (g *GPTFlags) Add(f *pflag.FlagSet, random bool) {
	g.GPTSet = pflag.NewFlagSet("", pflag.ContinueOnError)
	g.GPTSet.SortFlags = false
	g.GPTSet.IntVar(&g.Layers, "layers", 4, "number of blocks")
	g.GPTSet.IntVar(&g.Width, "width", 128, "width of the model, a multiple of --heads")
	g.GPTSet.IntVar(&g.Heads, "heads", 4, "attention heads of a block")
	g.GPTSet.IntVar(&g.Positions, "positions", 64, "tokens of a sequence")
	if random {
		g.GPTSet.IntVar(&g.Vocabulary, "vocabulary", 256, "number of different tokens")
	}
	g.GPTSet.VisitAll(func(f *pflag.Flag) { cli.Limit(g.GPTSet, fmt.Sprintf("[1,%d]", DimensionMax), f.Name) })
	if !random {
		g.GPTSet.Float64Var(&g.dropout, "dropout", 0, "share of values set to 0 in training")
		cli.Limit(g.GPTSet, "[0,1)", "dropout")
	}
	f.AddFlagSet(g.GPTSet)
}

// DimensionMax bounds a dimension of a model, so that the sizes of its variables are numbers.
const DimensionMax = 1 << 20

// Check validates the flags for the model of a name.
func (g *GPTFlags) Check(model string) error {
	var err error
	g.GPTSet.VisitAll(func(f *pflag.Flag) {
		if err == nil && f.Changed && model != "gpt" {
			err = cli.Usagef("--%s is for --model gpt, not %s", f.Name, model)
		}
	})
	if err == nil && g.Width%g.Heads != 0 {
		err = cli.Usagef("--width %d: want a multiple of --heads %d", g.Width, g.Heads)
	}
	return err
}
