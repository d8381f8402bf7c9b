package train_test

import (
	"testing"

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
			for _, cfg.ShardOptimizer = range []train.Sharding{train.ShardOff, train.ShardOn} {
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
