package train

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Shape is a shape of global batches.
type Shape struct {
	// GlobalBatch is the maximum number of examples of a step with batches of this shape. Default: Config.GlobalBatch.
	GlobalBatch int
	// Inputs and Labels describe one example.
	Inputs, Labels []engine.Feature
}

// MaxShapes is the largest number of shapes of batches: an engine compiles a program for each.
const MaxShapes = 64

// batchShape is a shape of global batches, and whether the programs for it are compiled.
type batchShape struct {
	Shape
	per        int  // rows of a share
	evaluation bool // not for training
	compiled   bool
}

// share returns the rows of a replica, of a global batch of so many examples.
func (s *batchShape) share(replica, examples int) (lo, hi int) {
	lo = min(replica*s.per, examples)
	return lo, min(lo+s.per, examples)
}

// completeShapes sets the defaults of the shapes and checks them.
func (c *Config) completeShapes() error {
	if c.EvaluationBatch == 0 {
		c.EvaluationBatch = c.GlobalBatch
	}
	if c.EvaluationBatch < c.GlobalBatch {
		return fmt.Errorf("train: Config.EvaluationBatch is %d: want at least GlobalBatch, %d, or 0 for that (smaller "+
			"batches fit in any case)", c.EvaluationBatch, c.GlobalBatch)
	}
	if len(c.Shapes) >= MaxShapes {
		return fmt.Errorf("train: Config.Shapes has %d shapes: want at most %d, because a program is compiled for each: use "+
			"fewer boundaries", len(c.Shapes), MaxShapes-1)
	}
	c.Shapes = slices.Clone(c.Shapes)
	all := []Shape{{c.GlobalBatch, c.Inputs, c.Labels}}
	for i := range c.Shapes {
		s := &c.Shapes[i]
		if s.GlobalBatch == 0 {
			s.GlobalBatch = c.GlobalBatch
		}
		switch {
		case s.GlobalBatch < 1:
			return fmt.Errorf("train: Config.Shapes[%d].GlobalBatch is %d: want at least 1", i, s.GlobalBatch)
		case !sameTypes(s.Inputs, c.Inputs) || !sameTypes(s.Labels, c.Labels):
			return fmt.Errorf("train: Config.Shapes[%d] has inputs %s and labels %s: want the number and types of Config, %s "+
				"and %s", i, formatFeatures(s.Inputs), formatFeatures(s.Labels), formatFeatures(c.Inputs),
				formatFeatures(c.Labels))
		}
		for _, other := range all {
			if sameFeatures(s.Inputs, other.Inputs) && sameFeatures(s.Labels, other.Labels) {
				return fmt.Errorf("train: Config.Shapes[%d] has inputs %s and labels %s, which another shape has too: want one "+
					"shape of them, with the larger GlobalBatch", i, formatFeatures(s.Inputs), formatFeatures(s.Labels))
			}
		}
		all = append(all, *s)
	}
	return nil
}

func sameTypes(a, b []engine.Feature) bool {
	return slices.EqualFunc(a, b, func(x, y engine.Feature) bool { return x.DType == y.DType })
}

func sameFeatures(a, b []engine.Feature) bool {
	return slices.EqualFunc(a, b, func(x, y engine.Feature) bool {
		return x.DType == y.DType && slices.Equal(x.Shape, y.Shape)
	})
}

// formatFeatures lists the types and shapes of features.
func formatFeatures(list []engine.Feature) string {
	texts := make([]string, len(list))
	for i, f := range list {
		texts[i] = f.DType.String() + tensor.FormatShape(f.Shape)
	}
	if len(texts) == 0 {
		return "none"
	}
	return strings.Join(texts, ", ")
}

// setShapes lists the shapes of the trainer's batches: that of the program first, then the others for training, then
// those for evaluation.
func (t *Trainer) setShapes() {
	c, n := &t.config, t.strategy.NumReplicasInSync()
	add := func(s Shape, evaluation bool) {
		t.shapes = append(t.shapes, &batchShape{Shape: s, per: ceilDiv(s.GlobalBatch, n), evaluation: evaluation})
	}
	add(Shape{c.GlobalBatch, c.Inputs, c.Labels}, false)
	t.shapes[0].compiled = true
	for _, s := range c.Shapes {
		add(s, false)
	}
	for _, s := range slices.Clone(t.shapes) {
		if c.EvaluationBatch > s.GlobalBatch {
			add(Shape{c.EvaluationBatch, s.Inputs, s.Labels}, true)
		}
	}
}

// several reports whether batches may have more than one shape.
func (t *Trainer) several() bool { return len(t.shapes) > 1 }

// shapeOf returns the shape for a global batch of so many examples, of which b has some: the smallest in which it fits.
// It is the same on all workers. It is that of the program if the batch fits in none, whose error says why.
func (t *Trainer) shapeOf(b data.Batch, examples int, labels, evaluation bool) *batchShape {
	fits := func(s *batchShape) bool {
		return hasFeatures(b.Inputs, s.Inputs) && (!labels || hasFeatures(b.Labels, s.Labels))
	}
	best := t.smallest(examples, evaluation, fits)
	for _, s := range t.shapes {
		if !fits(best) && fits(s) && (evaluation || !s.evaluation) {
			best = s // for too many examples
		}
	}
	return best
}

func (t *Trainer) smallest(examples int, evaluation bool, fits func(s *batchShape) bool) *batchShape {
	var best *batchShape
	for _, s := range t.shapes {
		if s.GlobalBatch >= examples && (evaluation || !s.evaluation) && (best == nil || s.GlobalBatch < best.GlobalBatch) &&
			fits(s) {
			best = s
		}
	}
	if best == nil {
		return t.shapes[0]
	}
	return best
}

// hasFeatures reports whether the rows of tensors have the given types and shapes.
func hasFeatures(list []*tensor.Tensor, features []engine.Feature) bool {
	return slices.EqualFunc(list, features, func(x *tensor.Tensor, f engine.Feature) bool {
		return x != nil && x.Rank() > 0 && x.DType() == f.DType && slices.Equal(x.Shape()[1:], f.Shape)
	})
}

// noShapeError adds the shapes of Config to the error of a batch whose shape is not among them.
func (t *Trainer) noShapeError(err error) error {
	if !t.several() {
		return err
	}
	var list []string
	for _, s := range t.shapes {
		if !s.evaluation {
			list = append(list, fmt.Sprintf("%d examples of %s", s.GlobalBatch, formatFeatures(s.Inputs)))
		}
	}
	return fmt.Errorf("%w; it has none of the %d shapes of Config and Config.Shapes either: at most %s", err, len(list),
		strings.Join(list, "; "))
}

// compileShape compiles the programs for batches of a shape, when the first of them is used. All workers do that in the
// same step, because they have the same batches.
func (t *Trainer) compileShape(ctx context.Context, s *batchShape) error {
	if s.compiled {
		return nil
	}
	t.enter(PhaseCompile)
	err := t.program.AddShape(ctx, engine.Shape{Rows: s.per, Inputs: s.Inputs, Labels: s.Labels, Training: !s.evaluation})
	if err != nil {
		return fmt.Errorf("compiling the model for batches of %d examples of %s: %w", s.GlobalBatch,
			formatFeatures(s.Inputs), err)
	}
	s.compiled = true
	return nil
}

// sharesFor returns the memory of g for batches of a shape, for each local replica.
func (g *globalBatch) sharesFor(s *batchShape) []engine.Batch {
	if list := g.memory[s]; list != nil {
		return list
	}
	rows := func(features []engine.Feature) (list []*tensor.Tensor) {
		for _, f := range features {
			list = append(list, tensor.New(f.DType, stackedShape(s.per, f.Shape)...))
		}
		return list
	}
	list := make([]engine.Batch, len(g.shares))
	for i := range list {
		list[i] = engine.Batch{Inputs: rows(s.Inputs), Labels: rows(s.Labels), Weights: make([]float32, s.per)}
	}
	g.memory[s] = list
	return list
}

// inferShapes sets Shapes from the buckets of Data, of which one was the first batch.
func (c *Config) inferShapes(ctx context.Context) error {
	samples, err := data.Shapes(ctx, c.Data)
	if err != nil || len(samples) == 0 {
		return err
	}
	first := true
	for _, sample := range samples {
		b, err := batchOf(sample.Element)
		if err != nil {
			return err
		}
		s := Shape{GlobalBatch: sample.Rows}
		if s.Inputs, err = featuresOf("input", b.Inputs); err != nil {
			return err
		}
		if s.Labels, err = featuresOf("label", b.Labels); err != nil {
			return err
		}
		switch {
		case sameFeatures(s.Inputs, c.Inputs) && sameFeatures(s.Labels, c.Labels):
			c.GlobalBatch = max(c.GlobalBatch, s.GlobalBatch)
			first = false
		default:
			c.Shapes = append(c.Shapes, s)
		}
	}
	if first {
		return errors.New("no bucket has the shape of the first batch")
	}
	return nil
}

// largest returns the largest number of examples of a batch.
func (t *Trainer) largest(evaluation bool) (n int) {
	for _, s := range t.shapes {
		if evaluation || !s.evaluation {
			n = max(n, s.GlobalBatch)
		}
	}
	return n
}
