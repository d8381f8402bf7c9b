package gomlx_test

import (
	"bytes"
	"fmt"
	"math"
	"testing"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/layers/activation"
	"github.com/gomlx/gomlx/ml/layers/norm"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train"
	"github.com/gomlx/gomlx/ml/train/loss"
	"github.com/gomlx/gomlx/ml/train/optimizer"
	"github.com/gomlx/gomlx/ml/train/optimizer/cosineschedule"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	lockstepoptimizer "github.com/lockstep-ml/lockstep/engine/gomlx/optimizer"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestEqualsGoMLXTrainer checks that one replica with the whole batch computes the same bits as GoMLX's own trainer:
// parameters, optimizer's state, moving averages.
func TestEqualsGoMLXTrainer(t *testing.T) {
	plain := func(s *model.Scope, in []*graph.Node) []*graph.Node {
		x := activation.Relu(layers.Dense(s.In("one"), in[0], true, 16))
		return []*graph.Node{layers.Dense(s.In("two"), x, true, 5)}
	}
	// GoMLX's layers after ours, so that paths in the order of creation are not sorted.
	unsorted := func(s *model.Scope, in []*graph.Node) []*graph.Node {
		x := graph.Tanh(layers.Dense(s.In("z"), in[0], true, 12))
		x = norm.BatchNorm(s.In("norm"), x, -1).UseBackendInference(false).Done()
		return []*graph.Node{layers.Dense(s.In("a"), x, true, 5)}
	}
	scheduled := func(s *model.Scope, in []*graph.Node) []*graph.Node {
		cosineschedule.New(s, in[0].Graph(), dtypes.Float32).LearningRate(0.1).PeriodSteps(4).Done()
		return plain(s, in)
	}
	for _, test := range []struct {
		name    string
		forward func(*model.Scope, []*graph.Node) []*graph.Node
		params  map[string]any
		opt     func() optimizer.Interface
	}{
		{"sgd", plain, nil, func() optimizer.Interface {
			return optimizer.StochasticGradientDescent().WithDecay(false).WithLearningRate(0.1)
		}},
		{"sgd with its decay", plain, nil, func() optimizer.Interface { return optimizer.StochasticGradientDescent() }},
		{"adam", plain, nil, func() optimizer.Interface { return optimizer.Adam().LearningRate(0.01).Done() }},
		{"adamw", unsorted, nil, func() optimizer.Interface { return optimizer.Adam().WeightDecay(0.004).Done() }},
		{"rmsprop", unsorted, nil, func() optimizer.Interface { return optimizer.RMSProp().Done() }},
		{
			"l2", plain,
			map[string]any{"l2_regularization": 0.01},
			func() optimizer.Interface { return optimizer.Adam().Done() },
		},
		{"l1 with its hook", plain, map[string]any{"l1_regularization": 0.05}, func() optimizer.Interface {
			return optimizer.StochasticGradientDescent().WithDecay(false).WithLearningRate(0.5)
		}},
		{
			"clipped steps", plain,
			map[string]any{"clip_step_by_value": 0.001},
			func() optimizer.Interface { return optimizer.Adam().Done() },
		},
		{"nesterov momentum with a schedule", unsorted, nil, func() optimizer.Interface {
			return lockstepoptimizer.SGD().Schedule(lockstepoptimizer.CosineDecay(0.1, 6,
				0.1)).Momentum(0.9).Nesterov(true).Done()
		}},
		{"adamw as Keras has it", unsorted, nil, func() optimizer.Interface {
			return lockstepoptimizer.Adam().LearningRate(0.01).WeightDecay(0.01).Done()
		}},
		{"rmsprop as Keras has it", plain, map[string]any{"l2_regularization": 0.01}, func() optimizer.Interface {
			return lockstepoptimizer.RMSProp().LearningRate(0.01).Momentum(0.5).Done()
		}},
		{"cosine schedule", scheduled, nil, func() optimizer.Interface {
			return optimizer.StochasticGradientDescent().WithDecay(false).WithLearningRate(0.1)
		}},
	} {
		for _, rows := range []int{16, 48, 7} {
			t.Run(fmt.Sprintf("%s/%d rows", test.name, rows), func(t *testing.T) {
				eachEngine(t, 1, func(t *testing.T, e engine.Engine) {
					m := &gomlx.Model{
						Forward: test.forward, Loss: gomlx.SparseCategoricalCrossEntropyLogits, Optimizer: test.opt(),
						Params: test.params,
					}
					compareWithTrainer(t, e, m, test.opt(), rows)
				})
			})
		}
	}
}

func compareWithTrainer(t *testing.T, e engine.Engine, m *gomlx.Model, opt optimizer.Interface, rows int) {
	const steps, features = 8, 6
	p := compile(t, m, e, engine.Spec{
		Rows: rows, Seed: 3, Devices: e.Devices(),
		Inputs: []engine.Feature{{DType: tensor.Float32, Shape: []int{features}}},
		Labels: []engine.Feature{{DType: tensor.Int32, Shape: []int{1}}},
	})
	store := model.NewStore()
	for name, value := range m.Params {
		store.SetParam(name, value)
	}
	initial := map[string]*tensors.Tensor{}
	for i, v := range p.Variables() {
		initial[v.Name] = toGoMLX(t, readVariable(t, p, 0, i))
	}
	// The trainer makes its variables in the order of the model function; they take the values given before.
	trainer := train.NewTrainer(gomlx.ComputeBackend(e), store,
		func(s *model.Scope, _ any, in []*graph.Node) []*graph.Node {
			return m.Forward(s, in)
		}, loss.SparseCategoricalCrossEntropyLogits, opt, nil, nil)
	store.SetLoader(loader(initial))
	for step := range steps {
		b := randomBatch(uint64(step), rows, features, 5)
		b.Labels[0] = b.Labels[0].Reshape(rows, 1)
		if _, err := trainer.TrainStep(train.Batch{
			Inputs: []*tensors.Tensor{toGoMLX(t, b.Inputs[0])}, Labels: []*tensors.Tensor{toGoMLX(t, b.Labels[0])},
		}); err != nil {
			t.Fatal(err)
		}
		if p.Info().WholeStep && step%2 == 0 { // in one program or in two
			m := engine.Micro{Batch: b, WeightSum: float64(rows), RNG: [3]uint64{1, 0, 3}, Last: true}
			if _, finite, err := p.Step(t.Context(), m); err != nil || !finite {
				t.Fatal(finite, err)
			}
			p.Commit()
			continue
		}
		trainStep(t, p, []engine.Batch{b}, float64(rows))
	}
	for i, v := range p.Variables() {
		theirs := store.GetVariable(v.Name)
		if theirs == nil || !theirs.HasValue() {
			t.Errorf("GoMLX's trainer has no variable %s", v.Name)
			continue
		}
		ours := readVariable(t, p, 0, i)
		same := false
		err := theirs.MustValue().ConstBytes(func(data []byte) { same = bytes.Equal(ours.Memory().HostBytes(), data) })
		if err != nil {
			t.Fatal(err)
		}
		if !same { // logged outside of ConstBytes, which holds the lock that printing needs
			t.Errorf("%s differs after %d steps: %v, GoMLX's %v", v.Name, steps, ours, theirs.MustValue())
		}
	}
}

// loader sets the first values of variables, for model.Store.
type loader map[string]*tensors.Tensor

func (l loader) LoadVariable(_ *model.Store, path string) (*tensors.Tensor, bool) {
	v, ok := l[path]
	delete(l, path)
	return v, ok
}

func (l loader) DeleteVariable(_ *model.Store, path string) error {
	delete(l, path)
	return nil
}

// TestReplicasAgree trains one model as 1, 2 and 3 replicas over batches that do not divide evenly, the last of each
// epoch partial, and wants the same weights up to rounding.
func TestReplicasAgree(t *testing.T) {
	const rows, global, features, epochs = 290, 100, 20, 10 // 3 steps an epoch
	data := randomBatch(1, rows, features, 5)
	eachEngine(t, 3, func(t *testing.T, e engine.Engine) {
		var want []*tensor.Tensor
		for _, n := range []int{1, 2, 3} {
			m := &gomlx.Model{
				Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
					x := activation.Relu(layers.Dense(s.In("one"), in[0], true, 32))
					return []*graph.Node{layers.Dense(s.In("two"), x, true, 5)}
				},
				Loss:      gomlx.SparseCategoricalCrossEntropyLogits,
				Optimizer: optimizer.StochasticGradientDescent().WithDecay(false).WithLearningRate(0.1),
			}
			per := (global + n - 1) / n
			p := compile(t, m, e, engine.Spec{
				Rows: per, Seed: 5, Devices: e.Devices()[:n],
				Inputs: []engine.Feature{{DType: tensor.Float32, Shape: []int{features}}},
				Labels: []engine.Feature{{DType: tensor.Int32}},
			})
			for range epochs {
				for lo := 0; lo < rows; lo += global {
					hi := min(rows, lo+global)
					trainStep(t, p, share(data, lo, hi, per, n), float64(hi-lo))
				}
			}
			for i, v := range p.Parameters() {
				got := readVariable(t, p, 0, i)
				for r := 1; r < n; r++ {
					if !readVariable(t, p, r, i).Equal(got) {
						t.Errorf("%d replicas: %s differs between them", n, v.Name)
					}
				}
				if n == 1 {
					want = append(want, got)
					continue
				}
				for j, x := range got.Float64s() {
					if d := math.Abs(x - want[i].Float64s()[j]); d > 1e-5 {
						t.Fatalf("%d replicas: %s[%d] differs by %g from one replica's", n, v.Name, j, d)
					}
				}
			}
		}
	})
}
