package gomlx

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/engine"
)

// Model describes a GoMLX model for Lockstep, and implements [engine.Model]. Compile does not modify it, and
// one Model may be compiled several times.
type Model struct {
	// Forward is an ordinary GoMLX model function. It gets one node per input of the batch, of shape (rows,
	// …), and returns the predictions, each of shape (rows, …). It is called once for each program (training,
	// evaluation, prediction), never during a step. Scope.IsTraining distinguishes them.
	Forward func(s *model.Scope, inputs []*graph.Node) []*graph.Node

	// Loss is the loss per example: one of this package, of GoMLX's ml/train/loss, or a custom one.
	Loss Loss

	// Optimizer is one of ml/train/optimizer, one of engine/gomlx/optimizer (momentum, and Keras' Adam and
	// RMSprop), or any other that has UpdateGraphWithGradients. Note that GoMLX's
	// optimizer.StochasticGradientDescent divides its learning rate by the square root of the step, unless
	// WithDecay(false) is set.
	Optimizer optimizer.Interface

	// Metrics are computed per example, in training and evaluation. [MetricFrom] takes those of GoMLX.
	Metrics []Metric

	// Precision is the type in which the layers compute. The default, and Float32, is the type of the inputs. With
	// MixedBFloat16 and MixedFloat16, Forward gets its floating-point inputs, and its layers their parameters, as
	// bfloat16 or float16. The variables, with all of the optimizer's, the gradients and the predictions stay
	// float32, as do loss, metrics, and the statistics of layer.BatchNorm and layer.SyncBatchNorm. It is Keras'
	// policy of the same name. The model function must take the type from its inputs (DType) or from
	// [ComputeDType].
	Precision Precision

	// Params are GoMLX hyperparameters, set at the root of the model's store: "l2_regularization",
	// "clip_step_by_value", …. A name with slashes ("/readout/l2_regularization") sets one in a scope.
	Params map[string]any
}

// Compile builds the programs for an engine that this package opened. It implements [engine.Model]. Errors in
// the model are a *[ModelError].
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
		return errors.New("gomlx: Model.Forward is nil: set a model function")
	case m.Loss == nil:
		return errors.New("gomlx: Model.Loss is nil: use one of this package, such as SparseCategoricalCrossEntropyLogits")
	case m.Optimizer == nil:
		return errors.New("gomlx: Model.Optimizer is nil: use one of ml/train/optimizer")
	case spec.Rows < 1:
		return fmt.Errorf("gomlx: Spec.Rows is %d: a batch has at least 1 row", spec.Rows)
	case len(spec.Inputs) == 0:
		return errors.New("gomlx: Spec.Inputs is empty: a model has at least one input")
	case len(spec.Devices) == 0:
		return errors.New("gomlx: Spec.Devices is empty: it lists the devices that compute")
	case spec.BucketBytes < 0:
		return fmt.Errorf("gomlx: Spec.BucketBytes is %d: want 1 or more, or 0 for the default", spec.BucketBytes)
	case spec.Shards > 1 && spec.Central != nil:
		return errors.New("gomlx: Spec.Shards and Spec.Central are both set: one device updates all central variables")
	}
	used, err := placed(spec)
	if err != nil {
		return err
	}
	if d := slices.Index(used, 0); d >= 0 {
		return fmt.Errorf("gomlx: device %d of Spec.Devices has no replica in Spec.ReplicaDevices", d)
	}
	if _, ok := m.Optimizer.(train.OptimizeWithGradients); !ok {
		return fmt.Errorf("gomlx: optimizer %T cannot apply given gradients (it has no method UpdateGraphWithGradients, as "+
			"GoMLX's SGD, "+
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

// placed checks that each replica has a device and, if updates are sharded, a shard. It returns the number of replicas
// of each device.
func placed(spec engine.Spec) ([]int, error) {
	used := make([]int, len(spec.Devices))
	n := spec.LocalReplicas()
	for r := range n {
		d := spec.DeviceOf(r)
		if d < 0 || d >= len(used) {
			return nil, fmt.Errorf("gomlx: Spec.ReplicaDevices[%d] is %d: want an index into the %d devices", r, d, len(used))
		}
		used[d]++
	}
	if n == 0 {
		return nil, errors.New("gomlx: Spec.ReplicaDevices is empty: want at least one replica")
	}
	if spec.Shards > 1 && len(spec.ReplicaShards) != n {
		return nil, fmt.Errorf("gomlx: Spec.ReplicaShards has %d elements: want the shard of each of the %d replicas",
			len(spec.ReplicaShards), n)
	}
	for i, k := range spec.ReplicaShards {
		if k < 0 || k >= max(1, spec.Shards) {
			return nil, fmt.Errorf("gomlx: Spec.ReplicaShards[%d] is %d: want 0 to %d", i, k, max(1, spec.Shards)-1)
		}
	}
	return used, nil
}
