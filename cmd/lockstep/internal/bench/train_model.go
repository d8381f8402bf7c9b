package bench

import (
	"math/rand/v2"
	"slices"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/setup"
	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/tensor"
)

// benchWorkload is what lockstep bench train trains.
type benchWorkload struct {
	model          *gomlx.Model
	inputs, labels []engine.Feature
	batch          func() data.Batch
	exampleBytes   int    // the least memory that an example needs in a step: the values of each layer
	unit           string // of the rate
	tokens         int    // of an example; 0: it has none
}

// images describes the images of a classifier: their shape, and the least memory that one needs in a step, for its
// pixels and the values of each layer.
var images = map[string]struct {
	shape        []int
	exampleBytes int
}{
	"mlp": {[]int{28, 28, 1}, 10 << 10}, "cnn": {[]int{28, 28, 1}, 80 << 10}, // as MNIST's
	"resnet": {[]int{32, 32, 3}, 2 << 20}, // as CIFAR's
}

// causalLMs are language models of fixed sizes, which are trained on sequences of causalTokens tokens.
var causalLMs = map[string]models.CausalLM{
	"gpt2": { // GPT-2 small
		Type: "gpt2", Vocabulary: 50257, Width: 768, Blocks: 12, Heads: 12, KVHeads: 12, HeadWidth: 64, Inner: 3072,
		Positions: 1024, Activation: "gelu_new", Epsilon: 1e-5, TiedHead: true,
	},
	"llama": {
		Type: "llama", Vocabulary: 32000, Width: 768, Blocks: 12, Heads: 12, KVHeads: 12, HeadWidth: 64, Inner: 2048,
		Positions: 1024, Activation: "silu", Epsilon: 1e-5, RopeBase: 10000, TiedHead: true,
	},
}

const causalTokens = 256

var benchModels = slices.Sorted(slices.Values(append(cli.Sorted(causalLMs), setup.ModelNames...)))

func (o *benchTrainFlags) workload() (w benchWorkload) {
	optimizer := setup.Optimizers[o.optimizer].Make(benchLearningRate, setup.DefaultOptimizer)
	sequences := func(blocks, width, heads, positions, vocabulary int) {
		w.inputs = []engine.Feature{{DType: tensor.Int32, Shape: []int{positions}}}
		w.labels, w.unit, w.tokens = w.inputs, "sequences", positions
		// Values that the backward pass reads: in a block about 16 vectors and the attention's weights; the logits.
		w.exampleBytes = 4 * positions * (blocks*(16*width+heads*positions) + vocabulary)
		w.batch = func() data.Batch { return randomSequences(o.globalBatch, positions, vocabulary) }
	}
	if x, ok := causalLMs[o.model]; ok {
		sequences(x.Blocks, x.Width, x.Heads, causalTokens, x.Vocabulary)
		w.model = &gomlx.Model{Forward: x.Forward, Loss: gomlx.SparseCategoricalCrossEntropyLogits, Optimizer: optimizer}
	} else if o.model == "gpt" {
		sequences(o.Layers, o.Width, o.Heads, o.Positions, o.Vocabulary)
		w.model = setup.LanguageModel(&o.GPTFlags, o.Vocabulary, optimizer)
	} else {
		const classes = 10
		x := images[o.model]
		w.inputs, w.labels = setup.ClassifierFeatures(x.shape)
		w.unit, w.exampleBytes = "images", x.exampleBytes
		w.batch = func() data.Batch { return randomImages(o.globalBatch, x.shape, classes) }
		w.model = setup.NewClassifier(o.model, x.shape, classes, nil, optimizer)
	}
	w.model.Metrics, w.model.Precision = nil, gomlx.Precision(o.step.Precision)
	return w
}

// randomImages returns n images of noise with random labels.
func randomImages(n int, shape []int, classes int) data.Batch {
	r := rand.New(rand.NewPCG(1, 2))
	images := tensor.New(tensor.Float32, append([]int{n}, shape...)...)
	for i, pixels := 0, tensor.Data[float32](images); i < len(pixels); i++ {
		pixels[i] = float32(r.NormFloat64())
	}
	return data.Batch{Inputs: []*tensor.Tensor{images}, Labels: []*tensor.Tensor{randomIntegers(r, classes, n)}}
}

// randomSequences returns n sequences of random tokens, with random labels.
func randomSequences(n, positions, vocabulary int) data.Batch {
	r := rand.New(rand.NewPCG(1, 2))
	draw := func() []*tensor.Tensor { return []*tensor.Tensor{randomIntegers(r, vocabulary, n, positions)} }
	return data.Batch{Inputs: draw(), Labels: draw()}
}

// randomIntegers returns numbers below a limit.
func randomIntegers(r *rand.Rand, limit int, shape ...int) *tensor.Tensor {
	t := tensor.New(tensor.Int32, shape...)
	for i, list := 0, tensor.Data[int32](t); i < len(list); i++ {
		list[i] = r.Int32N(int32(limit))
	}
	return t
}
