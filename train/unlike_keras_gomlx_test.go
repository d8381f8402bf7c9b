package train_test

import (
	"fmt"
	"math"
	"testing"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/model/initializer"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	"github.com/lockstep-ml/lockstep/engine/gomlx/optimizer"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train"
)

// fitted trains a model on the Go engine, over batches of the examples in their order, and returns the history, the
// loss of an evaluation and the weights by name.
func fitted(t *testing.T, replicas int, m *gomlx.Model, cfg train.Config, examples, test data.Batch, batch, epochs int,
) (losses []float64, evaluated float64, weights map[string][]float32) {
	t.Helper()
	e, err := gomlx.Open("go", gomlx.Options{Devices: replicas})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	s, err := strategyOf(e, replicas)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	cfg.Data, cfg.GlobalBatch = fromTensors(examples).Batch(batch), batch
	trainer, err := train.New(t.Context(), s, m, cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer trainer.Close()
	history, err := trainer.Fit(t.Context(), cfg.Data, train.FitConfig{Epochs: epochs})
	if err != nil {
		t.Fatal(err)
	}
	for _, epoch := range history.Epochs {
		losses = append(losses, epoch.Loss)
	}
	result, err := trainer.Evaluate(t.Context(), fromTensors(test).Batch(batch))
	if err != nil {
		t.Fatal(err)
	}
	list, err := trainer.Weights(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	weights = map[string][]float32{}
	for _, w := range list {
		if w.Value.DType() == tensor.Float32 {
			weights[w.Name] = tensor.Data[float32](w.Value)
		}
	}
	return losses, result.Loss, weights
}

func near[T float32 | float64](t *testing.T, what string, got, want []T) {
	t.Helper()
	for i := range want {
		if len(got) != len(want) || math.Abs(float64(got[i]-want[i])) > 2e-6 {
			t.Errorf("%s: got %v, want %v", what, got, want)
			return
		}
	}
}

func dense(units int) func(*model.Scope, []*graph.Node) []*graph.Node {
	return func(s *model.Scope, in []*graph.Node) []*graph.Node {
		return []*graph.Node{layers.Dense(s.WithInitializer(initializer.Zero), in[0], true, units)}
	}
}

// TestWeightsOfExamplesLikeKeras: with SumOverBatchSize, losses and weights are those of Keras 3.15.1 (Dense,
// SGD(0.25), 2 epochs of 2 batches of 4 examples, under OneDeviceStrategy and MirroredStrategy alike).
func TestWeightsOfExamplesLikeKeras(t *testing.T) {
	const n = 8
	x, y, classes := make([]float32, 2*n), make([]float32, n), []int32{0, 1, 2, 0, 1, 2, 0, 1}
	classWeights := make([]float32, n)
	for i := range n {
		x[2*i], x[2*i+1] = float32(2*i)/8-1, float32(2*i+1)/8-1
		y[i] = 2*x[2*i] - x[2*i+1] + 0.5
		classWeights[i] = []float32{2, 0.5, 0.25}[classes[i]]
	}
	inputs := []*tensor.Tensor{tensor.From(x, n, 2)}
	regression := data.Batch{
		Inputs: inputs, Labels: []*tensor.Tensor{tensor.From(y, n, 1)},
		Weights: tensor.From([]float32{2, 0, 0.5, 0.5, 1, 3, 0.25, 0.25}),
	}
	classification := data.Batch{
		Inputs: inputs, Labels: []*tensor.Tensor{tensor.From(classes)}, Weights: tensor.From(classWeights),
	}
	unweighted := classification
	unweighted.Weights = nil
	for _, c := range []struct {
		name           string
		units          int
		loss           gomlx.Loss
		examples, test data.Batch
		losses         []float64
		evaluated      float64
		kernel, bias   []float32
	}{
		{
			"sample_weight", 1, gomlx.MeanSquaredError, regression, regression,
			[]float64{0.36829379200935364, 0.06929464638233185},
			0.010262440890073776,
			[]float32{0.38845882, 0.42373112},
			[]float32{0.28217852},
		},
		{
			"class_weight", 3, gomlx.SparseCategoricalCrossEntropyLogits, classification, unweighted,
			[]float64{1.0912591218948364, 0.9610933065414429},
			1.0968236923217773,
			[]float32{-0.11102591, 0.05988229, 0.05114362, -0.06481589, 0.04403642, 0.02077948},
			[]float32{0.36968008, -0.12676699, -0.24291313},
		},
	} {
		for replicas := 1; replicas <= 2; replicas++ {
			m := &gomlx.Model{Forward: dense(c.units), Loss: c.loss, Optimizer: optimizer.SGD().LearningRate(0.25).Done()}
			losses, evaluated, weights := fitted(t, replicas, m, train.Config{LossReduction: train.SumOverBatchSize},
				c.examples, c.test, 4, 2)
			what := fmt.Sprintf("%s, %d replicas, ", c.name, replicas)
			near(t, what+"losses", losses, c.losses)
			near(t, what+"evaluation", []float64{evaluated}, []float64{c.evaluated})
			for name, want := range map[string][]float32{"/dense/weights": c.kernel, "/dense/biases": c.bias} {
				near(t, what+name, weights[name], want)
			}
		}
	}
}

// TestUnlikeKeras: the answers of docs/tf-distribute.md that are not Keras'.
func TestUnlikeKeras(t *testing.T) {
	column := func(x ...float32) *tensor.Tensor { return tensor.From(x, len(x), 1) }
	batchNorm := func(norm func(*model.Scope, *graph.Node, layer.BatchNormOptions) *graph.Node, o layer.BatchNormOptions,
	) *gomlx.Model {
		return &gomlx.Model{
			Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node { return []*graph.Node{norm(s, in[0], o)} },
			Loss:    gomlx.MeanSquaredError, Optimizer: optimizer.SGD().LearningRate(0.1).Done(),
		}
	}
	x := column(0, 2, 10, 14)
	rows := data.Batch{Inputs: []*tensor.Tensor{x}, Labels: []*tensor.Tensor{x}}
	for _, c := range []struct {
		replicas       int
		sync           bool
		mean, variance float32
	}{{1, false, 3.25, 16.875}, {2, false, 3.25, 1.75}, {2, true, 3.25, 16.875}} {
		m := batchNorm(layer.BatchNormWith, layer.BatchNormOptions{Momentum: 0.5, Sync: c.sync})
		_, _, weights := fitted(t, c.replicas, m, train.Config{}, rows, rows, 4, 1)
		what := fmt.Sprintf("%d replicas, sync %v, ", c.replicas, c.sync)
		near(t, what+"mean", weights["/batch_normalization/mean"], []float32{c.mean})
		near(t, what+"variance", weights["/batch_normalization/variance"], []float32{c.variance})
	}

	linear := data.Batch{Inputs: []*tensor.Tensor{column(1, 1)}, Labels: []*tensor.Tensor{column(8, -2)}}
	embedding := data.Batch{
		Inputs: []*tensor.Tensor{tensor.From([]int32{0, 0, 0, 1}, 2, 2)}, Labels: []*tensor.Tensor{column(0, 0)},
	}
	for replicas := 1; replicas <= 2; replicas++ {
		m := &gomlx.Model{
			Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
				return []*graph.Node{layers.Dense(s.WithInitializer(initializer.Zero), in[0], false, 1)}
			},
			Loss: gomlx.MeanSquaredError, Optimizer: optimizer.SGD().LearningRate(1).Done(),
		}
		_, _, weights := fitted(t, replicas, m, train.Config{ClipNorm: 1}, linear, linear, 2, 1)
		near(t, fmt.Sprintf("%d replicas, clipped", replicas), weights["/dense/weights"], []float32{1})

		m = &gomlx.Model{
			Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
				table := s.WithInitializer(initializer.One).VariableWithShape("table", shapes.Make(dtypes.Float32, 3, 1))
				rows := graph.Gather(table.NodeValue(in[0].Graph()), graph.ExpandAxes(in[0], -1))
				return []*graph.Node{graph.ReduceSum(rows, 1)}
			},
			Loss: gomlx.MeanSquaredError, Optimizer: optimizer.Adam().LearningRate(0.1).Done(),
		}
		_, _, weights = fitted(t, replicas, m, train.Config{}, embedding, embedding, 2, 1)
		near(t, fmt.Sprintf("%d replicas, embedding", replicas), weights["/table"], []float32{0.9, 0.9, 1})
	}
}
