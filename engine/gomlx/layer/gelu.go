package layer

import (
	"math"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers/activation"
)

// Gelu is the Gaussian error linear unit x·Φ(x), where Φ is the normal distribution function: GoMLX's
// activation.Gelu, and PyTorch's and Keras' default.
func Gelu(x *graph.Node) *graph.Node { return activation.Gelu(x) }

// Constants of GPT-2's GELU.
const (
	tanhScale = math.Sqrt2 / math.SqrtPi
	tanhCubic = 0.044715
)

// GeluTanh is the approximation of [Gelu] by a hyperbolic tangent, x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³))), as
// in GPT-2: GoMLX's activation.GeluApproximate without its power, which is slow, and PyTorch's
// gelu(approximate="tanh").
func GeluTanh(x *graph.Node) *graph.Node {
	cubic := graph.Mul(x, graph.AddScalar(graph.MulScalar(graph.Square(x), tanhCubic), 1))
	return graph.Mul(x, graph.MulScalar(graph.AddScalar(graph.Tanh(graph.MulScalar(cubic, tanhScale)), 1), 0.5))
}
