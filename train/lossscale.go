package train

import (
	"fmt"
	"math"

	"github.com/lockstep-ml/lockstep/tensor"
)

// LossScaling configures the dynamic loss scale of models that compute in float16, as Keras' LossScaleOptimizer and
// PyTorch's GradScaler do. The loss is multiplied by the scale before the backward pass, and the gradients are
// divided by it afterwards, in float32. So small gradients do not become 0 on the way. If a gradient is an infinity or
// NaN although the loss is finite, the step is skipped on all replicas and the scale is halved, down to 1. After
// GrowthSteps steps without that it is doubled. It is the same on all workers, and part of snapshots. At a scale of
// 1, and if the loss is not finite, Config.NotFinite applies.
type LossScaling struct {
	Initial     float64 // the first scale, a power of 2; 0: 2^15
	GrowthSteps int     // 0: 2000
}

const (
	initialScale = 1 << 15
	growthSteps  = 2000
	highestScale = 1 << 100 // far from infinity in float32, also times a loss
)

// complete sets the defaults and validates the rest.
func (c *LossScaling) complete() error {
	if c.Initial == 0 {
		c.Initial = initialScale
	}
	if c.GrowthSteps == 0 {
		c.GrowthSteps = growthSteps
	}
	if fraction, _ := math.Frexp(c.Initial); fraction != 0.5 || c.Initial < 1 || c.Initial > highestScale {
		return fmt.Errorf("train: Config.LossScaling.Initial is %v: want a power of 2 from 1 to 2^100", c.Initial)
	}
	if c.GrowthSteps < 0 {
		return fmt.Errorf("train: Config.LossScaling.GrowthSteps is %d: want at least 1, or 0 for %d", c.GrowthSteps,
			growthSteps)
	}
	return nil
}

// lossScale is the state of the loss scale.
type lossScale struct {
	Scale     float64 `json:"scale"`     // 0: the model needs none
	Good      int     `json:"good"`      // steps since its last change
	Overflows int     `json:"overflows"` // steps that were skipped
}

func (s *lossScale) check() error {
	if s != nil && (!(s.Scale >= 1 && s.Scale <= highestScale) || s.Good < 0 || s.Overflows < 0) {
		return fmt.Errorf("loss scale %v after %d steps without overflow and %d with: want a scale from 1 to 2^100", s.Scale,
			s.Good, s.Overflows)
	}
	return nil
}

// LossScale returns the scale by which the next step multiplies the loss, and the number of steps that were skipped
// because a gradient overflowed: see [LossScaling]. The scale is 1 if the model does not compute in float16.
func (t *Trainer) LossScale() (scale float64, overflows int) {
	if t.scale.Scale == 0 {
		return 1, 0
	}
	return t.scale.Scale, t.scale.Overflows
}

// computesIn sets the type in which the model's layers compute, and the first loss scale.
func (t *Trainer) computesIn() {
	if t.computeDType = t.program.Info().ComputeDType; t.computeDType == tensor.Float16 {
		t.scale.Scale = t.config.LossScaling.Initial
	}
}

// overflowed reports whether the last step's gradients are not finite because of the loss scale. The result is the
// same on every worker: see allFinite.
func (t *Trainer) overflowed() bool {
	return t.scale.Scale > 1 && finite(t.local[0].scalars[0]) && !t.allFinite()
}

// lowerScale halves the loss scale after an overflow. does describes what happens instead of the step.
func (t *Trainer) lowerScale(does string) {
	s := &t.scale
	s.Scale, s.Good = s.Scale/2, 0
	if s.Overflows++; s.Overflows&(s.Overflows-1) == 0 {
		t.config.Logger.Info("train: a gradient overflowed float16: "+does, "next loss scale", s.Scale, "so far", s.Overflows)
	}
}

// raiseScale counts a step without overflow.
func (t *Trainer) raiseScale() {
	s := &t.scale
	if s.Scale == 0 {
		return
	}
	if s.Good++; s.Good >= t.config.LossScaling.GrowthSteps {
		s.Scale, s.Good = min(s.Scale*2, highestScale), 0
	}
}

// computeName is the name of the type in which a model of mixed precision computes, as a snapshot holds it.
func (t *Trainer) computeName() string {
	switch t.computeDType {
	case tensor.Float16, tensor.BFloat16:
		return t.computeDType.String()
	}
	return ""
}

// restoreScale sets the loss scale of a snapshot.
func (t *Trainer) restoreScale(s *Snapshot) {
	if t.scale.Scale == 0 {
		return
	}
	t.scale = lossScale{Scale: t.config.LossScaling.Initial}
	if s.state.LossScale != nil {
		t.scale = *s.state.LossScale
	}
}

// otherPrecision returns how the model of a snapshot computed if this training's computes otherwise, or "".
func (t *Trainer) otherPrecision(s *Snapshot) string {
	now := t.computeName()
	if now == s.state.Compute {
		return ""
	}
	name := func(s string) string {
		if s == "" {
			return "in the type of its inputs"
		}
		return "in " + s
	}
	return fmt.Sprintf("the snapshot's model computed %s, this one computes %s", name(s.state.Compute), name(now))
}
