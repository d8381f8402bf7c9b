package layer

import (
	"cmp"
	"fmt"

	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/model/initializer"
	"github.com/gomlx/gomlx/ml/nn"

	"github.com/lockstep-ml/lockstep/engine/gomlx"
)

// LayerNorm normalises every row of x along the last axis, to mean 0 and variance 1, and applies a trained gain
// and offset. epsilon is added to the variance; 0 means 1e-5, PyTorch's default. Keras' and GoMLX's is 1e-3.
// It is GoMLX's norm.LayerNorm over the last axis. The variables are "layer_normalization/gain" and "…/offset".
// Float16 and bfloat16 are normalised in float32, with a gain and offset of
// float32 in a model of mixed precision.
func LayerNorm(s *model.Scope, x *graph.Node, epsilon float64) *graph.Node {
	epsilon = cmp.Or(epsilon, 1e-5)
	if x.Rank() < 2 || !(epsilon > 0) {
		panic(fmt.Errorf("layer.LayerNorm takes shape (rows, …, features) and a positive epsilon, not %s and %v", x.Shape(),
			epsilon))
	}
	s = s.In("layer_normalization")
	g, dtype, features := x.Graph(), x.DType(), x.Shape().Dim(-1)
	shape := shapes.Make(gomlx.VariableDType(x), features)
	gain := s.WithInitializer(initializer.One).VariableWithShape("gain", shape).NodeValue(g)
	offset := s.WithInitializer(initializer.Zero).VariableWithShape("offset", shape).NodeValue(g)
	y := nn.LayerNorm(gomlx.AtLeastFloat32(x), []int{x.Rank() - 1}, epsilon, gomlx.AtLeastFloat32(gain),
		gomlx.AtLeastFloat32(offset), nil)
	return graph.ConvertDType(y, dtype)
}
