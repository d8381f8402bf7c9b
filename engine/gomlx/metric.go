package gomlx

import (
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/gomlx/core/graph"

	"github.com/lockstep-ml/lockstep/engine"
)

// Metric computes a number per example, whose weighted mean over all examples is reported, or several numbers, from
// whose sums over all examples it is computed. The sums are added over batches and replicas before, in float64, so the
// metric does not depend on how the examples are divided.
type Metric struct {
	Name string // the displayed name, such as "accuracy"
	// PerExample gives a node of shape (rows), or of shape (rows, Sums).
	PerExample func(labels, predictions []*graph.Node) *graph.Node
	// Sums is the number of numbers per example, if it is not one.
	Sums int
	// Value computes the metric from the sums over all examples of each number times the example's weight, and the sum
	// of the weights. Without it, the metric is the mean of the number; several numbers are reported as a table, their
	// sums (train.Result.Tables).
	Value func(sums []float64, weight float64) float64

	stream func() engine.Stream // nil: the value follows from the sums over all batches
	mean   bool                 // PerExample finds the values of a mean of the batch
}

// SparseCategoricalAccuracy is 1 if the largest logit is that of the integer label, else 0. Its name is
// "accuracy".
func SparseCategoricalAccuracy() Metric {
	return Metric{Name: "accuracy", PerExample: func(labels, predictions []*graph.Node) *graph.Node {
		label, logits := pair("SparseCategoricalAccuracy", labels, predictions)
		label = sparseLabels("SparseCategoricalAccuracy", label, logits)
		return hits(graph.ArgMax(logits, -1, dtypes.Int32), graph.ConvertDType(label, dtypes.Int32), logits.DType())
	}}
}

// CategoricalAccuracy is 1 if the largest logit is that of the most probable label, else 0. Its name is
// "accuracy".
func CategoricalAccuracy() Metric {
	return Metric{Name: "accuracy", PerExample: func(labels, predictions []*graph.Node) *graph.Node {
		label, logits := pair("CategoricalAccuracy", labels, predictions)
		label = matched("CategoricalAccuracy", label, logits)
		return hits(graph.ArgMax(logits, -1, dtypes.Int32), graph.ArgMax(label, -1, dtypes.Int32), logits.DType())
	}}
}

// BinaryAccuracyLogits is 1 if the logit is positive and the label is above one half, or neither, else 0. Its
// name is "accuracy".
func BinaryAccuracyLogits() Metric {
	return Metric{Name: "accuracy", PerExample: func(labels, predictions []*graph.Node) *graph.Node {
		label, logits := pair("BinaryAccuracyLogits", labels, predictions)
		label = matched("BinaryAccuracyLogits", label, logits)
		predicted := graph.ConvertDType(graph.GreaterThan(logits, graph.ScalarZero(logits.Graph(), logits.DType())),
			dtypes.Int32)
		is := graph.ConvertDType(graph.GreaterThan(label, graph.Scalar(label.Graph(), label.DType(), 0.5)), dtypes.Int32)
		return hits(predicted, is, logits.DType())
	}}
}

// hits returns, per example, the share of elements in which a equals b.
func hits(a, b *graph.Node, dtype dtypes.DType) *graph.Node {
	return perExample(graph.ConvertDType(graph.Equal(a, b), dtype))
}
