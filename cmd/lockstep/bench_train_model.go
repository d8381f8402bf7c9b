package main

import (
	"math/rand/v2"
	"strconv"

	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/tensor"
)

// gptFlags are the sizes of the model gpt.
type gptFlags struct {
	layers, width, heads, positions, vocabulary int
	dropout                                     float64
	gptSet                                      *pflag.FlagSet
}

// add adds the flags. The vocabulary is a flag only for random tokens.
func (g *gptFlags) add(f *pflag.FlagSet, random bool) {
	g.gptSet = pflag.NewFlagSet("", pflag.ContinueOnError)
	g.gptSet.SortFlags = false
	g.gptSet.IntVar(&g.layers, "layers", 4, "number of blocks")
	g.gptSet.IntVar(&g.width, "width", 128, "width of the model, a multiple of --heads")
	g.gptSet.IntVar(&g.heads, "heads", 4, "attention heads of a block")
	g.gptSet.IntVar(&g.positions, "positions", 64, "tokens of a sequence")
	if random {
		g.gptSet.IntVar(&g.vocabulary, "vocabulary", 256, "number of different tokens")
	} else {
		g.gptSet.Float64Var(&g.dropout, "dropout", 0, "share of the values that training sets to 0 at random: of the "+
			"embedding, of the attention's weights, and of the output of each branch")
	}
	f.AddFlagSet(g.gptSet)
}

// dimensionMax bounds a dimension of a model, so that the sizes of its variables are numbers.
const dimensionMax = 1 << 20

func (g *gptFlags) check(model string) error {
	var err error
	g.gptSet.VisitAll(func(f *pflag.Flag) {
		n, bad := strconv.Atoi(f.Value.String())
		switch {
		case err != nil:
		case f.Changed && model != "gpt":
			err = usagef("--%s is for --model gpt, not %s", f.Name, model)
		case f.Name == "dropout" && !(g.dropout >= 0 && g.dropout < 1):
			err = usagef("--dropout %v: want at least 0 and less than 1", g.dropout)
		case f.Name == "dropout":
		case bad != nil || n < 1:
			err = usagef("--%s %s: want at least 1", f.Name, f.Value)
		case n > dimensionMax:
			err = usagef("--%s %s: want at most %s", f.Name, f.Value, grouped(dimensionMax))
		}
	})
	if err == nil && g.width%g.heads != 0 {
		err = usagef("--width %d: want a multiple of --heads %d", g.width, g.heads)
	}
	return err
}

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
	optimizer := optimizers[o.optimizer].make(benchLearningRate, defaultOptimizer)
	if o.model != "gpt" {
		const classes = 10
		w := benchWorkload{
			model: newClassifier(o.model, benchShape, classes, nil, optimizer), unit: "images",
			exampleBytes: exampleBytes[o.model], batch: func() data.Batch { return randomImages(o.globalBatch, classes) },
		}
		w.inputs, w.labels = classifierFeatures(benchShape)
		w.model.Metrics, w.model.Precision = nil, gomlx.Precision(o.step.precision)
		return w
	}
	sequence := []engine.Feature{{DType: tensor.Int32, Shape: []int{o.positions}}}
	gpt := languageModel(&o.gptFlags, o.vocabulary, optimizer)
	gpt.Metrics, gpt.Precision = nil, gomlx.Precision(o.step.precision)
	return benchWorkload{
		model:  gpt,
		inputs: sequence, labels: sequence, unit: "sequences", tokens: o.positions,
		// Values that the backward pass reads: in a block about 16 vectors and the attention's weights; the logits.
		exampleBytes: 4 * o.positions * (o.layers*(16*o.width+o.heads*o.positions) + o.vocabulary),
		batch:        func() data.Batch { return randomSequences(o.globalBatch, o.positions, o.vocabulary) },
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
