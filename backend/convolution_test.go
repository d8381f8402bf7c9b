package backend

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/gobackend"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
)

// convolution adds a convolution of a value, reshaped to images, with a kernel made of it.
func (g *randomGraph) convolution(x compute.Value, s shapes.Shape) {
	if s.Size() < 4 || s.Size() > 1<<11 {
		return
	}
	rank := 3 + g.IntN(2)
	spatial := rank - 2
	dims := make([]int, rank) // images, channels, spatial
	rest := s.Size()
	for i := range dims[1:] {
		dims[i+1] = 1
		for _, d := range []int{2, 3, 5, 2} {
			if rest%d == 0 && g.IntN(2) == 0 {
				dims[i+1], rest = dims[i+1]*d, rest/d
			}
		}
	}
	dims[0] = rest
	groups, batchGroups := 1, 1
	for _, d := range []int{2, 3, 5} {
		switch {
		case dims[1]%d == 0 && batchGroups == 1 && g.IntN(4) == 0:
			groups *= d
		case dims[0]%d == 0 && groups == 1 && g.IntN(8) == 0:
			batchGroups *= d
		}
	}
	filters := (1 + g.IntN(20)) * groups * batchGroups
	if g.IntN(3) == 0 {
		filters = (1 + g.IntN(2)) * groups * batchGroups
	}
	kernel := []int{dims[1] / groups, filters}
	var strides, dilations, steps []int
	var paddings [][2]int
	for i := range spatial {
		k := 1 + g.IntN(3)
		strides, dilations, steps = append(strides, 1+g.IntN(3)), append(dilations, 1+g.IntN(3)), append(steps, 1+g.IntN(2))
		padding := [2]int{g.IntN(3), g.IntN(3)}
		if g.IntN(3) == 0 {
			padding[g.IntN(2)] -= 2
		}
		if size := (dims[2+i]-1)*dilations[i] + 1 + padding[0] + padding[1] - (k-1)*steps[i] - 1; size < 0 {
			padding[1] -= size
		}
		kernel, paddings = append(kernel, k), append(paddings, padding)
	}
	if g.IntN(3) == 0 {
		for i := range dilations {
			dilations[i] = 1
			paddings[i] = [2]int{kernel[2+i] * steps[i], 0}
		}
	}
	// The axes lie in random orders.
	laid := func(dims []int) (order, laid []int) {
		order, laid = g.Perm(rank), make([]int, rank)
		if g.IntN(2) == 0 {
			for i := range order {
				order[i] = (i + spatial) % rank // channels last
				if i > 1 {
					order[i] = i - 2
				}
			}
		}
		for i, axis := range order {
			laid[axis] = dims[i]
		}
		return order, laid
	}
	value := func(v compute.Value, err error) compute.Value {
		if err != nil {
			panic(err)
		}
		return v
	}
	a, images := laid(dims)
	b, weights := laid(kernel)
	c, _ := laid(kernel)
	if batchGroups > 1 {
		c = a // the Go backend mistakes the axis of the images otherwise
	}
	flat := make([]float32, size(weights))
	for i := range flat {
		flat[i] = float32(g.NormFloat64())
	}
	w := value(g.f.Constant(flat, weights...))
	if g.IntN(2) == 0 {
		w = value(g.f.Reverse(w, b[2:]...))
	}
	config := compute.ConvolveAxesConfig{
		InputBatch: a[0], InputChannels: a[1], InputSpatial: a[2:],
		KernelInputChannels: b[0], KernelOutputChannels: b[1], KernelSpatial: b[2:],
		OutputBatch: c[0], OutputChannels: c[1], OutputSpatial: c[2:],
	}
	v, err := g.f.ConvGeneral(value(g.f.Reshape(x, images...)), w, config, strides, paddings, dilations, steps, groups,
		batchGroups)
	g.add(fmt.Sprint("ConvGeneral ", images, weights, config, strides, paddings, dilations, steps, groups, batchGroups), v,
		err)
}

// cnn is a convolutional network of GoMLX's operations: the loss, and its gradients.
func cnn(in []*graph.Node) []*graph.Node {
	x, labels, weights := in[0], in[1], in[2:]
	g := x.Graph()
	bias := func(y, b *graph.Node) *graph.Node { return graph.Add(y, graph.ExpandLeftToRank(b, y.Rank())) }
	relu := func(y *graph.Node) *graph.Node { return graph.Max(y, graph.ScalarZero(g, y.DType())) }
	for i := range 2 {
		x = relu(bias(graph.Convolve(x, weights[2*i]).Done(), weights[2*i+1]))
		x = graph.MaxPool(x).Window(2).Done()
	}
	x = graph.Reshape(x, x.Shape().Dim(0), -1)
	x = relu(bias(graph.Dot(x, weights[4]).Product(), weights[5]))
	x = bias(graph.Dot(x, weights[6]).Product(), weights[7])
	loss := graph.Neg(graph.ReduceAllMean(graph.ReduceSum(graph.Mul(graph.LogSoftmax(x), labels), -1)))
	return append([]*graph.Node{loss}, graph.Gradient(loss, weights...)...)
}

// cnnInputs returns images, labels and weights for the network.
func cnnInputs(images, side, filters int) (list []*tensors.Tensor) {
	r := rand.New(rand.NewPCG(1, 1))
	add := func(scale float64, dims ...int) {
		flat := make([]float32, size(dims))
		for i := range flat {
			flat[i] = float32(r.NormFloat64() * scale)
		}
		list = append(list, tensors.FromFlatDataAndDimensions(flat, dims...))
	}
	pooled := ((side-2)/2 - 2) / 2
	add(1, images, side, side, 1)
	add(0.1, images, 10)
	add(0.3, 3, 3, 1, filters)
	add(0.1, filters)
	add(0.1, 3, 3, filters, 2*filters)
	add(0.1, 2*filters)
	add(0.05, pooled*pooled*2*filters, 128)
	add(0.1, 128)
	add(0.1, 128, 10)
	add(0.1, 10)
	return list
}

// cnnOn executes the network n times, and returns the outputs of the last time.
func cnnOn(t testing.TB, b compute.Backend, n func() bool, in []*tensors.Tensor) (out []*tensors.Tensor) {
	exec, err := graph.NewExec(b, cnn)
	if err != nil {
		t.Fatal(err)
	}
	var args []any
	for _, x := range in {
		args = append(args, x)
	}
	for n() {
		for _, x := range out {
			if err := x.FinalizeAll(); err != nil {
				t.Fatal(err)
			}
		}
		if out, err = exec.Call(args...); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

// TestGradientsOfCNN compares the gradients of a convolutional network with those by the Go backend, and the bits of
// several numbers of threads.
func TestGradientsOfCNN(t *testing.T) {
	theirs, err := gobackend.New("ops_sequential")
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Finalize()
	in := func() []*tensors.Tensor { return cnnInputs(20, 12, 8) } // tensors belong to one backend
	once := func() func() bool {
		left := 2
		return func() bool { left--; return left > 0 }
	}
	want := cnnOn(t, theirs, once(), in())
	var first []*tensors.Tensor
	for _, threads := range []int{1, 2, 3} {
		b := withThreads(t, threads)
		defer b.Finalize()
		got := cnnOn(t, b, once(), in())
		for i := range want {
			x, y := tensors.MustCopyFlatData[float32](got[i]), tensors.MustCopyFlatData[float32](want[i])
			if err := compareData(x, y); err != nil {
				t.Errorf("%d threads: output %d: %v", threads, i, err)
			}
			if first != nil && !slices.Equal(x, tensors.MustCopyFlatData[float32](first[i])) {
				t.Errorf("%d threads: output %d has other bits than with one", threads, i)
			}
		}
		if first == nil {
			first = got
		}
	}
}

// TestBias compares the bits of convolutions that add a number for each channel with those of convolutions that are
// outputs, too, so that a loop adds the numbers.
func TestBias(t *testing.T) {
	b := withThreads(t, 2)
	defer b.Finalize()
	r := rand.New(rand.NewPCG(7, 7))
	for range 60 {
		images, side, channels, filters, padding := 1+r.IntN(9), 3+r.IntN(20), 1+r.IntN(40), 1+r.IntN(70), r.IntN(3)
		what := fmt.Sprint(images, side, channels, filters, padding)
		random := func(dims ...int) *tensors.Tensor {
			flat := make([]float32, size(dims))
			for i := range flat {
				flat[i] = float32(r.NormFloat64())
			}
			return tensors.FromFlatDataAndDimensions(flat, dims...)
		}
		x, w, bias := random(images, side, side, channels), random(3, 3, channels, filters), random(filters+1)
		run := func(f func(y, sum *graph.Node) []*graph.Node) *tensors.Tensor {
			exec, err := graph.NewExec(b, func(in []*graph.Node) []*graph.Node {
				y := graph.Convolve(in[0], in[1]).PaddingPerDim([][2]int{{padding, padding}, {padding, padding}}).Done()
				return f(y, graph.Add(y, graph.ExpandLeftToRank(graph.Slice(in[2], graph.AxisRange(1)), 4)))
			})
			if err != nil {
				t.Fatal(err)
			}
			out, err := exec.Call(x, w, bias)
			if err != nil {
				t.Fatal(what, err)
			}
			return out[0]
		}
		got := run(func(_, sum *graph.Node) []*graph.Node { return []*graph.Node{sum} })
		want := run(func(y, sum *graph.Node) []*graph.Node { return []*graph.Node{sum, y} })
		if !slices.Equal(tensors.MustCopyFlatData[float32](got), tensors.MustCopyFlatData[float32](want)) {
			t.Errorf("images, side, channels, filters, padding %s: other bits", what)
		}
	}
}

func BenchmarkCNN(b *testing.B) {
	for _, name := range []string{Name, "go"} {
		b.Run(name, func(b *testing.B) {
			backend, err := compute.NewWithConfig(name)
			if err != nil {
				b.Fatal(err)
			}
			defer backend.Finalize()
			cnnOn(b, backend, b.Loop, cnnInputs(64, 28, 32))
		})
	}
}
