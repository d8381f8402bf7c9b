package gomlx_test

import (
	"math"
	"slices"
	"testing"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/enginetest"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestEnginesAgree checks that the models of this repository, whose layers are built differently for each engine, have
// the same loss and gradients on all, and on one engine with other dtypes than float32.
func TestEnginesAgree(t *testing.T) {
	for _, test := range []struct {
		name    string
		forward models.Forward
		shape   []int
	}{
		{"mlp", models.MLP{Hidden: []int{20, 10}}.Forward, []int{6, 6, 1}},
		{"cnn", models.CNN{Filters: []int{4, 6}, Dense: 12}.Forward, []int{12, 12, 2}},
		{"cnn that pads", models.CNN{Filters: []int{4, 6}, Dense: 12, Same: true}.Forward, []int{8, 8, 1}},
	} {
		t.Run(test.name, func(t *testing.T) {
			const rows = 6
			size := tensor.New(tensor.Float32, test.shape...).Len()
			b := randomBatch(1, rows, size, 10)
			var wantLoss float64
			var want [][]float64
			compare := func(t *testing.T, e engine.Engine, dtype tensor.DType) {
				m := &gomlx.Model{
					Forward: test.forward, Loss: gomlx.SparseCategoricalCrossEntropyLogits,
					Optimizer: optimizer.StochasticGradientDescent(), Metrics: []gomlx.Metric{gomlx.SparseCategoricalAccuracy()},
				}
				s := features(e, rows, test.shape...)
				s.Inputs[0].DType = dtype
				p := compile(t, m, e, s)
				x := b.Inputs[0].Reshape(append([]int{rows}, test.shape...)...)
				if dtype == tensor.Float64 {
					x = tensor.From(x.Float64s(), x.Shape()...)
					for i, v := range p.Parameters() { // random numbers of other widths differ
						if err := p.Write(0, i, tensor.From(fixed(i, v), v.Shape...)); err != nil {
							t.Fatal(err)
						}
					}
				} else {
					for i, v := range p.Parameters() {
						narrow := make([]float32, len(fixed(i, v)))
						for j, w := range fixed(i, v) {
							narrow[j] = float32(w)
						}
						if err := p.Write(0, i, tensor.From(narrow, v.Shape...)); err != nil {
							t.Fatal(err)
						}
					}
				}
				g, err := enginetest.Gradients(t.Context(), p, 0, engine.Batch{
					Inputs: []*tensor.Tensor{x}, Labels: b.Labels,
					Weights: b.Weights,
				}, rows, [3]uint64{})
				if err != nil {
					t.Fatal(err)
				}
				if want == nil {
					wantLoss = g.Loss
					for _, x := range g.Tensors {
						want = append(want, x.Float64s())
					}
					return
				}
				if math.Abs(g.Loss-wantLoss) > 1e-5 {
					t.Errorf("loss %v, want %v", g.Loss, wantLoss)
				}
				for i, v := range p.Parameters() {
					for j, x := range g.Tensors[i].Float64s() {
						if d := math.Abs(x - want[i][j]); d > 1e-5 {
							t.Fatalf("gradient of %s[%d] differs by %g", v.Name, j, d)
						}
					}
				}
			}
			eachEngine(t, 1, func(t *testing.T, e engine.Engine) { compare(t, e, tensor.Float32) })
			t.Run("float64", func(t *testing.T) { compare(t, openEngine(t, "go", 1), tensor.Float64) })
		})
	}
}

// TestPoolTies checks, on every engine, that the first of several largest elements of a window gets the gradient. The
// engines build the pool differently.
func TestPoolTies(t *testing.T) {
	eachEngine(t, 1, func(t *testing.T, e engine.Engine) {
		m := &gomlx.Model{
			Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
				w := s.VariableWithShape("w", shapes.Make(dtypes.Float32, 1, 4, 6, 1)).NodeValue(in[0].Graph())
				pooled := layer.MaxPool2D(graph.Add(w, graph.Reshape(in[0], 1, 4, 6, 1)))
				return []*graph.Node{graph.Reshape(pooled, 1, -1)}
			},
			Loss: gomlx.SparseCategoricalCrossEntropyLogits, Optimizer: optimizer.StochasticGradientDescent(),
		}
		p := compile(t, m, e, features(e, 1, 24))
		if err := p.Write(0, 0, tensor.New(tensor.Float32, 1, 4, 6, 1)); err != nil {
			t.Fatal(err)
		}
		g, err := enginetest.Gradients(t.Context(), p, 0, engine.Batch{
			Inputs: []*tensor.Tensor{tensor.From([]float32{
				1, 1, 1, 2, 2, 2,
				1, 1, 2, 1, 1, 2,
				1, 2, 1, 1, 1, 1,
				1, 2, 2, 2, 1, 2,
			}, 1, 24)}, Labels: []*tensor.Tensor{tensor.New(tensor.Int32, 1)}, Weights: ones(1),
		}, 1, [3]uint64{})
		if err != nil {
			t.Fatal(err)
		}
		var got []int // the positions of elements with a gradient
		for i, x := range g.Tensors[0].Float64s() {
			if x != 0 {
				got = append(got, i)
			}
		}
		if want := []int{0, 3, 4, 13, 20, 23}; !slices.Equal(got, want) {
			t.Errorf("gradients at %v, want %v", got, want)
		}
	})
}

// fixed gives parameter i values that are exact in float32.
func fixed(i int, v engine.Variable) []float64 {
	list := make([]float64, tensor.New(v.DType, v.Shape...).Len())
	for j := range list {
		list[j] = float64((i*31+j*17)%41-20) / 128
	}
	return list
}
