package layer_test

import (
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/enginetest"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	"github.com/lockstep-ml/lockstep/tensor"
)

const normRows, normWidth = 6, 3

// normed is a program of one BatchNorm, whose loss is the squared distance from the labels.
func normed(t *testing.T) engine.Program {
	t.Helper()
	return normedBy(t, layer.BatchNorm)
}

func normedBy(t *testing.T, norm func(*model.Scope, *graph.Node) *graph.Node) engine.Program {
	t.Helper()
	e, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: 1})
	if err != nil {
		t.Fatal(err)
	}
	m := &gomlx.Model{
		Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
			shift := s.VariableWithValue("shift", []float32{0.5, -1, 2})
			x := graph.Mul(in[0], graph.ExpandLeftToRank(shift.NodeValue(in[0].Graph()), 2))
			return []*graph.Node{norm(s, x)}
		},
		Loss: gomlx.MeanSquaredError, Optimizer: optimizer.StochasticGradientDescent(),
	}
	f := []engine.Feature{{DType: tensor.Float32, Shape: []int{normWidth}}}
	p, err := m.Compile(t.Context(), e, engine.Spec{Rows: normRows, Inputs: f, Labels: f, Devices: e.Devices()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close(); e.Close() })
	return p
}

func normBatch(used int) engine.Batch {
	x, y := tensor.New(tensor.Float32, normRows, normWidth), tensor.New(tensor.Float32, normRows, normWidth)
	for i := range x.Len() {
		tensor.Data[float32](x)[i] = float32(math.Sin(float64(3*i + 1)))
		tensor.Data[float32](y)[i] = float32(math.Cos(float64(5*i + 2)))
	}
	w := make([]float32, normRows)
	for i := range used {
		w[i] = 1
	}
	return engine.Batch{Inputs: []*tensor.Tensor{x}, Labels: []*tensor.Tensor{y}, Weights: w, Padding: normRows - used}
}

// TestBatchNormValues compares moving averages and the loss with plain Go, with and without padding.
func TestBatchNormValues(t *testing.T) {
	for _, used := range []int{normRows, 4, 1} {
		p := normed(t)
		b := normBatch(used)
		g, err := enginetest.Gradients(t.Context(), p, 0, b, float64(used), [3]uint64{})
		if err != nil {
			t.Fatal(err)
		}
		p.Commit()
		loss := 0.0
		for c, shift := range []float64{0.5, -1, 2} {
			var mean, variance float64
			at := func(i int) float64 { return shift * b.Inputs[0].Float64s()[i*normWidth+c] }
			for i := range used {
				mean += at(i) / float64(used)
			}
			for i := range used {
				variance += (at(i) - mean) * (at(i) - mean) / float64(used)
			}
			for i := range used {
				d := (at(i)-mean)/math.Sqrt(variance+1e-3) - b.Labels[0].Float64s()[i*normWidth+c]
				loss += d * d / normWidth / float64(used)
			}
			near(t, "moving mean", value(t, p, "mean")[c], 0.01*mean)
			near(t, "moving variance", value(t, p, "variance")[c], 0.99+0.01*variance)
		}
		near(t, "loss", g.Loss, loss)
	}
}

// TestBatchNormPadding checks that padding changes no bit, and that a batch without examples changes no average.
func TestBatchNormPadding(t *testing.T) {
	p := normed(t)
	loss := func(b engine.Batch) float64 {
		g, err := enginetest.Gradients(t.Context(), p, 0, b, 4, [3]uint64{})
		if err != nil {
			t.Fatal(err)
		}
		p.Commit()
		return g.Loss
	}
	b := normBatch(4)
	want := loss(b)
	for i := 4 * normWidth; i < normRows*normWidth; i++ {
		tensor.Data[float32](b.Inputs[0])[i] = 1e6
	}
	if got := loss(b); got != want {
		t.Errorf("loss %v with other padding, want %v", got, want)
	}
	before := value(t, p, "mean")
	if got := loss(normBatch(0)); got != 0 {
		t.Errorf("loss %v without examples", got)
	}
	for c, x := range value(t, p, "mean") {
		if x != before[c] {
			t.Errorf("moving mean %v became %v without examples", before[c], x)
		}
	}
}

// TestBatchNormWeights checks that an example counts for mean and variance with any weight, also 0.
func TestBatchNormWeights(t *testing.T) {
	for _, norm := range []func(*model.Scope, *graph.Node) *graph.Node{layer.BatchNorm, layer.SyncBatchNorm} {
		averages := func(weights ...float32) []float64 {
			p := normedBy(t, norm)
			b := normBatch(4)
			copy(b.Weights, weights)
			if _, err := enginetest.Gradients(t.Context(), p, 0, b, 4, [3]uint64{}); err != nil {
				t.Fatal(err)
			}
			p.Commit()
			return append(value(t, p, "mean"), value(t, p, "variance")...)
		}
		want := averages(1, 1, 1, 1)
		if got := averages(2, 0, 0.5, 0); !slices.Equal(got, want) {
			t.Errorf("averages %v of examples with other weights, want %v", got, want)
		}
	}
}

// TestBatchNormOptions checks that momentum and epsilon can be set, and that bad ones are errors.
func TestBatchNormOptions(t *testing.T) {
	with := func(o layer.BatchNormOptions) func(*model.Scope, *graph.Node) *graph.Node {
		return func(s *model.Scope, x *graph.Node) *graph.Node { return layer.BatchNormWith(s, x, o) }
	}
	step := func(o layer.BatchNormOptions) (mean []float64, loss float64) {
		p := normedBy(t, with(o))
		g, err := enginetest.Gradients(t.Context(), p, 0, normBatch(normRows), normRows, [3]uint64{})
		if err != nil {
			t.Fatal(err)
		}
		p.Commit()
		return value(t, p, "mean"), g.Loss
	}
	mean, loss := step(layer.BatchNormOptions{})
	faster, same := step(layer.BatchNormOptions{Momentum: 0.5})
	for c := range mean {
		near(t, "moving mean", faster[c], 50*mean[c])
	}
	near(t, "loss", same, loss)
	// With a huge epsilon the output does not depend on x, and the loss is the mean square of the labels.
	squares := 0.0
	for _, y := range normBatch(normRows).Labels[0].Float64s() {
		squares += y * y / (normRows * normWidth)
	}
	_, loss = step(layer.BatchNormOptions{Epsilon: 1e20})
	near(t, "loss", loss, squares)

	e, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	for _, o := range []layer.BatchNormOptions{{Momentum: 1}, {Momentum: -0.5}, {Epsilon: -1}, {Momentum: math.NaN()}} {
		f := []engine.Feature{{DType: tensor.Float32, Shape: []int{normWidth}}}
		m := &gomlx.Model{
			Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node { return []*graph.Node{with(o)(s, in[0])} },
			Loss:    gomlx.MeanSquaredError, Optimizer: optimizer.StochasticGradientDescent(),
		}
		p, err := m.Compile(t.Context(), e, engine.Spec{Rows: normRows, Inputs: f, Labels: f, Devices: e.Devices()})
		if err == nil {
			p.Close()
		}
		if err == nil || !strings.Contains(err.Error(), "want a momentum between 0 and 1 and a positive epsilon") {
			t.Errorf("%+v: error %v", o, err)
		}
	}
}

// TestBatchNormGradient compares the gradient with respect to what comes before with differences.
func TestBatchNormGradient(t *testing.T) {
	p := normed(t)
	b := normBatch(5)
	at := -1
	for i, v := range p.Parameters() {
		if v.Name == "/shift" {
			at = i
		}
	}
	loss := func(shift []float32) (float64, []float64) {
		if err := p.Write(0, at, tensor.From(shift)); err != nil {
			t.Fatal(err)
		}
		g, err := enginetest.Gradients(t.Context(), p, 0, b, 5, [3]uint64{})
		if err != nil {
			t.Fatal(err)
		}
		return g.Loss, g.Tensors[at].Float64s()
	}
	// Small values, where the epsilon under the root matters: elsewhere the output does not depend on the factor.
	start := []float32{0.03, -0.05, 0.04}
	_, gradient := loss(start)
	const h = 1e-3
	for c := range start {
		up, down := append([]float32{}, start...), append([]float32{}, start...)
		up[c] += h
		down[c] -= h
		u, _ := loss(up)
		d, _ := loss(down)
		if slope := (u - d) / (2 * h); math.Abs(slope-gradient[c]) > 2e-2*math.Max(1, math.Abs(slope)) {
			t.Errorf("gradient %v, slope %v", gradient[c], slope)
		}
	}
}

func near(t *testing.T, what string, got, want float64) {
	t.Helper()
	if math.Abs(got-want) > 2e-5*math.Max(1, math.Abs(want)) {
		t.Errorf("%s is %v, want %v", what, got, want)
	}
}

// value returns the elements of the variable of that name.
func value(t *testing.T, p engine.Program, name string) []float64 {
	t.Helper()
	for i, v := range p.Variables() {
		if strings.HasSuffix(v.Name, "/"+name) {
			x, err := p.Read(0, i)
			if err != nil {
				t.Fatal(err)
			}
			return x.Float64s()
		}
	}
	t.Fatalf("no variable %s in %v", name, p.Variables())
	return nil
}
