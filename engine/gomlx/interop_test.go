package gomlx_test

import (
	"math"
	"strings"
	"testing"

	"github.com/gomlx/compute/gobackend"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/loss"
	"github.com/gomlx/gomlx/ml/train/metric"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/enginetest"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestLossesOfGoMLX compares GoMLX's losses on a padded batch with what GoMLX computes without padding, and their
// gradients with those of full batches.
func TestLossesOfGoMLX(t *testing.T) {
	const rows, examples, width = 4, 3, 3
	e := openEngine(t, "go", 1)
	backend, err := gobackend.New("")
	if err != nil {
		t.Fatal(err)
	}
	defer backend.Finalize()
	x := []float32{.1, .2, .7, .5, .25, .25, .3, .3, .4, .9, .05, .05}
	y := []float32{0, 0, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0}
	classes := []int32{2, 0, 1, 0}
	cast := func(f loss.LossFn) gomlx.Loss { return gomlx.Loss(f) }
	for name, c := range map[string]struct {
		loss   gomlx.Loss
		sparse bool
	}{
		"MeanSquaredError":              {loss: loss.MeanSquaredError},
		"MeanAbsoluteError":             {loss: loss.MeanAbsoluteError},
		"BinaryCrossentropy":            {loss: loss.BinaryCrossentropy},
		"BinaryCrossentropyLogits":      {loss: loss.BinaryCrossentropyLogits},
		"CategoricalCrossEntropyLogits": {loss: loss.CategoricalCrossEntropyLogits},
		"SparseCategoricalCrossEntropy": {loss: loss.SparseCategoricalCrossEntropyLogits, sparse: true},
		"Huber":                         {loss: cast(loss.MakeHuberLoss(0.5))},
		"AdaptivePower":                 {loss: cast(loss.MakeAdaptivePowerLoss(2, 1, 1, 0.1))},
		"EuclideanDistance":             {loss: loss.EuclideanDistance},
		"EuclideanDistanceSquare":       {loss: loss.EuclideanDistanceSquare},
		"several numbers": {loss: func(l, p []*graph.Node) *graph.Node {
			return graph.Square(graph.Sub(l[0], p[0]))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			spec := features(e, rows, width)
			spec.Labels = spec.Inputs
			label, theirs := tensor.From(y, rows, width), tensors.FromFlatDataAndDimensions(y[:examples*width], examples, width)
			if c.sparse {
				spec.Labels = []engine.Feature{{DType: tensor.Int32, Shape: []int{1}}}
				label, theirs = tensor.From(classes, rows, 1), tensors.FromFlatDataAndDimensions(classes[:examples], examples, 1)
			}
			want := graph.MustExecOnceN(backend, func(l, p *graph.Node) []*graph.Node {
				shift := graph.ScalarZero(p.Graph(), p.DType())
				x := c.loss([]*graph.Node{l}, []*graph.Node{graph.Add(p, shift)})
				if !x.IsScalar() {
					x = graph.ReduceAllMean(x)
				}
				return []*graph.Node{x, graph.Gradient(x, shift)[0]}
			}, theirs, tensors.FromFlatDataAndDimensions(x[:examples*width], examples, width))
			p := compile(t, asGiven(c.loss), e, spec)
			g, err := enginetest.Gradients(t.Context(), p, 0, engine.Batch{
				Inputs: []*tensor.Tensor{tensor.From(x, rows, width)}, Labels: []*tensor.Tensor{label},
				Weights: []float32{1, 1, 1, 0},
			}, examples, [3]uint64{})
			if err != nil {
				t.Fatal(err)
			}
			for i, got := range []float64{g.Loss, g.Tensors[0].Float64s()[0]} {
				if w := float64(want[i].Value().(float32)); !(math.Abs(got-w) <= 1e-5) {
					t.Errorf("%s is %v, GoMLX's %v", []string{"loss", "gradient"}[i], got, w)
				}
			}
			p.Discard()
		})
	}
}

// TestMeanOverAnotherAxis checks that a loss or a metric is refused whose mean is over the outputs of the model,
// also if there are as many as rows.
func TestMeanOverAnotherAxis(t *testing.T) {
	perOutput := func(l, p []*graph.Node) *graph.Node { // the root of the mean square error of each output
		return graph.ReduceAllMean(graph.Sqrt(graph.ReduceMean(graph.Square(graph.Sub(l[0], p[0])), 0)))
	}
	fixed := func(l, p []*graph.Node) *graph.Node {
		return graph.ReduceAllMean(graph.Mul(graph.Sub(l[0], p[0]), graph.Const(p[0].Graph(), make([]float32, 4*4))))
	}
	ofBatch := gomlx.MetricFrom(metric.NewMeanMetric("per output", "p", "loss",
		func(_ *model.Scope, l, p []*graph.Node) *graph.Node { return perOutput(l, p) }, nil))
	e := openEngine(t, "go", 1)
	for name, m := range map[string]*gomlx.Model{
		"loss": asGiven(perOutput), "metric": asGiven(gomlx.MeanSquaredError, ofBatch), "fixed rows": asGiven(fixed),
	} {
		for _, width := range []int{4, 3} {
			spec := features(e, 4, width)
			spec.Labels = spec.Inputs
			p, err := m.Compile(t.Context(), e, spec)
			if err == nil {
				t.Errorf("%s: compiled for 4 rows of %d outputs", name, width)
				_ = p.Close()
			} else if width == 4 && name != "fixed rows" && !strings.Contains(err.Error(), "with 5 rows it does not") {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}
