package gomlx_test

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/layers/activation"
	"github.com/gomlx/gomlx/ml/layers/norm"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/loss"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/enginetest"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestCompileExplains checks that errors which GoMLX words for its own users become errors of Compile that name the
// fix.
func TestCompileExplains(t *testing.T) {
	e := openEngine(t, "go", 1)
	flat := func(x *graph.Node) *graph.Node { return graph.Reshape(x, x.Shape().Dim(0), -1) }
	dense := func(s *model.Scope, in []*graph.Node) []*graph.Node {
		return []*graph.Node{layer.Dense(s.In("a"), flat(in[0]), 10)}
	}
	sparse := gomlx.SparseCategoricalCrossEntropyLogits
	for _, c := range []struct {
		name    string
		forward func(*model.Scope, []*graph.Node) []*graph.Node
		loss    gomlx.Loss
		want    []string
	}{
		{"GoMLX's loss", dense, loss.SparseCategoricalCrossEntropyLogits, []string{
			"GoMLX's loss.SparseCategoricalCrossEntropyLogits: ", "must have the same rank",
			"or gomlx.SparseCategoricalCrossEntropyLogits",
		}},
		{"no counterpart", dense, gomlx.Loss(loss.MakeHuberLoss(1)), []string{
			"loss.MakeHuberLoss", "must have same shape", "one number per example, or their mean",
		}},
		{"in a function", dense, func(l, p []*graph.Node) *graph.Node {
			return loss.SparseCategoricalCrossEntropyLogits(l, p)
		}, []string{
			"explain_test.go:", "GoMLX's loss.SparseCategoricalCrossEntropyLogits: ", "must have the same rank",
			"or gomlx.SparseCategoricalCrossEntropyLogits",
		}},
		{"added up", dense, func(l, p []*graph.Node) *graph.Node { return graph.ReduceAllSum(sparse(l, p)) }, []string{
			"Model.Loss gives (Float32): want one number per example, shape (4): its graph does not end in the mean",
			"gomlx.BatchLoss takes",
		}},
		{"an operation that the engine lacks", func(s *model.Scope, in []*graph.Node) []*graph.Node {
			x := graph.Real(graph.FFT(graph.ConvertDType(in[0], dtypes.Complex64)))
			return []*graph.Node{layer.Dense(s.In("a"), flat(x), 10)}
		}, sparse, []string{"the Go engine lacks the operation ", "run the model on the xla engine"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := &gomlx.Model{Forward: c.forward, Loss: c.loss, Optimizer: optimizer.Adam().Done()}
			p, err := m.Compile(t.Context(), e, features(e, 4, 8, 8, 1))
			if err == nil {
				p.Close()
				t.Fatal("compiled")
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("the error does not mention %q: %v", want, err)
				}
			}
			if strings.Contains(err.Error(), "reach out") {
				t.Errorf("the error sends to another project: %v", err)
			}
		})
	}
}

// TestHalfOnGo checks that layers of float16 and bfloat16 train on the Go engine, to the loss and about the gradients
// of float32.
func TestHalfOnGo(t *testing.T) {
	e := openEngine(t, "go", 1)
	forward := func(d dtypes.DType) func(*model.Scope, []*graph.Node) []*graph.Node {
		return func(s *model.Scope, in []*graph.Node) []*graph.Node {
			x := graph.ConvertDType(in[0], d)
			x = layer.Relu(layer.Conv2D(s.In("c"), x, 4, 3, true))
			x = layers.Dense(s.In("d"), graph.Reshape(x, x.Shape().Dim(0), -1), true, 16)
			x = activation.Apply(activation.TypeGelu, x)
			x = norm.LayerNorm(s.In("n"), x, -1).Done()
			x = graph.Softmax(x)
			return []*graph.Node{layer.Dense(s.In("a"), x, 5)}
		}
	}
	b := randomBatch(3, 6, 64, 5)
	b.Inputs[0] = b.Inputs[0].Reshape(6, 8, 8, 1)
	run := func(t *testing.T, d dtypes.DType) (float64, map[string][]float64) {
		spec := features(e, 6, 8, 8, 1)
		m := &gomlx.Model{
			Forward: forward(d), Loss: gomlx.SparseCategoricalCrossEntropyLogits,
			Optimizer: optimizer.Adam().Done(),
		}
		p := compile(t, m, e, spec)
		weights := map[string]*tensor.Tensor{}
		if d != dtypes.Float32 { // the random initial values differ by type
			q := compile(t, &gomlx.Model{Forward: forward(dtypes.Float32), Loss: m.Loss, Optimizer: m.Optimizer}, e,
				spec)
			for i, v := range q.Parameters() {
				weights[v.Name], _ = q.Read(0, i)
			}
			for i, v := range p.Parameters() {
				w := tensor.New(v.DType, v.Shape...)
				for j, x := range weights[v.Name].Float64s() {
					if v.DType == tensor.Float16 {
						tensor.Data[tensor.F16](w)[j] = tensor.F16From(float32(x))
					} else {
						tensor.Data[tensor.BF16](w)[j] = tensor.BF16From(float32(x))
					}
				}
				if err := p.Write(0, i, w); err != nil {
					t.Fatal(err)
				}
			}
		}
		g, err := enginetest.Gradients(t.Context(), p, 0, b, 6, [3]uint64{})
		if err != nil {
			t.Fatal(err)
		}
		gradients := map[string][]float64{}
		for i, v := range p.Parameters() {
			gradients[v.Name] = g.Tensors[i].Float64s()
		}
		if err := enginetest.Update(t.Context(), p, 0, 0); err != nil {
			t.Fatal(err)
		}
		p.Commit()
		if _, _, err := p.Evaluate(t.Context(), 0, b, 6); err != nil {
			t.Fatal(err)
		}
		if _, err := p.Predict(t.Context(), 0, b.Inputs); err != nil {
			t.Fatal(err)
		}
		return g.Loss, gradients
	}
	want, gradients := run(t, dtypes.Float32)
	for d, limit := range map[dtypes.DType]float64{dtypes.Float16: 0.02, dtypes.BFloat16: 0.1} {
		t.Run(fmt.Sprint(d), func(t *testing.T) {
			got, half := run(t, d)
			if !(math.Abs(got-want) < limit) {
				t.Errorf("loss %v, in float32 %v", got, want)
			}
			for name, list := range gradients {
				var most, apart float64
				for i, x := range list {
					most, apart = math.Max(most, math.Abs(x)), math.Max(apart, math.Abs(half[name][i]-x))
				}
				t.Logf("%s: %.1e of %.1e", name, apart, most)
				if !(apart < limit*most+limit/10) {
					t.Errorf("the gradient of %s differs by %v, the largest is %v", name, apart, most)
				}
			}
		})
	}
}

// TestInspector checks the losses of the rows, and the conditions on labels.
func TestInspector(t *testing.T) {
	eachEngine(t, 1, func(t *testing.T, e engine.Engine) {
		m := &gomlx.Model{
			Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
				return []*graph.Node{layer.Dense(s, in[0], 3)}
			},
			Loss: gomlx.SparseCategoricalCrossEntropyLogits, Optimizer: optimizer.Adam().Done(),
		}
		p := compile(t, m, e, features(e, 4, 2))
		if got := p.Info().Classes; len(got) != 1 || got[0] != 3 {
			t.Errorf("classes %v, want 3 of the only label", got)
		}
		if _, err := p.Losses(0); err == nil {
			t.Error("losses before any step")
		}
		b := randomBatch(1, 4, 2, 3)
		tensor.Data[int32](b.Labels[0])[2] = 3
		b.Weights[1] = 0.5
		check := func(total float64) {
			t.Helper()
			losses, err := p.Losses(0)
			if err != nil || len(losses) != 4 || !math.IsNaN(losses[2]) || !math.IsNaN(total) {
				t.Fatalf("losses %v of %v, %v: want a NaN in row 2", losses, total, err)
			}
			if sum := losses[0] + losses[1] + losses[3]; !(sum > 0) {
				t.Errorf("losses %v: want numbers in the other rows", losses)
			}
		}
		g, err := enginetest.Gradients(t.Context(), p, 0, b, 3.5, [3]uint64{})
		if err != nil {
			t.Fatal(err)
		}
		check(g.Loss)
		p.Discard()
		if _, err := p.Losses(0); err == nil {
			t.Error("losses after Discard")
		}
		total, _, err := p.Evaluate(t.Context(), 0, b, 3.5)
		if err != nil {
			t.Fatal(err)
		}
		check(total)
	})
}

// TestFunctionsOnGo checks that operations that take functions work on the Go engine.
func TestFunctionsOnGo(t *testing.T) {
	e := openEngine(t, "go", 1)
	forward := func(s *model.Scope, in []*graph.Node) []*graph.Node {
		g := in[0].Graph()
		number := shapes.Make(dtypes.Float32)
		twice := graph.NewFunction(g, "twice", func(g *graph.Graph) []*graph.Node {
			x := graph.Parameter(g, "x", number)
			return []*graph.Node{graph.Add(x, x)}
		})
		four := graph.While(graph.NewClosure(g, func(g *graph.Graph) []*graph.Node {
			return []*graph.Node{graph.LessThan(graph.Parameter(g, "x", number), graph.Const(g, float32(4)))}
		}), graph.NewClosure(g, func(g *graph.Graph) []*graph.Node {
			return []*graph.Node{graph.Add(graph.Parameter(g, "x", number), graph.Const(g, float32(1)))}
		}), graph.Scalar(g, dtypes.Float32, 0))[0]
		of := func(x float64) *graph.Function {
			return graph.NewClosure(g, func(g *graph.Graph) []*graph.Node {
				return []*graph.Node{graph.Const(g, float32(x))}
			})
		}
		one := graph.If(graph.GreaterThan(four, graph.ScalarZero(g, dtypes.Float32)), of(1), of(5))[0]
		factor := graph.StopGradient(graph.Add(one, twice.Call(four)[0])) // 9
		x := graph.StopGradient(graph.Sort(in[0], -1, false))
		more := layer.Dense(s, in[0], 1)
		return []*graph.Node{graph.Mul(graph.Concatenate([]*graph.Node{x, more}, -1), factor)}
	}
	m := &gomlx.Model{
		Forward: forward, Loss: gomlx.SparseCategoricalCrossEntropyLogits,
		Optimizer: optimizer.Adam().Done(),
	}
	p := compile(t, m, e, features(e, 2, 3))
	b := engine.Batch{
		Inputs:  []*tensor.Tensor{tensor.Of([]float32{1, 3, 2, -1, 0, 5}, 2, 3)},
		Labels:  []*tensor.Tensor{tensor.Of([]int32{0, 1}, 2)},
		Weights: ones(2),
	}
	out, err := p.Predict(t.Context(), 0, b.Inputs)
	if err != nil {
		t.Fatal(err)
	}
	if want := tensor.Of([]float32{27, 18, 9, 45, 0, -9}, 2, 3); !tensor.Of(firstColumns(out[0], 3), 2, 3).Equal(want) {
		t.Errorf("got %v, want %v and another column", out[0], want)
	}
	if _, err := enginetest.Gradients(t.Context(), p, 0, b, 2, [3]uint64{}); err != nil {
		t.Error(err)
	}
}

func firstColumns(x *tensor.Tensor, n int) (list []float32) {
	width := x.Shape()[1]
	for row := range x.Shape()[0] {
		list = append(list, tensor.Data[float32](x)[row*width:row*width+n]...)
	}
	return list
}
