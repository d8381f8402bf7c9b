package stages_test

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/gobackend"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"

	"github.com/lockstep-ml/lockstep/backend"
	"github.com/lockstep-ml/lockstep/engine/gomlx/internal/stages"
)

// sums adds an all-reduce, or an identity if there is no recorder.
type sums struct {
	r *stages.Recorder
	n int
}

func (s *sums) of(x *graph.Node) (y *graph.Node) {
	identity := func() {
		y = graph.IdentityWithCustomGradient(x, func(_, v *graph.Node) *graph.Node { return s.of(v) })
	}
	if s.r == nil {
		identity()
		return y
	}
	s.n++
	s.r.AllReduce(fmt.Sprint("sum ", s.n), identity)
	return y
}

var xShape = shapes.Make(dtypes.Float32, 3, 4)

// programs are graphs of two parameters, of xShape and of 4 numbers.
var programs = map[string]struct {
	stages int
	build  func(s *sums, x, w *graph.Node) []*graph.Node
}{
	"gradient": {5, func(s *sums, x, w *graph.Node) []*graph.Node {
		wide := func(n *graph.Node) *graph.Node { return graph.ExpandLeftToRank(n, 2) }
		h := graph.Tanh(graph.Mul(x, wide(w)))
		h = graph.Mul(h, graph.Exp(wide(s.of(graph.ReduceSum(h, 0)))))
		h = graph.Sub(h, s.of(graph.ReduceAllMean(h)))
		loss := graph.ReduceAllSum(graph.Square(h))
		return append([]*graph.Node{loss, h}, graph.Gradient(loss, w, x)...)
	}},
	"none": {0, func(_ *sums, x, w *graph.Node) []*graph.Node {
		return []*graph.Node{graph.Mul(x, graph.ExpandLeftToRank(w, 2))}
	}},
	"an unused one": {1, func(s *sums, x, _ *graph.Node) []*graph.Node {
		s.of(x)
		return []*graph.Node{graph.Neg(x)}
	}},
	"parameters, sums and constants as results": {3, func(s *sums, x, w *graph.Node) []*graph.Node {
		c := graph.Const(x.Graph(), []float32{1, 2, 3, 4})
		a := s.of(w) // of a parameter
		return []*graph.Node{x, a, s.of(a), c, s.of(c), graph.Identity(a), graph.Add(s.of(c), c), s.of(graph.Neg(c))}
	}},
	"a sum as it is and the value it is of": {2, func(s *sums, x, _ *graph.Node) []*graph.Node {
		y := graph.Square(x)
		return []*graph.Node{s.of(y), y, graph.Add(y, x)}
	}},
	"several of one stage": {2, func(s *sums, x, w *graph.Node) []*graph.Node {
		a, b := s.of(graph.Neg(x)), s.of(graph.Square(w))
		return []*graph.Node{graph.Mul(a, graph.ExpandLeftToRank(b, 2)), s.of(graph.Neg(x))}
	}},
	"several outputs of an operation": {2, func(s *sums, x, w *graph.Node) []*graph.Node {
		state := graph.Const(x.Graph(), []uint64{1, 2, 3})
		next, a := graph.RandomUniform(state, xShape)
		scaled := graph.Mul(a, x)
		b := s.of(graph.ReduceAllSum(scaled))
		return []*graph.Node{next, graph.Mul(a, b), scaled}
	}},
	"closures that capture": {3, func(s *sums, x, w *graph.Node) []*graph.Node {
		g := x.Graph()
		total := s.of(graph.ReduceAllSum(x))
		firstStage := graph.Exp(w) // of the first stage, captured in the last
		cond := graph.NewClosure(g, func(g *graph.Graph) []*graph.Node {
			i := graph.Parameter(g, "i", shapes.Make(dtypes.Int32))
			graph.Parameter(g, "v", w.Shape())
			return []*graph.Node{graph.LessThan(i, graph.Const(g, int32(3)))}
		})
		body := graph.NewClosure(g, func(g *graph.Graph) []*graph.Node {
			i := graph.Parameter(g, "i", shapes.Make(dtypes.Int32))
			v := graph.Parameter(g, "v", w.Shape())
			return []*graph.Node{graph.AddScalar(i, 1), graph.Add(graph.Mul(v, firstStage), total)}
		})
		loop := graph.While(cond, body, graph.Const(g, int32(0)), w)
		positive := graph.GreaterThan(s.of(graph.ReduceAllSum(loop[1])), graph.Const(g, float32(0)))
		branches := graph.If(positive,
			graph.NewClosure(g, func(*graph.Graph) []*graph.Node { return []*graph.Node{graph.Add(firstStage, w)} }),
			graph.NewClosure(g, func(*graph.Graph) []*graph.Node { return []*graph.Node{graph.Sub(firstStage, w)} }))
		return []*graph.Node{branches[0], loop[1]}
	}},
	"sorting": {2, func(s *sums, x, w *graph.Node) []*graph.Node {
		total := s.of(graph.ReduceAllSum(w))
		return []*graph.Node{graph.Sort(graph.Mul(x, total), 1, true), graph.Sort(x, 0, false)}
	}},
	"fused operations": {2, func(s *sums, x, w *graph.Node) []*graph.Node {
		g := x.Graph()
		weights := graph.ConvertDType(graph.Const(g, [][]int32{{1, -2}, {3, 4}, {-5, 6}, {7, 0}}), dtypes.Int8)
		scale := graph.Reshape(graph.Abs(w), 4, 1) // a value inside a configuration, which the next stage uses
		y := s.of(x)
		return []*graph.Node{
			graph.BackendFusedQuantizedDense(y, weights, nil,
				&graph.Quantization{Scheme: compute.QuantLinear, Scale: scale, BlockAxis: 1, BlockSize: 2}, compute.ActivationNone),
			scale,
		}
	}},
	"functions with a name": {2, func(s *sums, x, w *graph.Node) []*graph.Node {
		f := graph.NewFunction(x.Graph(), "double and square", func(g *graph.Graph) []*graph.Node {
			v := graph.Parameter(g, "v", w.Shape())
			return []*graph.Node{graph.MulScalar(v, 2), graph.Square(v)}
		})
		first := f.Call(w)
		second := f.Call(s.of(first[1]))
		return []*graph.Node{first[0], second[0], second[1], f.Call(second[1])[0]}
	}},
}

// backends are one that stages run on, and one with plans.
var backends = map[string]func() (compute.Backend, error){
	"staged":  func() (compute.Backend, error) { return gobackend.New("ops_sequential") },
	"planned": func() (compute.Backend, error) { return backend.New("") },
}

func eachBackend(t *testing.T, f func(t *testing.T, b compute.Backend, staged bool)) {
	for name := range backends {
		t.Run(name, func(t *testing.T) { f(t, newBackend(t, name), name == "staged") })
	}
}

func newBackend(t *testing.T, name string) compute.Backend {
	t.Helper()
	b, err := backends[name]()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Finalize)
	return b
}

// build compiles a program over b.
func build(t *testing.T, b compute.Backend, s *sums,
	f func(s *sums, x, w *graph.Node) []*graph.Node,
) compute.Executable {
	t.Helper()
	g := graph.NewGraph(b, t.Name())
	x, w := graph.Parameter(g, "x", xShape), graph.Parameter(g, "w", shapes.Make(dtypes.Float32, 4))
	if err := g.Compile(f(s, x, w)...); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.Finalize)
	return g.Executable()
}

func stagesOf(exe compute.Executable) int {
	if p, ok := exe.(interface{ Stages() int }); ok {
		return p.Stages()
	}
	return 0
}

func arguments(t *testing.T, b compute.Backend) []compute.Buffer {
	t.Helper()
	x := make([]float32, xShape.Size())
	for i := range x {
		x[i] = float32(i*i%7) - 2.5
	}
	var list []compute.Buffer
	for _, a := range []struct {
		flat  []float32
		shape shapes.Shape
	}{{x, xShape}, {[]float32{0.5, -0.25, 0.125, 1}, shapes.Make(dtypes.Float32, 4)}} {
		buffer, err := b.BufferFromFlatData(0, a.flat, a.shape)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, buffer)
	}
	return list
}

// copies is an exchange with no other replica.
func copies(t *testing.T, b compute.Backend) stages.Exchange {
	return func(_ []int, buffers []compute.Buffer) ([]compute.Buffer, error) {
		var list []compute.Buffer
		for _, x := range buffers {
			shape, err := x.Shape()
			if err != nil {
				return nil, err
			}
			c, err := b.BufferFromFlatData(0, values(t, x), shape)
			if err != nil {
				return nil, err
			}
			list = append(list, c)
		}
		return list, nil
	}
}

func values(t *testing.T, b compute.Buffer) any {
	t.Helper()
	shape, err := b.Shape()
	if err != nil {
		t.Fatal(err)
	}
	flat := reflect.MakeSlice(reflect.SliceOf(shape.DType.GoType()), shape.Size(), shape.Size()).Interface()
	if err := b.ToFlatData(flat); err != nil {
		t.Fatal(err)
	}
	return flat
}

// TestLikeTheWholeGraph checks that a graph in stages, with sums over one replica, gives the bits of the whole graph in
// every run, and does not change its arguments.
func TestLikeTheWholeGraph(t *testing.T) {
	eachBackend(t, func(t *testing.T, b compute.Backend, staged bool) {
		for name, c := range programs {
			t.Run(name, func(t *testing.T) {
				args := arguments(t, b)
				var want []any
				out, err := build(t, b, &sums{}, c.build).Execute(args, nil, 0)
				if err != nil {
					t.Fatal(err)
				}
				for _, x := range out {
					want = append(want, values(t, x))
				}
				exe := build(t, stages.New(b), nil, func(_ *sums, x, w *graph.Node) []*graph.Node {
					return c.build(&sums{r: x.Graph().Backend().(*stages.Recorder)}, x, w)
				})
				p, isProgram := exe.(stages.Program)
				if isProgram != (c.stages > 0) {
					t.Fatalf("compiled as a %T", exe)
				}
				if n := stagesOf(exe); staged && n != c.stages {
					t.Errorf("%d stages, want %d", n, c.stages)
				}
				for _, donate := range []bool{false, true, true, false} {
					if isProgram {
						out, err = p.Run(args, 0, donate, copies(t, b), nil)
					} else {
						out, err = exe.Execute(args, nil, 0)
					}
					if err != nil {
						t.Fatal(err)
					}
					for i, x := range out {
						if got := values(t, x); !reflect.DeepEqual(got, want[i]) {
							t.Errorf("result %d, donating %v: %v, want %v", i, donate, got, want[i])
						}
						if err := x.Finalize(); err != nil { // each is a separate buffer
							t.Errorf("result %d: %v", i, err)
						}
					}
				}
			})
		}
	})
}

// TestBuckets checks that a graph cut into buckets gives the bits of the whole graph, with or without all-reduces, and
// hands over the buckets in order, each of them while only the stages that it needs have run.
func TestBuckets(t *testing.T) {
	eachBackend(t, func(t *testing.T, b compute.Backend, staged bool) {
		for name, c := range programs {
			t.Run(name, func(t *testing.T) {
				args := arguments(t, b)
				out, err := build(t, b, &sums{}, c.build).Execute(args, nil, 0)
				if err != nil {
					t.Fatal(err)
				}
				var want []any
				for _, x := range out {
					want = append(want, values(t, x))
				}
				n := len(want)
				for _, buckets := range bucketings(n) {
					r := stages.New(b)
					r.Defer = true
					d := build(t, r, &sums{r: r}, c.build).(*stages.Deferred)
					exe, err := d.Compile(buckets)
					if err != nil {
						t.Fatal(err)
					}
					p, ok := exe.(stages.Program)
					if !ok {
						if len(buckets) > 1 || c.stages > 0 {
							t.Errorf("buckets %v are compiled as a %T", buckets, exe)
						}
						continue
					}
					if n := stagesOf(exe); staged && (n < len(buckets) || n > max(len(buckets), 1)+max(c.stages, 1)-1) {
						t.Errorf("buckets %v: %d stages, %d without buckets", buckets, n, c.stages)
					}
					for _, donate := range []bool{false, true, true} {
						got, next := make([]compute.Buffer, n), 0
						rest, err := p.Run(args, 0, donate, copies(t, b), func(k int, results []compute.Buffer) error {
							if k != next {
								t.Errorf("bucket %d was handed over, want %d", k, next)
							}
							next++
							for i, x := range results {
								got[buckets[k][i]] = x
							}
							return nil
						})
						if err != nil {
							t.Fatal(err)
						}
						if next != len(buckets) {
							t.Errorf("%d of the buckets %v were handed over", next, buckets)
						}
						for i, x := range rest {
							if (x == nil) != (got[i] != nil) {
								t.Fatalf("buckets %v: result %d was handed over, and returned: %v, %v", buckets, i, got[i] != nil, x != nil)
							}
							if x == nil {
								x = got[i]
							}
							if v := values(t, x); !reflect.DeepEqual(v, want[i]) {
								t.Errorf("buckets %v: result %d, donating %v: %v, want %v", buckets, i, donate, v, want[i])
							}
							if err := x.Finalize(); err != nil { // each is a separate buffer
								t.Errorf("result %d: %v", i, err)
							}
						}
					}
				}
			})
		}
	})
}

// bucketings lists some ways to group n results, all or some of them.
func bucketings(n int) (list [][][]int) {
	var each, backwards, pairs [][]int
	for i := range n {
		each, backwards = append(each, []int{i}), append(backwards, []int{n - 1 - i})
		if i%2 == 1 {
			pairs = append(pairs, []int{i, i - 1})
		}
	}
	return append(list, each, backwards, pairs, each[1:])
}

// TestTakeFails checks that the error of a receiver of buckets is returned, and that the program runs again.
func TestTakeFails(t *testing.T) {
	eachBackend(t, func(t *testing.T, b compute.Backend, _ bool) {
		r := stages.New(b)
		r.Defer = true
		d := build(t, r, &sums{r: r}, programs["gradient"].build).(*stages.Deferred)
		exe, err := d.Compile([][]int{{0}, {2, 3}})
		if err != nil {
			t.Fatal(err)
		}
		broken := errors.New("no memory")
		for at := range 3 {
			_, err := exe.(stages.Program).Run(arguments(t, b), 0, true, copies(t, b), func(k int, _ []compute.Buffer) error {
				if k == at {
					return broken
				}
				return nil
			})
			if errors.Is(err, broken) != (at < 2) {
				t.Errorf("error %v of bucket %d of 2", err, at)
			}
		}
	})
}

// TestExchangeFails checks that the error of an exchange is returned, and that the program runs again.
func TestExchangeFails(t *testing.T) {
	eachBackend(t, func(t *testing.T, b compute.Backend, _ bool) {
		r := stages.New(b)
		p := build(t, r, &sums{r: r}, programs["gradient"].build).(stages.Program)
		args := arguments(t, b)
		for at := range 4 {
			calls, broken := 0, errors.New("the link is down")
			_, err := p.Run(args, 0, true, func(which []int, buffers []compute.Buffer) ([]compute.Buffer, error) {
				if calls++; calls > at {
					return nil, broken
				}
				return copies(t, b)(which, buffers)
			}, nil)
			if !errors.Is(err, broken) || calls != at+1 {
				t.Errorf("error %v after %d calls, want %v after %d", err, calls, broken, at+1)
			}
		}
		if _, err := p.Run(args, 0, true, copies(t, b), nil); err != nil {
			t.Error(err)
		}
		if _, err := p.Execute(args, nil, 0); err == nil || !strings.Contains(err.Error(), ".Run") {
			t.Errorf("Execute: %v", err)
		}
	})
}

// TestNotInClosures checks that an all-reduce whose order depends on values is an error.
func TestNotInClosures(t *testing.T) {
	eachBackend(t, func(t *testing.T, b compute.Backend, _ bool) {
		r := stages.New(b)
		defer func() {
			if err := fmt.Sprint(recover()); !strings.Contains(err, "must not be inside a condition, a loop") {
				t.Errorf("panic %q", err)
			}
		}()
		build(t, r, &sums{r: r}, func(s *sums, x, w *graph.Node) []*graph.Node {
			f := graph.NewClosure(x.Graph(), func(*graph.Graph) []*graph.Node { return []*graph.Node{s.of(w)} })
			return graph.If(graph.GreaterThan(graph.ReduceAllSum(x), graph.ScalarZero(x.Graph(), dtypes.Float32)), f, f)
		})
	})
}
