package layer

import (
	"math"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers/activation"

	"github.com/lockstep-ml/lockstep/engine/gomlx/internal/gradient"
)

// Gelu is the Gaussian error linear unit x·Φ(x), where Φ is the normal distribution function: GoMLX's
// activation.Gelu, and PyTorch's and Keras' default.
//
// The Go backend computes the error function and exponentials in float64, one element at a time. There, for
// float32, Φ and the density are rational functions, with errors below 1.2e-6.
func Gelu(x *graph.Node) *graph.Node {
	return gelu(x, activation.Gelu, exactGelu, func(x, square, _ *graph.Node) *graph.Node {
		// The density is one over the 32nd power of a polynomial. For a large x that is one over infinity.
		power := horner(square, []float64{
			1.0291329622268677, 0.01608065702021122, 0.000125361344544217, 7.033264068923017e-07,
		})
		for range 5 {
			power = graph.Mul(power, power)
		}
		return graph.Div(x, power)
	})
}

// GeluTanh is the approximation of [Gelu] by a hyperbolic tangent, x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³))), as
// in GPT-2: GoMLX's activation.GeluApproximate, and PyTorch's gelu(approximate="tanh").
func GeluTanh(x *graph.Node) *graph.Node {
	return gelu(x, geluTanh, tanhGelu, func(x, square, factor *graph.Node) *graph.Node {
		inner := graph.AddScalar(graph.MulScalar(square, 6*tanhScale*tanhCubic), 2*tanhScale)
		return graph.Mul(graph.Mul(x, inner), graph.Sub(factor, graph.Mul(factor, factor)))
	})
}

// Constants of GPT-2's GELU.
const (
	tanhScale = math.Sqrt2 / math.SqrtPi
	tanhCubic = 0.044715
)

// gelu is x·f(x). factor is f(x) - ½ on the Go backend. slope returns x times the derivative of f, from x, x² and
// f(x).
func gelu(x *graph.Node, plain func(x *graph.Node) *graph.Node, factor rational,
	slope func(x, square, factor *graph.Node) *graph.Node,
) *graph.Node {
	if !onGoBackend(x.Graph()) || x.DType() != dtypes.Float32 {
		return plain(x)
	}
	var f *graph.Node
	return gradient.With([]*graph.Node{x}, func(in []*graph.Node) *graph.Node {
		f = graph.AddScalar(factor.at(in[0]), 0.5)
		return graph.Mul(in[0], f)
	}, func(in []*graph.Node, _, v *graph.Node) []*graph.Node {
		return []*graph.Node{graph.Mul(v, graph.Add(slope(in[0], graph.Mul(in[0], in[0]), f), f))}
	})
}

// geluTanh is activation.GeluApproximate without its power, which is slow.
func geluTanh(x *graph.Node) *graph.Node {
	cubic := graph.Mul(x, graph.AddScalar(graph.MulScalar(graph.Square(x), tanhCubic), 1))
	return graph.Mul(x, graph.MulScalar(graph.AddScalar(graph.Tanh(graph.MulScalar(cubic, tanhScale)), 1), 0.5))
}

// rational is the odd function x·P(x²)/Q(x²), with the coefficients of P and Q in ascending order. Below -limit
// and above limit it is constant: in float32 exactly -½ and ½.
type rational struct {
	limit float64
	p, q  []float64
}

// Φ(x) - ½ for the two kinds of GELU, with errors below 1.2e-6. The coefficients come from a least-squares fit,
// repeated with greater weights where the error was large.
var (
	exactGelu = rational{
		4.760000228881836,
		[]float64{0.3989468216896057, 0.028328776359558105, 0.004014194943010807, 4.4784348574467e-05},
		[]float64{1, 0.2377304881811142, 0.02460869401693344, 0.0012942608445882797, 1.5629817653461942e-06},
	}
	tanhGelu = rational{ // more precise, because the derivative multiplies the error by up to 25
		5.019999980926514,
		[]float64{
			0.3989420235157013, 0.03705534711480141, 0.003704039379954338, 0.00016694926307536662,
			4.529060788627248e-06,
		},
		[]float64{
			1, 0.26037168502807617, 0.02732987329363823, 0.001448512077331543, 7.341814489336684e-05,
			4.381235498840397e-07,
		},
	}
)

// at returns the function at x.
func (r rational) at(x *graph.Node) *graph.Node {
	x = graph.ClipScalar(x, -r.limit, r.limit)
	square := graph.Mul(x, x)
	return graph.Div(graph.Mul(x, horner(square, r.p)), horner(square, r.q))
}

// horner evaluates a polynomial with coefficients in ascending order.
func horner(x *graph.Node, coefficients []float64) *graph.Node {
	last := len(coefficients) - 1
	y := graph.MulScalar(x, coefficients[last])
	for i := last - 1; i > 0; i-- {
		y = graph.Mul(graph.AddScalar(y, coefficients[i]), x)
	}
	return graph.AddScalar(y, coefficients[0])
}
