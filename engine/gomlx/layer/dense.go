// Package layer provides GoMLX layers whose gradients are fast on the pure-Go backend. They are drop-in
// replacements for GoMLX's: they have the same variables with the same names, and the same mathematics. XLA
// compiles their graphs as efficiently as GoMLX's.
//
// The Go backend multiplies matrices with vector instructions, but moves and compares elements one by one.
// The gradients that GoMLX derives spend most of their time on the latter. The gradient of a matrix product
// transposes both operands and the result, the gradient of a maximum computes a sign, and a convolution is a
// scalar loop. The gradients in this package are written by hand, with matrix products and block copies.
package layer

import (
	"fmt"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers/regularizer"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/nn"
)

// Dense is layers.Dense with a bias. It maps x of shape (rows, features) to (rows, width), and panics on
// another rank. Its variables are "dense/weights" and "dense/biases". The hyperparameters for regularisation
// apply to the weights.
func Dense(s *model.Scope, x *graph.Node, width int) *graph.Node { return dense(s, x, width, false) }

// DenseRelu is Dense followed by a ReLU.
func DenseRelu(s *model.Scope, x *graph.Node, width int) *graph.Node { return dense(s, x, width, true) }

func dense(s *model.Scope, x *graph.Node, width int, relu bool) *graph.Node {
	if x.Rank() != 2 {
		panic(fmt.Errorf("layer.Dense takes shape (rows, features), not %s", x.Shape()))
	}
	s = s.In("dense")
	g, features := x.Graph(), x.Shape().Dim(-1)
	weights := s.VariableWithShape("weights", shapes.Make(x.DType(), features, width))
	if r := regularizer.FromScope(s); r != nil {
		r(g, weights)
	}
	biases := s.VariableWithShape("biases", shapes.Make(x.DType(), width))
	return linear(x, weights.NodeValue(g), biases.NodeValue(g), relu)
}

// linear is x·w + b for x of shape (rows, in) and w of shape (in, out), followed by a ReLU if relu is set.
func linear(x, w, b *graph.Node, relu bool) *graph.Node {
	if !onGoBackend(x.Graph()) {
		y := nn.Dense(x, w, b, compute.DenseLayoutInputOutputs)
		if relu {
			y = Relu(y)
		}
		return y
	}
	return withGradient([]*graph.Node{x, w, b}, func(in []*graph.Node) *graph.Node {
		y := nn.Dense(in[0], in[1], in[2], compute.DenseLayoutInputOutputs)
		if relu {
			y = graph.Max(y, graph.ScalarZero(y.Graph(), y.DType()))
		}
		return y
	}, func(in []*graph.Node, y, v *graph.Node) []*graph.Node {
		if relu {
			v = positive(y, v)
		}
		return []*graph.Node{
			dot(v, 1, in[1], 1), // v·wᵀ: no transpose is needed
			weightGradient(in[0], v),
			columnSums(v),
		}
	})
}

// weightGradient is xᵀ·v, of shape (in, out), for x of shape (rows, in) and v of shape (rows, out). The
// backend's matrix product needs the contracted axis of the left operand last. So it transposes either x, or
// v and the result, whichever moves fewer elements.
func weightGradient(x, v *graph.Node) *graph.Node {
	rows, in, out := x.Shape().Dim(0), x.Shape().Dim(1), v.Shape().Dim(1)
	if rows*in <= rows*out+in*out {
		return dot(graph.Transpose(x, 0, 1), 1, v, 0)
	}
	return graph.Transpose(dot(graph.Transpose(v, 0, 1), 1, x, 0), 0, 1)
}

// columnSums sums the rows of v, of shape (rows, columns), with a matrix product.
func columnSums(v *graph.Node) *graph.Node {
	ones := graph.Ones(v.Graph(), shapes.Make(v.DType(), 1, v.Shape().Dim(0)))
	return graph.Reshape(dot(ones, 1, v, 0), v.Shape().Dim(1))
}

// dot contracts an axis of each of two matrices.
func dot(a *graph.Node, axisA int, b *graph.Node, axisB int) *graph.Node {
	return graph.DotGeneral(a, []int{axisA}, nil, b, []int{axisB}, nil)
}

// positive is v where y > 0, and 0 elsewhere: the gradient of a ReLU with output y.
func positive(y, v *graph.Node) *graph.Node {
	return graph.Mul(v, number(graph.GreaterThan(y, graph.ScalarZero(y.Graph(), y.DType())), v.DType()))
}

// number is 1 where the condition is true, and 0 elsewhere. The Go backend branches on every element of a
// bool node, both in conversions and in Where, but not on those of an integer node.
func number(condition *graph.Node, dtype dtypes.DType) *graph.Node {
	if onGoBackend(condition.Graph()) {
		condition = graph.Bitcast(condition, dtypes.Uint8)
	}
	return graph.ConvertDType(condition, dtype)
}

// Relu returns max(x, 0), of the same shape as x.
func Relu(x *graph.Node) *graph.Node {
	return withGradient([]*graph.Node{x}, func(in []*graph.Node) *graph.Node {
		return graph.Max(in[0], graph.ScalarZero(x.Graph(), x.DType()))
	}, func(_ []*graph.Node, y, v *graph.Node) []*graph.Node {
		return []*graph.Node{positive(y, v)}
	})
}

// withGradient returns forward(inputs) with custom gradients. gradient returns the gradients with respect to
// the inputs, from the output y and its adjoint v.
//
// GoMLX supports custom gradients only for an identity. So the output passes through an identity that
// computes the gradients. Each input passes through an identity that replaces the gradients that GoMLX
// derived, which are then dead code. GoMLX visits nodes from the last to the first, so the output's identity
// comes before those of the inputs.
func withGradient(inputs []*graph.Node, forward func(in []*graph.Node) *graph.Node,
	gradient func(in []*graph.Node, y, v *graph.Node) []*graph.Node,
) *graph.Node {
	var gradients []*graph.Node
	in := make([]*graph.Node, len(inputs))
	for i, x := range inputs {
		in[i] = graph.IdentityWithCustomGradient(x, func(_, _ *graph.Node) *graph.Node { return gradients[i] })
	}
	y := forward(in)
	return graph.IdentityWithCustomGradient(y, func(y, v *graph.Node) *graph.Node {
		gradients = gradient(inputs, y, v)
		return v
	})
}
