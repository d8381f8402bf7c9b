package models

import (
	"fmt"
	"math"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"

	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
)

// GPT is a decoder-only transformer for sequences of integers, of shape (rows, positions). Each block applies
// causal attention and a perceptron with GELU, both after a layer normalisation and beside a residual
// connection. Positions are learned. The weights of the head are not those of the embedding; it has no bias. The
// output is the logits, of shape (rows, positions, vocabulary); labels of shape (rows, positions) suit the loss
// gomlx.SparseCategoricalCrossEntropyLogits, whose value for a sequence is the mean over its positions.
//
// Initial values are GPT-2's: a normal distribution of standard deviation 0.02 for weights and tables, divided
// by the square root of twice the number of blocks in the last layers of the residual branches; biases are 0.
type GPT struct {
	Vocabulary int // 0: 256, the bytes
	Width      int // 0: 128
	Heads      int // 0: 4
	Blocks     int // 0: 4

	// DType is the floating-point type; the zero value means [gomlx.ComputeDType]: float32, or the half type of a
	// model of mixed precision.
	DType dtypes.DType
}

// Forward is the model function.
func (m GPT) Forward(s *model.Scope, inputs []*graph.Node) []*graph.Node {
	vocabulary, width := orDefault(m.Vocabulary, 256), orDefault(m.Width, 128)
	heads, blocks, dtype := orDefault(m.Heads, 4), orDefault(m.Blocks, 4), m.DType
	if dtype == dtypes.InvalidDType {
		dtype = gomlx.ComputeDType(inputs[0].Graph())
	}
	tokens := inputs[0]
	if tokens.Rank() != 2 {
		panic(fmt.Errorf("models.GPT takes integers of shape (rows, positions), not %s", tokens.Shape()))
	}
	rows, positions := tokens.Shape().Dim(0), tokens.Shape().Dim(1)
	shape := []int{rows, positions, width}
	s = s.WithInitializer(normal(s, 0.02))
	residual := normal(s, 0.02/math.Sqrt(float64(2*blocks)))
	embedding := s.In("embedding")
	x := layer.Positions(embedding, layer.Embedding(embedding, tokens, dtype, vocabulary, width))
	x = graph.Reshape(x, rows*positions, width)
	for i := range blocks {
		b := s.In("block_%d", i)
		attend, expand, contract := b.In("attention"), b.In("expand"), b.In("contract")
		y := graph.Reshape(layer.LayerNorm(attend, x, 0), shape...)
		y = layer.SelfAttention(attend, y, layer.AttentionOptions{Heads: heads, Causal: true, Output: residual})
		x = graph.Add(x, graph.Reshape(y, rows*positions, width))
		y = layer.Gelu(layer.Dense(expand, layer.LayerNorm(expand, x, 0), 4*width))
		x = graph.Add(x, layer.Dense(contract.WithInitializer(residual), y, width))
	}
	readout := s.In("readout")
	x = layer.DenseWithoutBias(readout, layer.LayerNorm(readout, x, 0), vocabulary)
	return []*graph.Node{graph.Reshape(x, rows, positions, vocabulary)}
}

// normal initialises tables and matrices with a normal distribution, and vectors with 0.
func normal(s *model.Scope, deviation float64) model.VariableInitializer {
	return func(g *graph.Graph, shape shapes.Shape) *graph.Node {
		if shape.Rank() < 2 {
			return graph.Zeros(g, shape)
		}
		wide := shapes.Make(dtypes.Float32, shape.Dimensions...)
		return graph.ConvertDType(graph.MulScalar(s.RandomNormal(g, wide), deviation), shape.DType)
	}
}
