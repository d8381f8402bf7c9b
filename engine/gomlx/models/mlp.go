// Package models provides the models of Lockstep's command, examples and measurements: ordinary GoMLX model
// functions for [gomlx.Model].
package models

import (
	"fmt"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"

	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
)

// Forward is the type of a model function.
type Forward = func(s *model.Scope, inputs []*graph.Node) []*graph.Node

// MLP is a multi-layer perceptron. It flattens its input, applies hidden dense layers with ReLU, and a last
// dense layer that outputs the logits.
type MLP struct {
	Hidden  []int // widths of the hidden layers; nil: 512, 512
	Classes int   // number of logits; 0: 10
}

// Forward is the model function.
func (m MLP) Forward(s *model.Scope, inputs []*graph.Node) []*graph.Node {
	hidden, classes := m.Hidden, m.Classes
	if hidden == nil {
		hidden = []int{512, 512}
	}
	if classes == 0 {
		classes = 10
	}
	x := flatten(inputs[0])
	for i, width := range hidden {
		x = layer.DenseRelu(s.In("hidden_%d", i), x, width)
	}
	return []*graph.Node{layer.Dense(s.In("readout"), x, classes)}
}

// flatten reshapes each row to one dimension.
func flatten(x *graph.Node) *graph.Node {
	if x.Rank() == 0 {
		panic(fmt.Errorf("models: an input of shape %s has no rows", x.Shape()))
	}
	rows := x.Shape().Dim(0)
	return graph.Reshape(x, rows, x.Shape().Size()/rows)
}
