// Package layer provides GoMLX layers whose gradients are fast on the pure-Go backend. They are drop-in
// replacements for GoMLX's: they have the same variables with the same names, and the same mathematics. XLA
// compiles their graphs as efficiently as GoMLX's.
//
// The Go backend multiplies matrices with vector instructions, but moves and compares elements one by one.
// The gradients that GoMLX derives spend most of their time on the latter. The gradient of a matrix product
// transposes both operands and the result, the gradient of a maximum computes a sign, and a convolution is a
// scalar loop. The gradients in this package are written by hand, with matrix products and block copies. What
// remains is computed by kernels, loops of package fused: GELU, layer normalisation, the softmax of attention,
// large transposes. A kernel ends a stage of the program, so small transposes and sums are left to the backend.
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
	in := []*graph.Node{x, weights.NodeValue(g)}
	if bias {
		in = append(in, s.VariableWithShape("biases", shapes.Make(x.DType(), width)).NodeValue(g))
	}
	return linear(in, relu)
}

// linear is x·w + b for in = x, w and b, with x of shape (rows, in) and w of shape (in, out), followed by a ReLU
// if relu is set. b may be missing.
func linear(in []*graph.Node, relu bool) *graph.Node {
	product := func(in []*graph.Node) *graph.Node {
		if len(in) == 2 {
			return dot(in[0], 1, in[1], 0)
		}
		return nn.Dense(in[0], in[1], in[2], compute.DenseLayoutInputOutputs)
	}
	if !onGoBackend(in[0].Graph()) {
		y := product(in)
		if relu {
			y = Relu(y)
		}
		return y
	}
	return gradient.With(in, func(in []*graph.Node) *graph.Node {
		y := product(in)
		if relu {
			y = graph.Max(y, graph.ScalarZero(y.Graph(), y.DType()))
		}
		return y
	}, func(in []*graph.Node, y, v *graph.Node) []*graph.Node {
		if relu {
			v = positive(y, v)
		}
		gradients := []*graph.Node{
			dot(v, 1, in[1], 1), // v·wᵀ: no transpose is needed
			weightGradient(in[0], v),
		}
		if len(in) == 3 {
			gradients = append(gradients, columnSums(v))
		}
		return gradients
	})
}

// weightGradient is xᵀ·v, of shape (in, out), for x of shape (rows, in) and v of shape (rows, out). The
// backend's matrix product needs the contracted axis of the left operand last. So it transposes either x, or
// v and the result, whichever moves fewer elements.
func weightGradient(x, v *graph.Node) *graph.Node {
	rows, in, out := x.Shape().Dim(0), x.Shape().Dim(1), v.Shape().Dim(1)
	if rows*in <= rows*out+in*out {
		return dot(transpose(x), 1, v, 0)
	}
	return transpose(dot(transpose(v), 1, x, 0))
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
	return gradient.With([]*graph.Node{x}, func(in []*graph.Node) *graph.Node {
		return graph.Max(in[0], graph.ScalarZero(x.Graph(), x.DType()))
	}, func(_ []*graph.Node, y, v *graph.Node) []*graph.Node {
		return []*graph.Node{positive(y, v)}
	})
}

// fast reports whether the hand-written graphs of this package are faster for x than GoMLX's: on the Go backend,
// which has the fused operations that they use only for float32 and float64.
func fast(x *graph.Node) bool {
	return onGoBackend(x.Graph()) && (x.DType() == dtypes.Float32 || x.DType() == dtypes.Float64)
}
