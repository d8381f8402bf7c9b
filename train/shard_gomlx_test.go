package train_test

import (
	"testing"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	mltrain "github.com/gomlx/gomlx/ml/train"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/train"
)

// TestShardOptimizerKeepsBits checks that Adam with a sharded optimizer makes the bits of an unsharded one, for weights
// and slots, with any buckets and with clipping, and that each device has about its share of the slots.
func TestShardOptimizerKeepsBits(t *testing.T) {
	eachEngine(t, func(t *testing.T, engineName string) {
		configs := []train.Config{{BucketBytes: 1, ClipNorm: 0.5}, {}, {BucketBytes: 1, ClipValue: 0.01}}
		layers := [][]int{{40, 40, 40}, {1300}, {1300}} // the second has most parameters in one matrix, which is divided
		if engineName == "xla" {
			configs, layers = configs[:2], layers[:2] // XLA compiles for seconds each time
		}
		for i, cfg := range configs {
			want, unsharded, hidden := "", 0, layers[i]
			for _, cfg.Exchange = range []train.Exchange{train.AllReduce{}, train.Sharded{}} {
				cfg.GlobalBatch, cfg.Seed = 30, 1
				trainer := newTrainerWith(t, engineName, 2, cfg, unchanged, optimizer.Adam().Done(),
					models.MLP{Hidden: hidden}.Forward)
				if _, err := trainer.Fit(t.Context(), loadDigits(t).Train.Take(277).Batch(30), train.FitConfig{}); err != nil {
					t.Fatal(err)
				}
				s, err := trainer.Snapshot(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				got := train.HashWeights(s.Variables)
				if want == "" {
					want, unsharded = got, trainer.OptimizerBytes()/2 // of one device
					continue
				}
				if got != want {
					t.Errorf("%+v: sharded %s, unsharded %s", cfg, got, want)
				}
				if bytes := trainer.OptimizerBytes(); !trainer.Sharded() || bytes < unsharded || bytes > unsharded+100 {
					t.Errorf("%d bytes of slots on both devices, want those of %d once, and counters twice", bytes, unsharded)
				}
			}
		}
	})
}

// together is an optimizer that combines the gradients of several parameters.
type together struct{ optimizer.Interface }

func (o together) UpdateGraphWithGradients(s *model.Scope, gradients []*graph.Node, lossType dtypes.DType) {
	sum := graph.ScalarZero(gradients[0].Graph(), lossType)
	for _, g := range gradients {
		sum = graph.Add(sum, graph.ReduceAllSum(graph.Square(g)))
	}
	for i, g := range gradients {
		gradients[i] = graph.Div(g, graph.OnePlus(graph.Sqrt(sum)))
	}
	o.Interface.(mltrain.OptimizeWithGradients).UpdateGraphWithGradients(s, gradients, lossType)
}

// TestShardAuto checks that the optimizer of a large perceptron is sharded by default if it is Adam, with the bits of
// an unsharded one, and that others are not: of SGD, of a small model, of one whose gradients are mostly hidden, and
// where it is impossible.
func TestShardAuto(t *testing.T) {
	adam := func() optimizer.Interface { return optimizer.Adam().Done() }
	large := []int{2500, 70} // the first layer has 160,000 parameters, the second 175,000
	for name, test := range map[string]struct {
		cfg    train.Config
		opt    optimizer.Interface
		hidden []int
		want   bool
	}{
		"adam":         {opt: adam(), hidden: large, want: true},
		"sgd":          {opt: optimizer.StochasticGradientDescent().Done(), hidden: large},
		"small":        {opt: adam(), hidden: []int{70}},
		"first bucket": {opt: adam(), hidden: []int{600, 800, 70}, cfg: train.Config{BucketBytes: 1 << 18}},
		"norms":        {opt: together{adam()}, hidden: large},
	} {
		hashes := map[train.Exchange]string{}
		for _, mode := range []train.Exchange{nil, train.AllReduce{}} {
			cfg := test.cfg
			cfg.GlobalBatch, cfg.Seed, cfg.Exchange = 30, 1, mode
			trainer := newTrainerWith(t, "go", 2, cfg, unchanged, test.opt, models.MLP{Hidden: test.hidden}.Forward)
			if got := trainer.Sharded(); got != (test.want && mode == nil) {
				t.Errorf("%s, %v: the optimizer is sharded: %v", name, mode, got)
			}
			if _, err := trainer.Fit(t.Context(), loadDigits(t).Train.Take(60).Batch(30), train.FitConfig{}); err != nil {
				t.Fatal(err)
			}
			hashes[mode], _ = trainer.WeightsHash(t.Context())
		}
		if hashes[nil] != hashes[train.AllReduce{}] {
			t.Errorf("%s: %v", name, hashes)
		}
	}
}
