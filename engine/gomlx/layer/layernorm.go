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
	"github.com/lockstep-ml/lockstep/engine/gomlx/internal/gradient"
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
	if !fast(x) {
		y := nn.LayerNorm(gomlx.AtLeastFloat32(x), []int{x.Rank() - 1}, epsilon, gomlx.AtLeastFloat32(gain),
			gomlx.AtLeastFloat32(offset), nil)
		return graph.ConvertDType(y, dtype)
	}
	return graph.ReshapeWithShape(layerNorm(graph.Reshape(x, -1, features), gain, offset, epsilon), x.Shape())
}

// layerNorm normalises the rows of a matrix. Sums over rows and columns and broadcasts are matrix products.
func layerNorm(x, gain, offset *graph.Node, epsilon float64) *graph.Node {
	var normalized, rowGain, inverse *graph.Node
	n := x.Shape().Dim(1)
	return gradient.With([]*graph.Node{x, gain, offset}, func(in []*graph.Node) *graph.Node {
		x := in[0]
		centred := graph.Sub(x, rows(rowMeans(x), n))
		variance := rowMeans(graph.Mul(centred, centred))
		inverse = rows(graph.Reciprocal(graph.Sqrt(graph.AddScalar(variance, epsilon))), n)
		normalized = graph.Mul(centred, inverse)
		rowGain = columns(in[1], x.Shape().Dim(0))
		return graph.Add(graph.Mul(normalized, rowGain), columns(in[2], x.Shape().Dim(0)))
	}, func(_ []*graph.Node, _, v *graph.Node) []*graph.Node {
		scaled := graph.Mul(v, rowGain)
		mean := rows(rowMeans(scaled), n)
		along := rows(rowMeans(graph.Mul(scaled, normalized)), n)
		dx := graph.Mul(graph.Sub(graph.Sub(scaled, mean), graph.Mul(normalized, along)), inverse)
		return []*graph.Node{dx, columnSums(graph.Mul(v, normalized)), columnSums(v)}
	})
}

// rowMeans returns the means of the rows of a matrix, of shape (rows, 1).
func rowMeans(x *graph.Node) *graph.Node {
	n := x.Shape().Dim(1)
	return dot(x, 1, graph.MulScalar(graph.Ones(x.Graph(), shapes.Make(x.DType(), n, 1)), 1/float64(n)), 0)
}

// rows repeats each element of x, of shape (rows, 1), n times along its row.
func rows(x *graph.Node, n int) *graph.Node {
	return dot(x, 1, graph.Ones(x.Graph(), shapes.Make(x.DType(), 1, n)), 0)
}

// columns repeats the vector x as n rows.
func columns(x *graph.Node, n int) *graph.Node {
	return dot(graph.Ones(x.Graph(), shapes.Make(x.DType(), n, 1)), 1, graph.Reshape(x, 1, -1), 0)
}
