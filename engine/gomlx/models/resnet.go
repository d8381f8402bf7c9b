package models

import (
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"

	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
)

// ResNet is a residual network for images of shape (rows, height, width, channels), in the form of He et al. for small
// images (2016, section 4.2): a convolution, stages of residual blocks, the mean over all pixels, and a dense layer
// that outputs the logits. A block applies two convolutions of 3 by 3, each with batch normalisation, beside a
// residual connection. Between stages a max-pool of 2 by 2 halves the image, where the paper has convolutions of
// stride 2, and a convolution of 1 by 1 widens the result.
type ResNet struct {
	Filters []int // filters of each stage; nil: 16, 32, 64
	Blocks  int   // of each stage; 0: 3, which is the paper's ResNet-20
	Classes int   // number of logits; 0: 10
}

// Forward is the model function.
func (m ResNet) Forward(s *model.Scope, inputs []*graph.Node) []*graph.Node {
	filters, blocks, classes := m.Filters, orDefault(m.Blocks, 3), orDefault(m.Classes, 10)
	if filters == nil {
		filters = []int{16, 32, 64}
	}
	x := layer.Relu(normalised(s.In("stem"), inputs[0], filters[0]))
	for i, n := range filters {
		if i > 0 {
			if x.Shape().Dim(1) > 1 && x.Shape().Dim(2) > 1 {
				x = layer.MaxPool2D(cropToEven(x))
			}
			x = layer.Conv2D(s.In("widen_%d", i), x, n, 1, true)
		}
		for j := range blocks {
			b := s.In("stage_%d_block_%d", i, j)
			y := layer.Relu(normalised(b.In("first"), x, n))
			y = normalised(b.In("second"), y, n)
			x = layer.Relu(graph.Add(x, y))
		}
	}
	x = graph.ReduceMean(x, 1, 2)
	return []*graph.Node{layer.Dense(s.In("readout"), x, classes)}
}

// normalised is a convolution of 3 by 3 that preserves the size, and batch normalisation. Its averages follow the
// batches faster than by default, so that they fit after a hundred steps too.
func normalised(s *model.Scope, x *graph.Node, filters int) *graph.Node {
	x = layer.Conv2D(s, x, filters, 3, true)
	return layer.BatchNormWith(s, x, layer.BatchNormOptions{Momentum: 0.9})
}
