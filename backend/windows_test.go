package backend

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/gomlx/compute"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
)

// windows adds a reduction of windows of a value, and a selection in windows of a parameter.
func (g *randomGraph) windows(a int) {
	reduction := []compute.ReduceOpType{
		compute.ReduceOpMax, compute.ReduceOpSum, compute.ReduceOpMin, compute.ReduceOpProduct,
	}[g.IntN(4)]
	selected := g.IntN(2) == 0
	if selected { // of a parameter, since rounding could change which element is the largest
		a = g.IntN(3)
	}
	dims := g.shapes[a].Dimensions
	if len(dims) == 0 || g.shapes[a].Size() > 1<<12 {
		return
	}
	plain := g.IntN(3) == 0 // without dilations
	var taps, strides, dilations, steps []int
	var paddings [][2]int
	for _, d := range dims {
		w, s := 1, 1
		dilation, step, padding := 1, 1, [2]int{}
		if g.IntN(2) == 0 {
			w, s, padding = 1+g.IntN(3), 1+g.IntN(3), [2]int{g.IntN(3), g.IntN(3)}
			if !selected && !plain {
				dilation, step = 1+g.IntN(2), 1+g.IntN(2)
			}
		}
		if space := (d-1)*dilation + 1 + padding[0] + padding[1] - (w-1)*step - 1; space < 0 {
			padding[1] -= space
		}
		taps, strides, paddings = append(taps, w), append(strides, s), append(paddings, padding)
		dilations, steps = append(dilations, dilation), append(steps, step)
	}
	if plain {
		dilations, steps = nil, nil
	}
	if !selected {
		v, err := g.f.ReduceWindow(g.values[a], reduction, taps, strides, dilations, steps, paddings)
		g.add(fmt.Sprint("ReduceWindow ", a, reduction, taps, strides, dilations, steps, paddings), v, err)
		return
	}
	reduction = compute.ReduceOpMax
	scatter := g.f.SelectAndScatterMax
	if g.IntN(3) == 0 {
		reduction, scatter = compute.ReduceOpMin, g.f.SelectAndScatterMin
	}
	y, err := g.f.ReduceWindow(g.values[a], reduction, taps, strides, nil, nil, paddings)
	g.add(fmt.Sprint("ReduceWindow ", a, reduction, taps, strides, paddings), y, err)
	v, err := scatter(g.values[a], y, taps, strides, paddings)
	g.add(fmt.Sprint("SelectAndScatter ", a, reduction, taps, strides, paddings), v, err)
}

// TestPad compares with the definition, with negative numbers of elements too, which the Go backend does not take.
func TestPad(t *testing.T) {
	b := withThreads(t, 2)
	defer b.Finalize()
	r := rand.New(rand.NewPCG(1, 1))
	for range 200 {
		dims := []int{1 + r.IntN(5), 1 + r.IntN(40)}
		var axes []compute.PadAxis
		var out []int
		for _, d := range dims {
			a := compute.PadAxis{Start: r.IntN(7) - 3, End: r.IntN(7) - 3, Interior: r.IntN(3)}
			n := (d-1)*(a.Interior+1) + 1 + a.Start + a.End
			if n < 1 {
				a.End -= n - 1
				n = 1
			}
			axes, out = append(axes, a), append(out, n)
		}
		flat, want := make([]float32, size(dims)), make([]float32, size(out))
		for i := range want {
			want[i] = -1
		}
		for i := range flat {
			flat[i] = float32(i)
			row := axes[0].Start + i/dims[1]*(axes[0].Interior+1)
			column := axes[1].Start + i%dims[1]*(axes[1].Interior+1)
			if row >= 0 && row < out[0] && column >= 0 && column < out[1] {
				want[row*out[1]+column] = flat[i]
			}
		}
		exec, err := graph.NewExec(b, func(x *graph.Node) *graph.Node {
			return graph.Pad(x, graph.Scalar(x.Graph(), x.DType(), -1), axes...)
		})
		if err != nil {
			t.Fatal(err)
		}
		y, err := exec.Call1(tensors.FromFlatDataAndDimensions(flat, dims...))
		if err != nil {
			t.Fatal(err)
		}
		if got := tensors.MustCopyFlatData[float32](y); !slices.Equal(got, want) {
			t.Fatalf("%v of %v: %v, want %v", axes, dims, got, want)
		}
	}
}
