package gomlx_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/model/initializer"
	"github.com/gomlx/gomlx/ml/train"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/enginetest"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	"github.com/lockstep-ml/lockstep/internal/race"
	"github.com/lockstep-ml/lockstep/tensor"
)

// dense is a model of one dense layer, which tests change.
func dense(around func(s *model.Scope, x *graph.Node) *graph.Node) *gomlx.Model {
	return &gomlx.Model{
		Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
			x := in[0]
			if around != nil {
				x = around(s, x)
			}
			return []*graph.Node{layers.Dense(s, x, true, 3)}
		},
		Loss:      gomlx.SparseCategoricalCrossEntropyLogits,
		Optimizer: optimizer.StochasticGradientDescent().WithDecay(false).WithLearningRate(0.1),
	}
}

// onlyLoss is an optimizer that cannot take given gradients.
type onlyLoss struct{ optimizer.Interface }

func (onlyLoss) UpdateGraph(*model.Scope, *graph.Graph, *graph.Node) {}
func (onlyLoss) Clear(*model.Scope) error                            { return nil }

func TestCompileErrors(t *testing.T) {
	e := openEngine(t, "go", 1)
	for _, test := range []struct {
		name   string
		change func(m *gomlx.Model)
		want   string
	}{
		{"no model function", func(m *gomlx.Model) { m.Forward = nil }, "Forward is nil"},
		{"no loss", func(m *gomlx.Model) { m.Loss = nil }, "Loss is nil"},
		{"no optimizer", func(m *gomlx.Model) { m.Optimizer = nil }, "Optimizer is nil"},
		{"optimizer without gradients", func(m *gomlx.Model) { m.Optimizer = onlyLoss{} }, "gomlx_test.onlyLoss"},
		{"nameless metric", func(m *gomlx.Model) { m.Metrics = []gomlx.Metric{{}} }, "Metrics[0]"},
		{"metric twice", func(m *gomlx.Model) {
			m.Metrics = []gomlx.Metric{gomlx.SparseCategoricalAccuracy(), gomlx.CategoricalAccuracy()}
		}, `"accuracy"`},
		{"no prediction", func(m *gomlx.Model) {
			m.Forward = func(*model.Scope, []*graph.Node) []*graph.Node { return nil }
		}, "no prediction"},
		{"nil prediction", func(m *gomlx.Model) {
			m.Forward = func(*model.Scope, []*graph.Node) []*graph.Node { return []*graph.Node{nil} }
		}, "nil as prediction 0"},
		{"other rows", func(m *gomlx.Model) {
			m.Forward = func(s *model.Scope, in []*graph.Node) []*graph.Node {
				return []*graph.Node{graph.ReduceAllSum(layers.Dense(s, in[0], true, 3))}
			}
		}, "4 rows"},
		{"nothing trained", func(m *gomlx.Model) {
			m.Forward = func(_ *model.Scope, in []*graph.Node) []*graph.Node { return in }
		}, "no trainable variable"},
		{"loss that is a sum", func(m *gomlx.Model) {
			m.Loss = func(_, p []*graph.Node) *graph.Node { return graph.ReduceAllSum(p[0]) }
		}, "one number per example"},
		{"loss of two types", func(m *gomlx.Model) {
			m.Forward = func(s *model.Scope, in []*graph.Node) []*graph.Node {
				x := layers.Dense(s, in[0], true, 3)
				if s.IsTraining(x.Graph()) {
					x = graph.ConvertDType(x, dtypes.Float64)
				}
				return []*graph.Node{x}
			}
		}, "Float64 in training and Float32 in inference"},
		{"integer loss", func(m *gomlx.Model) {
			m.Loss = func(l, _ []*graph.Node) *graph.Node { return l[0] }
		}, "floating-point"},
		{"metric of no shape", func(m *gomlx.Model) {
			m.Metrics = []gomlx.Metric{{Name: "odd", PerExample: func(_, p []*graph.Node) *graph.Node { return p[0] }}}
		}, "metric odd"},
		{"metric of another number of sums", func(m *gomlx.Model) {
			metric := gomlx.ConfusionMatrix(3)
			metric.Sums++
			m.Metrics = []gomlx.Metric{metric}
		}, "metric confusion_matrix gives (Float32)[4, 9]: want 10 numbers per example, shape (4, 10)"},
		{"another main loss", func(m *gomlx.Model) {
			*m = *dense(func(_ *model.Scope, x *graph.Node) *graph.Node {
				train.AddMainLoss(graph.ReduceAllMean(x))
				return x
			})
		}, "AddMainLoss"},
		{"trained variable changed", func(m *gomlx.Model) {
			*m = *dense(func(s *model.Scope, x *graph.Node) *graph.Node {
				v := s.VariableWithShape("own", shapes.Make(dtypes.Float32))
				v.SetNodeValue(graph.OnePlus(v.NodeValue(x.Graph())))
				return graph.Add(x, v.NodeValue(x.Graph()))
			})
		}, "/own"},
		{"another parameter", func(m *gomlx.Model) {
			*m = *dense(func(_ *model.Scope, x *graph.Node) *graph.Node {
				return graph.Add(x, graph.Parameter(x.Graph(), "mine", shapes.Make(dtypes.Float32)))
			})
		}, `"mine"`},
	} {
		t.Run(test.name, func(t *testing.T) {
			m := dense(nil)
			test.change(m)
			p, err := m.Compile(t.Context(), e, features(e, 4, 5))
			if err == nil {
				p.Close()
				t.Fatal("compiled")
			}
			if !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %q does not mention %q", err, test.want)
			}
		})
	}
}

func TestCompileForAnotherEngine(t *testing.T) {
	var e engine.Engine = otherEngine{}
	if _, err := dense(nil).Compile(t.Context(), e, engine.Spec{}); err == nil ||
		!strings.Contains(err.Error(), "otherEngine") {
		t.Errorf("error %v does not name the engine", err)
	}
}

type otherEngine struct{ engine.Engine }

func TestOpenByName(t *testing.T) {
	if _, err := gomlx.Open("torch", gomlx.Options{}); err == nil || !strings.Contains(err.Error(), "go, xla") {
		t.Errorf("error %v does not list the engines", err)
	}
	if _, err := gomlx.Open("go", gomlx.Options{Devices: -1}); err == nil {
		t.Error("opened an engine with -1 devices")
	}
	e := openEngine(t, "go", 0)
	if got, want := len(e.Devices()), runtime.GOMAXPROCS(0); got != want {
		t.Errorf("%d devices by default, want one per core, %d", got, want)
	}
}

// TestErrorsSayWhere checks that a mistake in a model function is reported with its file and line, whichever package
// detects it.
func TestErrorsSayWhere(t *testing.T) {
	e := openEngine(t, "go", 1)
	var line int
	here := func() { _, _, line, _ = runtime.Caller(1) }
	for _, test := range []struct {
		name  string
		layer func(s *model.Scope, x *graph.Node) *graph.Node
	}{
		{"GoMLX's panic", func(_ *model.Scope, x *graph.Node) *graph.Node {
			here()
			return graph.Concatenate([]*graph.Node{x, graph.Ones(x.Graph(), shapes.Make(dtypes.Float64, 2))}, 0)
		}},
		{"a layer's panic", func(_ *model.Scope, x *graph.Node) *graph.Node {
			here()
			return layer.MaxPool2D(x)
		}},
		{"a panic in the standard library", func(s *model.Scope, x *graph.Node) *graph.Node {
			here()
			return layers.Dense(s.In("%s", strings.Repeat("x", -1)), x, true, 3)
		}},
		{"own panic", func(*model.Scope, *graph.Node) *graph.Node {
			here()
			panic("oh")
		}},
		{"nil pointer", func(_ *model.Scope, _ *graph.Node) *graph.Node {
			var n []*graph.Node
			here()
			return n[3]
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := dense(test.layer).Compile(t.Context(), e, features(e, 4, 5))
			var at *gomlx.ModelError
			if !errors.As(err, &at) {
				t.Fatalf("error %v is no ModelError", err)
			}
			if filepath.Base(at.File) != "model_test.go" || at.Line != line+1 {
				t.Errorf("at %s:%d, want model_test.go:%d: %v", at.File, at.Line, line+1, err)
			}
			if at.Cause == nil || at.Unwrap() != at.Cause || !strings.Contains(err.Error(), "model_test.go") {
				t.Errorf("error %q", err)
			}
		})
	}
}

// TestErrorsOutsideTheUsersCode checks that no place is named where the user's code did not panic.
func TestErrorsOutsideTheUsersCode(t *testing.T) {
	e := openEngine(t, "go", 1)
	m := dense(nil)
	m.Forward = func(s *model.Scope, in []*graph.Node) []*graph.Node { // GoMLX has no gradient for Rsqrt
		return []*graph.Node{graph.Rsqrt(graph.OnePlus(graph.Square(layers.Dense(s, in[0], true, 3))))}
	}
	_, err := m.Compile(t.Context(), e, features(e, 4, 5))
	var at *gomlx.ModelError
	if !errors.As(err, &at) || at.File != "" || !strings.Contains(err.Error(), "Rsqrt") {
		t.Errorf("error %v: want one that mentions Rsqrt and no file", err)
	}
}

// TestAccidentsSayWhere checks that a panic inside the backend, whose message names no place, names the operation, and
// that the program can be used afterwards. Integers divided by 0 are not an accident on XLA.
func TestAccidentsSayWhere(t *testing.T) {
	e := openEngine(t, "go", 1)
	m := dense(nil)
	m.Forward = func(s *model.Scope, in []*graph.Node) []*graph.Node {
		quotients := graph.Div(graph.MulScalar(graph.OnesLike(in[0]), 12), in[0])
		return []*graph.Node{layers.Dense(s, graph.ConvertDType(quotients, dtypes.Float32), true, 3)}
	}
	s := features(e, 4, 5)
	s.Inputs[0].DType = tensor.Int32
	p := compile(t, m, e, s)
	b := randomBatch(1, 4, 5, 3)
	b.Inputs[0] = tensor.New(tensor.Int32, 4, 5)
	divisors := tensor.Data[int32](b.Inputs[0])
	for i := range divisors {
		divisors[i] = int32(i + 1)
	}
	trainStep(t, p, []engine.Batch{b}, 4)
	divisors[2] = 0
	_, err := enginetest.Gradients(t.Context(), p, 0, b, 4, [3]uint64{})
	var at *gomlx.ModelError
	if !errors.As(err, &at) || at.File != "" || !strings.Contains(err.Error(), "Div(Int32)") ||
		!strings.Contains(err.Error(), "divide by zero") {
		t.Errorf("error %v: want one that names the operation", err)
	}
	p.Discard()
	divisors[2] = 6
	trainStep(t, p, []engine.Batch{b}, 4)
}

// TestOutputsThatAreArguments checks programs that return their arguments, one result twice, and constants: no result
// may share memory that the next call writes.
func TestOutputsThatAreArguments(t *testing.T) {
	m := dense(nil)
	m.Forward = func(s *model.Scope, in []*graph.Node) []*graph.Node {
		g, zero := in[0].Graph(), s.WithInitializer(initializer.Zero)
		last := zero.VariableWithShape("last", in[0].Shape()).SetTrainable(false)
		fixed := zero.VariableWithShape("fixed", shapes.Make(dtypes.Float32)).SetTrainable(false)
		if s.IsTraining(g) {
			last.SetNodeValue(in[0])
			fixed.SetNodeValue(graph.Scalar(g, dtypes.Float32, 3))
		}
		a, b := zero.VariableWithShape("a", shapes.Make(dtypes.Float32, 3)), zero.VariableWithShape("b",
			shapes.Make(dtypes.Float32, 3))
		bias := graph.ExpandLeftToRank(graph.Add(a.NodeValue(g), b.NodeValue(g)), 2) // one gradient for both
		return []*graph.Node{graph.Add(layers.Dense(s, in[0], true, 3), bias), in[0], in[0], last.NodeValue(g)}
	}
	eachEngine(t, 1, func(t *testing.T, e engine.Engine) {
		p := compile(t, m, e, features(e, 4, 5))
		var want *tensor.Tensor
		check := func(when string) {
			t.Helper()
			if got := readVariable(t, p, 0, variable(t, p, "/last")); !got.Equal(want) {
				t.Errorf("%s: the kept input is %v, want %v", when, got, want)
			}
			if got := readVariable(t, p, 0, variable(t, p, "/fixed")).Float64s()[0]; got != 3 {
				t.Errorf("%s: the constant is %v", when, got)
			}
			if !readVariable(t, p, 0, variable(t, p, "/a")).Equal(readVariable(t, p, 0, variable(t, p, "/b"))) {
				t.Errorf("%s: two parameters of one gradient differ", when)
			}
		}
		for step := range uint64(4) {
			b := randomBatch(step, 4, 5, 3)
			trainStep(t, p, []engine.Batch{b}, 4)
			want = b.Inputs[0]
			check("after a step")
			other := randomBatch(100+step, 4, 5, 3)
			if _, err := enginetest.Gradients(t.Context(), p, 0, other, 4, [3]uint64{}); err != nil {
				t.Fatal(err)
			}
			p.Discard()
			check("after a step that was discarded")
			out, err := p.Predict(t.Context(), 0, other.Inputs)
			if err != nil {
				t.Fatal(err)
			}
			if !out[1].Equal(other.Inputs[0]) || !out[2].Equal(other.Inputs[0]) || !out[3].Equal(want) {
				t.Errorf("predicted %v, want the input twice and the kept value", out[1:])
			}
			check("after a prediction")
		}
	})
}

// TestVersions checks that the versions that an engine's description names are those of go.mod.
func TestVersions(t *testing.T) {
	mod, err := os.ReadFile(filepath.Join("..", "..", "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	for path, version := range gomlx.Versions {
		if !strings.Contains(string(mod), path+" "+version+"\n") {
			t.Errorf("go.mod does not require %s %s", path, version)
		}
	}
}

// TestInitialValuesAreTheHosts checks that engines start from the same bits, also with initialisers of the user's.
func TestInitialValuesAreTheHosts(t *testing.T) {
	m := dense(func(s *model.Scope, x *graph.Node) *graph.Node {
		x = layers.Dense(s.In("glorot").WithInitializer(initializer.GlorotUniformFn(s)), x, true, 7)
		own := func(g *graph.Graph, shape shapes.Shape) *graph.Node {
			return graph.MulScalar(graph.Sin(s.RandomNormal(g, shape)), 0.1)
		}
		return layers.Dense(s.In("own").WithInitializer(own), x, true, 7)
	})
	var want []*tensor.Tensor
	eachEngine(t, 1, func(t *testing.T, e engine.Engine) {
		p := compile(t, m, e, features(e, 4, 5))
		var got []*tensor.Tensor
		for i, v := range p.Variables() {
			x := readVariable(t, p, 0, i)
			got = append(got, x)
			if strings.HasSuffix(v.Name, "weights") && slices.Max(x.Float64s()) == slices.Min(x.Float64s()) {
				t.Errorf("%s is constant", v.Name)
			}
		}
		if want == nil {
			want = got
			return
		}
		for i, v := range p.Variables() {
			if !got[i].Equal(want[i]) {
				t.Errorf("%s differs between the engines", v.Name)
			}
		}
	})
}

// TestRolesOfVariables puts one variable of each kind into a model.
func TestRolesOfVariables(t *testing.T) {
	m := dense(func(s *model.Scope, x *graph.Node) *graph.Node {
		g := x.Graph()
		scale := s.VariableWithValue("scale", float32(2)).SetTrainable(false) // never changes
		x = graph.Mul(x, scale.NodeValue(g))
		count := s.VariableWithValue("count", int64(0)) // an integer is not a parameter, although it is marked as trainable
		if s.IsTraining(g) {
			count.SetNodeValue(graph.OnePlus(count.NodeValue(g)))
			x = layers.DropoutStatic(s, x, 0.5)
			s.Store().GetVariable("/" + model.RNGStateVariableName).SetTrainable(true) // as after GoMLX's checkpoints
		}
		return graph.Add(x, graph.MulScalar(graph.ConvertDType(count.NodeValue(g), dtypes.Float32), 0))
	})
	m.Optimizer = optimizer.Adam().Done()
	e := openEngine(t, "go", 1)
	p := compile(t, m, e, features(e, 4, 5))
	want := map[string]engine.Role{
		"/dense/weights": engine.Parameter, "/dense/biases": engine.Parameter,
		"/AdamOptimizer/dense/weights_1st_moment": engine.Slot, "/AdamOptimizer/dense/weights_2nd_moment": engine.Slot,
		"/AdamOptimizer/dense/biases_1st_moment": engine.Slot, "/AdamOptimizer/dense/biases_2nd_moment": engine.Slot,
		"/AdamOptimizer/step": engine.Slot, "/global_step": engine.Slot, "/optimizers/learning_rate": engine.Slot,
		"/count": engine.Average, "/scale": engine.Frozen,
	}
	for _, v := range p.Variables() {
		role, ok := want[v.Name]
		if !ok || role != v.Role {
			t.Errorf("%s has role %v, want %v", v.Name, v.Role, role)
		}
		delete(want, v.Name)
	}
	if len(want) > 0 {
		t.Errorf("missing: %v", want)
	}
	for range 3 {
		trainStep(t, p, []engine.Batch{randomBatch(1, 4, 5, 3)}, 4)
	}
	if got := tensor.Data[int64](readVariable(t, p, 0, variable(t, p, "/count")))[0]; got != 3 {
		t.Errorf("the model's counter is %d after 3 steps", got)
	}
	if got := tensor.Data[int64](readVariable(t, p, 0, variable(t, p, "/global_step")))[0]; got != 3 {
		t.Errorf("the step is %d after 3 steps", got)
	}
}

// TestLearningRateCanBeWritten checks that the learning rate is a variable that the next step reads.
func TestLearningRateCanBeWritten(t *testing.T) {
	e := openEngine(t, "go", 1)
	p := compile(t, dense(nil), e, features(e, 4, 5))
	if err := p.Write(0, variable(t, p, "/optimizers/learning_rate"), tensor.Scalar(float32(0))); err != nil {
		t.Fatal(err)
	}
	before := readVariable(t, p, 0, 0)
	trainStep(t, p, []engine.Batch{randomBatch(1, 4, 5, 3)}, 4)
	if !readVariable(t, p, 0, 0).Equal(before) {
		t.Error("a step with learning rate 0 changed the parameters")
	}
}

// TestSGDDecays documents that GoMLX's SGD divides its learning rate by the square root of the step by default.
func TestSGDDecays(t *testing.T) {
	e := openEngine(t, "go", 1)
	moves := func(o optimizer.Interface) (list []float64) {
		m := dense(nil)
		m.Optimizer = o
		p := compile(t, m, e, features(e, 4, 5))
		b := randomBatch(1, 4, 5, 3)
		start := readVariable(t, p, 0, 0)
		for range 4 {
			if err := p.Write(0, 0, start); err != nil { // the same gradients each time
				t.Fatal(err)
			}
			if err := p.Write(0, 1, tensor.New(tensor.Float32, 5, 3)); err != nil {
				t.Fatal(err)
			}
			trainStep(t, p, []engine.Batch{b}, 4)
			list = append(list, math.Abs(readVariable(t, p, 0, 0).Float64s()[0]-start.Float64s()[0]))
		}
		return list
	}
	decayed := moves(optimizer.StochasticGradientDescent().WithLearningRate(0.1))
	constant := moves(optimizer.StochasticGradientDescent().WithLearningRate(0.1).WithDecay(false))
	if r := decayed[3] / decayed[0]; math.Abs(r-0.5) > 1e-3 {
		t.Errorf("step 4 is %v of step 1 by default, want 1/sqrt(4)", r)
	}
	if r := constant[3] / constant[0]; math.Abs(r-1) > 1e-3 {
		t.Errorf("step 4 is %v of step 1 without decay, want 1", r)
	}
}

// TestHooksMakeOnePart checks that per-step updates of layers run in one update program, after the optimizer.
func TestHooksMakeOnePart(t *testing.T) {
	m := dense(nil)
	m.Params = map[string]any{"l1_regularization": 10.0}
	e := openEngine(t, "go", 1)
	s := features(e, 4, 5)
	s.Replicas, s.BucketBytes = 2, 1
	p := compile(t, m, e, s)
	if n := len(p.Parts(0)); n != 1 || len(p.Buckets()) != 2 {
		t.Errorf("%d parts of %d buckets, want 1 of 2", n, len(p.Buckets()))
	}
	trainStep(t, p, []engine.Batch{randomBatch(1, 4, 5, 3)}, 4)
	for _, x := range readVariable(t, p, 0, variable(t, p, "/dense/weights")).Float64s() {
		if x != 0 {
			t.Fatalf("a weight of %v is left by an L1 penalty that makes all smaller ones 0", x)
		}
	}
}

// TestParamsInScopes checks that a hyperparameter with a path applies to that scope only.
func TestParamsInScopes(t *testing.T) {
	e := openEngine(t, "go", 1)
	loss := func(params map[string]any) float64 {
		m := dense(func(s *model.Scope, x *graph.Node) *graph.Node { return layers.Dense(s.In("first"), x, true, 4) })
		m.Params = params
		p := compile(t, m, e, features(e, 4, 5))
		l, _, err := p.Evaluate(t.Context(), 0, randomBatch(1, 4, 5, 3), 4)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	none, one := loss(nil), loss(map[string]any{"/first/l2_regularization": 0.1})
	both := loss(map[string]any{"l2_regularization": 0.1})
	if !(none < one && one < both) {
		t.Errorf("loss %v without a penalty, %v with one on the first layer, %v on both", none, one, both)
	}
}

// TestDiscardAfterAFailureInside injects failures where a step can fail, and checks that variables keep their old
// values.
func TestDiscardAfterAFailureInside(t *testing.T) {
	e := openEngine(t, "go", 1)
	p := compile(t, dense(nil), e, features(e, 4, 5))
	b := randomBatch(1, 4, 5, 3)
	trainStep(t, p, []engine.Batch{b}, 4)
	start := readVariable(t, p, 0, 0)
	for name, fail := range map[string]func(ctx context.Context, cancel func()) error{
		"before gradients": func(ctx context.Context, cancel func()) error {
			cancel()
			_, err := enginetest.Gradients(ctx, p, 0, b, 4, [3]uint64{})
			return err
		},
		"before the update": func(ctx context.Context, cancel func()) error {
			if _, err := enginetest.Gradients(ctx, p, 0, b, 4, [3]uint64{}); err != nil {
				t.Fatal(err)
			}
			cancel()
			return enginetest.Update(ctx, p, 0, 0)
		},
		"after the update, elsewhere": func(ctx context.Context, _ func()) error {
			if _, err := enginetest.Gradients(ctx, p, 0, b, 4, [3]uint64{}); err != nil {
				t.Fatal(err)
			}
			if err := enginetest.Update(ctx, p, 0, 0); err != nil {
				t.Fatal(err)
			}
			return errors.New("another replica failed")
		},
		"wrong batch": func(ctx context.Context, _ func()) error {
			_, err := enginetest.Gradients(ctx, p, 0, randomBatch(1, 3, 5, 3), 4, [3]uint64{})
			return err
		},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		if err := fail(ctx, cancel); err == nil {
			t.Errorf("%s: no error", name)
		}
		p.Discard()
		if !readVariable(t, p, 0, 0).Equal(start) {
			t.Errorf("%s: the failed step has left its traces", name)
		}
		cancel()
	}
	trainStep(t, p, []engine.Batch{b}, 4)
	if readVariable(t, p, 0, 0).Equal(start) {
		t.Error("the step after the failures changed nothing")
	}
}

// TestStepsLeaveNoGarbage checks that the memory of outputs is reused: GoMLX's trainer leaves all of it to the garbage
// collector.
func TestStepsLeaveNoGarbage(t *testing.T) {
	if race.Enabled {
		t.Skip("sync.Pool drops items at random under the race detector")
	}
	const width = 400
	m := dense(func(s *model.Scope, x *graph.Node) *graph.Node { return layers.Dense(s.In("big"), x, true, width) })
	e := openEngine(t, "go", 1)
	p := compile(t, m, e, features(e, 8, width))
	b := []engine.Batch{randomBatch(1, 8, width, 3)}
	for range 5 {
		trainStep(t, p, b, 8)
	}
	const steps, parameters = 50, 4 * width * width
	_, perStep := allocations(steps, math.MaxUint64, parameters, func() { trainStep(t, p, b, 8) })
	if perStep > parameters {
		t.Errorf("%d bytes allocated per step: the gradients and new values of %d bytes of parameters are not used again",
			perStep, parameters)
	}
	// A caller who computes gradients only need not discard them each time.
	_, perStep = allocations(steps, math.MaxUint64, parameters/2, func() {
		if _, err := enginetest.Gradients(t.Context(), p, 0, b[0], 8, [3]uint64{}); err != nil {
			t.Fatal(err)
		}
	})
	if perStep > parameters/2 {
		t.Errorf("%d bytes allocated for gradients of %d bytes, which the next ones replace", perStep, parameters)
	}
}

// TestRandomInInference checks that a model that is also random in inference is evaluated identically each time,
// whatever random numbers an earlier step drew.
func TestRandomInInference(t *testing.T) {
	eachEngine(t, 1, func(t *testing.T, e engine.Engine) {
		p := compile(t, dense(func(s *model.Scope, x *graph.Node) *graph.Node {
			return graph.Add(x, s.RandomNormal(x.Graph(), x.Shape()))
		}), e, features(e, 4, 5))
		b := randomBatch(1, 4, 5, 3)
		draw := func(seed uint64) {
			if _, err := enginetest.Gradients(t.Context(), p, 0, b, 4, [3]uint64{seed, 7, 7}); err != nil {
				t.Fatal(err)
			}
			p.Discard()
		}
		results := func(seed uint64) string {
			draw(seed)
			loss, _, err := p.Evaluate(t.Context(), 0, b, 4)
			if err != nil {
				t.Fatal(err)
			}
			draw(seed)
			out, err := p.Predict(t.Context(), 0, b.Inputs)
			if err != nil {
				t.Fatal(err)
			}
			return fmt.Sprint(loss, out[0])
		}
		if one, two := results(1), results(2); one != two {
			t.Errorf("%s after one step, %s after another", one, two)
		}
	})
}

// TestGradientsDoNotOverlap checks that gradients do not overlap, so that they can be written to, even if the backends
// could return one value for several of them, or a constant: gradients of parameters that are used alike, that are
// unused, and that are the weights themselves.
func TestGradientsDoNotOverlap(t *testing.T) {
	const rows, classes = 4, 3
	m := dense(func(s *model.Scope, x *graph.Node) *graph.Node {
		for _, name := range []string{"twin", "other_twin"} {
			x = graph.Add(x, s.VariableWithShape(name, shapes.Make(dtypes.Float32, 1, 5)).NodeValue(x.Graph()))
		}
		for _, name := range []string{"idle", "also_idle"} {
			s.VariableWithShape(name, shapes.Make(dtypes.Float32, 7)).NodeValue(x.Graph())
		}
		return x
	})
	forward := m.Forward
	m.Forward = func(s *model.Scope, in []*graph.Node) []*graph.Node {
		offset := s.VariableWithShape("offset", shapes.Make(dtypes.Float32, rows)).NodeValue(in[0].Graph())
		return append(forward(s, in), offset)
	}
	m.Loss = func(labels, predictions []*graph.Node) *graph.Node {
		return graph.Add(gomlx.SparseCategoricalCrossEntropyLogits(labels, predictions[:1]), predictions[1])
	}
	eachEngine(t, 1, func(t *testing.T, e engine.Engine) {
		p := compile(t, m, e, features(e, rows, 5))
		b := randomBatch(1, rows, 5, classes)
		bits := func(list []*tensor.Tensor) string {
			text := ""
			for _, x := range list {
				text += fmt.Sprintf("%x ", x.Memory().HostBytes())
			}
			return text
		}
		want, variables := "", ""
		for i := range 4 {
			g, err := enginetest.Gradients(t.Context(), p, 0, b, 1, [3]uint64{})
			if err != nil {
				t.Fatal(err)
			}
			list, values := g.Tensors, []*tensor.Tensor{}
			for v := range p.Variables() {
				values = append(values, readVariable(t, p, 0, v))
			}
			if i == 0 {
				want, variables = bits(list), bits(values)
			}
			if got := bits(list); got != want {
				t.Fatalf("gradients %s after the last ones were written to, want %s", got, want)
			}
			if got := bits(values); got != variables {
				t.Fatalf("variables %s after gradients were written to, want %s", got, variables)
			}
			for j, x := range list {
				before := bits(list[j+1:])
				for at := range x.Memory().HostBytes() {
					x.Memory().HostBytes()[at] ^= 0xff
				}
				if bits(list[j+1:]) != before {
					t.Fatalf("writing to the gradient of %s changed another", p.Parameters()[j].Name)
				}
			}
			p.Discard()
		}
	})
}

// TestManyProductsAtOnce runs more matrix products that do not depend on one another than the Go backend has
// workers. In its default mode they deadlock.
func TestManyProductsAtOnce(t *testing.T) {
	const rows, width = 512, 128
	m := dense(func(s *model.Scope, x *graph.Node) *graph.Node {
		var sum *graph.Node
		for i := range 4*runtime.GOMAXPROCS(0) + 4 {
			y := layers.Dense(s.In("branch_%d", i), x, true, width)
			if sum == nil {
				sum = y
			} else {
				sum = graph.Add(sum, y)
			}
		}
		return sum
	})
	e := openEngine(t, "go", 2)
	s := features(e, rows, width)
	s.Devices = e.Devices()
	p := compile(t, m, e, s)
	b := randomBatch(1, rows, width, 3)
	for range 5 {
		trainStep(t, p, []engine.Batch{b, b}, 2*rows)
	}
	alone := compile(t, m, e, features(e, rows, width))
	for range 5 {
		trainStep(t, alone, []engine.Batch{b}, rows)
	}
}

// TestNothingOnStandardOutput checks that the engine leaves standard output to the program.
func TestNothingOnStandardOutput(t *testing.T) {
	old := os.Stdout
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	os.Stdout = w
	func() {
		defer func() { os.Stdout = old }()
		e := openEngine(t, "go", 2)
		p := compile(t, dense(nil), e, features(e, 4, 5))
		trainStep(t, p, []engine.Batch{randomBatch(1, 4, 5, 3)}, 4)
	}()
	w.Close()
	if out, err := io.ReadAll(r); err != nil || len(out) > 0 {
		t.Errorf("printed %q, %v", out, err)
	}
}

// TestUpdateOfAverage checks that an update's new value of an average belongs to its step: later steps do not commit
// it.
func TestUpdateOfAverage(t *testing.T) {
	m := &gomlx.Model{
		Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
			count := s.VariableWithValue("count", float32(0)).SetTrainable(false)
			if g := in[0].Graph(); s.IsTraining(g) {
				count.SetNodeValue(graph.AddScalar(count.NodeValue(g), 1))
				train.AddPerStepUpdateGraphFn(s, g, func(_ *model.Scope, g *graph.Graph) {
					count.SetNodeValue(graph.AddScalar(count.NodeValue(g), 100))
				})
			}
			return []*graph.Node{layer.Dense(s.In("dense"), in[0], 2)}
		},
		Loss: gomlx.SparseCategoricalCrossEntropyLogits, Optimizer: optimizer.StochasticGradientDescent(),
	}
	e := openEngine(t, "go", 1)
	p := compile(t, m, e, features(e, 4, 3))
	count := variable(t, p, "/count")
	if role := p.Variables()[count].Role; role != engine.Average {
		t.Fatalf("the role is %v", role)
	}
	for _, step := range []struct {
		gradients, update bool
		want              float32
	}{{true, true, 101}, {false, true, 101}, {true, false, 102}, {true, true, 203}} {
		if step.gradients {
			if _, err := enginetest.Gradients(t.Context(), p, 0, randomBatch(1, 4, 3, 2), 4, [3]uint64{}); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := enginetest.Memory(p, 0); err != nil {
			t.Fatal(err)
		}
		if step.update {
			if err := enginetest.Update(t.Context(), p, 0, 0); err != nil {
				t.Fatal(err)
			}
		}
		p.Commit()
		if got := tensor.Data[float32](readVariable(t, p, 0, count))[0]; got != step.want {
			t.Errorf("%+v: got %v", step, got)
		}
	}
}
