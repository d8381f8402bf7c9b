package gomlx_test

import (
	"math"
	"strings"
	"testing"

	"github.com/gomlx/gomlx/core/graph"
	gomlxloss "github.com/gomlx/gomlx/ml/train/loss"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/enginetest"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestBatchLoss checks that GoMLX's mean loss gives the loss and the gradients of the loss per example, and that a
// replica's number counts by the share of its weights.
func TestBatchLoss(t *testing.T) {
	e := openEngine(t, "go", 1)
	spec := features(e, 4, 3)
	spec.Labels = spec.Inputs
	x := tensor.From([]float32{1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3}, 4, 3)
	y := tensor.From([]float32{1, 0, 3, 2, 5, 1, 7, 3, 9, 4, 2, 0}, 4, 3)
	batch := engine.Batch{Inputs: []*tensor.Tensor{x}, Labels: []*tensor.Tensor{y}, Weights: []float32{1, 1, 1, 1}}
	var losses, gradients []float64
	for _, l := range []gomlx.Loss{gomlx.MeanSquaredError, gomlx.BatchLoss(gomlxloss.MeanSquaredError)} {
		p := compile(t, asGiven(l), e, spec)
		for _, sum := range []float64{4, 8} { // all examples of the step are here, or half of them
			g, err := enginetest.Gradients(t.Context(), p, 0, batch, sum, [3]uint64{})
			if err != nil {
				t.Fatal(err)
			}
			losses, gradients = append(losses, g.Loss), append(gradients, g.Tensors[0].Float64s()[0])
			p.Discard()
		}
	}
	for i := range 2 {
		if math.Abs(losses[i]-losses[i+2]) > 1e-5 || math.Abs(gradients[i]-gradients[i+2]) > 1e-5 {
			t.Errorf("losses %v and gradients %v: want those of the loss per example", losses, gradients)
		}
	}
	if math.Abs(losses[0]-2*losses[1]) > 1e-5 {
		t.Errorf("losses %v: want half with twice the sum of weights", losses)
	}
	wrong := asGiven(gomlx.BatchLoss(func(_, p []*graph.Node) *graph.Node { return p[0] }))
	if _, err := wrong.Compile(t.Context(), e, spec); err == nil || !strings.Contains(err.Error(), "want a scalar") {
		t.Errorf("a loss of other shape: %v", err)
	}
}
