package backend

import (
	"slices"
	"testing"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/gobackend"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
)

// withFunctions is a graph with a loop, a condition, a function and a sort between operations of a plan. The functions
// capture a constant, a parameter, a view of it, and values that the plan computes.
func withFunctions(x, w *graph.Node) []*graph.Node {
	g := x.Graph()
	dot := graph.Tanh(graph.Dot(x, w).Product())
	total, turned := graph.ReduceAllSum(dot), graph.Transpose(w, 0, 1)
	three := graph.Const(g, int32(3))
	scalar := shapes.Make(dtypes.Int32)
	cond := graph.NewClosure(g, func(g *graph.Graph) []*graph.Node {
		i := graph.Parameter(g, "i", scalar)
		graph.Parameter(g, "v", dot.Shape())
		return []*graph.Node{graph.LessThan(i, three)}
	})
	body := graph.NewClosure(g, func(g *graph.Graph) []*graph.Node {
		i, v := graph.Parameter(g, "i", scalar), graph.Parameter(g, "v", dot.Shape())
		return []*graph.Node{graph.AddScalar(i, 1), graph.Add(graph.Mul(v, total), turned)}
	})
	loop := graph.While(cond, body, graph.Const(g, int32(0)), dot)
	other := graph.While(cond, body, graph.Const(g, int32(1)), dot) // the same functions
	branch := func(y *graph.Node) *graph.Function {
		return graph.NewClosure(g, func(*graph.Graph) []*graph.Node { return []*graph.Node{graph.Add(y, w)} })
	}
	chosen := graph.If(graph.GreaterThan(total, graph.ScalarZero(g, total.DType())), branch(dot), branch(x))[0]
	square := graph.NewFunction(g, "square", func(g *graph.Graph) []*graph.Node {
		return []*graph.Node{graph.Square(graph.Parameter(g, "v", dot.Shape()))}
	})
	called := graph.Exp(square.Call(graph.Neg(chosen))[0])
	return []*graph.Node{
		loop[1], graph.Neg(other[1]), graph.Sort(called, 1, true), chosen, graph.Dot(called, w).Product(), w,
		square.Call(w)[0],
	}
}

// TestFunctions compares a graph with functions with the Go backend. A plan executes it.
func TestFunctions(t *testing.T) {
	theirs, err := gobackend.New("ops_sequential")
	if err != nil {
		t.Fatal(err)
	}
	ours := withThreads(t, 2)
	var want []*tensors.Tensor
	for _, b := range []compute.Backend{theirs, ours} {
		defer b.Finalize()
		exec, err := graph.NewExec(b, withFunctions)
		if err != nil {
			t.Fatal(err)
		}
		flat := make([]float32, 9)
		for i := range flat {
			flat[i] = float32(i*i%7)/4 - 0.5
		}
		var got []*tensors.Tensor
		for range 2 { // the second time in the memory of the first one
			x, w := tensors.FromFlatDataAndDimensions(flat, 3, 3), tensors.FromFlatDataAndDimensions(flat[:9:9], 3, 3)
			if got, err = exec.Call(x, w); err != nil {
				t.Fatal(err)
			}
		}
		if want == nil {
			want = got
			continue
		}
		for i := range got {
			if err := compareData(tensors.MustCopyFlatData[float32](got[i]),
				tensors.MustCopyFlatData[float32](want[i])); err != nil {
				t.Errorf("output %d: %v", i, err)
			}
		}
	}
	p := newProgram(t, ours)
	x := p.parameter([]float32{3, 1, 2}, dtypes.Float32, 3)
	less, err := p.f.Closure()
	if err != nil {
		t.Fatal(err)
	}
	scalar := shapes.Make(dtypes.Float32)
	a, b := p.must(less.Parameter("a", scalar, nil)), p.must(less.Parameter("b", scalar, nil))
	if err := less.Return([]compute.Value{p.must(less.LessThan(a, b))}, nil); err != nil {
		t.Fatal(err)
	}
	list, err := p.f.Sort(less, 0, true, p.must(p.f.Neg(x)))
	if err != nil {
		t.Fatal(err)
	}
	exe := p.compile(list[0])
	if _, planned := exe.(*Executable); !planned {
		t.Errorf("a graph that sorts is a %T", exe)
	}
	if got := p.data(exe.Execute(p.in, nil, 0))[0]; !slices.Equal(got.([]float32), []float32{-3, -2, -1}) {
		t.Errorf("sorted: %v", got)
	}
}
