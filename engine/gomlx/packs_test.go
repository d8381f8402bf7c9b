package gomlx_test

import (
	"fmt"
	"math"
	"testing"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
)

// joining is SGD with gradients that another function has computed from the model's.
type joining struct {
	optimizer.Interface
	join func(gradients []*graph.Node) []*graph.Node
}

func (o joining) UpdateGraphWithGradients(s *model.Scope, gradients []*graph.Node, lossType dtypes.DType) {
	o.Interface.(train.OptimizeWithGradients).UpdateGraphWithGradients(s, o.join(gradients), lossType)
}

// clipped clips gradients by their global norm.
func clipped(norm float64) func(gradients []*graph.Node) []*graph.Node {
	return func(gradients []*graph.Node) (out []*graph.Node) {
		var squares *graph.Node
		for _, g := range gradients {
			if s := graph.ReduceAllSum(graph.Square(g)); squares == nil {
				squares = s
			} else {
				squares = graph.Add(squares, s)
			}
		}
		factor := graph.MinScalar(graph.Reciprocal(graph.MulScalar(graph.Sqrt(squares), 1/norm)), 1)
		for _, g := range gradients {
			out = append(out, graph.Mul(g, factor))
		}
		return out
	}
}

// TestPacksOfJoiningOptimizers checks that an optimizer that reads several gradients at once gets all of them, whatever
// Model.Packs is, and that another optimizer is compiled in packs.
func TestPacksOfJoiningOptimizers(t *testing.T) {
	sgd := func() optimizer.Interface {
		return optimizer.StochasticGradientDescent().WithDecay(false).WithLearningRate(0.5)
	}
	for _, test := range []struct {
		name     string
		opt      optimizer.Interface
		packable bool
	}{
		{"clipped by the global norm", joining{sgd(), clipped(0.1)}, false},
		{"divided by the number of gradients", joining{sgd(), func(gradients []*graph.Node) (out []*graph.Node) {
			for _, g := range gradients {
				out = append(out, graph.DivScalar(g, float64(len(gradients))))
			}
			return out
		}}, false},
		{"divided by a table of their number", joining{sgd(), func(gradients []*graph.Node) (out []*graph.Node) {
			table := make([]float32, 64) // longer than the constants whose values GoMLX prints
			for i := range table {
				table[i] = 1 / float32(len(gradients))
			}
			for _, g := range gradients {
				out = append(out, graph.Mul(g, graph.ReduceAllMean(graph.Const(g.Graph(), table))))
			}
			return out
		}}, false},
		{"each clipped by value", joining{sgd(), func(gradients []*graph.Node) (out []*graph.Node) {
			for _, g := range gradients {
				out = append(out, graph.ClipScalar(g, -0.01, 0.01))
			}
			return out
		}}, true},
		{"sgd", optimizer.StochasticGradientDescent(), true},
		{"adam", optimizer.Adam().WeightDecay(0.01).WithBackoffSteps(2).Done(), true},
		{"rmsprop", optimizer.RMSProp().Done(), true},
	} {
		t.Run(test.name, func(t *testing.T) {
			e := openEngine(t, "go", 1)
			var want []string
			for _, packs := range []int{1, 2, 3} {
				m := &gomlx.Model{
					Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
						return []*graph.Node{layer.Dense(s.In("two"), layer.DenseRelu(s.In("one"), in[0], 8), 3)}
					},
					Loss: gomlx.SparseCategoricalCrossEntropyLogits, Optimizer: test.opt, Packs: packs,
				}
				p := compile(t, m, e, features(e, 16, 6))
				expected := 1
				if test.packable {
					expected = packs
				}
				if p.Packs() != expected {
					t.Errorf("%d packs where %d are asked for: want %d", p.Packs(), packs, expected)
				}
				var start [][]float64
				for i := range p.Parameters() {
					start = append(start, readVariable(t, p, 0, i).Float64s())
				}
				trainStep(t, p, []engine.Batch{randomBatch(1, 16, 6, 3)}, 16)
				if test.name == "clipped by the global norm" {
					square := 0.0
					for i := range p.Parameters() {
						for j, x := range readVariable(t, p, 0, i).Float64s() {
							gradient := (start[i][j] - x) / 0.5 // of one step with that rate
							square += gradient * gradient
						}
					}
					if norm := math.Sqrt(square); math.Abs(norm-0.1) > 1e-5 {
						t.Errorf("%d packs: gradients of norm %v are applied, want 0.1", packs, norm)
					}
				}
				trainStep(t, p, []engine.Batch{randomBatch(2, 16, 6, 3)}, 16)
				var got []string
				for i, v := range p.Variables() {
					got = append(got, fmt.Sprint(v.Name, readVariable(t, p, 0, i).Float64s()))
				}
				if want == nil {
					want = got
				}
				if fmt.Sprint(got) != fmt.Sprint(want) {
					t.Errorf("%d packs give %v, one gives %v", packs, got, want)
				}
			}
		})
	}
}
