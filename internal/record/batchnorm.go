package record

import (
	"github.com/gomlx/compute"
	"github.com/gomlx/compute/shapes"
)

// norm builds a batch normalization. The first error stays.
type norm struct {
	f          compute.Function
	shape      shapes.Shape
	axis, size int
	err        error
}

func (f *Function) norm(x compute.Value, axis int) *norm {
	n := &norm{f: f, axis: axis}
	if n.shape, n.err = f.Shape(x); n.err == nil {
		n.size = n.shape.Size() / max(1, n.shape.Dimensions[axis])
	}
	return n
}

func (n *norm) do(op func(a, b compute.Value) (compute.Value, error), a, b compute.Value) compute.Value {
	if n.err != nil {
		return nil
	}
	var v compute.Value
	v, n.err = op(a, b)
	return v
}

func (n *norm) add(a, b compute.Value) compute.Value { return n.do(n.f.Add, a, b) }
func (n *norm) sub(a, b compute.Value) compute.Value { return n.do(n.f.Sub, a, b) }
func (n *norm) mul(a, b compute.Value) compute.Value { return n.do(n.f.Mul, a, b) }

// all spreads a number of each feature over all elements.
func (n *norm) all(v compute.Value) compute.Value {
	return n.do(func(v, _ compute.Value) (compute.Value, error) {
		return n.f.BroadcastInDim(v, n.shape, []int{n.axis})
	}, v, nil)
}

// number is the same number for each feature.
func (n *norm) number(x float64) compute.Value {
	return n.do(func(_, _ compute.Value) (compute.Value, error) {
		c, err := n.f.Constant(shapes.CastAsDType([]float64{x}, n.shape.DType))
		if err != nil {
			return nil, err
		}
		return n.f.BroadcastInDim(c, shapes.Make(n.shape.DType, n.shape.Dimensions[n.axis]), nil)
	}, nil, nil)
}

// sum adds the elements of each feature.
func (n *norm) sum(v compute.Value) compute.Value {
	return n.do(func(v, _ compute.Value) (compute.Value, error) {
		var axes []int
		for i := range n.shape.Dimensions {
			if i != n.axis {
				axes = append(axes, i)
			}
		}
		if len(axes) == 0 {
			return v, nil
		}
		return n.f.ReduceSum(v, axes...)
	}, v, nil)
}

// inverse is one over the standard deviation.
func (n *norm) inverse(variance compute.Value, epsilon float32) compute.Value {
	return n.do(func(v, _ compute.Value) (compute.Value, error) { return n.f.Rsqrt(v) },
		n.add(variance, n.number(float64(epsilon))), nil)
}

// BatchNormForInference implements compute.Function.
func (f *Function) BatchNormForInference(x, scale, offset, mean, variance compute.Value, epsilon float32, axis int) (
	compute.Value, error,
) {
	if !f.Of.ComposeBatchNorm {
		return f.Operations.BatchNormForInference(x, scale, offset, mean, variance, epsilon, axis)
	}
	n := f.norm(x, axis)
	y := n.mul(n.sub(x, n.all(mean)), n.all(n.mul(scale, n.inverse(variance, epsilon))))
	return n.add(y, n.all(offset)), n.err
}

// BatchNormForTraining implements compute.Function.
func (f *Function) BatchNormForTraining(x, scale, offset compute.Value, epsilon float32, axis int) (
	y, mean, variance compute.Value, err error,
) {
	if !f.Of.ComposeBatchNorm {
		return f.Operations.BatchNormForTraining(x, scale, offset, epsilon, axis)
	}
	n := f.norm(x, axis)
	share := n.number(1 / float64(n.size))
	mean = n.mul(n.sum(x), share)
	d := n.sub(x, n.all(mean))
	variance = n.mul(n.sum(n.mul(d, d)), share)
	y = n.add(n.mul(d, n.all(n.mul(scale, n.inverse(variance, epsilon)))), n.all(offset))
	return y, mean, variance, n.err
}

// BatchNormGradient implements compute.Function.
func (f *Function) BatchNormGradient(x, scale, mean, variance, gradient compute.Value, epsilon float32, axis int) (
	ofX, ofScale, ofOffset compute.Value, err error,
) {
	if !f.Of.ComposeBatchNorm {
		return f.Operations.BatchNormGradient(x, scale, mean, variance, gradient, epsilon, axis)
	}
	n := f.norm(x, axis)
	share, inverse := n.number(1/float64(n.size)), n.inverse(variance, epsilon)
	d := n.sub(x, n.all(mean))
	ofOffset = n.sum(gradient)
	product := n.mul(n.sum(n.mul(gradient, d)), inverse)
	ofScale = product
	// The gradient without its mean and its part along x.
	rest := n.sub(n.sub(gradient, n.all(n.mul(ofOffset, share))), n.mul(d, n.all(n.mul(n.mul(product, share), inverse))))
	ofX = n.mul(rest, n.all(n.mul(scale, inverse)))
	return ofX, ofScale, ofOffset, n.err
}
