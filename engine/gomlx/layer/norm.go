package layer

import (
	"fmt"

	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/model/initializer"

	"github.com/lockstep-ml/lockstep/engine/gomlx"
)

// What BatchNorm adds to the variance, and how much of the moving averages a step keeps: Keras' values.
const (
	normEpsilon  = 1e-3
	normMomentum = 0.99
)

// BatchNorm normalises every channel (the last axis) of x to mean 0 and variance 1 over the examples, and gives it a
// trained scale and offset. In inference it uses moving averages of mean and variance.
//
// Rows of weight 0 are left out of mean and variance, so that padding does not matter, and a replica without examples
// leaves its averages as they are. The gradient is the true one, through mean and variance. GoMLX's norm.BatchNorm
// counts padding; by default it does not run on the Go backend, and with UseBackendInference(false) it takes mean and
// variance for constants in the gradient.
//
// Each replica normalises by its own examples, as TensorFlow's layer does unless told otherwise; the averages are
// combined over the replicas when they are read. The variables are "batch_normalization/scale", "…/offset", "…/mean"
// and "…/variance".
func BatchNorm(s *model.Scope, x *graph.Node) *graph.Node {
	if x.Rank() < 2 {
		panic(fmt.Errorf("layer.BatchNorm takes shape (rows, …, channels), not %s", x.Shape()))
	}
	s = s.In("batch_normalization")
	g, channels := x.Graph(), x.Shape().Dim(-1)
	shape := shapes.Make(x.DType(), channels)
	one, zero := s.WithInitializer(initializer.One), s.WithInitializer(initializer.Zero)
	scale, offset := one.VariableWithShape("scale", shape).NodeValue(g), zero.VariableWithShape("offset", shape).NodeValue(g)
	means := zero.VariableWithShape("mean", shape).SetTrainable(false)
	variances := one.VariableWithShape("variance", shape).SetTrainable(false)

	mean, variance := means.NodeValue(g), variances.NodeValue(g)
	if s.IsTraining(g) {
		var used *graph.Node
		mean, variance, used = moments(x)
		update := func(v *model.Variable, now *graph.Node) {
			old := v.NodeValue(g)
			rate := graph.MulScalar(used, 1-normMomentum)
			v.SetNodeValue(graph.StopGradient(graph.Add(old, graph.Mul(rate, graph.Sub(now, old)))))
		}
		update(means, mean)
		update(variances, variance)
	}
	wide := func(n *graph.Node) *graph.Node { return graph.ExpandLeftToRank(n, x.Rank()) }
	factor := graph.Div(scale, graph.Sqrt(graph.AddScalar(variance, normEpsilon)))
	return graph.Add(graph.Mul(graph.Sub(x, wide(mean)), wide(factor)), wide(offset))
}

// moments returns mean and variance of each channel over the rows whose weight is not 0, and 1, or 0 if there are none.
func moments(x *graph.Node) (mean, variance, used *graph.Node) {
	rows := x.Shape().Dim(0)
	var keep *graph.Node // 1 or 0 for every row
	if w := gomlx.ExampleWeights(x.Graph()); w != nil {
		keep = number(graph.NotEqual(w, graph.ScalarZero(w.Graph(), w.DType())), x.DType())
	} else {
		keep = graph.Ones(x.Graph(), shapes.Make(x.DType(), rows))
	}
	var axes []int
	for axis := range x.Rank() - 1 {
		axes = append(axes, axis)
	}
	dims := make([]int, x.Rank())
	for i := range dims {
		dims[i] = 1
	}
	dims[0] = rows
	mask := graph.Reshape(keep, dims...)
	count := graph.ReduceAllSum(keep)
	used = graph.MinScalar(count, 1)
	count = graph.MulScalar(graph.MaxScalar(count, 1), float64(x.Shape().Size()/rows/x.Shape().Dim(-1)))
	mean = graph.Div(graph.ReduceSum(graph.Mul(x, mask), axes...), count)
	centred := graph.Mul(graph.Sub(x, graph.ExpandLeftToRank(mean, x.Rank())), mask)
	variance = graph.Div(graph.ReduceSum(graph.Square(centred), axes...), count)
	return mean, variance, used
}
