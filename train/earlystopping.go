package train

import (
	"context"
	"errors"
	"fmt"

	"github.com/lockstep-ml/lockstep/tensor"
)

// EarlyStoppingConfig configures [NewEarlyStopping]. The fields are Keras'.
type EarlyStoppingConfig struct {
	// Monitor is the loss or metric to follow. Default: "val_loss".
	Monitor string
	// Mode specifies whether a smaller or a larger number is better.
	Mode Mode
	// MinDelta is the smallest difference that counts as an improvement.
	MinDelta float64
	// Patience is the number of epochs without improvement after which training stops: at the first one of them by
	// default.
	Patience int
	// Baseline, if not nil, is a number that must be reached: until then an improvement does not reset the count of
	// epochs.
	Baseline *float64
	// StartFromEpoch is the first epoch, from 0, that counts.
	StartFromEpoch int
	// RestoreBest sets the weights to those of the best epoch before Fit returns, whether or not training stopped
	// early: with FitConfig.EMA weights and moving averages to the averages of that epoch, by which Monitor was computed.
	// They are kept in memory, and in snapshots.
	RestoreBest bool
}

// NewEarlyStopping returns a callback that stops training when a number does not improve any more (Keras'
// EarlyStopping). With FitConfig.ValidateEvery, each validation between steps counts as an epoch does. Every worker
// needs the callback: all of them decide by the same numbers.
func NewEarlyStopping(t *Trainer, cfg EarlyStoppingConfig) (Callback, error) {
	if cfg.Patience < 0 || cfg.StartFromEpoch < 0 || !(cfg.MinDelta >= 0) {
		return Callback{}, fmt.Errorf("train: EarlyStoppingConfig has Patience %d, StartFromEpoch %d and MinDelta %v: want "+
			"0 or more", cfg.Patience, cfg.StartFromEpoch, cfg.MinDelta)
	}
	e := &earlyStopping{
		cfg: cfg, monitor: monitor{t: t, of: "EarlyStoppingConfig", name: cfg.Monitor, mode: cfg.Mode, min: cfg.MinDelta},
	}
	c := e.watch(func() error {
		e.wait, e.at, e.weights, e.loaded = 0, -1, nil, nil
		return nil
	}, e.see)
	if cfg.RestoreBest {
		c.Name, c.Save, c.Load = "early stopping", e.save, e.load
		see := c.OnTrainDone
		c.OnTrainDone = func(ctx context.Context, h *History) error {
			if err := see(ctx, h); err != nil && !errors.Is(err, ErrStop) {
				return err
			}
			if e.weights == nil {
				return nil
			}
			if err := t.SetWeights(e.weights); err != nil || !t.fitting.Load().cfg.EMA {
				return err
			}
			return t.setEMA(e.weights)
		}
	}
	return c, nil
}

type earlyStopping struct {
	monitor
	cfg     EarlyStoppingConfig
	wait    int      // points since the best one
	best    point    // the best one
	at      int      // its index; -1: none
	weights []Weight // of it
	held    int      // the index of the point whose weights Load has restored
	loaded  []Weight
}

// see counts a point.
func (e *earlyStopping) see(ctx context.Context, i int, p point, now bool) (err error) {
	if p.epoch < e.cfg.StartFromEpoch {
		return nil
	}
	e.wait++
	if first := e.at < 0; e.improves(p) || first {
		e.best, e.at = p, i
		if err := e.keep(ctx, now); err != nil {
			return err
		}
		if x := p.numbers[e.name]; !first || e.hasBest {
			if e.cfg.Baseline == nil || e.better(x, *e.cfg.Baseline) {
				e.wait = 0
			}
			return nil
		}
	}
	if e.wait < e.cfg.Patience || i == 0 && p.epoch == 0 {
		return nil
	}
	if now && e.t.IsChief() {
		e.t.config.Logger.Info(fmt.Sprintf("train: stopping early after %v: %s is %.6g; the best is %.6g, of %v", p, e.name,
			p.numbers[e.name], e.monitor.best, e.best))
	}
	return ErrStop
}

// keep keeps the weights of the best point.
func (e *earlyStopping) keep(ctx context.Context, now bool) (err error) {
	f := e.t.fitting.Load()
	switch {
	case !e.cfg.RestoreBest:
	case now || f.isAt(e.best): // else later steps have changed them
		get := e.t.Weights
		if f.cfg.EMA {
			get = e.t.EMAWeights
		}
		e.weights, err = get(ctx)
	case e.held == e.at && e.loaded != nil:
		e.weights = e.loaded
	default:
		e.weights = nil
	}
	return err
}

// isAt reports whether no step was taken after a point.
func (f *fit) isAt(p point) bool {
	if p.step > 0 {
		return p.step == f.history.Steps
	}
	return f.position.step == 0 && f.position.epoch == p.epoch+1
}

// heldName is the name of the index of the point in the state.
const heldName = "#point"

func (e *earlyStopping) save() []Weight {
	if e.weights == nil {
		return nil
	}
	return append([]Weight{{heldName, tensor.Scalar(int64(e.at))}}, e.weights...)
}

func (e *earlyStopping) load(state []Weight) error {
	if len(state) == 0 {
		return nil
	}
	if state[0].Name != heldName || state[0].Value.DType() != tensor.Int64 || state[0].Value.Len() != 1 {
		return fmt.Errorf("its first tensor is %s: want the number of the best epoch", state[0].Name)
	}
	e.held, e.loaded = int(tensor.Data[int64](state[0].Value)[0]), state[1:]
	return nil
}
