package stages_test

import (
	"slices"
	"testing"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/gobackend"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"

	"github.com/lockstep-ml/lockstep/engine/gomlx/internal/stages"
)

// TestWork checks the estimate of products, and that what several outputs need counts once, for the first.
func TestWork(t *testing.T) {
	b, err := gobackend.New("")
	if err != nil {
		t.Fatal(err)
	}
	defer b.Finalize()
	r := stages.New(b)
	r.Defer = true
	g := graph.NewGraph(r, "work")
	defer g.Finalize()
	x := graph.Parameter(g, "x", shapes.Make(dtypes.Float32, 3, 5))
	w := graph.Parameter(g, "w", shapes.Make(dtypes.Float32, 5, 7))
	y := graph.Dot(x, w).Product()                        // 2 x 3 x 5 x 7
	z := graph.Dot(w, graph.Transpose(w, 0, 1)).Product() // 2 x 5 x 7 x 5, and the transposition
	if err := g.Compile(graph.Add(y, y), graph.Neg(y), z); err != nil {
		t.Fatal(err)
	}
	d := g.Executable().(*stages.Deferred)
	const dot, add, neg, other = 210, 4 * 3 * 21, 4 * 2 * 21, 350 + 4*2*35
	for _, test := range []struct{ order, want []int }{
		{[]int{0, 1, 2}, []int{dot + add, neg, other}},
		{[]int{2, 1, 0}, []int{other, dot + neg, add}},
		{[]int{2}, []int{other + dot + neg + add}},
		{nil, nil},
	} {
		var got []int
		for _, n := range d.Work(test.order) {
			got = append(got, int(n))
		}
		if !slices.Equal(got, test.want) {
			t.Errorf("outputs %v: %v, want %v", test.order, got, test.want)
		}
	}
}
