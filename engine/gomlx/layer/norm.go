package layer

import (
	"cmp"
	"fmt"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/model/initializer"

	"github.com/lockstep-ml/lockstep/engine/gomlx"
)

// What BatchNorm adds to the variance, and how much of the moving averages a step keeps, by default: Keras' values.
const (
	normEpsilon  = 1e-3
	normMomentum = 0.99
)

// BatchNorm normalises every channel (the last axis) of x to mean 0 and variance 1 over the examples, and gives it a
// trained scale and offset. In inference it uses moving averages of mean and variance.
//
// Padding is left out of mean and variance, and a replica without examples leaves its averages as they are. All examples
// count alike, whatever their weights, as in Keras. The gradient is the true one, through mean and variance. GoMLX's
// norm.BatchNorm counts padding; by default it does not run on the Go backend, and with UseBackendInference(false) it
// takes mean and variance for constants in the gradient.
//
// Each replica normalises by its own examples, as TensorFlow's layer does unless told otherwise; the averages are
// combined over the replicas when they are read. The variables are "batch_normalization/scale", "…/offset", "…/mean"
// and "…/variance".
//
// Float16 and bfloat16 are normalized in float32, as Keras does: neither has room for a sum over many rows, nor for a moving average's
// small steps. Scale and offset are of x's type, the moving averages float32.
func BatchNorm(s *model.Scope, x *graph.Node) *graph.Node {
	return BatchNormWith(s, x, BatchNormOptions{})
}

// SyncBatchNorm is [BatchNorm] over the examples of all replicas: n replicas normalise as one with the whole batch would,
// which matters where a replica's share is small (Keras' BatchNormalization(synchronized=True), PyTorch's SyncBatchNorm).
// The gradient is the true one, through the mean and variance of the global batch. Each call costs one all-reduce of
// three numbers per channel going forward, and one going back; see [gomlx.AllReduce]. The moving averages come out equal
// on all replicas. Variables and inference are those of BatchNorm, so a model may be trained with one and go on with the
// other.
func SyncBatchNorm(s *model.Scope, x *graph.Node) *graph.Node {
	return BatchNormWith(s, x, BatchNormOptions{Sync: true})
}

// BatchNormOptions are the settings of [BatchNormWith]. The zero value is [BatchNorm].
type BatchNormOptions struct {
	Momentum float64 // share of the moving averages that a step keeps, between 0 and 1; default 0.99
	Epsilon  float64 // added to the variance, positive; default 0.001
	Sync     bool    // normalise over the examples of all replicas: see [SyncBatchNorm]
}

// BatchNormWith is [BatchNorm] or [SyncBatchNorm] with other settings than Keras' defaults.
func BatchNormWith(s *model.Scope, x *graph.Node, o BatchNormOptions) *graph.Node {
	o.Momentum, o.Epsilon = cmp.Or(o.Momentum, normMomentum), cmp.Or(o.Epsilon, normEpsilon)
	if !(o.Momentum > 0 && o.Momentum < 1) || !(o.Epsilon > 0) {
		panic(fmt.Errorf("batch normalisation has momentum %v and epsilon %v: "+
			"want a momentum between 0 and 1 and a positive epsilon", o.Momentum, o.Epsilon))
	}
	moments := moments
	if o.Sync {
		moments = syncMoments
	}
	if x.Rank() < 2 {
		panic(fmt.Errorf("batch normalisation takes shape (rows, …, channels), not %s", x.Shape()))
	}
	s = s.In("batch_normalization")
	g, channels, dtype := x.Graph(), x.Shape().Dim(-1), x.DType()
	x = gomlx.AtLeastFloat32(x)
	one, zero := s.WithInitializer(initializer.One), s.WithInitializer(initializer.Zero)
	trained := func(s *model.Scope, name string) *graph.Node {
		return graph.ConvertDType(s.VariableWithShape(name, shapes.Make(dtype, channels)).NodeValue(g), x.DType())
	}
	scale, offset := trained(one, "scale"), trained(zero, "offset")
	shape := shapes.Make(x.DType(), channels)
	means := zero.VariableWithShape("mean", shape).SetTrainable(false)
	variances := one.VariableWithShape("variance", shape).SetTrainable(false)

	mean, variance := means.NodeValue(g), variances.NodeValue(g)
	if s.IsTraining(g) {
		var used *graph.Node
		mean, variance, used = moments(x)
		update := func(v *model.Variable, now *graph.Node) {
			old := v.NodeValue(g)
			rate := graph.MulScalar(used, 1-o.Momentum)
			v.SetNodeValue(graph.StopGradient(graph.Add(old, graph.Mul(rate, graph.Sub(now, old)))))
		}
		update(means, mean)
		update(variances, variance)
	}
	wide := func(n *graph.Node) *graph.Node { return graph.ExpandLeftToRank(n, x.Rank()) }
	factor := graph.Div(scale, graph.Sqrt(graph.AddScalar(variance, o.Epsilon)))
	return graph.ConvertDType(graph.Add(graph.Mul(graph.Sub(x, wide(mean)), wide(factor)), wide(offset)), dtype)
}

// moments returns mean and variance of each channel over the rows that are examples, and 1, or 0 if there are none.
func moments(x *graph.Node) (mean, variance, used *graph.Node) {
	l := localMoments(x)
	return l.mean, graph.Div(l.squares, l.count), l.used
}

// local is what a replica knows of its channels.
type local struct {
	mean    *graph.Node
	squares *graph.Node // sum of squared distances from the mean
	count   *graph.Node // of numbers per channel, at least 1
	used    *graph.Node // 1, or 0 if all rows are padding
}

func localMoments(x *graph.Node) local {
	rows := x.Shape().Dim(0)
	var keep *graph.Node // 1 or 0 for every row
	if examples := gomlx.Examples(x.Graph()); examples != nil {
		keep = graph.ConvertDType(examples, x.DType())
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
	l := local{used: graph.MinScalar(count, 1)}
	l.count = graph.MulScalar(graph.MaxScalar(count, 1), float64(x.Shape().Size()/rows/x.Shape().Dim(-1)))
	l.mean = graph.Div(graph.ReduceSum(graph.Mul(x, mask), axes...), l.count)
	centred := graph.Mul(graph.Sub(x, graph.ExpandLeftToRank(l.mean, x.Rank())), mask)
	l.squares = graph.ReduceSum(graph.Square(centred), axes...)
	return l
}

// syncMoments is moments over the rows of all replicas. Each replica centres its own numbers, as cancellation would
// otherwise eat the variance of channels far from 0; what is joined, with the means' distances from each other, travels
// as float64 for the same reason (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
// sample variances", 1979).
func syncMoments(x *graph.Node) (mean, variance, used *graph.Node) {
	if gomlx.Replicas(x.Graph()) == 1 {
		return moments(x)
	}
	l := localMoments(x)
	wide := func(n *graph.Node) *graph.Node { return graph.ConvertDType(n, dtypes.Float64) }
	n := graph.Mul(wide(l.count), wide(l.used)) // 0 without rows, where count is 1 or more
	m, squares := wide(l.mean), wide(l.squares)
	channels := m.Shape().Dim(0)
	sums := gomlx.AllReduce(graph.Concatenate([]*graph.Node{
		graph.Reshape(n, 1),
		graph.Mul(m, n),
		graph.Add(squares, graph.Mul(graph.Square(m), n)),
	}, 0), gomlx.Sum)
	part := func(from, to int) *graph.Node { return graph.Slice(sums, graph.AxisRange(from, to)) }
	total := graph.Reshape(part(0, 1))
	used = graph.ConvertDType(graph.MinScalar(total, 1), x.DType())
	total = graph.MaxScalar(total, 1)
	mean = graph.Div(part(1, 1+channels), total)
	variance = graph.Sub(graph.Div(part(1+channels, 1+2*channels), total), graph.Square(mean))
	return graph.ConvertDType(mean, x.DType()), graph.ConvertDType(graph.MaxScalar(variance, 0), x.DType()), used
}
