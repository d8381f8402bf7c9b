package gomlx_test

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/layers/norm"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/model/initializer"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/enginetest"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/tensor"
)

var mixed = []gomlx.Precision{gomlx.MixedBFloat16, gomlx.MixedFloat16}

// normedCNN is a convolution with batch normalization and a readout.
func normedCNN(s *model.Scope, in []*graph.Node) []*graph.Node {
	x := layer.Conv2D(s, in[0], 4, 3, true)
	x = layer.MaxPool2D(layer.Relu(layer.BatchNorm(s, x)))
	x = graph.Reshape(x, x.Shape().Dim(0), -1)
	return []*graph.Node{layer.Dense(s.In("readout"), x, 3)}
}

// classBatch is a batch whose first three numbers give the class.
func classBatch(seed uint64, rows int, shape ...int) engine.Batch {
	b := randomBatch(seed, rows, tensor.New(tensor.Float32, shape...).Len(), 3)
	x := tensor.Data[float32](b.Inputs[0])
	for i, y := range tensor.Data[int32](b.Labels[0]) {
		x[i*len(x)/rows+int(y)] += 3
	}
	b.Inputs[0] = b.Inputs[0].Reshape(append([]int{rows}, shape...)...)
	return b
}

// TestMixedPrecision checks that models of mixed precision learn like float32 ones, from the same initial values, with
// variables, gradients and predictions of float32, and compute in the half type.
func TestMixedPrecision(t *testing.T) {
	const rows, steps = 32, 30
	for _, test := range []struct {
		name    string
		forward models.Forward
		shape   []int
	}{
		{"mlp", models.MLP{Hidden: []int{32, 16}, Classes: 3}.Forward, []int{12}},
		{"cnn", normedCNN, []int{6, 6, 1}},
	} {
		t.Run(test.name, func(t *testing.T) {
			eachEngine(t, 1, func(t *testing.T, e engine.Engine) {
				averages := map[gomlx.Precision][]float64{} // after the first step
				train := func(p gomlx.Precision) (engine.Program, []float64) {
					dtype := dtypes.Float32
					switch p {
					case gomlx.MixedBFloat16:
						dtype = dtypes.BFloat16
					case gomlx.MixedFloat16:
						dtype = dtypes.Float16
					}
					m := &gomlx.Model{
						Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
							// a mixed model is also built in float32, for its variables
							if d := in[0].DType(); d != dtype && d != dtypes.Float32 || gomlx.ComputeDType(in[0].Graph()) != d {
								t.Errorf("%s: inputs are %s", p, d)
							}
							return test.forward(s, in)
						},
						Loss: gomlx.SparseCategoricalCrossEntropyLogits, Optimizer: optimizer.Adam().LearningRate(0.01).Done(),
						Metrics: []gomlx.Metric{gomlx.SparseCategoricalAccuracy()}, Precision: p,
					}
					program := compile(t, m, e, features(e, rows, test.shape...))
					if got := program.Info().ComputeDType; got.String() != strings.ToLower(dtype.String()) {
						t.Errorf("%s computes in %v", p, got)
					}
					var losses []float64
					for step := range steps {
						b := classBatch(uint64(step), rows, test.shape...)
						losses = append(losses, trainStep(t, program, []engine.Batch{b}, rows))
						for i, v := range program.Variables() {
							if step == 0 && v.Role == engine.Average {
								averages[p] = append(averages[p], readVariable(t, program, 0, i).Float64s()...)
							}
						}
					}
					return program, losses
				}
				reference, want := train("")
				for _, precision := range mixed {
					p, losses := train(precision)
					if len(p.Variables()) != len(reference.Variables()) {
						t.Fatalf("%s has %d variables, float32 %d", precision, len(p.Variables()), len(reference.Variables()))
					}
					for i, v := range p.Variables() {
						if want := reference.Variables()[i]; fmt.Sprint(v) != fmt.Sprint(want) {
							t.Errorf("%s has variable %v, float32 %v", precision, v, want)
						}
					}
					for i, got := range averages[precision] { // a step changes them by less than bfloat16 can represent
						if want := averages[""][i]; math.Abs(got-want) > 1e-4 {
							t.Errorf("%s: the moving averages are %v, in float32 %v", precision, averages[precision], averages[""])
							break
						}
					}
					differs := false
					for i, loss := range losses {
						differs = differs || loss != want[i]
						if !(math.Abs(loss-want[i]) <= 0.02*want[0]) {
							t.Errorf("%s: loss %v after %d steps, float32 %v", precision, loss, i, want[i])
						}
					}
					if !differs {
						t.Errorf("%s has float32's bits", precision)
					}
					if last := losses[steps-1]; last > want[0]/2 {
						t.Errorf("%s: the loss went from %v to %v only", precision, losses[0], last)
					}
					b := classBatch(100, rows, test.shape...)
					loss, metrics, err := p.Evaluate(t.Context(), 0, b, rows)
					wantLoss, wantMetrics, wantErr := reference.Evaluate(t.Context(), 0, b, rows)
					if err := errors.Join(err, wantErr); err != nil {
						t.Fatal(err)
					}
					if math.Abs(loss-wantLoss) > 0.02*want[0] || math.Abs(metrics[0]-wantMetrics[0]) > 2 {
						t.Errorf("%s evaluates to %v, %v, float32 to %v, %v", precision, loss, metrics, wantLoss, wantMetrics)
					}
					out, err := p.Predict(t.Context(), 0, b.Inputs)
					if err != nil {
						t.Fatal(err)
					}
					if out[0].DType() != tensor.Float32 {
						t.Errorf("%s predicts %v", precision, out[0].DType())
					}
				}
			})
		})
	}
}

// TestMixedGPT checks that a transformer, whose inputs are integers, learns in mixed precision as in float32.
func TestMixedGPT(t *testing.T) {
	const rows, positions, steps = 4, 6, 20
	x, y := tensor.New(tensor.Int32, rows, positions), tensor.New(tensor.Int32, rows, positions)
	for i := range tensor.Data[int32](x) {
		tensor.Data[int32](x)[i], tensor.Data[int32](y)[i] = int32(i*i%8), int32((i+1)*(i+1)%8)
	}
	b := engine.Batch{Inputs: []*tensor.Tensor{x}, Labels: []*tensor.Tensor{y}, Weights: ones(rows)}
	eachEngine(t, 1, func(t *testing.T, e engine.Engine) {
		var want []float64
		for _, precision := range gomlx.Precisions {
			m := &gomlx.Model{
				Forward: models.GPT{Vocabulary: 8, Width: 16, Heads: 2, Blocks: 1}.Forward,
				Loss:    gomlx.SparseCategoricalCrossEntropyLogits, Precision: precision,
				Optimizer: optimizer.Adam().LearningRate(0.01).Done(),
			}
			s := features(e, rows, positions)
			s.Inputs[0].DType, s.Labels[0].Shape = tensor.Int32, []int{positions}
			p := compile(t, m, e, s)
			for step := range steps {
				loss := trainStep(t, p, []engine.Batch{b}, rows)
				if precision == gomlx.Float32 {
					want = append(want, loss)
				} else if !(math.Abs(loss-want[step]) <= 0.05) {
					t.Errorf("%s: loss %v after %d steps, float32 %v", precision, loss, step, want[step])
				}
			}
		}
		if want[steps-1] > want[0]/2 {
			t.Errorf("the loss went from %v to %v only", want[0], want[steps-1])
		}
	})
}

// linear multiplies one number by a parameter of value 1, so its gradient is the input.
func linear(s *model.Scope, in []*graph.Node) []*graph.Node {
	w := s.WithInitializer(initializer.One).VariableWithShape("weight", in[0].Shape().Clone())
	w.SetTrainable(true)
	return []*graph.Node{graph.Mul(in[0], w.NodeValue(in[0].Graph()))}
}

func linearModel(p gomlx.Precision) *gomlx.Model {
	return &gomlx.Model{
		Forward: linear, Precision: p,
		Loss:      func(_, predictions []*graph.Node) *graph.Node { return graph.Reshape(predictions[0], 1) },
		Optimizer: optimizer.StochasticGradientDescent().WithDecay(false).WithLearningRate(1).Done(),
	}
}

// TestMixedMasters checks that updates too small for the half type add up in the parameters.
func TestMixedMasters(t *testing.T) {
	eachEngine(t, 1, func(t *testing.T, e engine.Engine) {
		for _, precision := range mixed {
			p := compile(t, linearModel(precision), e, features(e, 1, 1))
			const steps, step = 64, 1.0 / 4096 // bfloat16 has 1 - 1/256 below 1, float16 1 - 1/2048
			b := engine.Batch{
				Inputs: []*tensor.Tensor{tensor.From([]float32{step}, 1, 1)}, Labels: []*tensor.Tensor{tensor.New(tensor.Int32, 1)},
				Weights: ones(1),
			}
			for range steps {
				trainStep(t, p, []engine.Batch{b}, 1)
			}
			if got := readVariable(t, p, 0, 0); got.DType() != tensor.Float32 || got.Float64s()[0] != 1-steps*step {
				t.Errorf("%s: the weight is %v %v, want float32 %v", precision, got.DType(), got.Float64s(), 1-steps*step)
			}
		}
	})
}

// TestMixedLossScale checks that a loss scale keeps gradients that float16 would round to 0, and that one too large
// makes them infinite while the loss stays finite.
func TestMixedLossScale(t *testing.T) {
	eachEngine(t, 1, func(t *testing.T, e engine.Engine) {
		m := linearModel(gomlx.MixedFloat16)
		const small = 1.0 / (1 << 26)
		m.Loss = func(_, p []*graph.Node) *graph.Node { return graph.MulScalar(graph.Reshape(p[0], 1), small) }
		p := compile(t, m, e, features(e, 1, 1))
		b := engine.Batch{
			Inputs: []*tensor.Tensor{tensor.From([]float32{1}, 1, 1)}, Labels: []*tensor.Tensor{tensor.New(tensor.Int32, 1)},
			Weights: ones(1),
		}
		for _, test := range []struct{ scale, want float64 }{
			{1, 0}, {1 << 15, small}, {1 << 50, math.Inf(1)},
		} {
			s, err := p.Gradients(t.Context(), 0, engine.Micro{Batch: b, WeightSum: 1, Last: true, LossScale: test.scale}, nil)
			if err != nil {
				t.Fatal(err)
			}
			g, err := p.Gradient(0, 0)
			if err != nil {
				t.Fatal(err)
			}
			if g.DType() != tensor.Float32 || g.Float64s()[0] != test.want || s.Loss != small {
				t.Errorf("scale %v: gradient %v %v, loss %v: want float32 %v, loss %v", test.scale, g.DType(), g.Float64s(), s.Loss,
					test.want, small)
			}
			p.Discard()
		}
	})
}

// TestMixedReplicas checks that replicas on one device and on several have the same bits, and that all agree with one
// replica but for rounding.
func TestMixedReplicas(t *testing.T) {
	const rows, replicas = 8, 4
	eachEngine(t, replicas, func(t *testing.T, e engine.Engine) {
		for _, precision := range mixed {
			train := func(devices []int) [][]byte {
				m := &gomlx.Model{
					Forward: normedCNN, Loss: gomlx.SparseCategoricalCrossEntropyLogits, Precision: precision,
					Optimizer: optimizer.Adam().LearningRate(0.01).Done(),
				}
				s := features(e, rows, 6, 6, 1)
				n := 1
				for _, d := range devices {
					n = max(n, d+1)
				}
				s.Devices, s.ReplicaDevices, s.Sum = e.Devices()[:n], devices, newAdder(replicas).sum
				p := compile(t, m, e, s)
				for step := range 4 {
					b := classBatch(uint64(step), replicas*rows, 6, 6, 1)
					mixedStep(t, p, share(b, 0, replicas*rows, rows, replicas), s)
				}
				var list [][]byte
				for i := range p.Variables() {
					list = append(list, readVariable(t, p, 0, i).Memory().HostBytes())
				}
				return list
			}
			want := train([]int{0, 1, 2, 3})
			for _, devices := range [][]int{{0, 0, 1, 1}, {0, 0, 0, 0}} {
				for i, got := range train(devices) {
					if string(got) != string(want[i]) {
						t.Errorf("%s: variable %d differs with replicas on devices %v", precision, i, devices)
					}
				}
			}
		}
	})
}

// mixedStep runs a step of replicas that may share devices, with sums in the order of replicas.
func mixedStep(t *testing.T, p engine.Program, batches []engine.Batch, s engine.Spec) {
	t.Helper()
	var sums []*tensor.Tensor
	weight := float64(len(batches) * s.Rows)
	for r, b := range batches {
		m := engine.Micro{Batch: b, WeightSum: weight, Last: true, LossScale: 1024}
		if _, err := p.Gradients(t.Context(), r, m, nil); err != nil {
			t.Fatal(err)
		}
		for i := range p.Parameters() {
			g, err := p.Gradient(r, i)
			if err != nil {
				t.Fatal(err)
			}
			if r == 0 {
				sums = append(sums, g.Clone())
				continue
			}
			for j, x := range tensor.Data[float32](g) {
				tensor.Data[float32](sums[i])[j] += x
			}
		}
	}
	for r := range batches {
		for i := range sums {
			g, err := p.Gradient(r, i)
			if err != nil {
				t.Fatal(err)
			}
			copy(g.Memory().HostBytes(), sums[i].Memory().HostBytes())
		}
	}
	done := map[int]bool{}
	for r := range batches {
		if d := s.DeviceOf(r); !done[d] {
			done[d] = true
			if err := enginetest.Update(t.Context(), p, d, r); err != nil {
				t.Fatal(err)
			}
		}
	}
	p.Commit()
}

// TestMixedExplains checks the errors of models that cannot have mixed precision.
func TestMixedExplains(t *testing.T) {
	dense := func(s *model.Scope, x *graph.Node) []*graph.Node {
		return []*graph.Node{layers.Dense(s, x, true, 3)}
	}
	for _, test := range []struct {
		name    string
		forward models.Forward
		input   tensor.DType
		policy  gomlx.Precision
		want    []string
	}{
		{"unknown policy", normedCNN, tensor.Float32, "half", []string{
			`gomlx: Model.Precision is "half": want one of float32, mixed_bfloat16, mixed_float16`,
		}},
		{"float32 constant", func(s *model.Scope, in []*graph.Node) []*graph.Node {
			return dense(s, graph.Add(in[0], graph.Const(in[0].Graph(), [][]float32{{1, 2, 3, 4}})))
		}, tensor.Float32, gomlx.MixedBFloat16, []string{
			"gomlx: build the gradients program: ", "precision_test.go:",
			"Model.Precision is mixed_bfloat16: the model builds in float32, but not with inputs and variables of BFloat16",
		}},
		{"moving average in half width", func(s *model.Scope, in []*graph.Node) []*graph.Node {
			return dense(s, norm.BatchNorm(s, in[0], -1).UseBackendInference(false).Done())
		}, tensor.Float32, gomlx.MixedFloat16, []string{
			"gomlx: build the gradients program: the model function changes /batch_normalization/mean in Float16",
			"use layer.BatchNorm",
		}},
		{"float32 embedding", func(s *model.Scope, in []*graph.Node) []*graph.Node {
			return dense(s, graph.ReduceMean(layers.Embedding(s, in[0], dtypes.Float32, 10, 5), 1))
		}, tensor.Int32, gomlx.MixedBFloat16, []string{
			"Model.Precision is mixed_bfloat16, but no variable is used in BFloat16", "make the embedding of gomlx.ComputeDType",
		}},
		{"embedding of the compute type", func(s *model.Scope, in []*graph.Node) []*graph.Node {
			return dense(s, graph.ReduceMean(layers.Embedding(s, in[0], gomlx.ComputeDType(in[0].Graph()), 10, 5), 1))
		}, tensor.Int32, gomlx.MixedBFloat16, nil},
		{"another variable", func(s *model.Scope, in []*graph.Node) []*graph.Node {
			return []*graph.Node{layers.Dense(s.In("in_%s", in[0].DType()), in[0], true, 3)}
		}, tensor.Float32, gomlx.MixedBFloat16, []string{
			"only in mixed_bfloat16: want the same variables in every precision",
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			eachEngine(t, 1, func(t *testing.T, e engine.Engine) {
				m := &gomlx.Model{
					Forward: test.forward, Loss: gomlx.SparseCategoricalCrossEntropyLogits, Precision: test.policy,
					Optimizer: optimizer.StochasticGradientDescent(),
				}
				s := features(e, 4, 4)
				s.Inputs[0].DType = test.input
				p, err := m.Compile(t.Context(), e, s)
				if test.want == nil {
					if err != nil {
						t.Fatal(err)
					}
					b := engine.Batch{
						Inputs: []*tensor.Tensor{tensor.New(tensor.Int32, 4, 4)}, Labels: []*tensor.Tensor{tensor.New(tensor.Int32, 4)},
						Weights: ones(4),
					}
					trainStep(t, p, []engine.Batch{b}, 4)
					if err := p.Close(); err != nil {
						t.Fatal(err)
					}
					return
				}
				if err == nil {
					t.Fatal("no error")
				}
				for _, want := range test.want {
					if !strings.Contains(err.Error(), want) {
						t.Errorf("error %q lacks %q", err, want)
					}
				}
			})
		})
	}
}
