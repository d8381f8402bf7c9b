package gomlx_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/layers/activation"
	"github.com/gomlx/gomlx/ml/layers/attention"
	"github.com/gomlx/gomlx/ml/layers/norm"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/enginetest"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestGPTEqualsGoMLXLayers trains models.GPT and the same network of GoMLX's layers, from equal values, with padded
// rows. Losses and variables must agree.
func TestGPTEqualsGoMLXLayers(t *testing.T) {
	const rows, positions, vocabulary = 3, 10, 256
	eachEngine(t, 1, func(t *testing.T, e engine.Engine) {
		spec := engine.Spec{
			Rows: rows, Seed: 1, Devices: e.Devices()[:1],
			Inputs: []engine.Feature{{DType: tensor.Int32, Shape: []int{positions}}},
			Labels: []engine.Feature{{DType: tensor.Int32, Shape: []int{positions}}},
		}
		var programs []engine.Program
		for _, forward := range []models.Forward{models.GPT{}.Forward, gptOfGoMLX} {
			m := &gomlx.Model{
				Forward: forward, Loss: gomlx.SparseCategoricalCrossEntropyLogits,
				Optimizer: optimizer.StochasticGradientDescent().WithDecay(false).WithLearningRate(0.1),
			}
			programs = append(programs, compile(t, m, e, spec))
		}
		ours, theirs := programs[0], programs[1]
		for i, v := range ours.Variables() {
			if err := theirs.Write(0, variable(t, theirs, v.Name), readVariable(t, ours, 0, i)); err != nil {
				t.Fatal(err)
			}
		}
		r := rand.New(rand.NewPCG(1, 2))
		for step := range 4 {
			x, y := tensor.New(tensor.Int32, rows, positions), tensor.New(tensor.Int32, rows, positions)
			for i := range tensor.Data[int32](x) {
				tensor.Data[int32](x)[i], tensor.Data[int32](y)[i] = r.Int32N(vocabulary), r.Int32N(vocabulary)
			}
			b := engine.Batch{
				Inputs: []*tensor.Tensor{x}, Labels: []*tensor.Tensor{y}, Weights: []float32{1, 0.5, 0}, Padding: 1,
			}
			got := trainStep(t, ours, []engine.Batch{b}, 1.5)
			want := trainStep(t, theirs, []engine.Batch{b}, 1.5)
			if step == 0 && math.Abs(got-math.Log(vocabulary)) > 0.1 {
				t.Errorf("the first loss is %v, want about that of equal probabilities, %v", got, math.Log(vocabulary))
			}
			if d := math.Abs(got - want); !(d < 1e-5) {
				t.Errorf("step %d: loss %v, want %v", step, got, want)
			}
		}
		for i, v := range ours.Variables() {
			if v.DType != tensor.Float32 {
				continue
			}
			got := tensor.Data[float32](readVariable(t, ours, 0, i))
			want := tensor.Data[float32](readVariable(t, theirs, 0, variable(t, theirs, v.Name)))
			for j := range want {
				if d := math.Abs(float64(got[j] - want[j])); !(d < 1e-5) {
					t.Fatalf("%s[%d] is %v after training, want %v", v.Name, j, got[j], want[j])
				}
			}
		}
	})
}

// TestGPTOfHalfWidth computes loss and gradients of models.GPT of float16 and bfloat16.
func TestGPTOfHalfWidth(t *testing.T) {
	for _, dtype := range []dtypes.DType{dtypes.Float16, dtypes.BFloat16} {
		t.Run(fmt.Sprint(dtype), func(t *testing.T) {
			eachEngine(t, 1, func(t *testing.T, e engine.Engine) {
				m := &gomlx.Model{
					Forward:   models.GPT{Vocabulary: 8, Width: 8, Heads: 2, Blocks: 1, DType: dtype}.Forward,
					Loss:      gomlx.SparseCategoricalCrossEntropyLogits,
					Optimizer: optimizer.StochasticGradientDescent().WithDecay(false).WithLearningRate(0.5),
				}
				p := compile(t, m, e, engine.Spec{
					Rows: 2, Seed: 1, Devices: e.Devices()[:1],
					Inputs: []engine.Feature{{DType: tensor.Int32, Shape: []int{3}}},
					Labels: []engine.Feature{{DType: tensor.Int32, Shape: []int{3}}},
				})
				x := tensor.New(tensor.Int32, 2, 3)
				copy(tensor.Data[int32](x), []int32{1, 2, 3, 4, 5, 6})
				b := engine.Batch{Inputs: []*tensor.Tensor{x}, Labels: []*tensor.Tensor{x}, Weights: ones(2)}
				result, err := enginetest.Gradients(t.Context(), p, 0, b, 2, [3]uint64{})
				if err != nil {
					t.Fatal(err)
				}
				if d := math.Abs(result.Loss - math.Log(8)); !(d < 0.2) {
					t.Errorf("loss %v, want about %v", result.Loss, math.Log(8))
				}
			})
		})
	}
}

// gptOfGoMLX is models.GPT{} built of GoMLX's layers, with the same variables.
func gptOfGoMLX(s *model.Scope, inputs []*graph.Node) []*graph.Node {
	const vocabulary, width, heads, blocks = 256, 128, 4, 4
	g := inputs[0].Graph()
	rows, positions := inputs[0].Shape().Dim(0), inputs[0].Shape().Dim(1)
	embedding := s.In("embedding")
	x := layers.Embedding(embedding, graph.InsertAxes(inputs[0], -1), dtypes.Float32, vocabulary, width)
	position := embedding.VariableWithShape("positions", shapes.Make(dtypes.Float32, positions, width)).NodeValue(g)
	x = graph.Add(x, graph.ExpandLeftToRank(position, 3))
	normalize := func(s *model.Scope, x *graph.Node) *graph.Node {
		return norm.LayerNorm(s, x, -1).Epsilon(1e-5).Done()
	}
	for i := range blocks {
		b := s.In("block_%d", i)
		attend, expand := b.In("attention"), b.In("expand")
		y := normalize(attend, x)
		x = graph.Add(x, attention.SelfAttention(attend, y, heads, width/heads).UseQKVProjection().
			WithCausalMask(true).Done())
		y = activation.Gelu(layers.Dense(expand, normalize(expand, x), true, 4*width))
		x = graph.Add(x, layers.Dense(b.In("contract"), y, true, width))
	}
	readout := s.In("readout")
	x = layers.Dense(readout, normalize(readout, x), false, vocabulary)
	return []*graph.Node{graph.Reshape(x, rows, positions, vocabulary)}
}
