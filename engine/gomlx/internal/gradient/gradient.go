// Package gradient gives GoMLX graphs hand-written gradients.
package gradient

import "github.com/gomlx/gomlx/core/graph"

// With returns forward(inputs) with custom gradients. gradient returns the gradients with respect to the inputs,
// from the output y and its adjoint v.
//
// GoMLX supports custom gradients only for an identity. So the output passes through an identity that
// computes the gradients. Each input passes through an identity that replaces the gradients that GoMLX
// derived, which are then dead code. GoMLX visits nodes from the last to the first, so the output's identity
// comes before those of the inputs.
func With(inputs []*graph.Node, forward func(in []*graph.Node) *graph.Node,
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
