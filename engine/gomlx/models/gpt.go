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

	// Dropout is the share of the values that training sets to 0 at random, and divides the others by 1-Dropout: of
	// the embedding, of the attention's weights, and of the output of each residual branch (GPT-2's embd_pdrop,
	// attn_pdrop and resid_pdrop). Each replica draws for its rows, so results depend on the number of replicas.
	Dropout float64

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
	x = layer.Dropout(s, graph.Reshape(x, rows*positions, width), m.Dropout)
	for i := range blocks {
		b := s.In("block_%d", i)
		attend, expand, contract := b.In("attention"), b.In("expand"), b.In("contract")
		y := graph.Reshape(layer.LayerNorm(attend, x, 0), shape...)
		y = layer.SelfAttention(attend, y, layer.AttentionOptions{
			Heads: heads, Causal: true, Output: residual, Dropout: m.Dropout,
		})
		x = graph.Add(x, layer.Dropout(s, graph.Reshape(y, rows*positions, width), m.Dropout))
		y = layer.Gelu(layer.Dense(expand, layer.LayerNorm(expand, x, 0), 4*width))
		x = graph.Add(x, layer.Dropout(s, layer.Dense(contract.WithInitializer(residual), y, width), m.Dropout))
	}
	readout := s.In("readout")
	x = layer.DenseWithoutBias(readout, layer.LayerNorm(readout, x, 0), vocabulary)
	return []*graph.Node{graph.Reshape(x, rows, positions, vocabulary)}
}

// Cache returns the sizes of the keys and values for [GPT.Continue]. positions is the length of the sequences
// that the model was trained on.
func (m GPT) Cache(positions int) CacheShape {
	heads := orDefault(m.Heads, 4)
	return CacheShape{
		Blocks: orDefault(m.Blocks, 4), Heads: heads, HeadWidth: orDefault(m.Width, 128) / heads, Positions: positions,
		Vocabulary: orDefault(m.Vocabulary, 256),
	}
}

// Continue is the model function for new tokens of a sequence whose earlier keys and values are kept
// ([CacheShape]). It has the variables of Forward.
func (m GPT) Continue(s *model.Scope, inputs []*graph.Node) []*graph.Node {
	in := continued(inputs)
	width, dtype := orDefault(m.Width, 128), m.DType
	if dtype == dtypes.InvalidDType {
		dtype = gomlx.ComputeDType(in.tokens.Graph())
	}
	c := m.Cache(in.capacity())
	shape := []int{in.rows(), in.positions(), width}
	s = s.WithInitializer(normal(s, 0.02))
	embedding := s.In("embedding")
	x := layer.Embedding(embedding, in.tokens, dtype, c.Vocabulary, width)
	places := embedding.VariableWithShape("positions", shapes.Make(dtype, c.Positions, width)).NodeValue(x.Graph())
	x = graph.Reshape(graph.Add(x, in.places(places)), -1, width)
	var kept []*graph.Node
	for i := range c.Blocks {
		b := s.In("block_%d", i)
		attend, expand, contract := b.In("attention"), b.In("expand"), b.In("contract")
		y := graph.Reshape(layer.LayerNorm(attend, x, 0), shape...)
		y, keys, values := layer.CachedSelfAttention(attend, y, c.Heads, in.cache(i))
		kept = append(kept, keys, values)
		x = graph.Add(x, graph.Reshape(y, -1, width))
		y = layer.Gelu(layer.Dense(expand, layer.LayerNorm(expand, x, 0), 4*width))
		x = graph.Add(x, layer.Dense(contract, y, width))
	}
	readout := s.In("readout")
	x = layer.DenseWithoutBias(readout, layer.LayerNorm(readout, x, 0), c.Vocabulary)
	return in.outputs(graph.Reshape(x, in.rows(), in.positions(), c.Vocabulary), kept)
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
