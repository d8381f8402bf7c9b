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

// Defaults of BatchNorm, as in Keras: the number added to the variance, and the share of the moving averages
// that a step keeps.
const (
	normEpsilon  = 1e-3
	normMomentum = 0.99
)

// BatchNorm normalises every channel (the last axis) of x, of shape (rows, …, channels), to mean 0 and
// variance 1 over the examples. It then applies a trained scale and offset. In inference it uses moving
// averages of mean and variance.
//
// Mean and variance exclude padding, and a replica without examples does not change its averages. All
// examples count equally, whatever their weights, as in Keras. The gradient is exact, through mean and
// variance. GoMLX's norm.BatchNorm includes padding, and with UseBackendInference(false) it treats mean
// and variance as constants in the gradient.
//
// Each replica normalises by its local examples, as TensorFlow's layer does by default. The averages are
// combined over the replicas when they are read. The variables are "batch_normalization/scale", "…/offset",
// "…/mean" and "…/variance".
//
// Float16 and bfloat16 are normalised in float32, as in Keras, because their precision is too low for a sum
// over many rows and for the small steps of a moving average. Scale and offset have the dtype of x, or
// float32 in a model of mixed precision; the moving averages are float32.
func BatchNorm(s *model.Scope, x *graph.Node) *graph.Node {
	return BatchNormWith(s, x, BatchNormOptions{})
}

// SyncBatchNorm is [BatchNorm] over the examples of all replicas: n replicas normalise like one replica with
// the whole batch. This matters if a replica's share is small. It is Keras'
// BatchNormalization(synchronized=True) and PyTorch's SyncBatchNorm. The gradient is exact, through the mean
// and variance of the global batch. Each call adds one all-reduce of three numbers per channel to the forward
// pass, and one to the backward pass; see [gomlx.AllReduce]. The moving averages are equal on all replicas.
// Variables and inference are those of BatchNorm, so a model may be trained with one and continued with the
// other.
func SyncBatchNorm(s *model.Scope, x *graph.Node) *graph.Node {
	return BatchNormWith(s, x, BatchNormOptions{Sync: true})
}

// BatchNormOptions are the settings of [BatchNormWith]. The zero value is [BatchNorm].
type BatchNormOptions struct {
	Momentum float64 // share of the moving averages that a step keeps, above 0 and below 1; default 0.99
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
	g, channels, dtype, trainedIn := x.Graph(), x.Shape().Dim(-1), x.DType(), gomlx.VariableDType(x)
	x = gomlx.AtLeastFloat32(x)
	one, zero := s.WithInitializer(initializer.One), s.WithInitializer(initializer.Zero)
	trained := func(s *model.Scope, name string) *graph.Node {
		return graph.ConvertDType(s.VariableWithShape(name, shapes.Make(trainedIn, channels)).NodeValue(g), x.DType())
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

// moments returns mean and variance of each channel over the rows that are examples. used is 1, or 0 if there
// are not examples.
func moments(x *graph.Node) (mean, variance, used *graph.Node) {
	l := localMoments(x)
	return l.mean, graph.Div(l.squares, l.count), l.used
}

// local holds the moments of a replica's rows, per channel.
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

// syncMoments is moments over the rows of all replicas. Each replica centres its local numbers, because
// cancellation would otherwise destroy the variance of channels far from 0. For the same reason, the combined
// sums, with the distances between the means, are float64 (Chan, Golub and LeVeque, "Updating formulae and a
// pairwise algorithm for computing sample variances", 1979).
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
