package models

import (
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/model"

	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
)

// CNN is a convolutional network for images of shape (rows, height, width, channels). It applies stages of
// one convolution with ReLU and a max-pool of 2 by 2, then a dense layer with ReLU, and a dense layer that
// outputs the logits.
type CNN struct {
	Filters []int // filters of each stage; nil: 32, 64
	Kernel  int   // size of the kernels; 0: 3
	Same    bool  // pad the images, so that a convolution preserves their size
	Dense   int   // width of the dense layer; 0: 128
	Classes int   // number of logits; 0: 10

	// Dropout is the share of the dense layer's outputs that are dropped at random in training, from 0 to 1.
	Dropout float64
}

// Forward is the model function.
func (m CNN) Forward(s *model.Scope, inputs []*graph.Node) []*graph.Node {
	filters, kernel, width, classes := m.Filters, orDefault(m.Kernel, 3), orDefault(m.Dense, 128), orDefault(m.Classes, 10)
	if filters == nil {
		filters = []int{32, 64}
	}
	x := inputs[0]
	for i, n := range filters {
		if !m.Same {
			x = cropTo(x, useful(x.Shape().Dim(1), kernel), useful(x.Shape().Dim(2), kernel))
		}
		// ReLU and maximum commute. After the pool, only a quarter of the elements remain to compare.
		x = layer.Relu(layer.MaxPool2D(cropToEven(layer.Conv2D(s.In("stage_%d", i), x, n, kernel, m.Same))))
	}
	x = layer.DenseRelu(s.In("hidden"), flatten(x), width)
	x = layers.DropoutStatic(s, x, m.Dropout)
	return []*graph.Node{layer.Dense(s.In("readout"), x, classes)}
}

// useful returns how many of size pixels reach the pool through a convolution without padding. If the convolution's
// output has an odd size, the last pixel only reaches an output that cropToEven removes.
func useful(size, kernel int) int {
	if n := size - kernel + 1; n > 1 && n%2 == 1 {
		return size - 1
	}
	return size
}

// cropToEven crops the last row or column of pixels if the size is odd, because no window of the pool
// contains it.
func cropToEven(x *graph.Node) *graph.Node {
	return cropTo(x, x.Shape().Dim(1)/2*2, x.Shape().Dim(2)/2*2)
}

// cropTo crops the last rows and columns of pixels to h and w.
func cropTo(x *graph.Node, h, w int) *graph.Node {
	if h == x.Shape().Dim(1) && w == x.Shape().Dim(2) {
		return x
	}
	return graph.Slice(x, graph.AxisRange(), graph.AxisRange(0, h), graph.AxisRange(0, w), graph.AxisRange())
}

func orDefault(n, otherwise int) int {
	if n == 0 {
		return otherwise
	}
	return n
}
