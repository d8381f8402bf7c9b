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

// TestPartsOfJoiningOptimizers checks that an optimizer that reads several gradients at once gets all of them, whatever
// the buckets are, and that another optimizer is compiled in one part per bucket.
func TestPartsOfJoiningOptimizers(t *testing.T) {
	sgd := func() optimizer.Interface {
		return optimizer.StochasticGradientDescent().WithDecay(false).WithLearningRate(0.5)
	}
	for _, test := range []struct {
		name      string
		opt       optimizer.Interface
		separable bool
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
			var first []string
			for _, bytes := range []int{0, 1, 100} {
				m := &gomlx.Model{
					Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
						return []*graph.Node{layer.Dense(s.In("two"), layer.DenseRelu(s.In("one"), in[0], 8), 3)}
					},
					Loss: gomlx.SparseCategoricalCrossEntropyLogits, Optimizer: test.opt,
				}
				s := features(e, 16, 6)
				s.Replicas, s.BucketBytes = 2, bytes
				p := compile(t, m, e, s)
				buckets, want := len(p.Buckets()), 1
				if test.separable {
					want = buckets
				}
				if n := len(p.Parts(0)); n != want || (buckets > 1) != (bytes > 0) {
					t.Errorf("%d parts of %d buckets of %d bytes: want %d", n, buckets, bytes, want)
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
						t.Errorf("buckets of %d bytes: gradients of norm %v are applied, want 0.1", bytes, norm)
					}
				}
				trainStep(t, p, []engine.Batch{randomBatch(2, 16, 6, 3)}, 16)
				var got []string
				for i, v := range p.Variables() {
					got = append(got, fmt.Sprint(v.Name, readVariable(t, p, 0, i).Float64s()))
				}
				if first == nil {
					first = got
				}
				if fmt.Sprint(got) != fmt.Sprint(first) {
					t.Errorf("buckets of %d bytes give %v, one bucket %v", bytes, got, first)
				}
			}
		})
	}
}
