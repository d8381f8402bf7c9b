// Package layer provides GoMLX layers for what GoMLX's own lack, such as synchronized batch normalisation, and layers
// with the same variables, names and mathematics as GoMLX's whose graphs suit the engines: half types are normalised in
// float32, and pooling and some convolutions have gradients that XLA's CPU backend computes fast.
package layer

import (
	"fmt"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers/regularizer"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/nn"

	"github.com/lockstep-ml/lockstep/engine/gomlx/internal/gradient"
)

// Dense is layers.Dense with a bias. It maps x of shape (rows, features) to (rows, width), and panics on
// another rank. Its variables are "dense/weights" and "dense/biases". The hyperparameters for regularisation
// apply to the weights.
func Dense(s *model.Scope, x *graph.Node, width int) *graph.Node {
	return dense(s, x, width, true, false)
}

// DenseWithoutBias is Dense without a bias.
func DenseWithoutBias(s *model.Scope, x *graph.Node, width int) *graph.Node {
	return dense(s, x, width, false, false)
}

// DenseRelu is Dense followed by a ReLU.
func DenseRelu(s *model.Scope, x *graph.Node, width int) *graph.Node {
	return dense(s, x, width, true, true)
}

func dense(s *model.Scope, x *graph.Node, width int, bias, relu bool) *graph.Node {
	if x.Rank() != 2 {
		panic(fmt.Errorf("layer.Dense takes shape (rows, features), not %s", x.Shape()))
	}
	s = s.In("dense")
	g, features := x.Graph(), x.Shape().Dim(-1)
	weights := s.VariableWithShape("weights", shapes.Make(x.DType(), features, width))
	if r := regularizer.FromScope(s); r != nil {
		r(g, weights)
	}
	var y *graph.Node
	if bias {
		biases := s.VariableWithShape("biases", shapes.Make(x.DType(), width))
		y = nn.Dense(x, weights.NodeValue(g), biases.NodeValue(g), compute.DenseLayoutInputOutputs)
	} else {
		y = dot(x, 1, weights.NodeValue(g), 0)
	}
	if relu {
		y = Relu(y)
	}
	return y
}

// weightGradient is xᵀ·v, of shape (in, out), for x of shape (rows, in) and v of shape (rows, out). It transposes
// either x, or v and the result, whichever moves fewer elements.
func weightGradient(x, v *graph.Node) *graph.Node {
	rows, in, out := x.Shape().Dim(0), x.Shape().Dim(1), v.Shape().Dim(1)
	if rows*in <= rows*out+in*out {
		return dot(graph.Transpose(x, 0, 1), 1, v, 0)
	}
	return graph.Transpose(dot(graph.Transpose(v, 0, 1), 1, x, 0), 0, 1)
}

// dot contracts an axis of each of two matrices.
func dot(a *graph.Node, axisA int, b *graph.Node, axisB int) *graph.Node {
	return graph.DotGeneral(a, []int{axisA}, nil, b, []int{axisB}, nil)
}

// positive is v where y > 0, and 0 elsewhere: the gradient of a ReLU with output y.
func positive(y, v *graph.Node) *graph.Node {
	return graph.Mul(v, graph.ConvertDType(graph.GreaterThan(y, graph.ScalarZero(y.Graph(), y.DType())), v.DType()))
}

// Relu returns max(x, 0), of the same shape as x.
func Relu(x *graph.Node) *graph.Node {
	return gradient.With([]*graph.Node{x}, func(in []*graph.Node) *graph.Node {
		return graph.Max(in[0], graph.ScalarZero(x.Graph(), x.DType()))
	}, func(_ []*graph.Node, y, v *graph.Node) []*graph.Node {
		return []*graph.Node{positive(y, v)}
	})
}
