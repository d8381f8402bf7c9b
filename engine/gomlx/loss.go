package gomlx

import (
	"fmt"
	"math"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/gomlx/core/graph"
)

// Loss builds the loss per example: a node of shape (rows), from labels and predictions of shape (rows, …).
// Lockstep weights and averages it over the whole global batch.
//
// A function for GoMLX's trainer works, too. Of several numbers per example, shape (rows, …), the mean is taken. A
// scalar must be the mean of a node of shape (rows, …), as GoMLX's losses are: their graphs end in
// graph.ReduceAllMean. Lockstep finds that node, and takes its values as the losses of the examples. To tell the
// rows from another axis of the same size, it also builds the loss for one row more. Any other scalar is an error of
// Compile; [BatchLoss] takes it. GoMLX's own functions do not notice a label that is not a class; those of this
// package do.
//
// A loss per example that depends on other examples, such as a contrastive one, sees those of its replica only: the
// rule of [BatchLoss] holds.
//
// Like all graph-building functions, a Loss reports an error by a panic, which Compile returns as an error.
type Loss func(labels, predictions []*graph.Node) *graph.Node

// BatchLoss makes a Loss of a function that gives one number for all rows, as GoMLX's train.LossFn may: a loss that
// combines examples, such as a contrastive one, or a mean.
//
// The rule is that of data-parallel training: each replica computes f over its rows, and the loss of a step is the mean
// of these numbers, each weighted by the sum of the weights of the replica's examples. So a loss that combines examples
// depends on the number of replicas. f sees the rows of padding of a short batch, and no weights, unless it uses
// [Examples] or [ExampleWeights]; a mean over full batches of weight 1 is the mean over all examples.
func BatchLoss(f func(labels, predictions []*graph.Node) *graph.Node) Loss {
	return func(labels, predictions []*graph.Node) *graph.Node {
		x := f(labels, predictions)
		if x == nil || x.Rank() > 1 {
			panic(fmt.Errorf("BatchLoss gets %s: want a scalar, or one number per example", shapeOf(x)))
		}
		if x.IsScalar() {
			x = graph.BroadcastToDims(x, predictions[0].Shape().Dim(0))
		}
		return x
	}
}

// theirLosses is the prefix of the names of GoMLX's losses.
const theirLosses = "github.com/gomlx/gomlx/ml/train/loss."

// counterparts maps GoMLX's losses to those of this package.
var counterparts = map[string]string{
	"SparseCategoricalCrossEntropyLogits": "SparseCategoricalCrossEntropyLogits",
	"CategoricalCrossEntropyLogits":       "CategoricalCrossEntropyLogits",
	"BinaryCrossentropyLogits":            "BinaryCrossEntropyLogits",
	"MeanSquaredError":                    "MeanSquaredError",
	"MeanAbsoluteError":                   "MeanAbsoluteError",
}

// insteadOf describes what to use instead of one of GoMLX's losses.
func insteadOf(name string) string {
	ours, ok := counterparts[name]
	if !ok {
		return "want a function that returns one number per example, or their mean"
	}
	return "want other labels or predictions, or gomlx." + ours + " of Lockstep's package gomlx"
}

// SparseCategoricalCrossEntropyLogits is the cross entropy between integer labels of shape (rows) or (rows,
// 1), and logits of shape (rows, classes). With more dimensions between rows and classes, an example's loss
// is the mean over them. A label that is not from 0 to classes-1 makes the loss NaN, unless the example has
// weight 0.
func SparseCategoricalCrossEntropyLogits(labels, predictions []*graph.Node) *graph.Node {
	label, logits := pair("SparseCategoricalCrossEntropyLogits", labels, predictions)
	label = sparseLabels("SparseCategoricalCrossEntropyLogits", label, logits)
	g, classes, number := logits.Graph(), logits.Shape().Dim(-1), graph.ConvertDType(label, dtypes.Int64)
	noteClasses(labels[0], classes)
	known := graph.LogicalAnd(
		graph.GreaterOrEqual(number, graph.ScalarZero(g, dtypes.Int64)),
		graph.LessThan(number, graph.Scalar(g, dtypes.Int64, classes)))
	oneHot := graph.OneHot(label, classes, logits.DType())
	perLabel := crossEntropy(oneHot, logits)
	return perExample(graph.Where(known, perLabel, graph.Scalar(g, perLabel.DType(), math.NaN())))
}

// classesKey is the key under which a graph stores the number of classes of its label nodes.
type classesKey struct{}

// noteClasses records the number of classes of a label node.
func noteClasses(labels *graph.Node, classes int) {
	g := labels.Graph()
	noted, ok := g.State(classesKey{}).(map[*graph.Node]int)
	if !ok {
		noted = map[*graph.Node]int{}
		g.AttachState(classesKey{}, noted)
	}
	noted[labels] = classes
}

// classesOf returns the recorded number of classes of each label of a batch, or 0.
func classesOf(g *graph.Graph, labels []*graph.Node) []int {
	noted, _ := g.State(classesKey{}).(map[*graph.Node]int)
	list := make([]int, len(labels))
	for i, label := range labels {
		list[i] = noted[label]
	}
	return list
}

// CategoricalCrossEntropyLogits is the cross entropy between labels that are probabilities and logits, both of shape
// (rows, …, classes).
func CategoricalCrossEntropyLogits(labels, predictions []*graph.Node) *graph.Node {
	label, logits := pair("CategoricalCrossEntropyLogits", labels, predictions)
	return perExample(crossEntropy(matched("CategoricalCrossEntropyLogits", label, logits), logits))
}

// BinaryCrossEntropyLogits is the cross entropy between labels from 0 to 1 and logits of the same shape.
func BinaryCrossEntropyLogits(labels, predictions []*graph.Node) *graph.Node {
	label, logits := pair("BinaryCrossEntropyLogits", labels, predictions)
	label = matched("BinaryCrossEntropyLogits", label, logits)
	// max(z, 0) - z y + log(1 + exp(-|z|)): no exponential that overflows.
	z := graph.Sub(graph.MaxScalar(logits, 0), graph.Mul(logits, label))
	return perExample(graph.Add(z, graph.Log1P(graph.Exp(graph.Neg(graph.Abs(logits))))))
}

// MeanSquaredError is the mean of the squared differences over an example's elements.
func MeanSquaredError(labels, predictions []*graph.Node) *graph.Node {
	label, prediction := pair("MeanSquaredError", labels, predictions)
	return perExample(graph.Square(graph.Sub(matched("MeanSquaredError", label, prediction), prediction)))
}

// MeanAbsoluteError is the mean of the absolute differences over an example's elements.
func MeanAbsoluteError(labels, predictions []*graph.Node) *graph.Node {
	label, prediction := pair("MeanAbsoluteError", labels, predictions)
	return perExample(graph.Abs(graph.Sub(matched("MeanAbsoluteError", label, prediction), prediction)))
}

// Huber returns the Huber loss. With d the difference between prediction and label, it is the mean over an
// example's elements of d²/2 if |d| is at most delta, and of delta·(|d| - delta/2) otherwise. Outliers count
// less than in [MeanSquaredError]. Keras' default for delta is 1. The loss panics if delta is not positive.
func Huber(delta float64) Loss {
	return func(labels, predictions []*graph.Node) *graph.Node {
		if !(delta > 0) {
			panic(fmt.Errorf("Huber has delta %v: want a positive number", delta))
		}
		label, prediction := pair("Huber", labels, predictions)
		d := graph.Abs(graph.Sub(matched("Huber", label, prediction), prediction))
		near := graph.MinScalar(d, delta)
		// near·(d - near/2) is d²/2 up to delta, and the straight line beyond.
		return perExample(graph.Mul(near, graph.Sub(d, graph.MulScalar(near, 0.5))))
	}
}

// crossEntropy takes probabilities and logits of the same shape, and reduces the last dimension.
func crossEntropy(labels, logits *graph.Node) *graph.Node {
	return graph.ReduceSum(graph.Neg(graph.Mul(labels, graph.LogSoftmax(logits))), -1)
}

// perExample averages over all dimensions except the first.
func perExample(x *graph.Node) *graph.Node {
	if x.Rank() == 1 {
		return x
	}
	axes := make([]int, 0, x.Rank()-1)
	for axis := 1; axis < x.Rank(); axis++ {
		axes = append(axes, axis)
	}
	return graph.ReduceMean(x, axes...)
}

// pair returns the only label and the first prediction, the latter as at least float32.
func pair(what string, labels, predictions []*graph.Node) (label, prediction *graph.Node) {
	if len(labels) != 1 {
		panic(fmt.Errorf("%s takes 1 label, the batch has %d", what, len(labels)))
	}
	return labels[0], AtLeastFloat32(predictions[0])
}

// sparseLabels checks integer labels against logits, and removes a last dimension of 1.
func sparseLabels(what string, label, logits *graph.Node) *graph.Node {
	if !label.DType().IsInt() {
		panic(fmt.Errorf("%s takes integer labels, not %s", what, label.DType()))
	}
	dims := logits.Shape().Dimensions
	if logits.Rank() < 2 {
		panic(fmt.Errorf("%s takes logits of shape (rows, …, classes), not %s", what, logits.Shape()))
	}
	want := dims[:len(dims)-1]
	if label.Rank() == len(dims) && label.Shape().Dim(-1) == 1 {
		label = graph.Reshape(label, label.Shape().Dimensions[:len(dims)-1]...)
	}
	if label.Rank() != len(want) || label.Shape().Size() != logits.Shape().Size()/dims[len(dims)-1] {
		panic(fmt.Errorf("%s takes labels of shape %v for logits of shape %s, not %s", what, want, logits.Shape(),
			label.Shape()))
	}
	return label
}

// matched converts the label to the dtype and shape of the prediction. A last dimension of 1 may be missing
// in the label.
func matched(what string, label, prediction *graph.Node) *graph.Node {
	dims := prediction.Shape().Dimensions
	if n := len(dims); label.Rank() == n-1 && dims[n-1] == 1 {
		label = graph.InsertAxes(label, -1)
	}
	if !label.Shape().EqualDimensions(prediction.Shape()) {
		panic(fmt.Errorf("%s takes labels and predictions of one shape, not %s and %s", what, label.Shape(),
			prediction.Shape()))
	}
	return graph.ConvertDType(label, prediction.DType())
}
