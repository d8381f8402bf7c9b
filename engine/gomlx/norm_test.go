package gomlx_test

import (
	"fmt"
	"math"
	"testing"

	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/model/initializer"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/enginetest"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	"github.com/lockstep-ml/lockstep/tensor"
)

// setHalf stores x in a tensor of half width, and returns what is stored.
func setHalf(t *tensor.Tensor, i int, x float64) float64 {
	if t.DType() == tensor.Float16 {
		h := tensor.F16From(float32(x))
		tensor.Data[tensor.F16](t)[i] = h
		return float64(h.Float32())
	}
	h := tensor.BF16From(float32(x))
	tensor.Data[tensor.BF16](t)[i] = h
	return float64(h.Float32())
}

// TestBatchNormOfHalfWidth checks that batch normalization of float16 and bfloat16 counts and sums in float32, over
// more elements than half width can count, and that its moving averages reach the batch's mean and variance after many
// steps.
func TestBatchNormOfHalfWidth(t *testing.T) {
	const rows, channels, replicas = 60, 2, 2
	norms := map[string]func(*model.Scope, *graph.Node) *graph.Node{"own": layer.BatchNorm, "sync": layer.SyncBatchNorm}
	// 48,000 elements a channel and replica, or many steps.
	for _, size := range []struct{ width, steps int }{{800, 1}, {5, 500}} {
		for name, norm := range norms {
			for _, dtype := range []tensor.DType{tensor.Float16, tensor.BFloat16} {
				t.Run(fmt.Sprintf("%s/%v/%d steps", name, dtype, size.steps), func(t *testing.T) {
					eachEngine(t, replicas, func(t *testing.T, e engine.Engine) {
						m := &gomlx.Model{
							Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
								y := norm(s, in[0])
								if y.DType() != in[0].DType() {
									t.Errorf("%s normalized is %s", in[0].DType(), y.DType())
								}
								return []*graph.Node{y}
							},
							Loss: func(_, p []*graph.Node) *graph.Node {
								return graph.ReduceMean(graph.Square(gomlx.AtLeastFloat32(p[0])), 1, 2)
							},
							Optimizer: optimizer.StochasticGradientDescent(),
						}
						adder := newAdder(replicas)
						p := compile(t, m, e, engine.Spec{
							Rows: rows, Inputs: []engine.Feature{{DType: dtype, Shape: []int{size.width, channels}}},
							Labels:  []engine.Feature{{DType: tensor.Float32}},
							Devices: e.Devices()[:replicas], Sum: adder.sum,
						})
						x := tensor.New(dtype, rows, size.width, channels)
						var mean, variance [channels]float64
						count := float64(rows * size.width)
						for i := range x.Len() {
							mean[i%channels] += setHalf(x, i, 1.5*float64(1+i%channels)+math.Sin(float64(i))) / count
						}
						for i, v := range x.Float64s() {
							variance[i%channels] += (v - mean[i%channels]) * (v - mean[i%channels]) / count
						}
						labels := []*tensor.Tensor{tensor.New(tensor.Float32, rows)}
						b := engine.Batch{Inputs: []*tensor.Tensor{x}, Labels: labels, Weights: ones(rows)}
						near := func(what string, got, want, tolerance float64) {
							t.Helper()
							if !(math.Abs(got-want) <= tolerance*want) {
								t.Errorf("%s: %v, want %v", what, got, want)
							}
						}
						keep := 1.0 // how much of the initial averages is left
						for range size.steps {
							loss, _, err := allGradients(p, adder, []engine.Batch{b, b}, replicas*rows)
							if err != nil {
								t.Fatal(err)
							}
							p.Commit()
							keep *= 0.99
							if near("loss of normalized numbers", loss, 1, 0.01); t.Failed() {
								return
							}
						}
						read := func(replica int, name string) []float64 {
							return readVariable(t, p, replica, variable(t, p, "/batch_normalization/"+name)).Float64s()
						}
						for r := range replicas {
							for c := range channels {
								at := fmt.Sprintf("replica %d, channel %d: ", r, c)
								near(at+"moving mean", read(r, "mean")[c], (1-keep)*mean[c], 1e-4)
								near(at+"moving variance", read(r, "variance")[c], keep+(1-keep)*variance[c], 1e-4)
							}
						}
						loss, _, err := p.Evaluate(t.Context(), 0, b, rows)
						if err != nil {
							t.Fatal(err)
						}
						if size.steps > 1 {
							near("loss in inference", loss, 1, 0.02)
						}
					})
				})
			}
		}
	}
}

// TestLossOfHalfWidth: the losses of float16 and bfloat16 compute in float32: the mean over an example's elements, and
// the logarithm of a sum over classes.
func TestLossOfHalfWidth(t *testing.T) {
	const rows = 2
	for _, dtype := range []tensor.DType{tensor.Float16, tensor.BFloat16} {
		t.Run(dtype.String(), func(t *testing.T) {
			eachEngine(t, 1, func(t *testing.T, e engine.Engine) {
				loss := func(l gomlx.Loss, width int, x float64, label engine.Feature) float64 {
					m := &gomlx.Model{
						Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
							shape := shapes.Make(in[0].DType())
							v := s.WithInitializer(initializer.Zero).VariableWithShape("offset", shape)
							return []*graph.Node{graph.Add(in[0], v.NodeValue(in[0].Graph()))}
						},
						Loss: l, Optimizer: optimizer.StochasticGradientDescent(),
					}
					p := compile(t, m, e, engine.Spec{
						Rows: rows, Inputs: []engine.Feature{{DType: dtype, Shape: []int{width}}},
						Labels: []engine.Feature{label}, Devices: e.Devices()[:1],
					})
					in := tensor.New(dtype, rows, width)
					for i := range in.Len() {
						setHalf(in, i, x)
					}
					labels := []*tensor.Tensor{tensor.New(label.DType, append([]int{rows}, label.Shape...)...)}
					b := engine.Batch{Inputs: []*tensor.Tensor{in}, Labels: labels, Weights: ones(rows)}
					g, err := enginetest.Gradients(t.Context(), p, 0, b, rows, [3]uint64{})
					if err != nil {
						t.Fatal(err)
					}
					return g.Loss
				}
				wide := engine.Feature{DType: dtype, Shape: []int{70_000}}
				if got := loss(gomlx.MeanSquaredError, 70_000, 1.5, wide); math.Abs(got-2.25) > 1e-5 {
					t.Errorf("mean squared error %v, want 2.25", got)
				}
				class, want := engine.Feature{DType: tensor.Int32}, math.Log(300)
				if got := loss(gomlx.SparseCategoricalCrossEntropyLogits, 300, 0, class); math.Abs(got-want) > 1e-5 {
					t.Errorf("cross entropy over 300 equal classes %v, want %v", got, want)
				}
			})
		})
	}
}
