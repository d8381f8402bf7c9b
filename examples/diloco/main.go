// Command diloco trains a small GPT on the bytes of a text, over links that are too slow to exchange gradients in each
// step. The workers train by themselves and exchange what they have changed once in so many steps:
//
//	diloco -text shakespeare.txt -inner-steps 0                                    # one process, for comparison
//	lockstep run --nproc-per-node 2 -- diloco -text shakespeare.txt                # two processes
//	slow_link.sh 10mbit -text shakespeare.txt                                      # over a link of 10 Mbit/s
//
// slow_link.sh (Linux, root) compares it with synchronous training, by the loss and the bytes on the link.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train"
	"github.com/lockstep-ml/lockstep/train/compress"
)

type options struct {
	text          string
	steps, batch  int
	innerSteps    int // 0: gradients are exchanged in each step
	outerRate     float64
	outerMomentum float64
	compress      string
	width, blocks int
}

func main() {
	var o options
	flag.StringVar(&o.text, "text", "", "file with the text")
	flag.IntVar(&o.steps, "steps", 600, "number of steps")
	flag.IntVar(&o.batch, "batch", 32, "sequences per step, over all workers")
	flag.IntVar(&o.innerSteps, "inner-steps", 40, "steps between two exchanges; 0: exchange gradients in each step")
	flag.Float64Var(&o.outerRate, "outer-learning-rate", 0.7, "learning rate of the outer steps")
	flag.Float64Var(&o.outerMomentum, "outer-momentum", 0.9, "momentum of the outer steps")
	flag.StringVar(&o.compress, "compress", "bfloat16", "codec of the exchange, as in lockstep train")
	flag.IntVar(&o.width, "width", 64, "width of the model, a multiple of 4")
	flag.IntVar(&o.blocks, "blocks", 2, "blocks of the model")
	flag.Parse()
	if err := run(context.Background(), os.Stdout, o); err != nil {
		log.Fatal(err)
	}
}

// positions is the length of a sequence.
const positions = 64

// run trains, and prints the loss on the last tenth of the text.
func run(ctx context.Context, out io.Writer, o options) (err error) {
	text, err := os.ReadFile(o.text)
	if err != nil {
		return err
	}
	codec, err := compress.Parse(o.compress)
	if err != nil {
		return err
	}
	e, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: 1})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	s, err := distribute.NewMultiWorkerMirroredStrategy(distribute.MultiWorkerConfig{Engine: e})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	cut := len(text) / 10 * 9
	batches := sequences(text[:cut]).Shuffle(1).Batch(o.batch)
	cfg := train.Config{Data: batches, Exchange: train.AllReduce{Compress: codec}, ClipNorm: 1}
	if o.innerSteps > 0 {
		cfg.Exchange = train.DiLoCo{
			InnerSteps: o.innerSteps, LearningRate: o.outerRate, Momentum: o.outerMomentum, Compress: codec,
		}
	}
	t, err := train.New(ctx, s, &gomlx.Model{
		Forward: models.GPT{Width: o.width, Blocks: o.blocks}.Forward, Loss: gomlx.SparseCategoricalCrossEntropyLogits,
		Optimizer: optimizer.Adam().LearningRate(0.003).Done(),
	}, cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	begin := time.Now()
	if _, err := t.Fit(ctx, batches, train.FitConfig{StepsPerEpoch: o.steps}); err != nil {
		return err
	}
	took := time.Since(begin)
	result, err := t.Evaluate(ctx, sequences(text[cut:]).Batch(o.batch))
	if err != nil {
		return err
	}
	if s.Properties().ShouldCheckpoint { // true on one worker, the chief
		fmt.Fprintf(out, "inner_steps=%d compress=%v workers=%d steps=%d loss=%.4f seconds=%.1f\n", o.innerSteps, codec,
			s.NumReplicasInSync(), o.steps, result.Loss, took.Seconds())
	}
	return nil
}

// sequences cuts a text into sequences of bytes. Each byte's label is the next one.
func sequences(text []byte) data.Pipeline {
	return data.FromFunc((len(text)-1)/positions, func(_ context.Context, i int) (data.Element, error) {
		input, label := make([]int32, positions), make([]int32, positions)
		for k := range positions {
			input[k], label[k] = int32(text[i*positions+k]), int32(text[i*positions+k+1])
		}
		return data.Batch{Inputs: []*tensor.Tensor{tensor.Of(input)}, Labels: []*tensor.Tensor{tensor.Of(label)}}, nil
	})
}
