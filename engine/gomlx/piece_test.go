package gomlx_test

import (
	"strings"
	"testing"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	own "github.com/lockstep-ml/lockstep/engine/gomlx/optimizer"
)

// TestDividedParameters checks which optimizers let parameters be divided among shards: those that work element by
// element, and do not depend on the shape.
func TestDividedParameters(t *testing.T) {
	sgd := func() optimizer.Interface { return own.SGD().LearningRate(0.5).Done() }
	each := func(change func(g *graph.Node) *graph.Node) optimizer.Interface {
		return joining{sgd(), func(gradients []*graph.Node) (out []*graph.Node) {
			for _, g := range gradients {
				out = append(out, change(g))
			}
			return out
		}}
	}
	for _, test := range []struct {
		name    string
		opt     optimizer.Interface
		divided bool
	}{
		{"sgd", sgd(), true},
		{"momentum", own.SGD().LearningRate(0.5).Momentum(0.9).Nesterov(true).WeightDecay(0.01).Done(), true},
		{"adam", own.Adam().Schedule(own.CosineDecay(0.1, 100, 0)).Done(), true},
		{"rmsprop", own.RMSProp().Done(), true},
		{"averages of adam", own.EMA(own.Adam().Done(), own.EMAConfig{OverwriteEvery: 3}), true},
		{"gomlx's adam", optimizer.Adam().WeightDecay(0.01).WithBackoffSteps(2).Done(), true},
		{"gomlx's rmsprop", optimizer.RMSProp().Done(), true},
		{"each clipped by value", each(func(g *graph.Node) *graph.Node { return graph.ClipScalar(g, -0.01, 0.01) }), true},
		{"each divided by its norm", each(func(g *graph.Node) *graph.Node {
			return graph.Div(g, graph.Sqrt(graph.ReduceAllSum(graph.Square(g))))
		}), false},
		{"each row divided by its mean", each(func(g *graph.Node) *graph.Node {
			return graph.Div(g, graph.OnePlus(graph.ReduceAndKeep(g, graph.ReduceMean, -1)))
		}), false},
		{"each divided by its number of elements", each(func(g *graph.Node) *graph.Node {
			return graph.DivScalar(g, float64(g.Shape().Size()))
		}), false},
		{"only matrices decay", each(func(g *graph.Node) *graph.Node {
			if g.Rank() > 1 {
				return graph.MulScalar(g, 0.5)
			}
			return g
		}), false},
		{"reversed", each(func(g *graph.Node) *graph.Node { return graph.Reverse(g, 0) }), false},
	} {
		t.Run(test.name, func(t *testing.T) {
			e := openEngine(t, "go", 2)
			s := features(e, 4, 6)
			s.Devices, s.Replicas, s.Shards, s.ReplicaShards = e.Devices(), 2, 2, []int{0, 1}
			p := compile(t, &gomlx.Model{
				Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
					return []*graph.Node{layer.Dense(s.In("two"), layer.DenseRelu(s.In("one"), in[0], 3000), 3)}
				},
				Loss: gomlx.SparseCategoricalCrossEntropyLogits, Optimizer: test.opt,
			}, e, s)
			if pieces := p.Pieces(); (len(pieces) > len(p.Parameters())) != test.divided {
				t.Errorf("pieces %v, want divided ones: %v", pieces, test.divided)
			}
			for i, v := range p.Variables() {
				from, to := p.Kept(0, i)
				if n := v.Bytes() / v.DType.Bytes(); strings.HasPrefix(v.Name, "/EMA/one/dense/weights") && to-from >= n {
					t.Errorf("device 0 keeps %d to %d of the %d elements of %s", from, to, n, v.Name)
				}
			}
		})
	}
}
