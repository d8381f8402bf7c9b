package train_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"math"
	"strings"
	"testing"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train"
)

// numbersModel is a linear model with five outputs for examples of three numbers. If damage is set, it changes the
// logits.
func numbersModel(damage func(logits, in *graph.Node) *graph.Node) *gomlx.Model {
	return &gomlx.Model{
		Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
			logits := layer.Dense(s.In("b"), layer.Dense(s.In("a"), in[0], 4), 5)
			if damage != nil {
				logits = damage(logits, in[0])
			}
			return []*graph.Node{logits}
		},
		Loss: gomlx.SparseCategoricalCrossEntropyLogits, Optimizer: sgd(),
		Metrics: []gomlx.Metric{gomlx.SparseCategoricalAccuracy()},
	}
}

// numbers returns 24 examples for numbersModel.
func numbers() data.Batch {
	x, y := make([]float32, 24*3), make([]int32, 24)
	for i := range x {
		x[i] = float32(i%7) / 7
	}
	for i := range y {
		y[i] = int32(i % 5)
	}
	return data.Batch{Inputs: []*tensor.Tensor{tensor.Of(x, 24, 3)}, Labels: []*tensor.Tensor{tensor.Of(y, 24)}}
}

// newNumbers returns a trainer with global batches of 8 on two replicas.
func newNumbers(t *testing.T, m *gomlx.Model, cfg train.Config) *train.Trainer {
	t.Helper()
	e, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: 2})
	if err != nil {
		t.Fatal(err)
	}
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: e})
	if err != nil {
		t.Fatal(err)
	}
	cfg.Inputs, cfg.Labels = []engine.Feature{{DType: tensor.Float32, Shape: []int{3}}},
		[]engine.Feature{{DType: tensor.Int32}}
	cfg.GlobalBatch, cfg.Seed = 8, 1
	trainer, err := train.New(t.Context(), s, m, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(trainer.Close(), s.Close(), e.Close()); err != nil {
			t.Error(err)
		}
	})
	return trainer
}

// TestNotFiniteCauses checks that a loss or gradient that is not finite is an error that names its first cause, with
// step, replica and example, and that the step changes no variable; with one pack and with several.
func TestNotFiniteCauses(t *testing.T) {
	huge := func(logits, in *graph.Node) *graph.Node { // overflows for the example whose first number is 100
		return graph.Mul(logits, graph.Exp(graph.Slice(in, graph.AxisRange(), graph.AxisRange(0, 1))))
	}
	// A gradient of 0 · ∞ for an example of 100: the square root of 0.
	root := func(logits, in *graph.Node) *graph.Node {
		is := graph.Equal(graph.Slice(in, graph.AxisRange(), graph.AxisRange(0, 1)), graph.Scalar(in.Graph(),
			dtypes.Float32, 100))
		zero := graph.Mul(graph.ConvertDType(graph.LogicalNot(is), dtypes.Float32),
			graph.OnesLike(graph.ConvertDType(is, dtypes.Float32)))
		return graph.Add(logits, graph.Sqrt(graph.Abs(graph.Mul(zero, graph.ReduceAndKeep(logits, graph.ReduceSum,
			-1)))))
	}
	for _, c := range []struct {
		name    string
		model   func(logits, in *graph.Node) *graph.Node
		damage  func(x []float32, y []int32)
		prepare func(*train.Trainer) error
		step    int64
		replica int
		example int
		want    string
	}{
		{
			"label out of range", nil, func(_ []float32, y []int32) { y[8+5] = 7 }, nil, 2, 1, 5,
			"the loss of step 2 is NaN: on replica 1 example 5 (counted from 0) of batch 2 of the data: label 0 " +
				"is 7, but the model has 5 outputs for the classes: use labels from 0 to 4",
		},
		{
			"negative label", nil, func(_ []float32, y []int32) { y[16] = -1 }, nil, 3, 0, 0,
			"label 0 is -1, but the model has 5 outputs",
		},
		{"the first replica's", nil, func(_ []float32, y []int32) { y[7], y[3] = 9, 8 }, nil, 1, 0, 3, "label 0 is 8"},
		{
			"NaN in the data", nil, func(x []float32, _ []int32) { x[3*9+2] = float32(math.NaN()) }, nil, 2, 0, 1,
			"input 0 is not finite: element (2,) is NaN",
		},
		{
			"the input before the label", nil, func(x []float32, y []int32) { x[3*6], y[0] = float32(math.Inf(-1)), 5 },
			nil, 1, 1, 6, "input 0 is not finite: element (0,) is -Inf",
		},
		{"the model overflows", huge, func(x []float32, _ []int32) { x[3*4] = 100 }, nil, 1, 1, 4, "its loss is "},
		{
			"a gradient", root, func(x []float32, _ []int32) { x[3*20] = 100 }, nil, 3, 1, -1,
			"the gradient of /a/dense/",
		},
		{"a variable", nil, nil, func(t *train.Trainer) error {
			return t.SetVariable("/b/dense/biases", tensor.Of([]float32{0, 0, 0, float32(math.Inf(1)), 0}, 5))
		}, 1, 0, -1, "the parameter /b/dense/biases was not finite before this step: element (3,) is +Inf"},
	} {
		for _, cfg := range []train.Config{{}, {BucketBytes: 1}, {ClipNorm: 1}} {
			t.Run(c.name, func(t *testing.T) {
				b := numbers()
				if c.damage != nil {
					c.damage(tensor.Data[float32](b.Inputs[0]), tensor.Data[int32](b.Labels[0]))
				}
				trainer := newNumbers(t, numbersModel(c.model), cfg)
				if c.prepare != nil {
					if err := c.prepare(trainer); err != nil {
						t.Fatal(err)
					}
				}
				before := hash(t, trainer)
				h, err := trainer.Fit(t.Context(), fromTensors(b).Batch(8),
					train.FitConfig{Callbacks: []train.Callback{{
						OnStepEnd: func(context.Context, train.Step) error { before = hash(t, trainer); return nil },
					}}})
				var e *train.NotFiniteError
				if !errors.As(err, &e) {
					t.Fatalf("got %v, want a NotFiniteError", err)
				}
				if e.Step != c.step || e.Replica != c.replica || e.Example != c.example ||
					!strings.Contains(err.Error(), c.want) {
					t.Errorf("got step %d, replica %d, example %d, %v: want %d, %d, %d, %q", e.Step, e.Replica,
						e.Example, err, c.step, c.replica, c.example, c.want)
				}
				if h.Steps != int(c.step)-1 || trainer.Steps() != c.step-1 {
					t.Errorf("%d steps in the history, %d of the trainer: want %d", h.Steps, trainer.Steps(), c.step-1)
				}
				if after := hash(t, trainer); after != before {
					t.Error("the step that failed changed variables")
				}
			})
		}
	}
}

// masked is a model that adds a frozen variable to its two inputs before a softmax over them, as an attention mask is.
func masked() *gomlx.Model {
	return &gomlx.Model{
		Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
			mask := s.VariableWithValue("mask", []float32{0, 0, float32(math.Inf(-1))}).SetTrainable(false)
			x := in[0]
			logits := graph.Add(graph.ZerosLike(x), graph.ExpandLeftToRank(mask.NodeValue(x.Graph()), 2))
			shares := graph.Softmax(logits, -1)
			return []*graph.Node{layer.Dense(s, graph.Mul(x, shares), 5)}
		},
		Loss: gomlx.SparseCategoricalCrossEntropyLogits, Optimizer: sgd(),
	}
}

// TestNotFiniteFrozen checks that an infinity in a frozen variable is not reported as a cause, and that NaN is, if the
// data are finite.
func TestNotFiniteFrozen(t *testing.T) {
	bad := numbers()
	tensor.Data[float32](bad.Inputs[0])[3*5] = float32(math.NaN())
	var log bytes.Buffer
	trainer := newNumbers(t, masked(), train.Config{
		NotFinite: train.SkipNotFinite,
		Logger:    slog.New(slog.NewTextHandler(&log, nil)),
	})
	h, err := trainer.Fit(t.Context(), fromTensors(bad).Batch(8), train.FitConfig{})
	if err != nil || h.Steps != 3 || h.Skipped != 1 || !strings.Contains(log.String(), "example 5 ") {
		t.Errorf("got %d steps, %d skipped, %v, log %s", h.Steps, h.Skipped, err, log.String())
	}
	if err := trainer.SetVariable("/mask", tensor.Of([]float32{0, float32(math.NaN()), 0}, 3)); err != nil {
		t.Fatal(err)
	}
	const nan = "the frozen variable /mask has NaN: element (1,)"
	if _, err := trainer.Fit(t.Context(), fromTensors(numbers()).Batch(8), train.FitConfig{}); err == nil ||
		!strings.Contains(err.Error(), nan) {
		t.Errorf("NaN in the frozen variable: got %v", err)
	}
	tensor.Data[float32](bad.Inputs[0])[3*3] = float32(math.NaN())
	if _, err := trainer.Evaluate(t.Context(), fromTensors(bad).Batch(8)); err != nil {
		t.Errorf("an evaluation only warns: got %v", err)
	}
}

// TestNotFiniteWeightZero checks the cause if a batch normalization that ignores weights spreads NaN from an example of
// weight 0 to all others.
func TestNotFiniteWeightZero(t *testing.T) {
	m := numbersModel(nil)
	forward := m.Forward
	m.Forward = func(s *model.Scope, in []*graph.Node) []*graph.Node {
		return forward(s, []*graph.Node{layer.BatchNorm(s, in[0])})
	}
	b := numbers()
	tensor.Data[float32](b.Inputs[0])[3*(8+2)+1] = float32(math.NaN())
	b.Weights = tensor.New(tensor.Float32, 24)
	for i := range tensor.Data[float32](b.Weights) {
		tensor.Data[float32](b.Weights)[i] = 1
	}
	tensor.Data[float32](b.Weights)[8+2] = 0
	trainer := newNumbers(t, m, train.Config{})
	_, err := trainer.Fit(t.Context(), fromTensors(b).Batch(8), train.FitConfig{})
	var e *train.NotFiniteError
	if !errors.As(err, &e) || e.Replica != 0 || e.Example != 2 || !strings.Contains(err.Error(),
		"input 0 is not finite: element (1,) is NaN") {
		t.Errorf("got %v", err)
	}
}

// TestNotFiniteSkip checks that skipping gives the same weights as training without those batches, and logs the 1st,
// 2nd, 4th, … of them.
func TestNotFiniteSkip(t *testing.T) {
	b := numbers()
	clean := newNumbers(t, numbersModel(nil), train.Config{})
	sixteen := fromTensors(data.Batch{
		Inputs: []*tensor.Tensor{b.Inputs[0].Rows(0, 16)},
		Labels: []*tensor.Tensor{b.Labels[0].Rows(0, 16)},
	})
	want, err := clean.Fit(t.Context(), sixteen.Batch(8), train.FitConfig{Epochs: 3})
	if err != nil {
		t.Fatal(err)
	}
	tensor.Data[int32](b.Labels[0])[16] = 5
	var log bytes.Buffer
	var problems []int
	trainer := newNumbers(t, numbersModel(nil), train.Config{
		NotFinite: train.SkipNotFinite,
		Logger:    slog.New(slog.NewTextHandler(&log, nil)),
	})
	got, err := trainer.Fit(t.Context(), fromTensors(b).Batch(8), train.FitConfig{
		Epochs: 3,
		Callbacks: []train.Callback{{
			OnStepEnd: func(_ context.Context, s train.Step) error {
				if (s.NotFinite != nil) != (s.Step == 3) || s.Skipped != (s.Step == 3) ||
					math.IsNaN(s.Loss) != (s.Step == 3) {
					t.Errorf("step %d: %+v", s.Step, s)
				}
				if s.NotFinite != nil {
					problems = append(problems, s.NotFinite.Example)
				}
				return nil
			},
		}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if hash(t, trainer) != hash(t, clean) {
		t.Error("a skipped batch changed the weights")
	}
	if got.Steps != 9 || got.Skipped != 3 || trainer.Steps() != 6 || got.Epochs[2].Loss != want.Epochs[2].Loss ||
		len(problems) != 3 || problems[2] != 0 {
		t.Errorf("%d steps, %d skipped, %d made, loss %v, want %v, problems %v", got.Steps, got.Skipped,
			trainer.Steps(), got.Epochs[2].Loss, want.Epochs[2].Loss, problems)
	}
	if lines := strings.Count(log.String(), "the step is skipped"); lines != 2 || !strings.Contains(log.String(),
		"label 0 is 5") {
		t.Errorf("%d lines in the log, want 2, of the 1st and 2nd:\n%s", lines, log.String())
	}
	// A permanent defect cannot be skipped.
	if err := trainer.SetVariable("/a/dense/biases", tensor.Of([]float32{0, float32(math.NaN()), 0, 0},
		4)); err != nil {
		t.Fatal(err)
	}
	if _, err := trainer.Fit(t.Context(), sixteen.Batch(8), train.FitConfig{}); err == nil ||
		!strings.Contains(err.Error(), "/a/dense/biases was not finite before this step") {
		t.Errorf("with a NaN in a variable: %v", err)
	}
}

// TestNotFiniteWarn: WarnNotFinite takes the same steps as training without checks.
func TestNotFiniteWarn(t *testing.T) {
	b := numbers()
	tensor.Data[float32](b.Inputs[0])[2] = float32(math.NaN())
	var log bytes.Buffer
	trainer := newNumbers(t, numbersModel(nil), train.Config{
		NotFinite: train.WarnNotFinite,
		Logger:    slog.New(slog.NewTextHandler(&log, nil)),
	})
	h, err := trainer.Fit(t.Context(), fromTensors(b).Batch(8), train.FitConfig{Epochs: 2})
	if err != nil {
		t.Fatal(err)
	}
	if h.Steps != 6 || h.Skipped != 0 || trainer.Steps() != 6 || !math.IsNaN(h.Epochs[1].Loss) {
		t.Errorf("got %+v after %d steps", h, trainer.Steps())
	}
	weights, err := trainer.Weights(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if tensor.FirstNotFinite(weights[0].Value) < 0 {
		t.Error("the steps were not taken: the weights are finite")
	}
	// The 1st, 2nd and 4th of 6.
	if lines := strings.Count(log.String(), "the step is taken"); lines != 3 || !strings.Contains(log.String(),
		"input 0 is not finite") {
		t.Errorf("%d lines in the log, want 3:\n%s", lines, log.String())
	}
}

// TestNotFiniteEvaluate checks that the error of an evaluation also names the example.
func TestNotFiniteEvaluate(t *testing.T) {
	b := numbers()
	tensor.Data[int32](b.Labels[0])[8+6] = 5
	batches := fromTensors(b).Batch(8)
	trainer := newNumbers(t, numbersModel(nil), train.Config{})
	_, err := trainer.Evaluate(t.Context(), batches)
	var e *train.NotFiniteError
	if !errors.As(err, &e) || e.Replica != 1 || e.Example != 6 || !strings.Contains(err.Error(),
		"the loss of the evaluation after step 0 is NaN: on replica 1 example 6 (counted from 0) of batch 2 of "+
			"the data: label 0 is 5") {
		t.Errorf("got %v", err)
	}
	if _, err = trainer.Fit(t.Context(), fromTensors(numbers()).Batch(8),
		train.FitConfig{Validation: batches}); !errors.As(err, &e) {
		t.Errorf("validation: got %v", err)
	}
	for _, policy := range []train.NotFinitePolicy{train.WarnNotFinite, train.SkipNotFinite} {
		var log bytes.Buffer
		trainer := newNumbers(t, numbersModel(nil), train.Config{
			NotFinite: policy,
			Logger:    slog.New(slog.NewTextHandler(&log, nil)),
		})
		if r, err := trainer.Evaluate(t.Context(), batches); err != nil || !math.IsNaN(r.Loss) ||
			!strings.Contains(log.String(), "the evaluation continues") {
			t.Errorf("%v: got %+v, %v, log %s", policy, r, err, log.String())
		}
	}
}

// fromTensors is data.FromTensors for tensors that have equally many rows. It panics at an error.
func fromTensors(e data.Element) data.Pipeline {
	p, err := data.FromTensors(e)
	if err != nil {
		panic(err)
	}
	return p
}
