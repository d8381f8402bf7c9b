package optimizer

import (
	"fmt"
	"path"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train"
	"github.com/gomlx/gomlx/ml/train/optimizer"
)

// EMAScope is the scope of the averages that [EMA] keeps: that of the variable "/readout/weights" is
// "/EMA/readout/weights".
const EMAScope = "/EMA"

// EMAConfig configures [EMA].
type EMAConfig struct {
	// Momentum is the share of an average that an update keeps (Keras' ema_momentum). Default: 0.99.
	Momentum float64
	// OverwriteEvery is the number of updates after which the variables are set to their averages, again and again
	// (Keras' ema_overwrite_frequency). 0: never.
	OverwriteEvery int
}

// EMA makes any optimizer, of this package or GoMLX's, keep an exponential moving average of every trained variable
// (Keras' use_ema). After each update
//
//	average ← momentum·average + (1-momentum)·variable
//
// The first average is the variable's value before the first update. (Keras starts with the value after it.)
// The averages are slots of the optimizer, float32 or wider, so snapshots hold them. train.Trainer.EMAWeights
// returns them, and train.FitConfig.EMA validates by them.
func EMA(o optimizer.Interface, cfg EMAConfig) optimizer.Interface {
	if cfg.Momentum == 0 {
		cfg.Momentum = 0.99
	}
	return &ema{wrapped{o}, cfg}
}

type ema struct {
	wrapped
	cfg EMAConfig
}

var (
	_ train.OptimizeWithGradients = (*ema)(nil)
	_ train.OptimizeWithGradients = (*scheduled)(nil)
)

// UpdateGraphWithGradients implements GoMLX's train.OptimizeWithGradients.
func (e *ema) UpdateGraphWithGradients(scope *model.Scope, gradients []*graph.Node, lossType dtypes.DType) {
	if err := fraction("momentum", e.cfg.Momentum); err != nil {
		panic(fmt.Errorf("optimizer EMA: %w", err))
	}
	if e.cfg.OverwriteEvery < 0 {
		panic(fmt.Errorf("optimizer EMA: OverwriteEvery is %d: want at least 1, or 0 for never", e.cfg.OverwriteEvery))
	}
	g := gradients[0].Graph()
	variables, before := trained(scope, g), []*graph.Node{}
	for _, v := range variables {
		before = append(before, v.NodeValue(g))
	}
	count := optimizer.GetGlobalStepVar(scope).NodeValue(g) // of updates before this one
	e.inner().UpdateGraphWithGradients(scope, gradients, lossType)
	zero := graph.ScalarZero(g, count.DType())
	for i, v := range variables {
		shape := v.Shape().Clone()
		shape.DType = atLeastFloat32(shape.DType)
		at := scope.Store().Scope(path.Join(EMAScope, v.Scope()))
		slot := slotOf(at, v.Name(), shape, g)
		old := graph.Where(graph.Equal(count, zero), graph.ConvertDType(before[i], shape.DType), slot.value())
		now := graph.ConvertDType(v.NodeValue(g), shape.DType)
		next := slot.set(graph.Add(graph.MulScalar(old, e.cfg.Momentum), graph.MulScalar(now, 1-e.cfg.Momentum)))
		if n := e.cfg.OverwriteEvery; n > 0 {
			due := graph.Equal(graph.Mod(graph.OnePlus(count), graph.Scalar(g, count.DType(), n)), zero)
			v.SetNodeValue(graph.ConvertDType(graph.Where(due, next, now), v.DType()))
		}
	}
}

// UpdateGraph implements GoMLX's optimizer.Interface.
func (e *ema) UpdateGraph(scope *model.Scope, g *graph.Graph, loss *graph.Node) {
	updateByLoss(e, scope, loss)
}

// Clear deletes the averages and the wrapped optimizer's variables. It implements GoMLX's optimizer.Interface.
func (e *ema) Clear(scope *model.Scope) error {
	if err := scope.Store().Scope(EMAScope).DeleteVariablesInScope(); err != nil {
		return err
	}
	return e.wrapped.Clear(scope)
}

// wrapped is the optimizer that another one extends.
type wrapped struct{ optimizer optimizer.Interface }

// String returns the optimizer's name, for errors.
func (w wrapped) String() string { return fmt.Sprint(w.optimizer) }

// Clear implements GoMLX's optimizer.Interface.
func (w wrapped) Clear(scope *model.Scope) error { return w.optimizer.Clear(scope) }

func (w wrapped) inner() train.OptimizeWithGradients {
	o, ok := w.optimizer.(train.OptimizeWithGradients)
	if !ok {
		panic(fmt.Errorf("optimizer %T cannot apply given gradients: it has no method UpdateGraphWithGradients, as GoMLX's "+
			"SGD, Adam, AdamW, Adamax and RMSProp have", w.optimizer))
	}
	return o
}
