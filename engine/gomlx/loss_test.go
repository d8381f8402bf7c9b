package gomlx_test

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/model/initializer"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/enginetest"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/tensor"
)

// asGiven is a model that predicts its input, plus a trained number that begins at 0.
func asGiven(l gomlx.Loss, metrics ...gomlx.Metric) *gomlx.Model {
	return &gomlx.Model{
		Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
			v := s.VariableWithValue("offset", float32(0))
			return []*graph.Node{graph.Add(in[0], v.NodeValue(in[0].Graph()))}
		},
		Loss: l, Metrics: metrics, Optimizer: optimizer.StochasticGradientDescent(),
	}
}

// TestLossesAndMetrics compares losses and metrics with the formulas in plain Go, with weights.
func TestLossesAndMetrics(t *testing.T) {
	sigmoid := func(z float64) float64 { return 1 / (1 + math.Exp(-z)) }
	logSoftmax := func(z []float64, i int) float64 {
		sum := 0.0
		for _, v := range z {
			sum += math.Exp(v)
		}
		return z[i] - math.Log(sum)
	}
	best := func(z []float64) (at int) {
		for i, v := range z {
			if v > z[at] {
				at = i
			}
		}
		return at
	}
	mean := func(n int, f func(i int) float64) float64 {
		sum := 0.0
		for i := range n {
			sum += f(i)
		}
		return sum / float64(n)
	}
	number := func(b bool) float64 {
		if b {
			return 1
		}
		return 0
	}
	sparse := func(classes int) func(y, z []float64) (float64, float64) {
		return func(y, z []float64) (float64, float64) {
			n := len(y)
			row := func(i int) []float64 { return z[i*classes : (i+1)*classes] }
			return mean(n, func(i int) float64 { return -logSoftmax(row(i), int(y[i])) }),
				mean(n, func(i int) float64 { return number(best(row(i)) == int(y[i])) })
		}
	}
	for _, test := range []struct {
		name          string
		loss          gomlx.Loss
		metric        gomlx.Metric
		output, label []int // shapes of one row
		labels        tensor.DType
		want          func(y, z []float64) (loss, metric float64) // of one row
	}{
		{
			"sparse", gomlx.SparseCategoricalCrossEntropyLogits, gomlx.SparseCategoricalAccuracy(),
			[]int{4},
			nil, tensor.Int32,
			sparse(4),
		},
		{
			"sparse, labels of width 1", gomlx.SparseCategoricalCrossEntropyLogits, gomlx.SparseCategoricalAccuracy(),
			[]int{4},
			[]int{1},
			tensor.Int64, sparse(4),
		},
		{
			"sparse, bytes", gomlx.SparseCategoricalCrossEntropyLogits, gomlx.SparseCategoricalAccuracy(),
			[]int{4},
			[]int{1},
			tensor.Uint8, sparse(4),
		},
		{
			"sparse, sequences", gomlx.SparseCategoricalCrossEntropyLogits, gomlx.SparseCategoricalAccuracy(),
			[]int{3, 4},
			[]int{3},
			tensor.Int32, sparse(4),
		},
		{
			"categorical", gomlx.CategoricalCrossEntropyLogits, gomlx.CategoricalAccuracy(),
			[]int{4},
			[]int{4},
			tensor.Float32,
			func(y, z []float64) (float64, float64) {
				return 4 * mean(4, func(i int) float64 { return -y[i] * logSoftmax(z, i) }), number(best(y) == best(z))
			},
		},
		{
			"binary", gomlx.BinaryCrossEntropyLogits, gomlx.BinaryAccuracyLogits(),
			[]int{1},
			nil, tensor.Float32,
			func(y, z []float64) (float64, float64) {
				p := sigmoid(z[0])
				return -y[0]*math.Log(p) - (1-y[0])*math.Log(1-p), number((z[0] > 0) == (y[0] > 0.5))
			},
		},
		{
			"several binary", gomlx.BinaryCrossEntropyLogits, gomlx.BinaryAccuracyLogits(),
			[]int{3},
			[]int{3},
			tensor.Float32,
			func(y, z []float64) (float64, float64) {
				return mean(3, func(i int) float64 { return -y[i]*math.Log(sigmoid(z[i])) - (1-y[i])*math.Log(1-sigmoid(z[i])) }),
					mean(3, func(i int) float64 { return number((z[i] > 0) == (y[i] > 0.5)) })
			},
		},
		{
			"squared error", gomlx.MeanSquaredError,
			gomlx.Metric{Name: "mae", PerExample: gomlx.MeanAbsoluteError},
			[]int{2, 3},
			[]int{2, 3},
			tensor.Float32,
			func(y, z []float64) (float64, float64) {
				return mean(6, func(i int) float64 { return (y[i] - z[i]) * (y[i] - z[i]) }), mean(6,
					func(i int) float64 { return math.Abs(y[i] - z[i]) })
			},
		},
		{
			"huber", gomlx.Huber(1),
			gomlx.Metric{Name: "wide", PerExample: gomlx.Huber(0.25)},
			[]int{2, 3},
			[]int{2, 3},
			tensor.Float32,
			func(y, z []float64) (float64, float64) {
				huber := func(delta float64) float64 {
					return mean(6, func(i int) float64 {
						if d := math.Abs(y[i] - z[i]); d > delta {
							return delta * (d - delta/2)
						}
						return (y[i] - z[i]) * (y[i] - z[i]) / 2
					})
				}
				return huber(1), huber(0.25)
			},
		},
		{
			"absolute error", gomlx.MeanAbsoluteError,
			gomlx.Metric{Name: "mse", PerExample: gomlx.MeanSquaredError},
			[]int{1},
			nil, tensor.Float32,
			func(y, z []float64) (float64, float64) { return math.Abs(y[0] - z[0]), (y[0] - z[0]) * (y[0] - z[0]) },
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			const rows = 5
			e := openEngine(t, "go", 1)
			s := features(e, rows, test.output...)
			s.Labels = []engine.Feature{{DType: test.labels, Shape: test.label}}
			p := compile(t, asGiven(test.loss, test.metric), e, s)
			z := randomBatch(1, rows, tensor.New(tensor.Float32, test.output...).Len(),
				2).Inputs[0].Reshape(append([]int{rows}, test.output...)...)
			y := tensor.New(test.labels, append([]int{rows}, test.label...)...)
			for i := range y.Len() {
				setLabel(y, i)
			}
			b := engine.Batch{Inputs: []*tensor.Tensor{z}, Labels: []*tensor.Tensor{y}, Weights: []float32{1, 2, 0.5, 1, 0}}
			loss, metrics, err := p.Evaluate(t.Context(), 0, b, 4.5)
			if err != nil {
				t.Fatal(err)
			}
			var wantLoss, wantMetric float64
			for i := range rows {
				l, m := test.want(y.Rows(i, i+1).Float64s(), z.Rows(i, i+1).Float64s())
				wantLoss += float64(b.Weights[i]) * l / 4.5
				wantMetric += float64(b.Weights[i]) * m
			}
			if math.Abs(loss-wantLoss) > 1e-5 || math.Abs(metrics[0]-wantMetric) > 1e-5 {
				t.Errorf("loss %v, metric %v: want %v, %v", loss, metrics[0], wantLoss, wantMetric)
			}
		})
	}
}

// setLabel sets element i to a value that every kind of label may have.
func setLabel(y *tensor.Tensor, i int) {
	switch y.DType() {
	case tensor.Int32:
		tensor.Data[int32](y)[i] = int32(i % 4)
	case tensor.Int64:
		tensor.Data[int64](y)[i] = int64(i % 3)
	case tensor.Uint8:
		tensor.Data[uint8](y)[i] = uint8(3 - i%4)
	case tensor.Float32:
		tensor.Data[float32](y)[i] = float32((i*7)%5) / 4
	}
}

// TestLargeLogits checks that losses do not overflow.
func TestLargeLogits(t *testing.T) {
	for name, l := range map[string]gomlx.Loss{
		"sparse": gomlx.SparseCategoricalCrossEntropyLogits,
		"binary": gomlx.BinaryCrossEntropyLogits,
	} {
		t.Run(name, func(t *testing.T) {
			e := openEngine(t, "go", 1)
			s := features(e, 2, 2)
			y := tensor.From([]int32{0, 1}, 2)
			if name == "binary" {
				s.Labels = []engine.Feature{{DType: tensor.Float32, Shape: []int{2}}}
				y = tensor.From([]float32{0, 1, 1, 0}, 2, 2)
			}
			p := compile(t, asGiven(l), e, s)
			b := engine.Batch{
				Inputs: []*tensor.Tensor{tensor.From([]float32{-1000, 1000, 1000, -1000}, 2, 2)}, Labels: []*tensor.Tensor{y},
				Weights: ones(2),
			}
			g, err := enginetest.Gradients(t.Context(), p, 0, b, 2, [3]uint64{})
			if err != nil {
				t.Fatal(err)
			}
			if math.IsNaN(g.Loss) || math.IsInf(g.Loss, 0) || math.IsNaN(g.Tensors[0].Float64s()[0]) {
				t.Errorf("loss %v, gradient %v", g.Loss, g.Tensors[0])
			}
		})
	}
}

// TestUnknownLabels checks that a label that is not a class is visible in the loss, and that an example of weight 0
// does not count, whatever its loss is.
func TestUnknownLabels(t *testing.T) {
	eachEngine(t, 1, func(t *testing.T, e engine.Engine) {
		p := compile(t, asGiven(gomlx.SparseCategoricalCrossEntropyLogits, gomlx.SparseCategoricalAccuracy()), e,
			features(e, 4, 3))
		b := randomBatch(1, 4, 3, 3)
		copy(tensor.Data[int32](b.Labels[0]), []int32{0, 1, 2, 0})
		copy(b.Weights, []float32{1, 1, 1, 0})
		gradients := func() (loss float64, accuracy float64, offset float64) {
			g, err := enginetest.Gradients(t.Context(), p, 0, b, 3, [3]uint64{})
			if err != nil {
				t.Fatal(err)
			}
			return g.Loss, g.Metrics[0], g.Tensors[0].Float64s()[0]
		}
		loss, accuracy, offset := gradients()
		for _, label := range []int32{-1, 3, math.MaxInt32} {
			tensor.Data[int32](b.Labels[0])[3] = label
			if l, a, o := gradients(); l != loss || a != accuracy || o != offset {
				t.Errorf("label %d of weight 0: loss %v, accuracy %v, gradient %v: want %v, %v, %v", label, l, a, o, loss, accuracy,
					offset)
			}
			b.Weights[3] = 1
			if l, _, _ := gradients(); !math.IsNaN(l) {
				t.Errorf("label %d of 3 classes: loss %v, want NaN", label, l)
			}
			b.Weights[3] = 0
		}
	})
}

// TestHalfWidth checks that a model of half width is trained by float32 sums: 301 examples are counted as such, and the
// coefficients of Adam, which half width would round to 1, give finite steps.
func TestHalfWidth(t *testing.T) {
	for _, dtype := range []tensor.DType{tensor.Float16, tensor.BFloat16} {
		t.Run(dtype.String(), func(t *testing.T) {
			eachEngine(t, 1, func(t *testing.T, e engine.Engine) {
				const rows = 301
				one := gomlx.Metric{Name: "one", PerExample: func(_, p []*graph.Node) *graph.Node {
					return graph.OnesLike(graph.Reshape(p[0], rows))
				}}
				m := &gomlx.Model{
					Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
						g := in[0].Graph()
						v := s.WithInitializer(initializer.Zero).VariableWithShape("offset", shapes.Make(in[0].DType()))
						return []*graph.Node{graph.Add(in[0], v.NodeValue(g))}
					},
					Loss: gomlx.MeanSquaredError, Metrics: []gomlx.Metric{one}, Optimizer: optimizer.Adam().LearningRate(0.25).Done(),
				}
				s := features(e, rows, 1)
				s.Inputs[0].DType, s.Labels = dtype, []engine.Feature{{DType: tensor.Float32, Shape: []int{1}}}
				p := compile(t, m, e, s)
				y := tensor.New(tensor.Float32, rows, 1)
				for i := range rows {
					tensor.Data[float32](y)[i] = 1
				}
				b := engine.Batch{
					Inputs: []*tensor.Tensor{tensor.New(dtype, rows, 1)}, Labels: []*tensor.Tensor{y},
					Weights: ones(rows),
				}
				first := math.NaN()
				for step := range 4 {
					g, err := enginetest.Gradients(t.Context(), p, 0, b, rows, [3]uint64{})
					if err != nil {
						t.Fatal(err)
					}
					if g.Metrics[0] != rows {
						t.Errorf("%v examples counted, want %d", g.Metrics[0], rows)
					}
					if step == 0 {
						first = g.Loss
					} else if step == 3 && !(g.Loss < first/2) {
						t.Errorf("loss %v after 3 steps, %v at first", g.Loss, first)
					}
					if err := enginetest.Update(t.Context(), p, 0, 0); err != nil {
						t.Fatal(err)
					}
					p.Commit()
				}
				if v := p.Parameters()[0]; v.DType != dtype {
					t.Errorf("the parameter is %v, want %v", v.DType, dtype)
				}
			})
		})
	}
}

// TestLossErrors checks that labels that do not fit are refused with both shapes.
func TestLossErrors(t *testing.T) {
	e := openEngine(t, "go", 1)
	for _, test := range []struct {
		name          string
		loss          gomlx.Loss
		output, label []int
		labels        tensor.DType
		want          string
	}{
		{"sparse with numbers", gomlx.SparseCategoricalCrossEntropyLogits, []int{4}, nil, tensor.Float32, "integer labels"},
		{
			"sparse of another shape", gomlx.SparseCategoricalCrossEntropyLogits,
			[]int{4},
			[]int{2},
			tensor.Int32,
			"(Int32)[3 2]",
		},
		{"sparse without classes", gomlx.SparseCategoricalCrossEntropyLogits, nil, nil, tensor.Int32, "(rows, …, classes)"},
		{
			"categorical of another shape", gomlx.CategoricalCrossEntropyLogits,
			[]int{4},
			[]int{3},
			tensor.Float32,
			"one shape",
		},
		{"binary of another shape", gomlx.BinaryCrossEntropyLogits, []int{4}, []int{3}, tensor.Float32, "one shape"},
		{"squares of another shape", gomlx.MeanSquaredError, []int{4}, nil, tensor.Float32, "one shape"},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := features(e, 3, test.output...)
			s.Labels = []engine.Feature{{DType: test.labels, Shape: test.label}}
			p, err := asGiven(test.loss).Compile(t.Context(), e, s)
			if err == nil {
				p.Close()
				t.Fatal("compiled")
			}
			if got := strings.ReplaceAll(fmt.Sprint(err), ", ", " "); !strings.Contains(got,
				strings.ReplaceAll(test.want, ", ", " ")) {
				t.Errorf("error %q does not mention %q", err, test.want)
			}
		})
	}
}
