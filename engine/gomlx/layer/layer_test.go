package layer_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/gomlx/compute/gobackend"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/layers/activation"
	"github.com/gomlx/gomlx/ml/model"

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
				if d := distance(g, w); !(d < 5e-6) {
					t.Errorf("%s differs by %g: %v, want %v", name, d, g, w)
				}
			}
		})
	}
}

// run builds a layer, and returns its output and gradients by name. Variables take the given values; missing ones are
// drawn and added.
func run(t *testing.T, values map[string]*tensors.Tensor, x *tensors.Tensor,
	f func(s *model.Scope, x *graph.Node) *graph.Node,
) map[string]*tensors.Tensor {
	t.Helper()
	b, err := gobackend.New("ops_sequential")
	if err != nil {
		t.Fatal(err)
	}
	defer b.Finalize()
	store := model.NewStore()
	g := graph.NewGraph(b, t.Name())
	model.SetStore(g, store)
	in := graph.Parameter(g, "x", x.Shape())
	y := f(store.RootScope(), in)
	weights := graph.Const(g, random(2, y.Shape().Dimensions...))
	names, nodes := []string{"input"}, []*graph.Node{in}
	args := []any{x}
	for v := range store.IterVariables() {
		if values[v.Path()] == nil {
			values[v.Path()] = random(uint64(len(values)), v.Shape().Dimensions...)
		}
	}
	for h := 1; h < g.NumParameters(); h++ {
		path := g.GetParameterByHandle(graph.ParameterHandle(h)).GetParameterName()
		names, nodes = append(names, path), append(nodes, store.GetVariable(path).NodeValue(g))
		v, err := values[path].LocalClone()
		if err != nil {
			t.Fatal(err)
		}
		args = append(args, v)
	}
	gradients := graph.Gradient(graph.ReduceAllSum(graph.Mul(y, weights)), nodes...)
	if err := g.Compile(append([]*graph.Node{y}, gradients...)...); err != nil {
		t.Fatal(err)
	}
	args[0], err = x.LocalClone()
	if err != nil {
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
	b, err := gobackend.New("ops_sequential")
	if err != nil {
		t.Fatal(err)
	}
	defer b.Finalize()
	for name, f := range map[string]func(s *model.Scope, x *graph.Node){
		"dense of images":     func(s *model.Scope, x *graph.Node) { layer.Dense(s, x, 3) },
		"convolution of rows": func(s *model.Scope, x *graph.Node) { layer.Conv2D(s, graph.Reshape(x, 2, -1), 3, 3, false) },
		"kernel too large":    func(s *model.Scope, x *graph.Node) { layer.Conv2D(s, x, 3, 7, false) },
		"kernel of 0":         func(s *model.Scope, x *graph.Node) { layer.Conv2D(s, x, 3, 0, false) },
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
