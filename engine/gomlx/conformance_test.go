package gomlx_test

import (
	"testing"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/layers/activation"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer"
	"go.uber.org/goleak"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/enginetest"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestConformanceGo(t *testing.T) {
	enginetest.Run(t, conformance(func(n int) (engine.Engine, error) {
		return gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: n})
	}))
}

// conformance is the suite's configuration with this package's models.
func conformance(open func(n int) (engine.Engine, error)) enginetest.Config {
	classifier := func(hidden func(s *model.Scope, x *graph.Node) *graph.Node) *gomlx.Model {
		return &gomlx.Model{
			Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
				x := hidden(s, activation.Relu(layers.Dense(s.In("one"), in[0], true, 8)))
				return []*graph.Node{layers.Dense(s.In("two"), x, true, enginetest.Classes)}
			},
			Loss:      gomlx.SparseCategoricalCrossEntropyLogits,
			Optimizer: optimizer.Adam().LearningRate(0.01).Done(),
			Metrics:   []gomlx.Metric{gomlx.SparseCategoricalAccuracy()},
		}
	}
	same := func(_ *model.Scope, x *graph.Node) *graph.Node { return x }
	return enginetest.Config{
		Open:  open,
		Plain: func() engine.Model { return classifier(same) },
		Random: func() engine.Model {
			return classifier(func(s *model.Scope, x *graph.Node) *graph.Node { return layers.DropoutStatic(s, x, 0.5) })
		},
		Averaging: func() engine.Model {
			return classifier(func(s *model.Scope, x *graph.Node) *graph.Node {
				return layer.BatchNorm(s.In("norm"), x)
			})
		},
		Regularised: func() engine.Model {
			m := classifier(same)
			m.Params = map[string]any{"l2_regularization": 0.01}
			return m
		},
		Wide: func() engine.Model {
			return classifier(func(s *model.Scope, x *graph.Node) *graph.Node {
				return layers.Dense(s.In("narrow"), activation.Relu(layers.Dense(s.In("wide"), x, true, 5000)), true, 8)
			})
		},
		Panicking: func() engine.Model {
			return classifier(func(*model.Scope, *graph.Node) *graph.Node { panic("deliberate") })
		},
	}
}
