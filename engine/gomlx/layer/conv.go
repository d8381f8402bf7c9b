package layer

import (
	"fmt"
	"slices"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/shapes"
	. "github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers/regularizer"
	"github.com/gomlx/gomlx/ml/model"
)

// Conv2D is layers.Convolution with a square kernel, stride 1 and a bias, for images x of shape (rows, height, width,
// channels). same pads with zeros so that the size stays; otherwise it shrinks by size-1. The variables are
// "conv/weights", of shape (size, size, channels, filters), and "conv/biases".
func Conv2D(s *model.Scope, x *Node, filters, size int, same bool) *Node {
	if x.Rank() != 4 {
		panic(fmt.Errorf("layer.Conv2D takes images of shape (rows, height, width, channels), not %s", x.Shape()))
	}
	if size < 1 || (same && size%2 == 0) {
		panic(fmt.Errorf("layer.Conv2D takes a kernel of 1 or more, an odd one if the size is to stay: not %d", size))
	}
	s = s.In("conv")
	g, channels := x.Graph(), x.Shape().Dim(3)
	weights := s.VariableWithShape("weights", shapes.Make(x.DType(), size, size, channels, filters))
	if r := regularizer.FromScope(s); r != nil {
		r(g, weights)
	}
	biases := s.VariableWithShape("biases", shapes.Make(x.DType(), filters))
	border := 0
	if same {
		border = (size - 1) / 2
	}
	if x.Shape().Dim(1)+2*border < size || x.Shape().Dim(2)+2*border < size {
		panic(fmt.Errorf("layer.Conv2D: a kernel of %d does not fit into images of shape %s", size, x.Shape()))
	}
	if onGoBackend(g) {
		return convolve(x, weights.NodeValue(g), biases.NodeValue(g), size, border)
	}
	y := Convolve(x, weights.NodeValue(g)).PaddingPerDim([][2]int{{border, border}, {border, border}}).Done()
	return Add(y, ExpandLeftToRank(biases.NodeValue(g), 4))
}

// convolve is a convolution as matrix products: each window of size by size pixels becomes a row with all its values,
// and a one for the bias. Its gradient with respect to the images multiplies once for every place in the window, and
// adds the products up, each where its pixels are.
func convolve(x, kernel, bias *Node, size, border int) *Node {
	dims := x.Shape().Dimensions
	rows, channels, filters := dims[0], dims[3], bias.Shape().Size()
	height, width := dims[1]+2*border-size+1, dims[2]+2*border-size+1
	windows, weights := rows*height*width, size*size*channels
	var patches *Node
	return withGradient([]*Node{x, kernel, bias}, func(in []*Node) *Node {
		x, dtype := frame(in[0], border), x.DType()
		var parts []*Node
		for i := range size {
			for j := range size {
				parts = append(parts, Slice(x, AxisRange(), AxisRange(i, i+height), AxisRange(j, j+width), AxisRange()))
			}
		}
		parts = append(parts, Ones(x.Graph(), shapes.Make(dtype, rows, height, width, 1)))
		patches = Reshape(Concatenate(parts, 3), windows, weights+1)
		y := dot(patches, 1, Concatenate([]*Node{Reshape(in[1], weights, filters), Reshape(in[2], 1, filters)}, 0), 0)
		return Reshape(y, rows, height, width, filters)
	}, func(in []*Node, _, v *Node) []*Node {
		v = Reshape(v, windows, filters)
		var sum *Node
		for i := range size {
			for j := range size {
				k := Reshape(Slice(in[1], AxisElem(i), AxisElem(j), AxisRange(), AxisRange()), channels, filters)
				part := pad(Reshape(dot(v, 1, k, 1), rows, height, width, channels), i, size-1-i, j, size-1-j)
				if sum == nil {
					sum = part
				} else {
					sum = Add(sum, part)
				}
			}
		}
		if border > 0 {
			sum = Slice(sum, AxisRange(), AxisRange(border, -border), AxisRange(border, -border), AxisRange())
		}
		g := weightGradient(patches, v)
		return []*Node{
			sum,
			Reshape(Slice(g, AxisRange(0, weights), AxisRange()), size, size, channels, filters),
			Reshape(Slice(g, AxisRange(weights), AxisRange()), filters),
		}
	})
}

// MaxPool2D is the maximum over windows of 2 by 2, which must fit. Where several elements are the largest, the first
// gets the gradient.
func MaxPool2D(x *Node) *Node {
	if x.Rank() != 4 || x.Shape().Dim(1)%2 != 0 || x.Shape().Dim(2)%2 != 0 {
		panic(fmt.Errorf("layer.MaxPool2D takes images of an even height and width, (rows, height, width, channels), not %s", x.Shape()))
	}
	dims := x.Shape().Dimensions
	rows, height, width, channels := dims[0], dims[1], dims[2], dims[3]
	x = maxHalves(Reshape(x, rows*height*width/2, 2*channels))
	x = maxHalves(Reshape(x, rows*height/2, width*channels))
	return Reshape(x, rows, height/2, width/2, channels)
}

// maxHalves is the larger of the left and the right half of every row.
func maxHalves(x *Node) *Node {
	half := x.Shape().Dim(1) / 2
	split := func(x *Node) (left, right *Node) {
		return Slice(x, AxisRange(), AxisRange(0, half)), Slice(x, AxisRange(), AxisRange(half))
	}
	var left, right *Node
	return withGradient([]*Node{x}, func(in []*Node) *Node {
		left, right = split(in[0])
		return Max(left, right)
	}, func(_ []*Node, _, v *Node) []*Node {
		first := Mul(v, number(GreaterOrEqual(left, right), v.DType()))
		return []*Node{Concatenate([]*Node{first, Sub(v, first)}, 1)}
	})
}

// frame adds n pixels of zeros on every side of the images. GoMLX has no gradient for Pad, not even a dead one, but for
// Concatenate.
func frame(x *Node, n int) *Node {
	for axis := 1; n > 0 && axis <= 2; axis++ {
		dims := slices.Clone(x.Shape().Dimensions)
		dims[axis] = n
		zeros := Zeros(x.Graph(), shapes.Make(x.DType(), dims...))
		x = Concatenate([]*Node{zeros, x, zeros}, axis)
	}
	return x
}

// pad adds zeros around the images, in gradients.
func pad(x *Node, top, bottom, left, right int) *Node {
	if top+bottom+left+right == 0 {
		return x
	}
	zero := ScalarZero(x.Graph(), x.DType())
	return Pad(x, zero, compute.PadAxis{}, compute.PadAxis{Start: top, End: bottom}, compute.PadAxis{Start: left, End: right}, compute.PadAxis{})
}

// onGoBackend reports whether the graph is for the pure-Go backend.
func onGoBackend(g *Graph) bool { return g.Backend().String() == "go" }
