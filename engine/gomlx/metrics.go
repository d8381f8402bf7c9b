package gomlx

import (
	"fmt"
	"math"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
)

// MeanOf is the mean of any number per example, such as a [Loss] other than the model's:
// MeanOf("mean_absolute_error", MeanAbsoluteError).
func MeanOf(name string, f Loss) Metric { return Metric{Name: name, PerExample: f} }

// RootMeanSquaredError is the root of the mean of the squared differences. Its name is "root_mean_squared_error".
func RootMeanSquaredError() Metric {
	return Metric{
		Name: "root_mean_squared_error", PerExample: MeanSquaredError,
		Value: func(sums []float64, weight float64) float64 { return math.Sqrt(sums[0] / weight) },
	}
}

// RSquared is the coefficient of determination: 1 less the mean squared difference between predictions and
// labels, as a share of the labels' variance (Keras' R2Score of all elements together). It is 0 for a model
// that always predicts the mean, and NaN if all labels are equal. Its name is "r_squared".
func RSquared() Metric {
	return Metric{
		Name: "r_squared", Sums: 3, PerExample: func(labels, predictions []*graph.Node) *graph.Node {
			label, prediction := pair("RSquared", labels, predictions)
			label = matched("RSquared", label, prediction)
			rows := prediction.Shape().Dim(0)
			flat := func(x *graph.Node) *graph.Node { return perExample(graph.Reshape(x, rows, -1)) }
			return graph.Stack([]*graph.Node{
				flat(graph.Square(graph.Sub(label, prediction))), flat(label), flat(graph.Square(label)),
			}, 1)
		},
		Value: func(sums []float64, weight float64) float64 {
			return 1 - sums[0]/(sums[2]-sums[1]*sums[1]/weight)
		},
	}
}

// Perplexity is the exponential of the mean cross entropy of integer labels and logits, as for
// [SparseCategoricalCrossEntropyLogits]. Its name is "perplexity".
func Perplexity() Metric {
	return Metric{
		Name: "perplexity", PerExample: SparseCategoricalCrossEntropyLogits,
		Value: func(sums []float64, weight float64) float64 { return math.Exp(sums[0] / weight) },
	}
}

// SparseTopKAccuracy is 1 if fewer than k logits are larger than that of the integer label, else 0 (Keras'
// SparseTopKCategoricalAccuracy). Its name is "top_5_accuracy" for k = 5.
func SparseTopKAccuracy(k int) Metric {
	const what = "SparseTopKAccuracy"
	name := fmt.Sprintf("top_%d_accuracy", k)
	return Metric{Name: name, PerExample: func(labels, predictions []*graph.Node) *graph.Node {
		label, logits := pair(what, labels, predictions)
		label = sparseLabels(what, label, logits)
		if k < 1 {
			panic(fmt.Errorf("%s has k %d: want at least 1", what, k))
		}
		oneHot := graph.OneHot(label, logits.Shape().Dim(-1), logits.DType())
		own := graph.ReduceAndKeep(graph.Mul(oneHot, logits), graph.ReduceSum, -1)
		larger := graph.ConvertDType(graph.GreaterThan(logits, own), logits.DType())
		before := graph.ReduceSum(larger, -1)
		return perExample(graph.ConvertDType(
			graph.LessThan(before, graph.Scalar(logits.Graph(), logits.DType(), float64(k))), logits.DType()))
	}}
}

// Binary has the metrics of binary classification. The labels are 0 or 1, of the shape of the predictions. Every
// element counts.
//
//	Metrics: []gomlx.Metric{gomlx.Binary{Logits: true}.AUC()}
type Binary struct {
	// Logits specifies that the predictions are logits. By default they are probabilities.
	Logits bool
	// Threshold is the probability above which a prediction is positive. Default: 0.5. AUC does not use it.
	Threshold float64
	// PR selects the area under the curve of precision over recall, for AUC. By default it is that of the receiver
	// operating characteristic (ROC).
	PR bool
	// Thresholds is the number of thresholds of AUC. Default: 200.
	Thresholds int
}

// Precision is the share of positive predictions whose label is 1, or 0 without positive predictions. Its name is
// "precision".
func (b Binary) Precision() Metric {
	return b.counted("precision", func(tp, fp, _ float64) float64 { return ratio(tp, tp+fp) })
}

// Recall is the share of labels of 1 whose prediction is positive, or 0 without such labels. Its name is "recall".
func (b Binary) Recall() Metric {
	return b.counted("recall", func(tp, _, fn float64) float64 { return ratio(tp, tp+fn) })
}

// F1 is the harmonic mean of precision and recall. Its name is "f1". For several classes see [MacroF1].
func (b Binary) F1() Metric { return b.counted("f1", f1) }

func f1(tp, fp, fn float64) float64 { return ratio(2*tp, 2*tp+fp+fn) }

// ratio is a/b, or 0 if b is 0.
func ratio(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return a / b
}

// elements returns labels and probabilities, of shape (rows, elements).
func (b Binary) elements(what string, labels, predictions []*graph.Node) (label, p *graph.Node) {
	label, p = pair(what, labels, predictions)
	label = matched(what, label, p)
	if b.Logits {
		p = graph.Sigmoid(p)
	}
	rows := p.Shape().Dim(0)
	return graph.Reshape(label, rows, -1), graph.Reshape(p, rows, -1)
}

// counted is a metric of the numbers of true positives, false positives and false negatives.
func (b Binary) counted(name string, value func(tp, fp, fn float64) float64) Metric {
	if b.Threshold == 0 {
		b.Threshold = 0.5
	}
	return Metric{
		Name: name, Sums: 3, PerExample: func(labels, predictions []*graph.Node) *graph.Node {
			label, p := b.elements(name, labels, predictions)
			positive := graph.ConvertDType(graph.GreaterThan(p, graph.Scalar(p.Graph(), p.DType(), b.Threshold)), p.DType())
			return columns(graph.Mul(positive, label), graph.Mul(positive, graph.OneMinus(label)),
				graph.Mul(graph.OneMinus(positive), label))
		},
		Value: func(sums []float64, _ float64) float64 { return value(sums[0], sums[1], sums[2]) },
	}
}

// columns adds up each node over its elements of a row, and returns the sums as columns.
func columns(list ...*graph.Node) *graph.Node {
	out := make([]*graph.Node, len(list))
	for i, x := range list {
		out[i] = graph.ReduceAndKeep(x, graph.ReduceSum, 1)
	}
	return graph.Concatenate(out, 1)
}

// AUC is the area under the curve, approximated as Keras' AUC does by the trapezoids (for PR: by interpolation)
// between thresholds from 0 to 1. Its name is "auc".
func (b Binary) AUC() Metric {
	if b.Thresholds == 0 {
		b.Thresholds = 200
	}
	n := b.Thresholds
	return Metric{
		Name: "auc", Sums: 2*n + 2, PerExample: func(labels, predictions []*graph.Node) *graph.Node {
			label, p := b.elements("AUC", labels, predictions)
			if n < 2 {
				panic(fmt.Errorf("AUC has %d thresholds: want at least 2", n))
			}
			g := p.Graph()
			thresholds := make([]float64, n)
			for i := range thresholds {
				thresholds[i] = float64(i) / float64(n-1)
			}
			thresholds[0], thresholds[n-1] = -1e-7, 1+1e-7
			rows, elements := p.Shape().Dim(0), p.Shape().Dim(1)
			shape := shapes.Make(p.DType(), rows, elements, n)
			wide := func(x *graph.Node) *graph.Node {
				return graph.BroadcastToDims(graph.InsertAxes(x, -1), shape.Dimensions...)
			}
			limits := graph.ConvertDType(graph.Const(g, thresholds), p.DType())
			limits = graph.BroadcastToDims(graph.Reshape(limits, 1, 1, n), shape.Dimensions...)
			above := graph.ConvertDType(graph.GreaterThan(wide(p), limits), p.DType())
			tp := graph.ReduceSum(graph.Mul(above, wide(label)), 1)
			fp := graph.ReduceSum(graph.Mul(above, wide(graph.OneMinus(label))), 1)
			return graph.Concatenate([]*graph.Node{tp, fp, columns(label, graph.OneMinus(label))}, 1)
		},
		Value: func(sums []float64, _ float64) float64 {
			tp, fp, positive, negative := sums[:n], sums[n:2*n], sums[2*n], sums[2*n+1]
			if b.PR {
				return areaPR(tp, fp, positive)
			}
			area := 0.0
			for i := range n - 1 {
				height := (ratio(tp[i], positive) + ratio(tp[i+1], positive)) / 2
				area += (ratio(fp[i], negative) - ratio(fp[i+1], negative)) * height
			}
			return area
		},
	}
}

// areaPR interpolates between thresholds as Davis and Goadrich (2006) and Keras do: true positives grow linearly with
// positive predictions.
func areaPR(tp, fp []float64, positive float64) (area float64) {
	for i := range len(tp) - 1 {
		p, next := tp[i]+fp[i], tp[i+1]+fp[i+1]
		slope := ratio(tp[i]-tp[i+1], max(p-next, 0))
		intercept := tp[i+1] - slope*next
		safe := 1.0
		if p > 0 && next > 0 {
			safe = ratio(p, max(next, 0))
		}
		area += ratio(slope*(tp[i]-tp[i+1]+intercept*math.Log(safe)), max(positive, 0))
	}
	return area
}

// ConfusionMatrix counts examples by label and prediction: element (i, j), at i·classes+j of the table, is the weight
// of the examples of label i whose largest logit is that of class j. Its name is "confusion_matrix". Labels outside
// the classes are not counted.
func ConfusionMatrix(classes int) Metric {
	const what = "ConfusionMatrix"
	sums := classes * classes
	return Metric{Name: "confusion_matrix", Sums: sums, PerExample: func(labels, predictions []*graph.Node) *graph.Node {
		label, predicted := oneHots(what, labels, predictions, classes)
		pairs := graph.Mul(graph.InsertAxes(label, -1), graph.InsertAxes(predicted, -2)) // (rows, elements, labels, classes)
		return graph.Reshape(graph.ReduceSum(pairs, 1), label.Shape().Dim(0), sums)
	}}
}

// MacroF1 is the mean over the classes of the F1 score of each, for integer labels and logits (Keras'
// F1Score(average="macro")). Its name is "f1".
func MacroF1(classes int) Metric {
	return Metric{
		Name: "f1", Sums: 3 * classes, PerExample: func(labels, predictions []*graph.Node) *graph.Node {
			label, predicted := oneHots("MacroF1", labels, predictions, classes)
			return graph.Concatenate([]*graph.Node{
				graph.ReduceSum(graph.Mul(label, predicted), 1), graph.ReduceSum(label, 1), graph.ReduceSum(predicted, 1),
			}, 1)
		},
		Value: func(sums []float64, _ float64) (mean float64) {
			for i := range classes {
				tp, is, said := sums[i], sums[classes+i], sums[2*classes+i]
				mean += f1(tp, said-tp, is-tp) / float64(classes)
			}
			return mean
		},
	}
}

// oneHots returns labels and predicted classes as vectors, of shape (rows, elements, classes).
func oneHots(what string, labels, predictions []*graph.Node, classes int) (label, predicted *graph.Node) {
	label, logits := pair(what, labels, predictions)
	label = sparseLabels(what, label, logits)
	if n := logits.Shape().Dim(-1); n != classes {
		panic(fmt.Errorf("%s has %d classes, and the model gives %d logits: want as many", what, classes, n))
	}
	rows := logits.Shape().Dim(0)
	label = graph.OneHot(graph.Reshape(label, rows, -1), classes, logits.DType())
	best := graph.Reshape(graph.ArgMax(logits, -1, dtypes.Int32), rows, -1)
	return label, graph.OneHot(best, classes, logits.DType())
}
