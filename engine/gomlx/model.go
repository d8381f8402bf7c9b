package gomlx

import (
	"context"
	"errors"
	"fmt"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/engine"
)

// Model is a GoMLX model to be trained by Lockstep; it implements [engine.Model]. It is a description: compiling it
// changes nothing in it, and one Model may be compiled several times.
type Model struct {
	// Forward is an ordinary GoMLX model function. It gets one node per input of the batch, of shape (rows, …), and
	// returns the predictions, each with rows rows as well. It is called once for each program (training, evaluation,
	// prediction), never during a step; Scope.IsTraining tells which.
	Forward func(s *model.Scope, inputs []*graph.Node) []*graph.Node

	// Loss is the loss per example, one of this package's or your own.
	Loss Loss

	// Optimizer is one of ml/train/optimizer, one of engine/gomlx/optimizer (momentum, and Keras' Adam and RMSprop), or any that has
	// UpdateGraphWithGradients. Mind that GoMLX's optimizer.StochasticGradientDescent divides its learning rate by the square root of the step unless it is told
	// WithDecay(false).
	Optimizer optimizer.Interface

	// Metrics are computed in training and evaluation, per example.
	Metrics []Metric

	// Params are GoMLX hyperparameters, set at the root of the model's store: "l2_regularization",
	// "clip_step_by_value", …. A name with slashes ("/readout/l2_regularization") sets one in a scope.
	Params map[string]any

	// Packs is the number of parts that the apply step is compiled in, so that one can run while the gradients of the
	// next still travel. 0 means 1. The parts hold about the same number of bytes, in the order of the parameters'
	// names, and give the same bits as one would. An optimizer that looks at several gradients at once, such as one
	// that clips by the global norm, needs 1, and so do layers that change weights after each step: Compile finds out
	// and makes 1.
	Packs int
}

// Compile builds the programs for an engine that this package opened. It implements [engine.Model].
func (m *Model) Compile(ctx context.Context, e engine.Engine, spec engine.Spec) (engine.Program, error) {
	b, ok := e.(*backend)
	if !ok {
		return nil, fmt.Errorf("gomlx: a model of this package cannot run on engine %T: open one with gomlx.Open", e)
	}
	if err := m.validate(spec); err != nil {
		return nil, err
	}
	return compile(ctx, m, b, spec)
}

func (m *Model) validate(spec engine.Spec) error {
	switch {
	case m.Forward == nil:
		return errors.New("gomlx: Model.Forward is nil: it must be a model function")
	case m.Loss == nil:
		return errors.New("gomlx: Model.Loss is nil: take one of this package's, such as SparseCategoricalCrossEntropyLogits")
	case m.Optimizer == nil:
		return errors.New("gomlx: Model.Optimizer is nil: take one of ml/train/optimizer")
	case m.Packs < 0:
		return fmt.Errorf("gomlx: Model.Packs is %d: want 1 or more, or 0 for 1", m.Packs)
	case spec.Rows < 1:
		return fmt.Errorf("gomlx: Spec.Rows is %d: a batch has at least 1 row", spec.Rows)
	case len(spec.Inputs) == 0:
		return errors.New("gomlx: Spec.Inputs is empty: a model has at least one input")
	case len(spec.Devices) == 0:
		return errors.New("gomlx: Spec.Devices is empty: it lists the device of each local replica")
	}
	if err := ownLoss(m.Loss); err != nil {
		return err
	}
	if _, ok := m.Optimizer.(train.OptimizeWithGradients); !ok {
		return fmt.Errorf("gomlx: optimizer %T cannot apply given gradients (it has no method UpdateGraphWithGradients, as GoMLX's SGD, "+
			"Adam, AdamW, Adamax and RMSProp have), so its gradients cannot be reduced over replicas", m.Optimizer)
	}
	seen := map[string]bool{}
	for i, x := range m.Metrics {
		if x.Name == "" || x.PerExample == nil {
			return fmt.Errorf("gomlx: Model.Metrics[%d] lacks a name or a function", i)
		}
		if seen[x.Name] {
			return fmt.Errorf("gomlx: Model.Metrics has two metrics called %q", x.Name)
		}
		seen[x.Name] = true
	}
	return nil
}
