package gomlx_test

import (
	"math"
	"testing"

	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/enginetest"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
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

// fixed gives parameter i values that are exact in float32.
func fixed(i int, v engine.Variable) []float64 {
	list := make([]float64, tensor.New(v.DType, v.Shape...).Len())
	for j := range list {
		list[j] = float64((i*31+j*17)%41-20) / 128
	}
	return list
}
