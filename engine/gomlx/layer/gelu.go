package layer

import (
	"math"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers/activation"

	"github.com/lockstep-ml/lockstep/engine/gomlx/internal/fused"
	"github.com/lockstep-ml/lockstep/engine/gomlx/internal/gradient"
)

// Gelu is the Gaussian error linear unit x·Φ(x), where Φ is the normal distribution function: GoMLX's
// activation.Gelu, and PyTorch's and Keras' default.
//
// The Go backend computes the error function and exponentials in float64, one element at a time. There, for
// float32, package fused's loop evaluates rational functions for Φ and the density, with errors below 1.2e-6.
func Gelu(x *graph.Node) *graph.Node { return gelu("gelu", x, activation.Gelu, &exactGelu) }

// GeluTanh is the approximation of [Gelu] by a hyperbolic tangent, x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³))), as
// in GPT-2: GoMLX's activation.GeluApproximate, and PyTorch's gelu(approximate="tanh").
func GeluTanh(x *graph.Node) *graph.Node { return gelu("gelu by tanh", x, geluTanh, &tanhGelu) }

// Constants of GPT-2's GELU.
const (
	tanhScale = math.Sqrt2 / math.SqrtPi
	tanhCubic = 0.044715
)

// gelu is plain(x), computed by k on the Go engine.
func gelu(name string, x *graph.Node, plain func(x *graph.Node) *graph.Node, k *fused.Gelu) *graph.Node {
	if x.DType() != dtypes.Float32 || !kernels(x) {
		return plain(x)
	}
	result := []shapes.Shape{x.Shape()}
	return gradient.With([]*graph.Node{x}, func(in []*graph.Node) *graph.Node {
		return kernel(name, nil, func(out, in [][]float32) { k.Apply(out[0], in[0]) }, nil, result, in...)[0]
	}, func(in []*graph.Node, _, v *graph.Node) []*graph.Node {
		return kernel("gradient of "+name, nil, func(out, in [][]float32) { k.Gradient(out[0], in[0], in[1]) }, nil,
			result, in[0], v)
	})
}

// geluTanh is activation.GeluApproximate without its power, which is slow.
func geluTanh(x *graph.Node) *graph.Node {
	cubic := graph.Mul(x, graph.AddScalar(graph.MulScalar(graph.Square(x), tanhCubic), 1))
	return graph.Mul(x, graph.MulScalar(graph.AddScalar(graph.Tanh(graph.MulScalar(cubic, tanhScale)), 1), 0.5))
}

// The two kinds of GELU, with errors of Φ below 1.2e-6. The coefficients come from a least-squares fit, repeated with
// greater weights where the error was large. The density of the first is one over the 32nd power of a polynomial: for a
// large x, one over infinity.
var (
	exactGelu = fused.Gelu{
		Limit: 4.760000228881836,
		P:     [5]float32{0.3989468216896057, 0.028328776359558105, 0.004014194943010807, 4.4784348574467e-05},
		Q: [6]float32{
			1, 0.2377304881811142, 0.02460869401693344, 0.0012942608445882797, 1.5629817653461942e-06,
		},
		Slope: [4]float32{1.0291329622268677, 0.01608065702021122, 0.000125361344544217, 7.033264068923017e-07},
	}
	tanhGelu = fused.Gelu{ // more precise, because the derivative multiplies the error by up to 25
		Limit: 5.019999980926514,
		P: [5]float32{
			0.3989420235157013, 0.03705534711480141, 0.003704039379954338, 0.00016694926307536662,
			4.529060788627248e-06,
		},
		Q: [6]float32{
			1, 0.26037168502807617, 0.02732987329363823, 0.001448512077331543, 7.341814489336684e-05,
			4.381235498840397e-07,
		},
		Slope: [4]float32{0, 0, 2 * tanhScale, 6 * tanhScale * tanhCubic},
	}
)
