package backend

import (
	"math/rand/v2"
	"testing"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
)

// TestBatchNorm compares GoMLX's batch normalization and its gradient with their formulas.
func TestBatchNorm(t *testing.T) {
	b := withThreads(t, 2)
	defer b.Finalize()
	const epsilon = 1e-3
	r := rand.New(rand.NewPCG(1, 1))
	for axis, dims := range [][]int{{7, 6, 5, 4}, {6, 7, 5, 4}, {4, 5, 7, 6}, {6, 5, 4, 7}} {
		parameter := func(dims ...int) *tensors.Tensor {
			flat := make([]float32, size(dims))
			for i := range flat {
				flat[i] = float32(1 + r.Float64())
			}
			return tensors.FromFlatDataAndDimensions(flat, dims...)
		}
		exec, err := graph.NewExec(b, func(x, scale, offset, mean, variance, weights *graph.Node) []*graph.Node {
			all := func(v *graph.Node) *graph.Node {
				return graph.BroadcastToShape(graph.ExpandAxes(v, others(axis)...), x.Shape())
			}
			formula := func(mean, variance *graph.Node) *graph.Node {
				y := graph.Div(graph.Sub(x, all(mean)), graph.Sqrt(graph.AddScalar(all(variance), epsilon)))
				return graph.Add(graph.Mul(y, all(scale)), all(offset))
			}
			var out []*graph.Node
			add := func(y *graph.Node) {
				loss := graph.ReduceAllSum(graph.Mul(graph.Mul(y, y), weights))
				out = append(out, append(graph.Gradient(loss, x, scale, offset), y)...)
			}
			y, ourMean, ourVariance := graph.InternalBatchNormForTraining(x, scale, offset, epsilon, axis)
			add(y)
			m := graph.ReduceMean(x, others(axis)...)
			v := graph.ReduceMean(graph.Square(graph.Sub(x, all(m))), others(axis)...)
			add(formula(m, v))
			inference := graph.InternalBatchNormForInference(x, scale, offset, mean, variance, epsilon, axis)
			ours := append(out[:4:4], ourMean, ourVariance, inference)
			return append(append(ours, out[4:]...), m, v, formula(mean, variance))
		})
		if err != nil {
			t.Fatal(err)
		}
		out, err := exec.Call(parameter(dims...), parameter(7), parameter(7), parameter(7), parameter(7), parameter(dims...))
		if err != nil {
			t.Fatal(err)
		}
		for i := range len(out) / 2 {
			got := tensors.MustCopyFlatData[float32](out[i])
			if err := compareData(got, tensors.MustCopyFlatData[float32](out[len(out)/2+i])); err != nil {
				t.Errorf("axis %d: output %d: %v", axis, i, err)
			}
		}
	}
}

// others lists the axes of four but one.
func others(axis int) (list []int) {
	for i := range 4 {
		if i != axis {
			list = append(list, i)
		}
	}
	return list
}
