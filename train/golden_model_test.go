package train

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/layers/activation"
	"github.com/gomlx/gomlx/ml/layers/norm"
	"github.com/gomlx/gomlx/ml/model"
	gomlxoptimizer "github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	"github.com/lockstep-ml/lockstep/engine/gomlx/optimizer"
)

// goldenLayer is a layer of a golden training, with the fields of its type.
type goldenLayer struct {
	Name, Type string

	Units, Filters, Kernel, Size, Axis, Vocabulary int

	Activation *string
	L2         float64
	Padding    string
	Momentum   float64
	Epsilon    float64
}

// goldenLayers describes each type of layer: a function that computes its outputs from the current values (at first one
// for each input of the model), and its variables by Keras' name with the path of ours below the layer's name.
var goldenLayers = map[string]struct {
	build     goldenBuilder
	variables map[string]string
}{
	"dense": {
		each(goldenDense),
		map[string]string{"kernel": "dense/weights", "bias": "dense/biases"},
	},
	"conv2d": {
		each(goldenConv2D),
		map[string]string{"kernel": "conv/weights", "bias": "conv/biases"},
	},
	"batch_norm": {
		each(func(l *goldenLayer, s *model.Scope, x *graph.Node) *graph.Node {
			return layer.BatchNormWith(s, x, layer.BatchNormOptions{Momentum: l.Momentum, Epsilon: l.Epsilon, Sync: true})
		}),
		map[string]string{
			"gamma": "batch_normalization/scale", "beta": "batch_normalization/offset",
			"moving_mean": "batch_normalization/mean", "moving_variance": "batch_normalization/variance",
		},
	},
	"layer_norm": {
		each(func(l *goldenLayer, s *model.Scope, x *graph.Node) *graph.Node {
			return norm.LayerNorm(s, x, -1).Epsilon(l.Epsilon).Done()
		}),
		map[string]string{"gamma": "layer_normalization/gain", "beta": "layer_normalization/offset"},
	},
	"embedding":                {each(goldenEmbedding), map[string]string{"embeddings": "embeddings"}},
	"embedding_of_both_inputs": {each(goldenEmbedding), map[string]string{"embeddings": "embeddings"}},
	"relu": {each(func(_ *goldenLayer, _ *model.Scope, x *graph.Node) *graph.Node {
		return layer.Relu(x)
	}), nil},
	"max_pool2d": {each(goldenMaxPool), nil},
	"flatten": {each(func(_ *goldenLayer, _ *model.Scope, x *graph.Node) *graph.Node {
		return graph.Reshape(x, x.Shape().Dim(0), -1)
	}), nil},
	"mean_over_axis": {each(func(l *goldenLayer, _ *model.Scope, x *graph.Node) *graph.Node {
		return graph.ReduceMean(x, l.Axis)
	}), nil},
	"concatenate_both": {func(_ *goldenLayer, _ *model.Scope, in []*graph.Node) []*graph.Node {
		return []*graph.Node{graph.Concatenate(in, -1)}
	}, nil},
}

// goldenBuilder computes the values after a layer from those before it.
type goldenBuilder func(l *goldenLayer, s *model.Scope, in []*graph.Node) []*graph.Node

// each applies a layer, with the same variables, to every value.
func each(f func(*goldenLayer, *model.Scope, *graph.Node) *graph.Node) goldenBuilder {
	return func(l *goldenLayer, s *model.Scope, in []*graph.Node) []*graph.Node {
		out := make([]*graph.Node, len(in))
		for i, x := range in {
			out[i] = f(l, s, x)
		}
		return out
	}
}

var goldenActivations = map[string]func(*graph.Node) *graph.Node{
	"relu": layer.Relu, "tanh": graph.Tanh, "sigmoid": graph.Sigmoid, "gelu": activation.Gelu,
}

func (l *goldenLayer) activate(x *graph.Node) *graph.Node {
	if l.Activation == nil {
		return x
	}
	return goldenActivations[*l.Activation](x)
}

func goldenDense(l *goldenLayer, s *model.Scope, x *graph.Node) *graph.Node {
	s.SetParam("l2_regularization", l.L2)
	if x.Rank() == 2 {
		return l.activate(layer.Dense(s, x, l.Units))
	}
	return l.activate(layers.Dense(s, x, true, l.Units))
}

func goldenConv2D(l *goldenLayer, s *model.Scope, x *graph.Node) *graph.Node {
	return l.activate(layer.Conv2D(s, x, l.Filters, l.Kernel, l.Padding == "same"))
}

func goldenMaxPool(l *goldenLayer, _ *model.Scope, x *graph.Node) *graph.Node {
	if l.Size == 2 && x.Shape().Dim(1)%2 == 0 && x.Shape().Dim(2)%2 == 0 {
		return layer.MaxPool2D(x)
	}
	return graph.MaxPool(x).Window(l.Size).NoPadding().Done()
}

func goldenEmbedding(l *goldenLayer, s *model.Scope, x *graph.Node) *graph.Node {
	return layers.Embedding(s, graph.InsertAxes(x, -1), dtypes.Float32, l.Vocabulary, l.Units)
}

// check returns an error if this runner does not know the layer.
func (l *goldenLayer) check() error {
	if _, ok := goldenLayers[l.Type]; !ok {
		return fmt.Errorf("layer %q has type %q: the runner knows %q",
			l.Name, l.Type, slices.Sorted(maps.Keys(goldenLayers)))
	}
	if l.Activation != nil && goldenActivations[*l.Activation] == nil {
		return fmt.Errorf("layer %q has activation %q: the runner knows %q",
			l.Name, *l.Activation, slices.Sorted(maps.Keys(goldenActivations)))
	}
	if l.Type == "conv2d" && l.Padding != "valid" && l.Padding != "same" {
		return fmt.Errorf("layer %q has padding %q: want valid or same", l.Name, l.Padding)
	}
	return nil
}

// forward returns the model function. A model with several losses has as many outputs: its last layers, each applied
// to what comes before them.
func (c *goldenTraining) forward(s *model.Scope, in []*graph.Node) []*graph.Node {
	heads := 0
	if len(c.Loss) > 1 {
		heads = len(c.Loss)
	}
	x := in
	trunk := c.Layers[:len(c.Layers)-heads]
	scope := func(l *goldenLayer) *model.Scope {
		if l.Name == "" {
			return s
		}
		return s.In("%s", l.Name)
	}
	for i := range trunk {
		x = goldenLayers[trunk[i].Type].build(&trunk[i], scope(&trunk[i]), x)
	}
	if len(x) != 1 {
		panic(fmt.Errorf("the layers make %d values of the inputs: want one", len(x)))
	}
	if heads == 0 {
		return x
	}
	var out []*graph.Node
	for i := range c.Layers[len(trunk):] {
		l := &c.Layers[len(trunk)+i]
		out = append(out, goldenLayers[l.Type].build(l, scope(l), x)...)
	}
	return out
}

// names returns our name of every variable by Keras' path.
func (c *goldenTraining) names() map[string]string {
	out := map[string]string{}
	for _, l := range c.Layers {
		for theirs, ours := range goldenLayers[l.Type].variables {
			out[l.Name+"/"+theirs] = "/" + l.Name + "/" + ours
		}
	}
	return out
}

// decidedByRounding returns, by Keras' path, the variables whose values rounding decides, and how far they may be
// from Keras'.
//
// A batch normalisation subtracts its mean, so it takes away what the biases before it add, and their true
// gradient is 0. The computed one is rounding errors of about 1e-8, which Adam divides by their own size: it
// moves such a bias by up to its learning rate in every step, in any direction, also on one device. The
// moving mean follows. Training does not depend on either.
func (c *goldenTraining) decidedByRounding() map[string]float64 {
	if c.Optimizer.Name != "adam" && c.Optimizer.Name != "adamw" {
		return nil // only Adam's epsilon is as small as the errors
	}
	within := c.Optimizer.LearningRate * float64(len(c.StepLoss))
	out := map[string]float64{}
	for i := range c.Layers {
		if c.Layers[i].Type != "batch_norm" {
			continue
		}
		for k := i - 1; k >= 0 && c.Layers[k].keepsConstants(); k-- {
			if _, ok := goldenLayers[c.Layers[k].Type].variables["bias"]; ok {
				out[c.Layers[k].Name+"/bias"] = within
				out[c.Layers[i].Name+"/moving_mean"] = within
			}
			if c.Layers[k].Padding == "same" {
				break // at the border a constant before it makes less
			}
		}
	}
	return out
}

// keepsConstants reports whether adding a constant to each channel of the layer's input, or to its bias, adds one to
// each channel of its output.
func (l *goldenLayer) keepsConstants() bool {
	switch l.Type {
	case "dense", "conv2d":
		return l.Activation == nil
	case "flatten", "max_pool2d", "mean_over_axis":
		return true
	}
	return false
}

const goldenSparse = "sparse_categorical_crossentropy_from_logits"

var goldenLosses = map[string]gomlx.Loss{
	goldenSparse:                      gomlx.SparseCategoricalCrossEntropyLogits,
	"binary_crossentropy_from_logits": gomlx.BinaryCrossEntropyLogits,
	"mse":                             gomlx.MeanSquaredError,
	"huber":                           gomlx.Huber(1),
}

// loss is the sum of the outputs' losses.
func (c *goldenTraining) loss(labels, predictions []*graph.Node) *graph.Node {
	var sum *graph.Node
	for i, kind := range c.Loss {
		l := goldenLosses[kind](labels[i:i+1], predictions[i:i+1])
		if sum == nil {
			sum = l
		} else {
			sum = graph.Add(sum, l)
		}
	}
	return sum
}

// model returns the training's model for Lockstep.
func (c *goldenTraining) model() *gomlx.Model {
	m := &gomlx.Model{Forward: c.forward, Loss: c.loss, Optimizer: c.Optimizer.build()}
	if c.EMA > 0 {
		m.Optimizer = optimizer.EMA(m.Optimizer, optimizer.EMAConfig{Momentum: c.EMA})
	}
	if c.Evaluate.Accuracy != nil {
		m.Metrics = []gomlx.Metric{gomlx.SparseCategoricalAccuracy()}
	}
	return m
}

// goldenOptimizer is Keras' optimizer with its arguments.
type goldenOptimizer struct {
	Name         string
	LearningRate float64 `json:"learning_rate"`
	Schedule     *struct {
		Name       string
		Initial    float64
		DecaySteps int `json:"decay_steps"`
		Alpha      float64
	}
	Momentum, Beta1, Beta2, Epsilon, Rho float64

	WeightDecay float64 `json:"weight_decay"`
}

var goldenOptimizers = map[string]func(o *goldenOptimizer, s optimizer.Schedule) gomlxoptimizer.Interface{
	"sgd":      goldenSGD,
	"momentum": goldenSGD,
	"nesterov": goldenSGD,
	"adam":     goldenAdam,
	"adamw":    goldenAdam,
	"rmsprop": func(o *goldenOptimizer, s optimizer.Schedule) gomlxoptimizer.Interface {
		return optimizer.RMSProp().LearningRate(o.LearningRate).Schedule(s).
			Rho(o.Rho).Momentum(o.Momentum).Epsilon(o.Epsilon).WeightDecay(o.WeightDecay).Done()
	},
}

func goldenSGD(o *goldenOptimizer, s optimizer.Schedule) gomlxoptimizer.Interface {
	return optimizer.SGD().LearningRate(o.LearningRate).Schedule(s).
		Momentum(o.Momentum).Nesterov(o.Name == "nesterov").WeightDecay(o.WeightDecay).Done()
}

func goldenAdam(o *goldenOptimizer, s optimizer.Schedule) gomlxoptimizer.Interface {
	return optimizer.Adam().LearningRate(o.LearningRate).Schedule(s).
		Betas(o.Beta1, o.Beta2).Epsilon(o.Epsilon).WeightDecay(o.WeightDecay).Done()
}

func (o *goldenOptimizer) check() error {
	if goldenOptimizers[o.Name] == nil {
		return fmt.Errorf("optimizer %q: the runner knows %q", o.Name, slices.Sorted(maps.Keys(goldenOptimizers)))
	}
	if o.Schedule != nil && o.Schedule.Name != "cosine_decay" {
		return fmt.Errorf("schedule %q: the runner knows cosine_decay", o.Schedule.Name)
	}
	return nil
}

func (o *goldenOptimizer) build() gomlxoptimizer.Interface {
	var schedule optimizer.Schedule
	if s := o.Schedule; s != nil {
		schedule = optimizer.CosineDecay(s.Initial, s.DecaySteps, s.Alpha)
	}
	return goldenOptimizers[o.Name](o, schedule)
}

// check returns an error if the training asks for anything that this runner does not know.
func (c *goldenTraining) check() error {
	errs := []error{c.Optimizer.check()}
	for i := range c.Layers {
		errs = append(errs, c.Layers[i].check())
	}
	for _, kind := range c.Loss {
		if goldenLosses[kind] == nil {
			errs = append(errs, fmt.Errorf("loss %q: the runner knows %q", kind, slices.Sorted(maps.Keys(goldenLosses))))
		}
	}
	for _, in := range c.Inputs {
		if in.DType != "float32" && in.DType != "int32" {
			errs = append(errs, fmt.Errorf("input of type %q: the runner knows float32 and int32", in.DType))
		}
	}
	if len(c.Loss) == 0 || len(c.Loss) != len(c.Y) || len(c.Loss) > len(c.Layers) || len(c.Inputs) != len(c.X) {
		errs = append(errs, fmt.Errorf("%d losses, %d labels, %d layers, %d inputs with values for %d: "+
			"want a label and an output for each loss, and values for each input",
			len(c.Loss), len(c.Y), len(c.Layers), len(c.Inputs), len(c.X)))
	}
	if c.Batch < 1 || c.Epochs < 1 || len(c.Weights) == 0 {
		errs = append(errs, fmt.Errorf("batch %d, %d epochs, %d examples: want at least 1 of each",
			c.Batch, c.Epochs, len(c.Weights)))
	}
	return errors.Join(errs...)
}

// oneOrMore lists names that JSON has as one string, or as a list.
type oneOrMore []string

func (l *oneOrMore) UnmarshalJSON(text []byte) error {
	if bytes.HasPrefix(text, []byte("[")) {
		return json.Unmarshal(text, (*[]string)(l))
	}
	*l = []string{""}
	return json.Unmarshal(text, &(*l)[0])
}

// goldenArray is an array of any rank, in row-major order.
type goldenArray struct {
	shape  []int
	values []float64
}

func (n *goldenArray) UnmarshalJSON(text []byte) error {
	var nested any
	if err := json.Unmarshal(text, &nested); err != nil {
		return err
	}
	for x := nested; ; {
		list, ok := x.([]any)
		if !ok {
			break
		}
		if n.shape = append(n.shape, len(list)); len(list) == 0 {
			break
		}
		x = list[0]
	}
	return n.flatten(nested, 0)
}

func (n *goldenArray) flatten(x any, depth int) error {
	switch x := x.(type) {
	case float64:
		if depth == len(n.shape) {
			n.values = append(n.values, x)
			return nil
		}
	case []any:
		if depth < len(n.shape) && len(x) == n.shape[depth] {
			for _, e := range x {
				if err := n.flatten(e, depth+1); err != nil {
					return err
				}
			}
			return nil
		}
	}
	return fmt.Errorf("%v at depth %d: want numbers in lists of shape %v", x, depth, n.shape)
}
