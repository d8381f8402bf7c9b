package layer_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/gobackend"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/layers/activation"
	"github.com/gomlx/gomlx/ml/layers/attention"
	"github.com/gomlx/gomlx/ml/layers/norm"
	"github.com/gomlx/gomlx/ml/model"

	"github.com/lockstep-ml/lockstep/backend"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
)

// TestLikeGoMLX compares each layer with GoMLX's own with the same variables: outputs, and the gradients of a loss
// that gives each output its own weight, with respect to the input and every variable.
func TestLikeGoMLX(t *testing.T) {
	for _, test := range []struct {
		name         string
		shape        []int
		ours, theirs func(s *model.Scope, x *graph.Node) *graph.Node
	}{
		{
			"dense",
			[]int{5, 7},
			func(s *model.Scope, x *graph.Node) *graph.Node { return layer.Dense(s, x, 4) },
			func(s *model.Scope, x *graph.Node) *graph.Node { return layers.Dense(s, x, true, 4) },
		},
		{
			"dense, few rows",
			[]int{2, 40},
			func(s *model.Scope, x *graph.Node) *graph.Node { return layer.Dense(s, x, 30) },
			func(s *model.Scope, x *graph.Node) *graph.Node { return layers.Dense(s, x, true, 30) },
		},
		{
			"dense, many rows, narrow output",
			[]int{300, 40},
			func(s *model.Scope, x *graph.Node) *graph.Node { return layer.Dense(s, x, 3) },
			func(s *model.Scope, x *graph.Node) *graph.Node { return layers.Dense(s, x, true, 3) },
		},
		{
			"dense with relu",
			[]int{6, 9},
			func(s *model.Scope, x *graph.Node) *graph.Node { return layer.DenseRelu(s, x, 8) },
			func(s *model.Scope, x *graph.Node) *graph.Node { return activation.Relu(layers.Dense(s, x, true, 8)) },
		},
		{
			"two dense in a row",
			[]int{6, 9},
			func(s *model.Scope, x *graph.Node) *graph.Node {
				return layer.Dense(s.In("b"), layer.DenseRelu(s.In("a"), x, 8), 3)
			},
			func(s *model.Scope, x *graph.Node) *graph.Node {
				return layers.Dense(s.In("b"), activation.Relu(layers.Dense(s.In("a"), x, true, 8)), true, 3)
			},
		},
		{
			"one dense used twice",
			[]int{6, 5},
			func(s *model.Scope, x *graph.Node) *graph.Node {
				return layer.Dense(s.At("a"), layer.DenseRelu(s.At("a"), x, 5), 5)
			},
			func(s *model.Scope, x *graph.Node) *graph.Node {
				return layers.Dense(s.At("a"), activation.Relu(layers.Dense(s.At("a"), x, true, 5)), true, 5)
			},
		},
		{
			"dense without bias",
			[]int{5, 7},
			func(s *model.Scope, x *graph.Node) *graph.Node { return layer.DenseWithoutBias(s, x, 4) },
			func(s *model.Scope, x *graph.Node) *graph.Node { return layers.Dense(s, x, false, 4) },
		},
		{
			"gelu",
			[]int{300, 90},
			func(_ *model.Scope, x *graph.Node) *graph.Node { return layer.Gelu(graph.MulScalar(x, 3)) },
			func(_ *model.Scope, x *graph.Node) *graph.Node { return activation.Gelu(graph.MulScalar(x, 3)) },
		},
		{
			"gelu of tanh",
			[]int{300, 90},
			func(_ *model.Scope, x *graph.Node) *graph.Node { return layer.GeluTanh(graph.MulScalar(x, 3)) },
			func(_ *model.Scope, x *graph.Node) *graph.Node {
				return activation.GeluApproximate(graph.MulScalar(x, 3))
			},
		},
		{
			"layer norm",
			[]int{40, 33},
			func(s *model.Scope, x *graph.Node) *graph.Node { return layer.LayerNorm(s, x, 1e-3) },
			func(s *model.Scope, x *graph.Node) *graph.Node { return norm.LayerNorm(s, x, -1).Done() },
		},
		{
			"layer norm of three axes, default epsilon",
			[]int{4, 5, 16},
			func(s *model.Scope, x *graph.Node) *graph.Node { return layer.LayerNorm(s, x, 0) },
			func(s *model.Scope, x *graph.Node) *graph.Node { return norm.LayerNorm(s, x, -1).Epsilon(1e-5).Done() },
		},
		{
			"attention",
			[]int{3, 5, 12},
			func(s *model.Scope, x *graph.Node) *graph.Node {
				return layer.SelfAttention(s, x, layer.AttentionOptions{Heads: 3})
			},
			func(s *model.Scope, x *graph.Node) *graph.Node {
				return attention.SelfAttention(s, x, 3, 4).UseQKVProjection().Done()
			},
		},
		{
			"causal attention", // positions are few for a head's width, so that gradients transpose the other operand
			[]int{2, 4, 64},
			func(s *model.Scope, x *graph.Node) *graph.Node {
				return layer.SelfAttention(s, x, layer.AttentionOptions{Heads: 2, Causal: true})
			},
			func(s *model.Scope, x *graph.Node) *graph.Node {
				return attention.SelfAttention(s, x, 2, 32).UseQKVProjection().WithCausalMask(true).Done()
			},
		},
		{
			"causal attention of many positions and one head",
			[]int{2, 40, 6},
			func(s *model.Scope, x *graph.Node) *graph.Node {
				return layer.SelfAttention(s, x, layer.AttentionOptions{Causal: true})
			},
			func(s *model.Scope, x *graph.Node) *graph.Node {
				return attention.SelfAttention(s, x, 1, 6).UseQKVProjection().WithCausalMask(true).Done()
			},
		},
		{
			"positions",
			[]int{5, 4, 6},
			layer.Positions,
			func(s *model.Scope, x *graph.Node) *graph.Node {
				table := s.VariableWithShape("positions", shapes.Make(x.DType(), 4, 6)).NodeValue(x.Graph())
				return graph.Add(x, graph.ExpandLeftToRank(table, 3))
			},
		},
		{
			"embedding", // of the integers 0 to 6, made from x; the gradient of x is 0
			[]int{5, 4},
			func(s *model.Scope, x *graph.Node) *graph.Node {
				return layer.Embedding(s, integers(x), x.DType(), 7, 6)
			},
			func(s *model.Scope, x *graph.Node) *graph.Node {
				table := s.VariableWithShape("embeddings", shapes.Make(x.DType(), 7, 6)).NodeValue(x.Graph())
				return graph.DotGeneral(graph.OneHot(integers(x), 7, x.DType()), []int{2}, nil, table, []int{0}, nil)
			},
		},
		{
			"relu",
			[]int{6, 9},
			func(_ *model.Scope, x *graph.Node) *graph.Node { return layer.Relu(x) },
			func(_ *model.Scope, x *graph.Node) *graph.Node { return activation.Relu(x) },
		},
		{
			"convolution",
			[]int{3, 6, 7, 2},
			func(s *model.Scope, x *graph.Node) *graph.Node { return layer.Conv2D(s, x, 4, 3, false) },
			func(s *model.Scope, x *graph.Node) *graph.Node {
				return layers.Convolution(s, x).Channels(4).KernelSize(3).NoPadding().Done()
			},
		},
		{
			"convolution that pads",
			[]int{3, 4, 5, 2},
			func(s *model.Scope, x *graph.Node) *graph.Node { return layer.Conv2D(s, x, 4, 3, true) },
			func(s *model.Scope, x *graph.Node) *graph.Node {
				return layers.Convolution(s, x).Channels(4).KernelSize(3).PadSame().Done()
			},
		},
		{
			"convolution of 5 that pads",
			[]int{2, 5, 6, 1},
			func(s *model.Scope, x *graph.Node) *graph.Node { return layer.Conv2D(s, x, 3, 5, true) },
			func(s *model.Scope, x *graph.Node) *graph.Node {
				return layers.Convolution(s, x).Channels(3).KernelSize(5).PadSame().Done()
			},
		},
		{
			"large convolution",
			[]int{70, 18, 18, 8},
			func(s *model.Scope, x *graph.Node) *graph.Node { return layer.Conv2D(s, x, 32, 3, false) },
			func(s *model.Scope, x *graph.Node) *graph.Node {
				return layers.Convolution(s, x).Channels(32).KernelSize(3).NoPadding().Done()
			},
		},
		{
			"convolution of 1",
			[]int{2, 3, 3, 3},
			func(s *model.Scope, x *graph.Node) *graph.Node { return layer.Conv2D(s, x, 2, 1, true) },
			func(s *model.Scope, x *graph.Node) *graph.Node {
				return layers.Convolution(s, x).Channels(2).KernelSize(1).Done()
			},
		},
		{
			"max-pool",
			[]int{2, 4, 6, 3},
			func(_ *model.Scope, x *graph.Node) *graph.Node { return layer.MaxPool2D(x) },
			func(_ *model.Scope, x *graph.Node) *graph.Node { return graph.MaxPool(x).Window(2).Done() },
		},
		{
			"a stage",
			[]int{2, 8, 8, 1},
			func(s *model.Scope, x *graph.Node) *graph.Node {
				return layer.Relu(layer.MaxPool2D(layer.Conv2D(s, x, 3, 3, true)))
			},
			func(s *model.Scope, x *graph.Node) *graph.Node {
				return graph.MaxPool(activation.Relu(layers.Convolution(s,
					x).Channels(3).KernelSize(3).PadSame().Done())).Window(2).Done()
			},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			values := map[string]*tensors.Tensor{}
			x := random(1, test.shape...)
			want := run(t, values, x, test.theirs)
			got := run(t, values, x, test.ours)
			if len(got) != len(want) {
				t.Fatalf("%d results, want %d: the variables are not the same", len(got), len(want))
			}
			for name, w := range want {
				g, ok := got[name]
				if !ok {
					t.Errorf("no %s", name)
					continue
				}
				if d := distance(g, w); !(d < limitOf(name)) {
					t.Errorf("%s differs by %g: %v, want %v", name, d, g, w)
				}
			}
		})
	}
}

// TestDropout checks the share of zeros, the others' factor, and the gradient, which has the same.
func TestDropout(t *testing.T) {
	const n, rate = 20000, 0.3
	x := tensors.FromFlatDataAndDimensions(slices.Repeat([]float32{2}, n), 1, n)
	got := run(t, map[string]*tensors.Tensor{}, x, func(s *model.Scope, x *graph.Node) *graph.Node {
		return layer.Dropout(s, x, rate)
	})
	y, dx := tensors.MustCopyFlatData[float32](got["output"]), tensors.MustCopyFlatData[float32](got["gradient of input"])
	weights := tensors.MustCopyFlatData[float32](random(2, 1, n))
	zeros := 0
	for i := range y {
		factor := float32(1 / (1 - rate))
		if y[i] == 0 {
			zeros, factor = zeros+1, 0
		}
		if math.Abs(float64(y[i]-2*factor)) > 1e-6 || math.Abs(float64(dx[i]-weights[i]*factor)) > 1e-6 {
			t.Fatalf("element %d is %v with gradient %v of %v", i, y[i], dx[i], weights[i])
		}
	}
	if share := float64(zeros) / n; math.Abs(share-rate) > 0.02 { // six standard deviations
		t.Errorf("%v of the elements are 0, want %v", share, rate)
	}
}

// TestAttentionDropout compares attention with dropout on Lockstep's backend with that on GoMLX's Go backend, from the
// same random numbers: outputs and all gradients.
func TestAttentionDropout(t *testing.T) {
	values, x := map[string]*tensors.Tensor{}, random(1, 3, 5, 12)
	attend := func(rate float64) func(s *model.Scope, x *graph.Node) *graph.Node {
		return func(s *model.Scope, x *graph.Node) *graph.Node {
			return layer.SelfAttention(s, x, layer.AttentionOptions{Heads: 3, Causal: true, Dropout: rate})
		}
	}
	want, got := runOn(t, goBackend(t), values, x, attend(0.4)), run(t, values, x, attend(0.4))
	for name, w := range want {
		if d := distance(got[name], w); !(d < limitOf(name)) {
			t.Errorf("%s differs by %g: %v, want %v", name, d, got[name], w)
		}
	}
	if without := run(t, values, x, attend(0)); distance(without["output"], want["output"]) < 0.01 {
		t.Error("the output is the same without dropout")
	}
}

// limitOf is the largest distance of a result.
func limitOf(name string) float64 {
	if strings.HasSuffix(name, "biases_k") {
		return 1e-3 // it changes no score relative to the others: its gradient is 0 but for rounding
	}
	return 5e-6
}

// integers maps numbers to 0 to 6.
func integers(x *graph.Node) *graph.Node {
	x = graph.AddScalar(graph.MulScalar(graph.StopGradient(x), 2), 3)
	return graph.ConvertDType(graph.ClipScalar(x, 0, 6.5), dtypes.Int32)
}

// TestGeluEverywhere compares both kinds of GELU and their gradients with the definitions in float64, from where
// they round to 0 or x.
func TestGeluEverywhere(t *testing.T) {
	const n = 40001
	flat := make([]float32, n)
	for i := range flat {
		flat[i] = float32(-20 + 40*float64(i)/(n-1))
	}
	flat[0], flat[n-1] = -1e30, 1e30
	x := tensors.FromFlatDataAndDimensions(flat, 1, n)
	k := math.Sqrt(2 / math.Pi)
	for name, f := range map[string]struct {
		layer             func(x *graph.Node) *graph.Node
		factor, gradients func(x float64) float64
	}{
		"exact": {
			layer.Gelu,
			func(x float64) float64 { return math.Erfc(-x/math.Sqrt2) / 2 },
			func(x float64) float64 { return math.Erfc(-x/math.Sqrt2)/2 + x*math.Exp(-x*x/2)/math.Sqrt(2*math.Pi) },
		},
		"tanh": {
			layer.GeluTanh,
			func(x float64) float64 { return (1 + math.Tanh(k*(x+0.044715*x*x*x))) / 2 },
			func(x float64) float64 {
				tanh := math.Tanh(k * (x + 0.044715*x*x*x))
				return (1+tanh)/2 + x/2*(1-tanh*tanh)*k*(1+3*0.044715*x*x)
			},
		},
	} {
		got := run(t, map[string]*tensors.Tensor{}, x, func(_ *model.Scope, x *graph.Node) *graph.Node { return f.layer(x) })
		y, dx := tensors.MustCopyFlatData[float32](got["output"]), tensors.MustCopyFlatData[float32](got["gradient of input"])
		weights := tensors.MustCopyFlatData[float32](random(2, 1, n))
		for i, x := range flat {
			x := float64(x)
			want := x * f.factor(x)
			if d := math.Abs(float64(y[i]) - want); !(d <= 1.3e-6*max(1, math.Abs(x))) || x < -5.43 && y[i] != 0 {
				t.Fatalf("%s: at %v: %v, want %v", name, x, y[i], want)
			}
			if math.Abs(x) > 1e29 {
				continue // x² overflows in the definition
			}
			slope := float64(weights[i]) * f.gradients(x)
			if d := math.Abs(float64(dx[i]) - slope); !(d <= 4e-6*max(1, math.Abs(float64(weights[i])))) {
				t.Fatalf("%s: gradient at %v: %v, want %v", name, x, dx[i], slope)
			}
		}
	}
}

// goBackend returns GoMLX's Go backend.
func goBackend(t *testing.T) compute.Backend {
	b, err := gobackend.New("ops_sequential")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Finalize)
	return b
}

// run builds a layer for Lockstep's backend, and returns its output and gradients by name. Variables take the given
// values; missing ones are drawn and added.
func run(t *testing.T, values map[string]*tensors.Tensor, x *tensors.Tensor,
	f func(s *model.Scope, x *graph.Node) *graph.Node,
) map[string]*tensors.Tensor {
	t.Helper()
	b, err := backend.New("")
	if err != nil {
		t.Fatal(err)
	}
	defer b.Finalize()
	return runOn(t, b, values, x, f)
}

// runOn is run on a backend. The graph is one of training, whose random numbers are the same in each call.
func runOn(t *testing.T, b compute.Backend, values map[string]*tensors.Tensor, x *tensors.Tensor,
	f func(s *model.Scope, x *graph.Node) *graph.Node,
) map[string]*tensors.Tensor {
	t.Helper()
	store := model.NewStore()
	store.SetRNGStateFromSeed(1)
	g := graph.NewGraph(b, t.Name())
	model.SetStore(g, store)
	store.SetTraining(g, true)
	in := graph.Parameter(g, "x", x.Shape())
	y := f(store.RootScope(), in)
	weights := graph.Const(g, random(2, y.Shape().Dimensions...))
	names, nodes := []string{"input"}, []*graph.Node{in}
	args := []any{x}
	for v := range store.IterVariables() {
		if values[v.Path()] == nil && v.Trainable {
			values[v.Path()] = random(uint64(len(values)), v.Shape().Dimensions...)
		}
	}
	for h := 1; h < g.NumParameters(); h++ {
		path := g.GetParameterByHandle(graph.ParameterHandle(h)).GetParameterName()
		variable := store.GetVariable(path)
		value := values[path]
		if variable.Trainable {
			names, nodes = append(names, path), append(nodes, variable.NodeValue(g))
		} else {
			value = variable.MustValue()
		}
		v, err := value.LocalClone()
		if err != nil {
			t.Fatal(err)
		}
		args = append(args, v)
	}
	gradients := graph.Gradient(graph.ReduceAllSum(graph.Mul(y, weights)), nodes...)
	if err := g.Compile(append([]*graph.Node{y}, gradients...)...); err != nil {
		t.Fatal(err)
	}
	var err error
	if args[0], err = x.LocalClone(); err != nil {
		t.Fatal(err)
	}
	results := map[string]*tensors.Tensor{}
	for i, out := range g.Run(args...) {
		if err := out.ToLocal(); err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			results["output"] = out
		} else {
			results["gradient of "+names[i-1]] = out
		}
	}
	return results
}

// TestConvolutionOfEverySize compares the convolution and its gradients with plain loops, even kernels included, for
// which GoMLX's layer has a wrong gradient of its input.
func TestConvolutionOfEverySize(t *testing.T) {
	const rows, height, width, channels, filters = 2, 4, 5, 2, 3
	for size := 1; size <= 4; size++ {
		for _, same := range []bool{false, true} {
			before, after := 0, 0
			if same {
				before, after = (size-1)/2, size/2
			}
			h, w := height+before+after-size+1, width+before+after-size+1
			x := random(1, rows, height, width, channels)
			kernel, bias := random(3, size, size, channels, filters), random(4, filters)
			weights := random(2, rows, h, w, filters) // of the output's elements in the objective: run's
			flat := tensors.MustCopyFlatData[float32]
			xs, ks, bs, vs := flat(x), flat(kernel), flat(bias), flat(weights)
			y, dx := make([]float32, len(vs)), make([]float32, len(xs))
			dk, db := make([]float32, len(ks)), make([]float32, len(bs))
			for at := range y {
				f, column, line, row := at%filters, at/filters%w, at/filters/w%h, at/filters/w/h
				y[at] = bs[f]
				db[f] += vs[at]
				for k := range ks {
					if k%filters != f {
						continue
					}
					c, dj, di := k/filters%channels, k/filters/channels%size, k/filters/channels/size
					i, j := line+di-before, column+dj-before
					if i < 0 || i >= height || j < 0 || j >= width {
						continue
					}
					pixel := ((row*height+i)*width+j)*channels + c
					y[at] += xs[pixel] * ks[k]
					dx[pixel] += vs[at] * ks[k]
					dk[k] += vs[at] * xs[pixel]
				}
			}
			values := map[string]*tensors.Tensor{"/conv/weights": kernel, "/conv/biases": bias}
			got := run(t, values, x, func(s *model.Scope, x *graph.Node) *graph.Node {
				return layer.Conv2D(s, x, filters, size, same)
			})
			for name, want := range map[string]*tensors.Tensor{
				"output":                    tensors.FromFlatDataAndDimensions(y, rows, h, w, filters),
				"gradient of input":         tensors.FromFlatDataAndDimensions(dx, rows, height, width, channels),
				"gradient of /conv/weights": tensors.FromFlatDataAndDimensions(dk, size, size, channels, filters),
				"gradient of /conv/biases":  tensors.FromFlatDataAndDimensions(db, filters),
			} {
				if d := distance(got[name], want); !(d < 5e-6) {
					t.Errorf("kernel of %d, same size %v: %s differs by %g", size, same, name, d)
				}
			}
		}
	}
}

// TestMaxPoolTies checks that the first of several largest elements gets the whole gradient.
func TestMaxPoolTies(t *testing.T) {
	x := tensors.FromFlatDataAndDimensions([]float32{
		1, 1, 0, 3,
		1, 1, 3, 0,
	}, 1, 2, 4, 1)
	got := run(t, map[string]*tensors.Tensor{}, x,
		func(_ *model.Scope, x *graph.Node) *graph.Node { return layer.MaxPool2D(x) })["gradient of input"]
	v := tensors.MustCopyFlatData[float32](random(2, 1, 1, 2, 1))
	want := []float32{v[0], 0, 0, v[1], 0, 0, 0, 0}
	if g := tensors.MustCopyFlatData[float32](got); fmt.Sprint(g) != fmt.Sprint(want) {
		t.Errorf("gradient %v, want %v", g, want)
	}
}

func TestMisusePanics(t *testing.T) {
	b := goBackend(t)
	for name, f := range map[string]func(s *model.Scope, x *graph.Node){
		"dense of images":     func(s *model.Scope, x *graph.Node) { layer.Dense(s, x, 3) },
		"convolution of rows": func(s *model.Scope, x *graph.Node) { layer.Conv2D(s, graph.Reshape(x, 2, -1), 3, 3, false) },
		"kernel too large":    func(s *model.Scope, x *graph.Node) { layer.Conv2D(s, x, 3, 7, false) },
		"kernel of 0":         func(s *model.Scope, x *graph.Node) { layer.Conv2D(s, x, 3, 0, false) },
		"attention of rows": func(s *model.Scope, x *graph.Node) {
			layer.SelfAttention(s, graph.Reshape(x, 2, -1), layer.AttentionOptions{})
		},
		"odd heads": func(s *model.Scope, x *graph.Node) {
			layer.SelfAttention(s, graph.Reshape(x, 2, 5, 5), layer.AttentionOptions{Heads: 2})
		},
		"norm of a vector":    func(s *model.Scope, x *graph.Node) { layer.LayerNorm(s, graph.Reshape(x, -1), 0) },
		"negative epsilon":    func(s *model.Scope, x *graph.Node) { layer.LayerNorm(s, x, -1) },
		"embedding of floats": func(s *model.Scope, x *graph.Node) { layer.Embedding(s, x, x.DType(), 5, 2) },
		"positions of images": func(s *model.Scope, x *graph.Node) { layer.Positions(s, x) },
		"dropout of all":      func(s *model.Scope, x *graph.Node) { layer.Dropout(s, x, 1) },
		"pool of odd images":  func(_ *model.Scope, x *graph.Node) { layer.MaxPool2D(x) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if err, ok := recover().(error); !ok || err.Error() == "" {
					t.Errorf("recovered %v, want an error", err)
				}
			}()
			f(model.NewStore().RootScope(), graph.Zeros(graph.NewGraph(b, name), random(1, 2, 5, 5, 1).Shape()))
		})
	}
}

func random(seed uint64, dims ...int) *tensors.Tensor {
	r := rand.New(rand.NewPCG(seed, 7))
	n := 1
	for _, d := range dims {
		n *= d
	}
	flat := make([]float32, n)
	for i := range flat {
		flat[i] = float32(r.NormFloat64())
	}
	return tensors.FromFlatDataAndDimensions(flat, dims...)
}

// distance is the largest difference, relative to the largest element if that is above 1.
func distance(a, b *tensors.Tensor) float64 {
	if !a.Shape().Equal(b.Shape()) {
		return math.Inf(1)
	}
	x, y := tensors.MustCopyFlatData[float32](a), tensors.MustCopyFlatData[float32](b)
	d, scale := 0.0, 1.0
	for i := range x {
		d, scale = max(d, math.Abs(float64(x[i]-y[i]))), max(scale, math.Abs(float64(y[i])))
	}
	return d / scale
}
