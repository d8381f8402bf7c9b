package gomlx_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/gobackend"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/model"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	"github.com/lockstep-ml/lockstep/tensor"
)

// lossFunc is the loss of a [gomlx.Gradient].
type lossFunc = func(parameters, inputs []*graph.Node) *graph.Node

// update is a part of a step: one loss, which trains some of the variables. Its inputs are the batch, then the fixed
// variables.
type update struct {
	loss           lossFunc
	trained, fixed []int
}

// job is a custom training: its variables, the batch of all replicas by rows, and the updates of a step.
type job struct {
	variables [][]float32
	shapes    [][]int
	batch     [][]float32 // by input
	columns   []int       // by input
	updates   []update
}

const (
	gradientRows  = 8
	gradientSteps = 6
	gradientRate  = 0.125
)

// TestGradientInRun trains on two replicas with gradients of own losses. One replica with the whole batch, and GoMLX by
// itself, compute the same.
func TestGradientInRun(t *testing.T) {
	eachEngine(t, 2, func(t *testing.T, e engine.Engine) {
		for name, j := range map[string]job{"one model": regression(), "two models": adversarial()} {
			t.Run(name, func(t *testing.T) {
				want := j.byGoMLX(t)
				for i, v := range want {
					if slices.Equal(v, j.variables[i]) {
						t.Errorf("variable %d is not trained", i)
					}
				}
				for replicas := 1; replicas <= 2; replicas++ {
					got := j.inRun(t, e, replicas)
					for i := range want {
						for k := range want[i] {
							if d := math.Abs(float64(got[i][k] - want[i][k])); !(d < 1e-5) {
								t.Errorf("%d replicas, variable %d: %v, want %v", replicas, i, got[i], want[i])
								break
							}
						}
					}
				}
			})
		}
	})
}

// newJob returns a job with random numbers for variables of these shapes, and for inputs of so many columns.
func newJob(columns []int, shapes ...[]int) job {
	random := rand.New(rand.NewPCG(1, 2))
	numbers := func(n int) []float32 {
		list := make([]float32, n)
		for i := range list {
			list[i] = random.Float32()*2 - 1
		}
		return list
	}
	j := job{shapes: shapes, columns: columns}
	for _, s := range shapes {
		j.variables = append(j.variables, numbers(tensor.New(tensor.Float32, s...).Len()))
	}
	for _, n := range columns {
		j.batch = append(j.batch, numbers(gradientRows*n))
	}
	return j
}

// regression is a network with one hidden layer.
func regression() job {
	j := newJob([]int{3, 1}, []int{3, 5}, []int{5}, []int{5, 1})
	j.updates = []update{{trained: []int{0, 1, 2}, loss: func(p, in []*graph.Node) *graph.Node {
		hidden := layer.Gelu(graph.Add(graph.Dot(in[0], p[0]).Product(), graph.InsertAxes(p[1], 0)))
		return graph.ReduceAllMean(graph.Square(graph.Sub(graph.Dot(hidden, p[2]).Product(), in[1])))
	}}}
	return j
}

// adversarial is a GAN: the discriminator is trained with the generator's samples, then the generator by the
// discriminator's new weights.
func adversarial() job {
	generated := func(noise, weights, bias *graph.Node) *graph.Node {
		return graph.Add(graph.Dot(noise, weights).Product(), graph.InsertAxes(bias, 0))
	}
	softplus := func(x *graph.Node) *graph.Node { return graph.Log1P(graph.Exp(x)) }
	j := newJob([]int{2, 3}, []int{3, 2}, []int{2}, []int{2, 1}) // real samples and noise; generator, discriminator
	j.updates = []update{
		{trained: []int{2}, fixed: []int{0, 1}, loss: func(p, in []*graph.Node) *graph.Node {
			fake := generated(in[1], in[2], in[3])
			return graph.Add(graph.ReduceAllMean(softplus(graph.Neg(graph.Dot(in[0], p[0]).Product()))),
				graph.ReduceAllMean(softplus(graph.Dot(fake, p[0]).Product())))
		}},
		{trained: []int{0, 1}, fixed: []int{2}, loss: func(p, in []*graph.Node) *graph.Node {
			fake := generated(in[1], p[0], p[1])
			return graph.ReduceAllMean(softplus(graph.Neg(graph.Dot(fake, in[2]).Product())))
		}},
	}
	return j
}

// inRun trains on replicas that each have an equal part of the rows, and returns the variables.
func (j job) inRun(t *testing.T, e engine.Engine, replicas int) [][]float32 {
	ctx := t.Context()
	var names []string
	for _, d := range e.Devices()[:replicas] {
		names = append(names, fmt.Sprintf("%s:%d", d.Kind, d.Index))
	}
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: e, Devices: names})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var variables []*distribute.Variable
	for i, v := range j.variables {
		x, err := s.NewVariable(ctx, distribute.VariableConfig{
			Name: fmt.Sprint("v", i), Initial: tensor.Of(slices.Clone(v), j.shapes[i]...),
			Aggregation: distribute.AggregateFirst,
		})
		if err != nil {
			t.Fatal(err)
		}
		variables = append(variables, x)
	}
	var gradients []*gomlx.Gradient
	for _, u := range j.updates {
		g, err := gomlx.NewGradient(e, u.loss)
		if err != nil {
			t.Fatal(err)
		}
		defer g.Close()
		gradients = append(gradients, g)
	}
	batch := make(distribute.PerReplica[[]*tensor.Tensor], replicas)
	for r := range batch {
		for i, n := range j.columns {
			rows := gradientRows / replicas
			batch[r] = append(batch[r], tensor.Of(j.batch[i][r*rows*n:(r+1)*rows*n], rows, n))
		}
	}
	devices := s.EngineDevices()
	step := func(ctx context.Context, r *distribute.Replica, batch []*tensor.Tensor) (*tensor.Tensor, error) {
		var last *tensor.Tensor
		values := func(which []int) (list []*tensor.Tensor, err error) {
			for _, i := range which {
				x, err := variables[i].Read(r)
				if err != nil {
					return nil, err
				}
				list = append(list, x)
			}
			return list, nil
		}
		for i, u := range j.updates {
			trained, err := values(u.trained)
			if err != nil {
				return nil, err
			}
			fixed, err := values(u.fixed)
			if err != nil {
				return nil, err
			}
			loss, mine, err := gradients[i].Of(ctx, devices[r.LocalID()], trained, slices.Concat(batch, fixed))
			if err != nil {
				return nil, err
			}
			all, err := distribute.AllReduce(ctx, r, distribute.Mean, append(mine, loss))
			if err != nil {
				return nil, err
			}
			for k, v := range u.trained {
				if err := variables[v].AssignSub(r, scaled(all[k])); err != nil {
					return nil, err
				}
			}
			last = all[len(mine)]
		}
		return last, nil
	}
	for range gradientSteps {
		if _, err := distribute.Run(ctx, s, step, batch); err != nil {
			t.Fatal(err)
		}
	}
	var result [][]float32
	for _, v := range variables {
		components := v.Values()
		first := tensor.Data[float32](components[0].(*tensor.Tensor))
		for _, c := range components {
			if !slices.Equal(tensor.Data[float32](c.(*tensor.Tensor)), first) {
				t.Errorf("%s differs between the replicas", v)
			}
		}
		result = append(result, first)
	}
	return result
}

// scaled returns what a step subtracts from a variable.
func scaled(gradient *tensor.Tensor) *tensor.Tensor {
	x := gradient.Clone()
	for i := range tensor.Data[float32](x) {
		tensor.Data[float32](x)[i] *= gradientRate
	}
	return x
}

// byGoMLX trains on the whole batch with GoMLX alone.
func (j job) byGoMLX(t *testing.T) [][]float32 {
	backend, err := gobackend.New("ops_sequential")
	if err != nil {
		t.Fatal(err)
	}
	defer backend.Finalize()
	var values [][]float32
	for _, v := range j.variables {
		values = append(values, slices.Clone(v))
	}
	for range gradientSteps {
		for _, u := range j.updates {
			for k, g := range u.gradients(t, backend, j, values) {
				for i := range g {
					values[u.trained[k]][i] -= gradientRate * g[i]
				}
			}
		}
	}
	return values
}

// gradients computes gradients of the whole batch with GoMLX alone.
func (u update) gradients(t *testing.T, backend compute.Backend, j job, values [][]float32) (list [][]float32) {
	var args []any
	for _, i := range u.trained {
		args = append(args, tensors.FromFlatDataAndDimensions(values[i], j.shapes[i]...))
	}
	for i, n := range j.columns {
		args = append(args, tensors.FromFlatDataAndDimensions(j.batch[i], gradientRows, n))
	}
	for _, i := range u.fixed {
		args = append(args, tensors.FromFlatDataAndDimensions(values[i], j.shapes[i]...))
	}
	n := len(u.trained)
	exec, err := graph.NewExec(backend, func(nodes []*graph.Node) []*graph.Node {
		return graph.Gradient(u.loss(nodes[:n], nodes[n:]), nodes[:n]...)
	})
	if err != nil {
		t.Fatal(err)
	}
	defer exec.Finalize()
	out, err := exec.Call(args...)
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range out {
		list = append(list, tensors.MustCopyFlatData[float32](x))
	}
	return list
}

// TestGradientOfDevice checks losses and gradients of several shapes and types, by several goroutines.
func TestGradientOfDevice(t *testing.T) {
	eachEngine(t, 2, func(t *testing.T, e engine.Engine) {
		g, err := gomlx.NewGradient(e, func(p, in []*graph.Node) *graph.Node {
			return graph.ReduceAllSum(graph.Mul(graph.Square(p[0]), in[0]))
		})
		if err != nil {
			t.Fatal(err)
		}
		defer g.Close()
		var all sync.WaitGroup
		for i := range 8 {
			all.Go(func() {
				n := 1 + i/2%2
				p, in := make([]float64, n), make([]float64, n)
				want := 0.0
				for k := range p {
					p[k], in[k] = float64(i+k), 3
					want += 3 * p[k] * p[k]
				}
				unused := tensor.Of([]float32{7})
				loss, gradients, err := g.Of(t.Context(), e.Devices()[i%2], []*tensor.Tensor{tensor.Of(p), unused},
					[]*tensor.Tensor{tensor.Of(in)})
				if err != nil {
					t.Error(err)
					return
				}
				if got := tensor.Data[float64](loss)[0]; got != want {
					t.Errorf("loss %v, want %v", got, want)
				}
				for k, x := range tensor.Data[float64](gradients[0]) {
					if x != 6*p[k] {
						t.Errorf("gradient %v at %v, want %v", x, p[k], 6*p[k])
					}
				}
				if x := tensor.Data[float32](gradients[1]); len(x) != 1 || x[0] != 0 {
					t.Errorf("gradient of a parameter that the loss does not use: %v, want [0]", x)
				}
			})
		}
		all.Wait()
	})
}

// TestGradientErrors checks that wrong arguments and loss functions are errors.
func TestGradientErrors(t *testing.T) {
	e := openEngine(t, "go", 1)
	device := e.Devices()[0]
	of := func(loss lossFunc, d engine.Device, p, in []*tensor.Tensor) error {
		g, err := gomlx.NewGradient(e, loss)
		if err != nil {
			return err
		}
		defer g.Close()
		_, _, err = g.Of(t.Context(), d, p, in)
		return err
	}
	sum := func(p, in []*graph.Node) *graph.Node { return graph.ReduceAllSum(graph.Add(p[0], in[0])) }
	pair := []*tensor.Tensor{tensor.Of([]float32{1, 2})}
	integers := []*tensor.Tensor{tensor.Of([]int32{1, 2})}
	store := model.NewStore()
	for _, c := range []struct {
		name  string
		loss  lossFunc
		p, in []*tensor.Tensor
		want  string
	}{
		{"no function", nil, pair, pair, "the loss function of NewGradient is nil"},
		{"no parameters", sum, nil, pair, "no parameters"},
		{"a nil input", sum, pair, []*tensor.Tensor{nil}, "input 0 is nil"},
		{"an integer parameter", sum, integers, pair, "parameter 0 is of int32: want a floating-point type"},
		{"an empty input", sum, pair, []*tensor.Tensor{tensor.New(tensor.Float32, 0, 2)}, "input 0 of shape (0, 2) has no"},
		{
			"shapes that do not fit", sum, pair,
			[]*tensor.Tensor{tensor.Of([]float32{1, 2, 3})},
			"gradient_test.go",
		},
		{"too few inputs", sum, pair, nil, "index out of range"},
		{
			"no scalar", func(p, _ []*graph.Node) *graph.Node { return p[0] }, pair, nil,
			"the loss is (Float32)[2]: want a floating-point scalar",
		},
		{
			"an integer loss", func(_, in []*graph.Node) *graph.Node { return graph.ReduceAllSum(in[0]) }, pair, integers,
			"the loss is (Int32): want a floating-point scalar",
		},
		{"no loss", func(_, _ []*graph.Node) *graph.Node { return nil }, pair, nil, "the loss is nil"},
		{"an all-reduce", func(p, _ []*graph.Node) *graph.Node {
			return gomlx.AllReduce(graph.ReduceAllSum(p[0]), gomlx.Sum)
		}, pair, nil, "all-reduce the results of Gradient.Of by distribute.AllReduce"},
		{"a variable", func(p, _ []*graph.Node) *graph.Node {
			v := store.RootScope().VariableWithShape("w", shapes.Make(dtypes.Float32))
			return graph.Mul(graph.ReduceAllSum(p[0]), v.NodeValue(p[0].Graph()))
		}, pair, nil, `uses "/w", a variable or parameter that was not given`},
	} {
		if err := of(c.loss, device, c.p, c.in); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want an error with %q", c.name, err, c.want)
		}
	}
	err := of(sum, engine.Device{Kind: "GPU"}, pair, pair)
	if err == nil || !strings.Contains(err.Error(), "no device GPU:0") {
		t.Errorf("another device: %v", err)
	}
	if _, err := gomlx.NewGradient(nil, sum); err == nil || !strings.Contains(err.Error(), "open one with gomlx.Open") {
		t.Errorf("no engine: %v", err)
	}

	g, err := gomlx.NewGradient(e, sum)
	if err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("the step has failed")
	cancel(cause)
	if _, _, err := g.Of(ended, device, pair, pair); !errors.Is(err, cause) {
		t.Errorf("in a step that has failed: %v, want %v", err, cause)
	}
	for n := range 64 {
		x := []*tensor.Tensor{tensor.New(tensor.Float32, n+1)}
		if _, _, err := g.Of(t.Context(), device, x, x); err != nil {
			t.Fatal(err)
		}
	}
	x := []*tensor.Tensor{tensor.New(tensor.Float32, 65)}
	if _, _, err := g.Of(t.Context(), device, x, x); err == nil || !strings.Contains(err.Error(), "pad the inputs") {
		t.Errorf("the 65th shape: %v", err)
	}
	if err := g.Close(); err != nil {
		t.Error(err)
	}
	if _, _, err := g.Of(t.Context(), device, pair, pair); err == nil || !strings.Contains(err.Error(), "closed") {
		t.Errorf("closed: %v", err)
	}
}
