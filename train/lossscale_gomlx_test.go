package train_test

import (
	"context"
	"math"
	"testing"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/train"
)

// TestMixedFloat16 checks that a float16 model whose gradients overflow at the first loss scale finds a scale at which
// it learns as in float32.
func TestMixedFloat16(t *testing.T) {
	batches := loadDigits(t).Train.Batch(100)
	eachEngine(t, func(t *testing.T, name string) {
		fit := func(p gomlx.Precision) (*train.Trainer, float64, int) {
			cfg := train.Config{GlobalBatch: 100, Seed: 1, LossScaling: train.LossScaling{Initial: 1 << 28}}
			around := func(m *gomlx.Model) engine.Model {
				m.Precision = p
				return m
			}
			trainer := newTrainerWith(t, name, 2, cfg, around, sgd(), models.MLP{Hidden: []int{32}}.Forward)
			overflows := 0
			h, err := trainer.Fit(t.Context(), batches, train.FitConfig{Epochs: 3, Callbacks: []train.Callback{{
				OnStepEnd: func(_ context.Context, s train.Step) error {
					if s.Overflow {
						overflows++
					}
					return nil
				},
			}}})
			if err != nil {
				t.Fatal(err)
			}
			if h.Skipped != overflows {
				t.Errorf("%s: %d steps were skipped, %d overflowed", p, h.Skipped, overflows)
			}
			return trainer, h.Epochs[2].Loss, overflows
		}
		_, want, none := fit(gomlx.Float32)
		trainer, loss, overflows := fit(gomlx.MixedFloat16)
		if none != 0 || overflows < 4 || math.Abs(loss-want) > 0.3*want {
			t.Errorf("float16 has loss %v after %d overflows, float32 %v after %d", loss, overflows, want, none)
		}
		if scale, n := trainer.LossScale(); scale != math.Ldexp(1, 28-overflows) || n != overflows {
			t.Errorf("scale %v after %d of %d overflows", scale, n, overflows)
		}
	})
}
