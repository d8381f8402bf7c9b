package optimizer_test

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/model/initializer"
	gomlxoptimizer "github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/enginetest"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/optimizer"
	"github.com/lockstep-ml/lockstep/tensor"
)

const width = 3

// The initial values of the model's two variables.
var starts = map[string][]float64{"/one/w": {0.5, -1, 2}, "/two/v": {1, 0, -0.25}}

// line is a program of the model x·w + v, element by element, with the mean of squared differences as its loss, all of
// one type.
func line(t *testing.T, dtype tensor.DType, o gomlxoptimizer.Interface, bucketBytes int,
	params map[string]any,
) engine.Program {
	t.Helper()
	e, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	p, err := compileLine(t, e, dtype, o, bucketBytes, params)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

func compileLine(
	t *testing.T, e engine.Engine, dtype tensor.DType, o gomlxoptimizer.Interface, bucketBytes int, params map[string]any,
) (engine.Program, error) {
	t.Helper()
	m := &gomlx.Model{
		Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
			x := in[0]
			value := func(scope, name string) *graph.Node {
				v := s.In("%s", scope).WithInitializer(initializer.Zero).VariableWithShape(name, shapes.Make(x.DType(), width))
				return graph.ExpandLeftToRank(v.NodeValue(x.Graph()), 2)
			}
			return []*graph.Node{graph.Add(graph.Mul(x, value("one", "w")), value("two", "v"))}
		},
		Loss: gomlx.MeanSquaredError, Optimizer: o, Params: params,
	}
	f := []engine.Feature{{DType: dtype, Shape: []int{width}}}
	p, err := m.Compile(t.Context(), e, engine.Spec{
		Rows: 1, Inputs: f, Labels: f, Devices: e.Devices(), Replicas: 2, BucketBytes: bucketBytes,
	})
	if err != nil {
		return nil, err
	}
	for i, v := range p.Variables() {
		if start, ok := starts[v.Name]; ok {
			if err := p.Write(0, i, array(dtype, start...)); err != nil {
				t.Fatal(err)
			}
		}
	}
	return p, nil
}

func array(dtype tensor.DType, x ...float64) *tensor.Tensor {
	t := tensor.New(dtype, len(x))
	for i, v := range x {
		switch dtype {
		case tensor.Float64:
			tensor.Data[float64](t)[i] = v
		case tensor.BFloat16:
			tensor.Data[tensor.BF16](t)[i] = tensor.BF16From(float32(v))
		default:
			tensor.Data[float32](t)[i] = float32(v)
		}
	}
	return t
}

// example returns the example of a step: some numbers, and every third step one whose gradients are tiny.
func example(step int) (x, y []float64) {
	for i := range width {
		x = append(x, math.Sin(float64(3*step+i+1)))
		y = append(y, math.Cos(float64(5*step+2*i)))
		if step%3 == 2 {
			x[i] *= 1e-6
		}
	}
	return x, y
}

// makeStep makes one step of the program.
func makeStep(t *testing.T, p engine.Program, dtype tensor.DType, step int) {
	t.Helper()
	x, y := example(step)
	b := engine.Batch{
		Inputs:  []*tensor.Tensor{array(dtype, x...).Reshape(1, width)},
		Labels:  []*tensor.Tensor{array(dtype, y...).Reshape(1, width)},
		Weights: []float32{1},
	}
	if _, err := enginetest.Gradients(t.Context(), p, 0, b, 1, [3]uint64{}); err != nil {
		t.Fatal(err)
	}
	if err := enginetest.Update(t.Context(), p, 0, 0); err != nil {
		t.Fatal(err)
	}
	p.Commit()
}

func read(t *testing.T, p engine.Program, name string) []float64 {
	t.Helper()
	i := slices.IndexFunc(p.Variables(), func(v engine.Variable) bool { return v.Name == name })
	if i < 0 {
		t.Fatalf("no variable %s in %v", name, p.Variables())
	}
	value, err := p.Read(0, i)
	if err != nil {
		t.Fatal(err)
	}
	return value.Float64s()
}

// element is one number of a variable with its slots, updated by a plain loop.
type element struct{ w, a, b, c float64 }

// cosine is Keras' CosineDecay.
func cosine(initial float64, steps int, alpha float64, step int) float64 {
	done := float64(min(step, steps)) / float64(steps)
	return initial * ((1-alpha)*0.5*(1+math.Cos(math.Pi*done)) + alpha)
}

// TestLikeThePaper compares every optimizer with plain Go in float64, over 12 steps, as one pack and as two.
func TestLikeThePaper(t *testing.T) {
	sgd := func(rate, momentum float64, nesterov bool) func(*element, float64, int) {
		return func(e *element, g float64, _ int) {
			e.a = momentum*e.a - rate*g
			if nesterov {
				e.w += momentum*e.a - rate*g
			} else {
				e.w += e.a
			}
		}
	}
	adam := func(rate func(step int) float64, beta1, beta2, epsilon, decay float64) func(*element, float64, int) {
		return func(e *element, g float64, step int) {
			e.w -= rate(step) * decay * e.w
			e.a, e.b = beta1*e.a+(1-beta1)*g, beta2*e.b+(1-beta2)*g*g
			n := float64(step + 1)
			corrected := rate(step) * math.Sqrt(1-math.Pow(beta2, n)) / (1 - math.Pow(beta1, n))
			e.w -= corrected * e.a / (math.Sqrt(e.b) + epsilon)
		}
	}
	rms := func(rate, rho, momentum, epsilon, decay float64, centered bool) func(*element, float64, int) {
		return func(e *element, g float64, _ int) {
			e.w -= rate * decay * e.w
			e.a, e.b = rho*e.a+(1-rho)*g*g, rho*e.b+(1-rho)*g
			v := e.a
			if centered {
				v -= e.b * e.b
			}
			e.c = momentum*e.c + rate*g/math.Sqrt(v+epsilon)
			e.w -= e.c
		}
	}
	constant := func(rate float64) func(int) float64 { return func(int) float64 { return rate } }
	for _, test := range []struct {
		name string
		made func() gomlxoptimizer.Interface
		want func(e *element, g float64, step int)
	}{
		{"sgd", func() gomlxoptimizer.Interface { return optimizer.SGD().LearningRate(0.3).Done() }, sgd(0.3, 0, false)},
		{"sgd by default", func() gomlxoptimizer.Interface { return optimizer.SGD().Done() }, sgd(0.01, 0, false)},
		{
			"nesterov without momentum",
			func() gomlxoptimizer.Interface { return optimizer.SGD().Nesterov(true).Done() },
			sgd(0.01, 0, true),
		},
		{
			"momentum", func() gomlxoptimizer.Interface { return optimizer.SGD().LearningRate(0.2).Momentum(0.9).Done() },
			sgd(0.2, 0.9, false),
		},
		{
			"nesterov", func() gomlxoptimizer.Interface {
				return optimizer.SGD().LearningRate(0.2).Momentum(0.8).Nesterov(true).Done()
			},
			sgd(0.2, 0.8, true),
		},
		{
			"momentum with a schedule",
			func() gomlxoptimizer.Interface {
				return optimizer.SGD().Schedule(optimizer.CosineDecay(0.5, 7, 0.1)).Momentum(0.9).Done()
			},
			func(e *element, g float64, step int) { sgd(cosine(0.5, 7, 0.1, step), 0.9, false)(e, g, step) },
		},
		{
			"adam by default",
			func() gomlxoptimizer.Interface { return optimizer.Adam().Done() },
			adam(constant(0.001), 0.9, 0.999, 1e-7, 0),
		},
		{
			"adam", func() gomlxoptimizer.Interface {
				return optimizer.Adam().LearningRate(0.1).Betas(0.7, 0.95).Epsilon(1e-3).Done()
			},
			adam(constant(0.1), 0.7, 0.95, 1e-3, 0),
		},
		{
			"adamw with a schedule",
			func() gomlxoptimizer.Interface {
				return optimizer.Adam().Schedule(optimizer.CosineDecay(0.05, 12, 0)).WeightDecay(0.3).Done()
			},
			adam(func(step int) float64 { return cosine(0.05, 12, 0, step) }, 0.9, 0.999, 1e-7, 0.3),
		},
		{
			"rmsprop by default",
			func() gomlxoptimizer.Interface { return optimizer.RMSProp().Done() },
			rms(0.001, 0.9, 0, 1e-7, 0, false),
		},
		{
			"rmsprop", func() gomlxoptimizer.Interface {
				return optimizer.RMSProp().LearningRate(0.05).Rho(0.6).Epsilon(1e-2).WeightDecay(0.1).Done()
			},
			rms(0.05, 0.6, 0, 1e-2, 0.1, false),
		},
		{
			"rmsprop, centered, with momentum",
			func() gomlxoptimizer.Interface {
				return optimizer.RMSProp().LearningRate(0.05).Momentum(0.5).Centered(true).Done()
			},
			rms(0.05, 0.9, 0.5, 1e-7, 0, true),
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			one, two := line(t, tensor.Float64, test.made(), 0, nil), line(t, tensor.Float64, test.made(), 1, nil)
			if n := len(two.Parts(0)); n != 2 {
				t.Fatalf("%d parts, want 2", n)
			}
			want := map[string][]element{}
			for name, start := range starts {
				for _, w := range start {
					want[name] = append(want[name], element{w: w})
				}
			}
			for step := range 12 {
				makeStep(t, one, tensor.Float64, step)
				makeStep(t, two, tensor.Float64, step)
				x, y := example(step)
				for i := range width {
					w, v := &want["/one/w"][i], &want["/two/v"][i]
					g := 2 * (x[i]*w.w + v.w - y[i]) / width
					test.want(w, g*x[i], step)
					test.want(v, g, step)
				}
				for name, elements := range want {
					for i, e := range elements {
						a, b := read(t, one, name)[i], read(t, two, name)[i]
						if math.Abs(a-e.w) > 1e-12 {
							t.Fatalf("step %d: %s[%d] is %v, want %v", step+1, name, i, a, e.w)
						}
						if a != b {
							t.Fatalf("step %d: %s[%d] is %v with two parts, %v with one", step+1, name, i, b, a)
						}
					}
				}
			}
		})
	}
}

// TestStateIsTheOptimizers checks that the state of an optimizer has the documented names, and is not a weight of the
// model.
func TestStateIsTheOptimizers(t *testing.T) {
	for _, test := range []struct {
		made gomlxoptimizer.Interface
		want string
	}{
		{optimizer.SGD().Done(), ""},
		{optimizer.SGD().Momentum(0.5).Done(), "/SGD/one/w_momentum /SGD/two/v_momentum "},
		{
			optimizer.Adam().Done(),
			"/Adam/one/w_1st_moment /Adam/one/w_2nd_moment /Adam/two/v_1st_moment /Adam/two/v_2nd_moment ",
		},
		{optimizer.RMSProp().Done(), "/RMSProp/one/w_mean_square /RMSProp/two/v_mean_square "},
		{
			optimizer.RMSProp().Centered(true).Momentum(0.5).Done(),
			"/RMSProp/one/w_mean /RMSProp/one/w_mean_square /RMSProp/one/w_momentum " +
				"/RMSProp/two/v_mean /RMSProp/two/v_mean_square /RMSProp/two/v_momentum ",
		},
	} {
		p := line(t, tensor.Float32, test.made, 0, nil)
		var slots []string
		for _, v := range p.Variables() {
			if v.Role == engine.Slot {
				slots = append(slots, v.Name)
			}
		}
		want := test.want + "/global_step /optimizers/learning_rate"
		if got := strings.Join(slots, " "); got != want {
			t.Errorf("%v has slots %s, want %s", test.made, got, want)
		}
	}
}

// TestLearningRate checks that the rate is the option, else GoMLX's hyperparameter, and that it can be written between
// steps and by a schedule.
func TestLearningRate(t *testing.T) {
	const name = "/optimizers/learning_rate"
	params := map[string]any{"learning_rate": 0.25}
	for _, test := range []struct {
		made gomlxoptimizer.Interface
		want float64
	}{
		{optimizer.SGD().Done(), 0.25},
		{optimizer.SGD().LearningRate(0.5).Done(), 0.5},
		{optimizer.Adam().Done(), 0.25},
		{optimizer.RMSProp().LearningRate(2).Done(), 2},
	} {
		if got := read(t, line(t, tensor.Float64, test.made, 0, params), name)[0]; got != test.want {
			t.Errorf("%v has a rate of %v, want %v", test.made, got, test.want)
		}
	}

	p := line(t, tensor.Float64, optimizer.SGD().LearningRate(0.5).Done(), 0, nil)
	i := slices.IndexFunc(p.Variables(), func(v engine.Variable) bool { return v.Name == name })
	if err := p.Write(0, i, tensor.Scalar(0.0)); err != nil {
		t.Fatal(err)
	}
	makeStep(t, p, tensor.Float64, 0)
	if got := read(t, p, "/one/w"); !slices.Equal(got, starts["/one/w"]) {
		t.Errorf("a step with a rate of 0 gives %v, from %v", got, starts["/one/w"])
	}

	p = line(t, tensor.Float64, optimizer.SGD().Schedule(optimizer.CosineDecay(0.5, 4, 0.1)).Done(), 0, nil)
	for step := range 6 {
		makeStep(t, p, tensor.Float64, step)
		if got, want := read(t, p, name)[0], cosine(0.5, 4, 0.1, step); math.Abs(got-want) > 1e-15 {
			t.Errorf("step %d has a rate of %v, want %v", step, got, want)
		}
	}
}

// TestHyperparameters checks that GoMLX's hyperparameters for clipping are used.
func TestHyperparameters(t *testing.T) {
	p := line(t, tensor.Float64, optimizer.SGD().LearningRate(1).Done(), 0, map[string]any{"clip_step_by_value": 1e-3})
	makeStep(t, p, tensor.Float64, 0)
	for i, w := range read(t, p, "/one/w") {
		if d := math.Abs(w - starts["/one/w"][i]); math.Abs(d-1e-3) > 1e-15 {
			t.Errorf("element %d moves by %v, want 0.001", i, d)
		}
	}
}

// TestMistakes checks that invalid options are errors of Compile.
func TestMistakes(t *testing.T) {
	e, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	for _, test := range []struct {
		made gomlxoptimizer.Interface
		want string
	}{
		{optimizer.SGD().Momentum(1).Done(), "optimizer SGD: momentum 1: want at least 0, and below 1"},
		{optimizer.SGD().Momentum(math.NaN()).Done(), "optimizer SGD: momentum NaN"},
		{optimizer.SGD().WeightDecay(-1).Done(), "optimizer SGD: weight decay -1: want 0 or more"},
		{optimizer.Adam().Betas(0.9, 1).Done(), "optimizer Adam: beta2 1: want at least 0, and below 1"},
		{optimizer.Adam().Epsilon(-1).Done(), "optimizer Adam: epsilon -1: want 0 or more"},
		{optimizer.RMSProp().Rho(-0.1).Done(), "optimizer RMSProp: rho -0.1: want at least 0, and below 1"},
		{optimizer.RMSProp().LearningRate(math.Inf(1)).Done(), "optimizer RMSProp: learning rate +Inf: want a finite number"},
		{optimizer.EMA(optimizer.SGD().Done(), optimizer.EMAConfig{Momentum: 1}), "optimizer EMA: momentum 1: want at least"},
	} {
		p, err := compileLine(t, e, tensor.Float64, test.made, 1, nil)
		if err == nil {
			p.Close()
		}
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("got error %v, want %q", err, test.want)
		}
	}
	defer func() {
		if got := fmt.Sprint(recover()); got != "optimizer: CosineDecay over 0 steps: want at least 1" {
			t.Errorf("CosineDecay panics with %s", got)
		}
	}()
	optimizer.CosineDecay(1, 0, 0)
}

// TestHalfWidth checks that parameters of bfloat16 have state of float32, which a small gradient still changes.
func TestHalfWidth(t *testing.T) {
	p := line(t, tensor.BFloat16, optimizer.Adam().LearningRate(0.25).Done(), 0, nil)
	for step := range 3 {
		makeStep(t, p, tensor.BFloat16, step)
	}
	for _, v := range p.Variables() {
		want := tensor.Float32
		if v.Role == engine.Parameter {
			want = tensor.BFloat16
		}
		if v.DType != want && v.Name != "/global_step" {
			t.Errorf("%s is %v, want %v", v.Name, v.DType, want)
		}
	}
	for i, x := range read(t, p, "/Adam/one/w_2nd_moment") {
		if before := starts["/one/w"][i]; !(x > 0) || math.Abs(read(t, p, "/one/w")[i]-before) < 0.1 {
			t.Errorf("element %d has a second moment of %v and moved from %v to %v",
				i, x, before, read(t, p, "/one/w")[i])
		}
	}
}
