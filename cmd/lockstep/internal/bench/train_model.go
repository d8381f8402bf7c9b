package bench

import (
	"math/rand/v2"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/setup"
	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
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

func (o *benchTrainFlags) workload() benchWorkload {
	optimizer := setup.Optimizers[o.optimizer].Make(benchLearningRate, setup.DefaultOptimizer)
	if o.model != "gpt" {
		const classes = 10
		w := benchWorkload{
			model: setup.NewClassifier(o.model, benchShape, classes, nil, optimizer), unit: "images",
			exampleBytes: exampleBytes[o.model], batch: func() data.Batch { return randomImages(o.globalBatch, classes) },
		}
		w.inputs, w.labels = setup.ClassifierFeatures(benchShape)
		w.model.Metrics, w.model.Precision = nil, gomlx.Precision(o.step.Precision)
		return w
	}
	sequence := []engine.Feature{{DType: tensor.Int32, Shape: []int{o.Positions}}}
	gpt := setup.LanguageModel(&o.GPTFlags, o.Vocabulary, optimizer)
	gpt.Metrics, gpt.Precision = nil, gomlx.Precision(o.step.Precision)
	return benchWorkload{
		model:  gpt,
		inputs: sequence, labels: sequence, unit: "sequences", tokens: o.Positions,
		// Values that the backward pass reads: in a block about 16 vectors and the attention's weights; the logits.
		exampleBytes: 4 * o.Positions * (o.Layers*(16*o.Width+o.Heads*o.Positions) + o.Vocabulary),
		batch:        func() data.Batch { return randomSequences(o.globalBatch, o.Positions, o.Vocabulary) },
	}
}

// randomSequences returns n sequences of random tokens, with random labels.
func randomSequences(n, positions, vocabulary int) data.Batch {
	r := rand.New(rand.NewPCG(1, 2))
	draw := func() []*tensor.Tensor {
		t := tensor.New(tensor.Int32, n, positions)
		for i, tokens := 0, tensor.Data[int32](t); i < len(tokens); i++ {
			tokens[i] = r.Int32N(int32(vocabulary))
		}
		return []*tensor.Tensor{t}
	}
	return data.Batch{Inputs: draw(), Labels: draw()}
}
