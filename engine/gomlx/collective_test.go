package gomlx_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/enginetest"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	"github.com/lockstep-ml/lockstep/tensor"
)

// adder adds up the contributions of n replicas in one process, in the order of replicas.
type adder struct {
	mu      sync.Mutex
	changed sync.Cond
	n, here int
	round   int
	src     [][]*tensor.Tensor
	names   [][]string
	calls   []string // names of every round
	failed  error
}

func newAdder(n int) *adder {
	m := &adder{n: n, src: make([][]*tensor.Tensor, n), names: make([][]string, n)}
	m.changed.L = &m.mu
	return m
}

func (m *adder) sum(_ context.Context, replica int, dst, src []*tensor.Tensor, names []string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.src[replica], m.names[replica] = src, names
	m.wait()
	if m.failed != nil {
		return m.failed
	}
	for i, d := range dst {
		for r := range m.n {
			if m.names[r][i] != names[i] {
				return fmt.Errorf("replica %d sums %v, replica %d %v", r, m.names[r], replica, names)
			}
			add(d, m.src[r][i], r == 0)
		}
	}
	if replica == 0 {
		m.calls = append(m.calls, strings.Join(names, " "))
	}
	m.wait() // no src changes before all have read it
	return m.failed
}

func (m *adder) wait() {
	round := m.round
	if m.here++; m.here == m.n {
		m.here, m.round = 0, m.round+1
		m.changed.Broadcast()
	}
	for m.round == round && m.failed == nil {
		m.changed.Wait()
	}
}

func (m *adder) fail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.failed = err
	m.changed.Broadcast()
}

func add(dst, src *tensor.Tensor, first bool) {
	switch dst.DType() {
	case tensor.Float32:
		addTo(tensor.Data[float32](dst), tensor.Data[float32](src), first)
	case tensor.Float64:
		addTo(tensor.Data[float64](dst), tensor.Data[float64](src), first)
	case tensor.Int32:
		addTo(tensor.Data[int32](dst), tensor.Data[int32](src), first)
	}
}

func addTo[T float32 | float64 | int32](dst, src []T, first bool) {
	for i, x := range src {
		if first {
			dst[i] = 0
		}
		dst[i] += x
	}
}

// allGradients runs the gradients program of n replicas concurrently, and returns loss and gradients summed over them.
func allGradients(p engine.Program, m *adder, batches []engine.Batch, weightSum float64) (float64, [][]float64,
	error,
) {
	out, errs := make([]enginetest.Result, len(batches)), make([]error, len(batches))
	var wg sync.WaitGroup
	for r, b := range batches {
		wg.Go(func() {
			if out[r], errs[r] = enginetest.Gradients(context.Background(), p, r, b, weightSum, [3]uint64{}); errs[r] != nil {
				m.fail(errs[r])
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return 0, nil, err
	}
	loss, sums := 0.0, make([][]float64, len(out[0].Tensors))
	for i := range sums {
		sums[i] = make([]float64, out[0].Tensors[i].Len())
	}
	for _, g := range out {
		loss += g.Loss
		for i, x := range g.Tensors {
			addTo(sums[i], x.Float64s(), false)
		}
	}
	return loss, sums, nil
}

// entangled is a model in which every value depends on all replicas, by all-reduces in sequence and in parallel.
func entangled(s *model.Scope, in []*graph.Node) []*graph.Node {
	x := in[0]
	g, d := x.Graph(), x.DType()
	number := func(name string, values ...float64) *graph.Node {
		return graph.ConvertDType(s.VariableWithValue(name, values).SetTrainable(true).NodeValue(g), d)
	}
	wide := func(n *graph.Node) *graph.Node { return graph.ExpandLeftToRank(n, 2) }
	h := graph.Tanh(graph.Mul(x, wide(number("a", 0.3, -0.7, 1.1))))
	if s.IsTraining(g) {
		mean := gomlx.AllReduce(graph.ReduceSum(h, 0), gomlx.Mean)
		other := gomlx.AllReduce(graph.ReduceSum(graph.Square(x), 0), gomlx.Sum) // of the same stage; no gradient reaches it
		h = graph.Mul(h, graph.Exp(graph.Neg(wide(graph.Square(mean)))))
		total := gomlx.AllReduce(graph.ReduceAllSum(graph.Mul(h, wide(number("b", 0.5, 0.2, -0.4)))), gomlx.Sum)
		h = graph.Add(h, graph.Mul(graph.Sin(total), wide(graph.Tanh(other))))
	}
	return []*graph.Node{graph.ReduceSum(graph.Square(graph.Sub(h, wide(number("c", 0.1, 0.2, 0.3)))), 1)}
}

func entangledModel() *gomlx.Model {
	return &gomlx.Model{
		Forward:   entangled,
		Loss:      func(_, predictions []*graph.Node) *graph.Node { return predictions[0] },
		Optimizer: optimizer.StochasticGradientDescent(),
	}
}

func entangledSpec(e engine.Engine, d tensor.DType, m *adder) engine.Spec {
	return engine.Spec{
		Rows: 3, Inputs: []engine.Feature{{DType: d, Shape: []int{3}}}, Labels: []engine.Feature{{DType: d}},
		Devices: e.Devices()[:m.n], Sum: m.sum,
	}
}

func entangledBatches(d tensor.DType, n int) []engine.Batch {
	rng := rand.New(rand.NewPCG(7, 7))
	list := make([]engine.Batch, n)
	for r := range list {
		x, y := tensor.New(d, 3, 3), tensor.New(d, 3)
		for i := range x.Len() {
			v := rng.NormFloat64()
			if d == tensor.Float32 {
				tensor.Data[float32](x)[i] = float32(v)
			} else {
				tensor.Data[float64](x)[i] = v
			}
		}
		list[r] = engine.Batch{Inputs: []*tensor.Tensor{x}, Labels: []*tensor.Tensor{y}, Weights: ones(3)}
	}
	return list
}

// TestAllReduceGradient compares the gradient through all-reduces with differences of the loss.
func TestAllReduceGradient(t *testing.T) {
	for _, c := range []struct {
		dtype      tensor.DType
		step, want float64
	}{{tensor.Float32, 1e-2, 1e-3}, {tensor.Float64, 1e-5, 1e-8}} {
		t.Run(c.dtype.String(), func(t *testing.T) {
			eachEngine(t, 3, func(t *testing.T, e engine.Engine) {
				m := newAdder(3)
				p := compile(t, entangledModel(), e, entangledSpec(e, c.dtype, m))
				batches := entangledBatches(c.dtype, 3)
				if _, _, err := allGradients(p, m, batches, 9); err != nil {
					t.Fatal(err)
				}
				want := "all_reduce_1 all_reduce_2|all_reduce_3|all_reduce_3/gradient|all_reduce_1/gradient"
				if strings.Join(m.calls, "|") != want {
					t.Errorf("calls %q, want %q", m.calls, want)
				}
				holdGradient(t, p, m, batches, 9, c.step, c.want)
			})
		})
	}
}

// holdGradient compares every gradient of p with differences of the loss over steps of h.
func holdGradient(t *testing.T, p engine.Program, m *adder, batches []engine.Batch, weightSum, h, tolerance float64) {
	t.Helper()
	_, gradients, err := allGradients(p, m, batches, weightSum)
	if err != nil {
		t.Fatal(err)
	}
	largest := 0.0
	for i, v := range p.Parameters() {
		at := variable(t, p, v.Name)
		start := readVariable(t, p, 0, at)
		for k := range start.Len() {
			loss := func(by float64) float64 {
				moved := start.Clone()
				if moved.DType() == tensor.Float32 {
					tensor.Data[float32](moved)[k] += float32(by)
				} else {
					tensor.Data[float64](moved)[k] += by
				}
				for r := range batches {
					if err := p.Write(r, at, moved); err != nil {
						t.Fatal(err)
					}
				}
				l, _, err := allGradients(p, m, batches, weightSum)
				if err != nil {
					t.Fatal(err)
				}
				return l
			}
			slope := (loss(h) - loss(-h)) / (2 * h)
			loss(0)
			off := math.Abs(slope-gradients[i][k]) / math.Max(1, math.Abs(slope))
			if largest = math.Max(largest, off); !(off < tolerance) {
				t.Errorf("%s[%d]: gradient %v, slope %v", v.Name, k, gradients[i][k], slope)
			}
		}
	}
	t.Logf("gradients are off by %.1e at most", largest)
}

// TestAllReduceBits checks that the bits are the same in every run, and on every replica.
func TestAllReduceBits(t *testing.T) {
	eachEngine(t, 2, func(t *testing.T, e engine.Engine) {
		var first string
		for range 5 {
			m := newAdder(2)
			p := compile(t, entangledModel(), e, entangledSpec(e, tensor.Float32, m))
			loss, gradients, err := allGradients(p, m, entangledBatches(tensor.Float32, 2), 6)
			if err != nil {
				t.Fatal(err)
			}
			if got := fmt.Sprint(loss, gradients); first == "" {
				first = got
			} else if got != first {
				t.Errorf("%s, then %s", first, got)
			}
		}
	})
}

// TestAllReduceFails checks that an error of the sum ends Gradients with that error, and that the next step works.
func TestAllReduceFails(t *testing.T) {
	eachEngine(t, 2, func(t *testing.T, e engine.Engine) {
		m, broken, left := newAdder(2), errors.New("the link is down"), 0
		spec := entangledSpec(e, tensor.Float32, m)
		spec.Sum = func(ctx context.Context, replica int, dst, src []*tensor.Tensor, names []string) error {
			if replica == 1 {
				if left--; left == 0 {
					return broken
				}
			}
			return m.sum(ctx, replica, dst, src, names)
		}
		p := compile(t, entangledModel(), e, spec)
		for left = range 5 {
			m.failed, m.here = nil, 0
			fails := left > 0
			_, _, err := allGradients(p, m, entangledBatches(tensor.Float32, 2), 6)
			if fails != errors.Is(err, broken) {
				t.Errorf("error %v, want one: %v", err, fails)
			}
			p.Discard()
		}
	})
}

// TestAllReduceMistakes checks the errors for invalid uses.
func TestAllReduceMistakes(t *testing.T) {
	e := openEngine(t, "go", 2)
	with := func(f func(s *model.Scope, x *graph.Node) *graph.Node) *gomlx.Model {
		m := entangledModel()
		m.Forward = func(s *model.Scope, in []*graph.Node) []*graph.Node {
			x := graph.Mul(in[0], s.VariableWithValue("a", float32(2)).NodeValue(in[0].Graph()))
			return []*graph.Node{graph.ReduceSum(f(s, x), 1)}
		}
		return m
	}
	training := func(f func(x *graph.Node) *graph.Node) *gomlx.Model {
		return with(func(s *model.Scope, x *graph.Node) *graph.Node {
			if s.IsTraining(x.Graph()) {
				return f(x)
			}
			return x
		})
	}
	twice := training(func(x *graph.Node) *graph.Node { return gomlx.AllReduce(x, gomlx.Sum) })
	spec := entangledSpec(e, tensor.Float32, newAdder(2))
	for _, c := range []struct {
		m    *gomlx.Model
		spec func(*engine.Spec)
		want string
	}{
		{twice, func(s *engine.Spec) { s.Sum = nil }, "engine.Spec.Sum"},
		{training(func(x *graph.Node) *graph.Node { return gomlx.AllReduce(x, 7) }), nil, "want Sum or Mean"},
		{training(func(x *graph.Node) *graph.Node {
			return graph.ConvertDType(gomlx.AllReduce(graph.ConvertDType(x, dtypes.Int32), gomlx.Mean), dtypes.Float32)
		}), nil, "want a floating-point type"},
		{training(func(x *graph.Node) *graph.Node {
			return graph.Where(gomlx.AllReduce(graph.IsFinite(x), gomlx.Sum), x, x)
		}), nil, "want a numeric type"},
	} {
		s := spec
		if c.spec != nil {
			c.spec(&s)
		}
		if _, err := c.m.Compile(t.Context(), e, s); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("error %v, want %q", err, c.want)
		}
	}

	// One replica needs no sum: the result is x.
	alone := spec
	alone.Sum, alone.Devices = nil, alone.Devices[:1]
	p := compile(t, with(func(_ *model.Scope, x *graph.Node) *graph.Node { return gomlx.AllReduce(x, gomlx.Sum) }), e,
		alone)
	b := entangledBatches(tensor.Float32, 1)[0]
	if _, err := enginetest.Gradients(t.Context(), p, 0, b, 3, [3]uint64{}); err != nil {
		t.Error(err)
	}
	if _, _, err := p.Evaluate(t.Context(), 0, b, 3); err != nil {
		t.Error(err)
	}

	// Inference does not wait for other replicas.
	p = compile(t, with(func(_ *model.Scope, x *graph.Node) *graph.Node { return gomlx.AllReduce(x, gomlx.Sum) }), e, spec)
	if _, _, err := p.Evaluate(t.Context(), 0, b, 3); err == nil || !strings.Contains(err.Error(), "Scope.IsTraining") {
		t.Errorf("Evaluate: %v", err)
	}
	if _, err := p.Predict(t.Context(), 0, b.Inputs); err == nil || !strings.Contains(err.Error(), "Scope.IsTraining") {
		t.Errorf("Predict: %v", err)
	}
}

// TestAllReduceIntegers adds up counts.
func TestAllReduceIntegers(t *testing.T) {
	eachEngine(t, 2, func(t *testing.T, e engine.Engine) {
		counting := entangledModel()
		counting.Forward = func(s *model.Scope, in []*graph.Node) []*graph.Node {
			g := in[0].Graph()
			a := s.VariableWithValue("a", float32(2)).NodeValue(g)
			if !s.IsTraining(g) {
				return []*graph.Node{graph.ReduceSum(graph.Mul(in[0], a), 1)}
			}
			rows := gomlx.AllReduce(graph.ReduceAllSum(graph.ConvertDType(gomlx.ExampleWeights(g), dtypes.Int32)), gomlx.Sum)
			one := graph.Ones(g, shapes.Make(dtypes.Float32, 3))
			return []*graph.Node{graph.Mul(graph.Mul(one, a), graph.ConvertDType(rows, dtypes.Float32))}
		}
		m := newAdder(2)
		p := compile(t, counting, e, entangledSpec(e, tensor.Float32, m))
		batches := entangledBatches(tensor.Float32, 2)
		batches[1].Weights[2] = 0
		loss, gradients, err := allGradients(p, m, batches, 5)
		if err != nil {
			t.Fatal(err)
		}
		if loss != 10 || gradients[0][0] != 5 { // 2 times 5 rows, a mean over 5 rows
			t.Errorf("loss %v, gradient %v: want 10 and 5", loss, gradients[0][0])
		}
	})
}

// syncModel normalises in[0]·a over all replicas, and then the outputs of a dense layer.
func syncModel() *gomlx.Model {
	m := entangledModel()
	m.Forward = func(s *model.Scope, in []*graph.Node) []*graph.Node {
		g, d := in[0].Graph(), in[0].DType()
		numbers := func(name string, values ...float64) *graph.Node {
			return graph.ConvertDType(s.VariableWithValue(name, values).SetTrainable(true).NodeValue(g), d)
		}
		// Small values, where the epsilon under the root matters: elsewhere the output does not depend on the factor.
		x := graph.Mul(in[0], graph.ExpandLeftToRank(numbers("a", 0.03, -0.05, 0.04), 2))
		x = layer.SyncBatchNorm(s.In("first"), x)
		x = graph.Tanh(graph.Dot(x, graph.Reshape(numbers("w", 0.1, -0.2, 0.3, 0.4, 0.5, -0.6), 3, 2)).Product())
		x = layer.SyncBatchNorm(s.In("second"), x)
		return []*graph.Node{graph.ReduceSum(graph.Square(graph.AddScalar(x, 0.5)), 1)}
	}
	return m
}

// TestSyncBatchNormGradient compares the gradient through two synchronised normalisations with differences, with
// padding, and with a replica that has only padding.
func TestSyncBatchNormGradient(t *testing.T) {
	eachEngine(t, 3, func(t *testing.T, e engine.Engine) {
		m := newAdder(3)
		p := compile(t, syncModel(), e, entangledSpec(e, tensor.Float64, m))
		batches := entangledBatches(tensor.Float64, 3)
		batches[1].Weights = []float32{1, 0.5, 0}
		batches[2].Weights = []float32{0, 0, 0}
		holdGradient(t, p, m, batches, 4.5, 1e-6, 1e-8)
	})
}

// TestSyncBatchNormFarFromZero checks that the variance of numbers around 10,000 has no cancellation in float32.
func TestSyncBatchNormFarFromZero(t *testing.T) {
	eachEngine(t, 2, func(t *testing.T, e engine.Engine) {
		far := entangledModel()
		far.Forward = func(s *model.Scope, in []*graph.Node) []*graph.Node {
			return []*graph.Node{graph.ReduceSum(layer.SyncBatchNorm(s, in[0]), 1)}
		}
		m := newAdder(2)
		p := compile(t, far, e, entangledSpec(e, tensor.Float32, m))
		batches := entangledBatches(tensor.Float32, 2)
		var mean, variance [3]float64
		for r, b := range batches {
			for i, x := range tensor.Data[float32](b.Inputs[0]) {
				x += 10_000 + float32(2*r)
				tensor.Data[float32](b.Inputs[0])[i] = x
				mean[i%3] += float64(x) / 6
			}
		}
		for _, b := range batches {
			for i, x := range b.Inputs[0].Float64s() {
				variance[i%3] += (x - mean[i%3]) * (x - mean[i%3]) / 6
			}
		}
		if _, _, err := allGradients(p, m, batches, 6); err != nil {
			t.Fatal(err)
		}
		p.Commit()
		for r := range 2 {
			got := readVariable(t, p, r, variable(t, p, "/batch_normalization/variance")).Float64s()
			for c, v := range variance {
				if v := 0.99 + 0.01*v; math.Abs(got[c]-v) > 1e-5 {
					t.Errorf("replica %d, channel %d: moving variance %v, want %v", r, c, got[c], v)
				}
			}
		}
	})
}

// TestAllReducePanics checks that a panic in Spec.Sum is an error of Gradients, and that the replicas of the device can
// compute afterwards.
func TestAllReducePanics(t *testing.T) {
	e := openEngine(t, "go", 1)
	s := features(e, 4, 3)
	s.ReplicaDevices = []int{0, 0}
	sums := newAdder(2)
	panics := true
	s.Sum = func(ctx context.Context, replica int, dst, src []*tensor.Tensor, names []string) error {
		if panics {
			panic(fmt.Sprintf("sum of replica %d is broken", replica))
		}
		return sums.sum(ctx, replica, dst, src, names)
	}
	m := &gomlx.Model{
		Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
			x := layer.Dense(s, in[0], 2)
			if s.IsTraining(x.Graph()) {
				x = gomlx.AllReduce(x, gomlx.Mean)
			}
			return []*graph.Node{x}
		},
		Loss: gomlx.SparseCategoricalCrossEntropyLogits, Optimizer: optimizer.StochasticGradientDescent(),
	}
	p := compile(t, m, e, s)
	batches := []engine.Batch{randomBatch(1, 4, 3, 2), randomBatch(2, 4, 3, 2)}
	for r, b := range batches {
		_, err := enginetest.Gradients(t.Context(), p, r, b, 8, [3]uint64{})
		if want := fmt.Sprintf("sum of replica %d is broken", r); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("gradients of replica %d: %v, want %q", r, err, want)
		}
	}
	p.Discard()
	panics = false
	if _, _, err := allGradients(p, sums, batches, 8); err != nil {
		t.Errorf("gradients after a panic: %v", err)
	}
}
