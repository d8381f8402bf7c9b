package train

import (
	"context"
	"fmt"
)

// ReduceLROnPlateauConfig configures [NewReduceLROnPlateau]. The fields are Keras'.
type ReduceLROnPlateauConfig struct {
	// Monitor is the loss or metric to follow. Default: "val_loss".
	Monitor string
	// Mode specifies whether a smaller or a larger number is better.
	Mode Mode
	// Factor multiplies the learning rate, and is less than 1. Default: 0.1.
	Factor float64
	// Patience is the number of epochs without improvement after which the rate is reduced. Default: 10.
	Patience int
	// MinDelta is the smallest difference that counts as an improvement. Default: 0.0001. Negative: none.
	MinDelta float64
	// Cooldown is the number of epochs after a reduction that are not counted.
	Cooldown int
	// MinRate is the lowest learning rate (Keras' min_lr).
	MinRate float64
}

// NewReduceLROnPlateau returns a callback that reduces the learning rate when a number does not improve any more
// (Keras' ReduceLROnPlateau). With FitConfig.ValidateEvery, each validation between steps counts as an epoch does.
// Every worker needs the callback: all of them decide by the same numbers. Fit fails at its start if a schedule of
// the optimizer sets the rate.
func NewReduceLROnPlateau(t *Trainer, cfg ReduceLROnPlateauConfig) (Callback, error) {
	if cfg.Factor == 0 {
		cfg.Factor = 0.1
	}
	if cfg.Patience == 0 {
		cfg.Patience = 10
	}
	switch {
	case cfg.MinDelta == 0:
		cfg.MinDelta = 1e-4
	case cfg.MinDelta < 0:
		cfg.MinDelta = 0
	}
	if !(cfg.Factor > 0 && cfg.Factor < 1) || cfg.Patience < 0 || cfg.Cooldown < 0 || !(cfg.MinRate >= 0) {
		return Callback{}, fmt.Errorf("train: ReduceLROnPlateauConfig has Factor %v, Patience %d, Cooldown %d and MinRate "+
			"%v: want a factor between 0 and 1, and the others 0 or more", cfg.Factor, cfg.Patience, cfg.Cooldown, cfg.MinRate)
	}
	r := &reduceLR{cfg: cfg, monitor: monitor{
		t: t, of: "ReduceLROnPlateauConfig", name: cfg.Monitor, mode: cfg.Mode, min: cfg.MinDelta,
	}}
	return r.watch(func() error {
		r.wait, r.cooldown = 0, 0
		if err := t.rateIsFree(); err != nil {
			return fmt.Errorf("train: ReduceLROnPlateau: %w", err)
		}
		return nil
	}, r.see), nil
}

type reduceLR struct {
	monitor
	cfg            ReduceLROnPlateauConfig
	wait, cooldown int // points
}

// see counts a point.
func (r *reduceLR) see(_ context.Context, _ int, p point, now bool) error {
	if r.cooldown > 0 {
		r.cooldown--
		r.wait = 0
	}
	if r.improves(p) {
		r.wait = 0
		return nil
	}
	if r.cooldown > 0 {
		return nil
	}
	if r.wait++; r.wait < r.cfg.Patience {
		return nil
	}
	rate, _ := r.t.LearningRate()
	if now && rate <= r.cfg.MinRate {
		return nil
	}
	r.wait, r.cooldown = 0, r.cfg.Cooldown
	if !now { // a snapshot has the reduced rate
		return nil
	}
	next := max(rate*r.cfg.Factor, r.cfg.MinRate)
	if r.t.IsChief() {
		r.t.config.Logger.Info(fmt.Sprintf("train: after %v, the learning rate is reduced from %.4g to %.4g: %s is %.6g; "+
			"the best is %.6g", p, rate, next, r.name, p.numbers[r.name], r.best))
	}
	return r.t.SetLearningRate(next)
}
