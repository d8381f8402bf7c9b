package gomlx_test

import (
	"math"
	"testing"

	"github.com/gomlx/compute/gobackend"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/train/loss"

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
