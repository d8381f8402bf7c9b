package gomlx_test

import (
	"fmt"
	"math"
	"testing"

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

// cutModels lists models whose gradients program is cut into buckets.
var cutModels = []struct {
	name    string
	shape   []int
	forward models.Forward
}{
	{"mlp", []int{28, 28, 1}, models.MLP{}.Forward},
	{"cnn", []int{8, 8, 1}, models.CNN{Same: true, Dropout: 0.5}.Forward},
	{"normalised", []int{8, 8, 1}, func(s *model.Scope, in []*graph.Node) []*graph.Node {
		x := layer.BatchNorm(s.In("first"), layer.Conv2D(s.In("conv"), in[0], 4, 3, true))
		x = graph.Reshape(layer.Relu(x), x.Shape().Dim(0), -1)
		x = layer.Relu(layer.BatchNorm(s.In("second"), layer.Dense(s.In("hidden"), x, 16)))
		return []*graph.Node{layer.Dense(s.In("readout"), x, 10)}
	}},
}

func cutModel(forward models.Forward) *gomlx.Model {
	return &gomlx.Model{
		Forward: forward, Loss: gomlx.SparseCategoricalCrossEntropyLogits,
		Metrics:   []gomlx.Metric{gomlx.SparseCategoricalAccuracy()},
		Optimizer: optimizer.StochasticGradientDescent().WithDecay(false).WithLearningRate(0.01),
	}
}

// TestCutsKeepBits checks that the number of buckets does not change the bits of losses, gradients and averages on the
// Go engine. On XLA, programs of another cut are fused differently, so their results may differ in rounding.
func TestCutsKeepBits(t *testing.T) {
	eachEngine(t, 1, func(t *testing.T, e engine.Engine) {
		for _, m := range cutModels {
			t.Run(m.name, func(t *testing.T) {
				var first []*tensor.Tensor
				for _, bytes := range []int{1 << 30, 1 << 14, 1} {
					s := features(e, 16, m.shape...)
					s.Replicas, s.BucketBytes = 2, bytes
					p := compile(t, cutModel(m.forward), e, s)
					flat := randomBatch(3, 16, tensor.New(tensor.Float32, m.shape...).Len(), 10)
					flat.Inputs[0] = flat.Inputs[0].Reshape(append([]int{16}, m.shape...)...)
					g, err := enginetest.Gradients(t.Context(), p, 0, flat, 32, [3]uint64{1, 2, 3})
					if err != nil {
						t.Fatal(err)
					}
					got := []*tensor.Tensor{tensor.Scalar(g.Loss)}
					for _, x := range g.Tensors {
						got = append(got, x.Clone())
					}
					p.Commit()
					for i, v := range p.Variables() {
						if v.Role == engine.Average {
							got = append(got, readVariable(t, p, 0, i))
						}
					}
					if first == nil {
						first = got
						continue
					}
					differ, largest := 0, 0.0
					for i, x := range got {
						if !x.Equal(first[i]) {
							differ++
						}
						want := first[i].Float64s()
						for j, v := range x.Float64s() {
							largest = math.Max(largest, math.Abs(v-want[j]))
						}
					}
					text := fmt.Sprintf("%d buckets: %d of %d results have other bits, by %.1e at most", len(p.Buckets()), differ,
						len(got), largest)
					if t.Log(text); differ > 0 && e.Name() == "go" || largest > 1e-5 {
						t.Error(text)
					}
				}
			})
		}
	})
}

// TestBucketsOfModels checks that a program is cut by default if much computation can hide the exchange of its
// gradients, and not if the exchange takes longer on any link where the cut pays off.
func TestBucketsOfModels(t *testing.T) {
	eachEngine(t, 1, func(t *testing.T, e engine.Engine) {
		for _, m := range []struct {
			name    string
			shape   []int
			forward models.Forward
			rows    int
			least   int // buckets
			most    int
		}{
			{"perceptron of little work", []int{28, 28, 1}, models.MLP{}.Forward, 4, 1, 1},
			{"gpt", []int{64}, models.GPT{Blocks: 1}.Forward, 32, 2, 6},
		} {
			mm, s, _ := benchmarked(m.forward, m.shape, m.rows, 1)
			s.Devices, s.Replicas = e.Devices()[:1], 2
			p := compile(t, mm, e, s)
			list, total := p.Buckets(), 0
			for _, b := range list {
				total += b.Bytes
			}
			if t.Logf("%s: %v", m.name, list); len(list) < m.least || len(list) > m.most {
				t.Errorf("%s has %d buckets, want %d to %d", m.name, len(list), m.least, m.most)
			}
			if last := list[len(list)-1].Bytes; len(list) > 1 && last > total/2 {
				t.Errorf("%s: the last bucket, which nothing hides, has %d of %d bytes", m.name, last, total)
			}
		}
	})
}
