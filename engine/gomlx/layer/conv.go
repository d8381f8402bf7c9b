package layer

import (
	"fmt"
	"slices"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers/regularizer"
	"github.com/gomlx/gomlx/ml/model"

	"github.com/lockstep-ml/lockstep/backend"
	"github.com/lockstep-ml/lockstep/engine/gomlx/internal/gradient"
)

// Conv2D is layers.Convolution with a square kernel, stride 1 and a bias, for images x of shape (rows, height, width,
// channels). same pads with zeros so that the size stays, with one more at the end if the kernel is even, as Keras
// does; otherwise it shrinks by size-1. The variables are "conv/weights", of shape (size, size, channels, filters), and
// "conv/biases". GoMLX's own layer gives its input a wrong gradient if the kernel is even.
func Conv2D(s *model.Scope, x *graph.Node, filters, size int, same bool) *graph.Node {
	if x.Rank() != 4 {
		panic(fmt.Errorf("layer.Conv2D takes images of shape (rows, height, width, channels), not %s", x.Shape()))
	}
	if size < 1 {
		panic(fmt.Errorf("layer.Conv2D takes a kernel of 1 or more: not %d", size))
	}
	s = s.In("conv")
	g, channels := x.Graph(), x.Shape().Dim(3)
	weights := s.VariableWithShape("weights", shapes.Make(x.DType(), size, size, channels, filters))
	if r := regularizer.FromScope(s); r != nil {
		r(g, weights)
	}
	biases := s.VariableWithShape("biases", shapes.Make(x.DType(), filters))
	var border border
	if same {
		border.before, border.after = (size-1)/2, size/2
	}
	if x.Shape().Dim(1)+border.sum() < size || x.Shape().Dim(2)+border.sum() < size {
		panic(fmt.Errorf("layer.Conv2D: a kernel of %d does not fit into images of shape %s", size, x.Shape()))
	}
	if size%2 == 0 || !onLockstep(g) && productsOnXLA(x, filters, size, border) {
		return convolve(x, weights.NodeValue(g), biases.NodeValue(g), size, border)
	}
	padding := [2]int{border.before, border.after}
	y := graph.Convolve(x, weights.NodeValue(g)).PaddingPerDim([][2]int{padding, padding}).Done()
	return graph.Add(y, graph.ExpandLeftToRank(biases.NodeValue(g), 4))
}

// productsOnXLA reports whether a convolution by matrix products is faster on XLA's CPU backend than its own
// convolution. A kernel of 1 is a product of the pixels. Images of few channels and many pixels have small
// windows.
func productsOnXLA(x *graph.Node, filters, size int, border border) bool {
	dims := x.Shape().Dimensions
	windows := dims[0] * (dims[1] + border.sum() - size + 1) * (dims[2] + border.sum() - size + 1)
	return size == 1 || size <= 3 && dims[3] <= 3 && filters >= 16 && windows >= 1<<15
}

// border is the number of zero pixels added at the start and the end of each side of the images.
type border struct{ before, after int }

func (b border) sum() int { return b.before + b.after }

// convolve computes a convolution by matrix products. Each window of size by size pixels becomes a row of its
// values, and a one for the bias. The gradient with respect to the images is one product for each position in
// the window. The products are added at the positions of their pixels.
func convolve(x, kernel, bias *graph.Node, size int, border border) *graph.Node {
	dims := x.Shape().Dimensions
	rows, channels, filters := dims[0], dims[3], bias.Shape().Size()
	height, width := dims[1]+border.sum()-size+1, dims[2]+border.sum()-size+1
	windows, weights := rows*height*width, size*size*channels
	var patches *graph.Node
	return gradient.With([]*graph.Node{x, kernel, bias}, func(in []*graph.Node) *graph.Node {
		x, dtype := frame(in[0], border), x.DType()
		var parts []*graph.Node
		for i := range size {
			for j := range size {
				parts = append(parts, graph.Slice(x, graph.AxisRange(), graph.AxisRange(i, i+height), graph.AxisRange(j, j+width),
					graph.AxisRange()))
			}
		}
		parts = append(parts, graph.Ones(x.Graph(), shapes.Make(dtype, rows, height, width, 1)))
		patches = graph.Reshape(graph.Concatenate(parts, 3), windows, weights+1)
		y := dot(patches, 1,
			graph.Concatenate([]*graph.Node{graph.Reshape(in[1], weights, filters), graph.Reshape(in[2], 1, filters)}, 0), 0)
		return graph.Reshape(y, rows, height, width, filters)
	}, func(in []*graph.Node, _, v *graph.Node) []*graph.Node {
		v = graph.Reshape(v, windows, filters)
		place := placeGradients(v, in[1], channels, filters)
		var sum *graph.Node
		for i := range size {
			for j := range size {
				part := pad(graph.Reshape(place(i, j), rows, height, width, channels), i, size-1-i, j, size-1-j)
				if sum == nil {
					sum = part
				} else {
					sum = graph.Add(sum, part)
				}
			}
		}
		if border.sum() > 0 {
			inside := func(size int) graph.SliceAxisSpec { return graph.AxisRange(border.before, border.before+size) }
			sum = graph.Slice(sum, graph.AxisRange(), inside(dims[1]), inside(dims[2]), graph.AxisRange())
		}
		g := weightGradient(patches, v)
		return []*graph.Node{
			sum,
			graph.Reshape(graph.Slice(g, graph.AxisRange(0, weights), graph.AxisRange()), size, size, channels, filters),
			graph.Reshape(graph.Slice(g, graph.AxisRange(weights), graph.AxisRange()), filters),
		}
	})
}

// placeGradients returns a function that gives, for each position in the window, the gradient with respect to
// the pixels there: v, of shape (windows, filters), times the kernel at that position. If these products are
// small, they are slices of one large product.
func placeGradients(v, kernel *graph.Node, channels, filters int) func(i, j int) *graph.Node {
	if v.Shape().Dim(0)*channels*filters >= largeProduct {
		return func(i, j int) *graph.Node {
			k := graph.Slice(kernel, graph.AxisElem(i), graph.AxisElem(j), graph.AxisRange(), graph.AxisRange())
			return dot(v, 1, graph.Reshape(k, channels, filters), 1)
		}
	}
	size := kernel.Shape().Dim(0)
	all := dot(v, 1, graph.Reshape(kernel, size*size*channels, filters), 1)
	return func(i, j int) *graph.Node {
		at := (i*size + j) * channels
		return graph.Slice(all, graph.AxisRange(), graph.AxisRange(at, at+channels))
	}
}

// largeProduct is the number of multiplications from which one product for each position is faster than slices of one
// for all.
const largeProduct = 4 << 20

// MaxPool2D is the maximum over windows of 2 by 2 pixels, for x of shape (rows, height, width, channels). It
// panics unless height and width are even. If several elements are the largest, the first gets the gradient.
func MaxPool2D(x *graph.Node) *graph.Node {
	if x.Rank() != 4 || x.Shape().Dim(1)%2 != 0 || x.Shape().Dim(2)%2 != 0 {
		panic(fmt.Errorf("layer.MaxPool2D takes images of an even height and width, (rows, height, width, channels), not %s",
			x.Shape()))
	}
	if onLockstep(x.Graph()) {
		return graph.MaxPool(x).Window(2).Done()
	}
	return maxQuarters(x)
}

// maxQuarters is MaxPool2D for XLA. Every operation, also of the gradient, has the axes (rows, height/2, width/2,
// channels), so XLA's loops run along the channels with vector instructions. If the axes were merged, XLA would compute
// the position of each element by divisions.
func maxQuarters(x *graph.Node) *graph.Node {
	dims := x.Shape().Dimensions
	rows, height, width, channels := dims[0], dims[1]/2, dims[2]/2, dims[3]
	quarter := func(x *graph.Node, i, j int) *graph.Node {
		all := graph.AxisRange()
		x = graph.Slice(x, all, all, graph.AxisElem(i), all, graph.AxisElem(j))
		return graph.Reshape(x, rows, height, width, channels)
	}
	var first, upper, lower *graph.Node // conditions: the maximum is in the upper half, or in the left part of a half
	return gradient.With([]*graph.Node{x}, func(in []*graph.Node) *graph.Node {
		x := graph.Reshape(in[0], rows, height, 2, width, 2, channels)
		a, b, c, d := quarter(x, 0, 0), quarter(x, 0, 1), quarter(x, 1, 0), quarter(x, 1, 1)
		up, down := graph.Max(a, b), graph.Max(c, d)
		first, upper, lower = graph.GreaterOrEqual(up, down), graph.GreaterOrEqual(a, b), graph.GreaterOrEqual(c, d)
		return graph.Max(up, down)
	}, func(_ []*graph.Node, _, v *graph.Node) []*graph.Node {
		zero := graph.ZerosLike(v)
		row := func(v, left *graph.Node) *graph.Node {
			var halves []*graph.Node
			for _, x := range []*graph.Node{graph.Where(left, v, zero), graph.Where(left, zero, v)} {
				halves = append(halves, graph.Reshape(x, rows, height, width, 1, channels))
			}
			return graph.Reshape(graph.Concatenate(halves, 3), rows, height, 1, 2*width, channels)
		}
		both := []*graph.Node{row(graph.Where(first, v, zero), upper), row(graph.Where(first, zero, v), lower)}
		return []*graph.Node{graph.Reshape(graph.Concatenate(both, 2), dims...)}
	})
}

// frame adds zero pixels around the images. It uses Concatenate, because GoMLX has no gradient for Pad, which
// it needs even for dead code.
func frame(x *graph.Node, b border) *graph.Node {
	for axis := 1; axis <= 2; axis++ {
		zeros := func(n int) []*graph.Node {
			if n == 0 {
				return nil
			}
			dims := slices.Clone(x.Shape().Dimensions)
			dims[axis] = n
			return []*graph.Node{graph.Zeros(x.Graph(), shapes.Make(x.DType(), dims...))}
		}
		if parts := slices.Concat(zeros(b.before), []*graph.Node{x}, zeros(b.after)); len(parts) > 1 {
			x = graph.Concatenate(parts, axis)
		}
	}
	return x
}

// pad adds zeros around the images, in gradients.
func pad(x *graph.Node, top, bottom, left, right int) *graph.Node {
	if top+bottom+left+right == 0 {
		return x
	}
	zero := graph.ScalarZero(x.Graph(), x.DType())
	return graph.Pad(x, zero, compute.PadAxis{}, compute.PadAxis{Start: top, End: bottom},
		compute.PadAxis{Start: left, End: right}, compute.PadAxis{})
}

// onLockstep reports whether a graph is for Lockstep's own backend, where GoMLX's operations are the fastest.
func onLockstep(g *graph.Graph) bool { return g.Backend().Name() == backend.Name }
