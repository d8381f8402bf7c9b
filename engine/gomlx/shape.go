package gomlx

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gomlx/compute/shapes"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// shape is a shape of a replica's batches, with the programs for it.
type shape struct {
	engine.Shape
	inputShapes, labelShapes []shapes.Shape // of whole batches

	gradients         *executable // nil for evaluation and prediction only
	evaluate, predict *executable
	step              *executable // nil unless the job has one replica
}

// errNotTraining is the error of training on a batch for evaluation.
var errNotTraining = errors.New("gomlx: batches of this shape are for Evaluate and Predict only: set Shape.Training")

// shape returns the shape of the builder's batches.
func (bl *builder) shape(training bool) *shape {
	return &shape{
		Shape:       engine.Shape{Rows: bl.spec.Rows, Inputs: bl.spec.Inputs, Labels: bl.spec.Labels, Training: training},
		inputShapes: bl.inputs, labelShapes: bl.labels,
	}
}

// programs lists the executables.
func (s *shape) programs() (list []*executable) {
	for _, x := range []*executable{s.gradients, s.evaluate, s.predict, s.step} {
		if x != nil {
			list = append(list, x)
		}
	}
	return list
}

func (s *shape) close() {
	for _, x := range s.programs() {
		x.close()
	}
}

// AddShape implements [engine.Program].
func (p *program) AddShape(ctx context.Context, s engine.Shape) error {
	if p.replicas == nil {
		return errors.New("gomlx: the program is closed")
	}
	spec := p.spec
	spec.Rows, spec.Inputs, spec.Labels = s.Rows, s.Inputs, s.Labels
	if spec.Rows < 1 || len(spec.Inputs) != len(p.spec.Inputs) || len(spec.Labels) != len(p.spec.Labels) {
		return fmt.Errorf("gomlx: a shape of %d rows, %d inputs and %d labels: want at least 1 row, and %d inputs and %d "+
			"labels", s.Rows, len(s.Inputs), len(s.Labels), len(p.spec.Inputs), len(p.spec.Labels))
	}
	bl, err := newBuilder(p.model, p.backend, spec)
	if err != nil {
		return err
	}
	added, err := p.buildShape(ctx, bl, s.Training)
	if err != nil {
		for _, x := range bl.graphs {
			x.close()
		}
		return fmt.Errorf("%w (for batches of %d rows with inputs of %s, where the first ones have %d with %s)", err, s.Rows,
			featureShapes(s.Inputs), p.spec.Rows, featureShapes(p.spec.Inputs))
	}
	var feeds []*feed
	for _, r := range p.replicas {
		f, err := r.newFeed(added)
		if err != nil {
			for _, f := range feeds {
				f.close()
			}
			added.close()
			return err
		}
		feeds = append(feeds, f)
	}
	for i, r := range p.replicas {
		r.shapes = append(r.shapes, feeds[i])
	}
	p.shapes = append(p.shapes, added)
	return nil
}

// featureShapes lists the shapes of features.
func featureShapes(list []engine.Feature) (text string) {
	for i, f := range list {
		if i > 0 {
			text += ", "
		}
		text += f.DType.String() + tensor.FormatShape(f.Shape)
	}
	return text
}

// buildShape builds the programs for another shape, which read the variables of p.
func (p *program) buildShape(ctx context.Context, bl *builder, training bool) (s *shape, err error) {
	if err := bl.masters(); err != nil {
		return nil, err
	}
	s = bl.shape(training)
	if training {
		if s.gradients, err = bl.training(); err != nil {
			return nil, bl.explain(err)
		}
		if err := p.sameRoles(bl); err != nil {
			return nil, err
		}
		s.gradients.buckets = resultsOf(p.buckets)
	}
	if s.evaluate, err = bl.evaluation(); err != nil {
		return nil, bl.explain(err)
	}
	if s.predict, err = bl.prediction(); err != nil {
		return nil, bl.explain(err)
	}
	if training && p.step != nil {
		if s.step, err = bl.wholeStep(); err != nil {
			return nil, err
		}
	}
	if bl.lossType != p.lossType || !slices.Equal(bl.sums, p.metricSums()) {
		return nil, fmt.Errorf("gomlx: loss of %s and metrics of %v sums: want %s and %v as for the first batches",
			bl.lossType, bl.sums, p.lossType, p.metricSums())
	}
	index := map[string]int{}
	for i, v := range p.variables {
		index[v.Name] = i
	}
	list, err := bl.variables()
	if err != nil {
		return nil, err
	}
	for _, v := range list {
		i, known := index[v.Name]
		if !known {
			return nil, fmt.Errorf("gomlx: the model has another variable, %s: want the variables of the first batches", v.Name)
		}
		if !p.variables[i].shape.Equal(v.shape) {
			return nil, fmt.Errorf("gomlx: variable %s has shape %s, for the first batches %s: its shape must not depend on "+
				"that of a batch", v.Name, v.shape, p.variables[i].shape)
		}
	}
	for _, x := range s.programs() {
		if err := x.bind(index); err != nil {
			return nil, err
		}
		if err := x.finish(); err != nil {
			return nil, err
		}
	}
	for _, x := range []*executable{s.gradients, s.step} {
		if x == nil || x == s.gradients && s.step != nil {
			continue // a step of one replica needs one of them; the other is compiled on first use
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("gomlx: compile: %w", context.Cause(ctx))
		}
		if err := x.compile(); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// sameRoles returns an error unless training changes the variables that it changes for the first batches.
func (p *program) sameRoles(bl *builder) error {
	same := len(bl.trained) == p.parameters && len(bl.changed) == len(p.gradients.changes)
	for i := 0; same && i < len(bl.trained); i++ {
		same = bl.trained[i].Path() == p.variables[i].Name
	}
	for i := 0; same && i < len(bl.changed); i++ {
		same = bl.changed[i].Path() == p.gradients.changes[i]
	}
	if !same {
		return errors.New("gomlx: the model function trains or changes other variables: want those of the first batches")
	}
	return nil
}

// metricSums lists the number of sums of each metric.
func (p *program) metricSums() (list []int) {
	for _, s := range p.info.Summaries {
		list = append(list, s.Sums)
	}
	return list
}
