package models

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	"github.com/lockstep-ml/lockstep/tensor"
)

// CacheShape has the sizes of the keys and values that a language model computes for each position and needs for all
// later ones. The model functions [GPT.Continue] and [CausalLM.Continue] take those of earlier positions as
// inputs, and compute new positions only. [Decoder] keeps them.
//
// The inputs are the new tokens, int32 (n); the number of earlier positions, int32 (); and for each block, keys and
// values of the earlier positions, float32 (Heads, Positions, HeadWidth), of which the later ones are ignored. The
// outputs are the logits of the new tokens, (n, Vocabulary), and for each block the keys and values of the new
// positions, (Heads, n, HeadWidth). The first dimension of all is that of the rows.
type CacheShape struct {
	Blocks     int
	Heads      int // of keys and values
	HeadWidth  int
	Positions  int // the longest sequence
	Vocabulary int
}

// Inputs returns one row of the inputs of Continue for n new tokens.
func (c CacheShape) Inputs(n int) []engine.Feature {
	list := []engine.Feature{{DType: tensor.Int32, Shape: []int{n}}, {DType: tensor.Int32, Shape: []int{}}}
	for range 2 * c.Blocks {
		list = append(list, engine.Feature{
			DType: tensor.Float32, Shape: []int{c.Heads, c.Positions, c.HeadWidth},
		})
	}
	return list
}

// Predictor computes a Continue function for one row, as train.Predictor does.
type Predictor interface {
	NewState(first, axis int) (engine.State, error)
	Continue(ctx context.Context, s engine.State, at, count int, inputs ...*tensor.Tensor) ([]*tensor.Tensor, error)
}

// Decoder computes the logits of one sequence, whose keys and values stay where the engine computes: a new token
// computes one position, and only tokens and logits are copied between host and engine. Where these share no memory,
// the engine copies all keys and values within its own, once for each call. The methods must not be called
// concurrently.
type Decoder struct {
	shape   CacheShape
	step    Predictor
	block   Predictor
	inBlock int
	state   engine.State // (1, heads, positions, width): keys and values of each block
	length  int
}

// NewDecoder returns a decoder of an empty sequence. step computes Continue for [CacheShape.Inputs] of one
// token. block computes it for inBlock tokens, which is faster for long prompts, and shares the variables of step
// (train.Predictor.ForInputs); nil means that tokens are computed one by one. NewDecoder panics if step is nil, or if
// there is a block of less than one token. The caller must call [Decoder.Close].
func NewDecoder(shape CacheShape, step, block Predictor, inBlock int) (*Decoder, error) {
	if step == nil || block != nil && inBlock < 1 {
		panic(fmt.Sprintf("models: NewDecoder with the step %v, and a block of %d tokens: want a step, and at least 1 token "+
			"in a block", step, inBlock))
	}
	s, err := step.NewState(2, 2)
	if err != nil {
		return nil, fmt.Errorf("models: NewDecoder: keys and values: %w", err)
	}
	return &Decoder{shape: shape, step: step, block: block, inBlock: inBlock, state: s}, nil
}

// Close frees keys and values. The predictors stay open.
func (d *Decoder) Close() error { return d.state.Close() }

// Len returns the number of tokens of the sequence.
func (d *Decoder) Len() int { return d.length }

// Reset makes the sequence empty.
func (d *Decoder) Reset() { d.length = 0 }

// Append adds tokens to the sequence, and returns the logits after the last one, of which the caller owns the memory.
// It returns an error if there are no tokens, or if the sequence would be longer than CacheShape.Positions. After an
// error the sequence is what it was.
func (d *Decoder) Append(ctx context.Context, tokens ...int32) (logits []float32, err error) {
	switch n := d.length + len(tokens); {
	case len(tokens) == 0:
		return nil, errors.New("models: Decoder.Append of no tokens: want at least one")
	case n > d.shape.Positions:
		return nil, fmt.Errorf("models: a sequence of %d tokens: want at most the %d positions of the cache", n,
			d.shape.Positions)
	}
	before := d.length
	for len(tokens) > 0 {
		predictor, n := d.step, 1
		if d.block != nil && len(tokens) > 1 {
			predictor, n = d.block, d.inBlock
		}
		now := tokens[:min(n, len(tokens))]
		if logits, err = d.compute(ctx, predictor, n, now); err != nil {
			d.length = before
			return nil, err
		}
		tokens = tokens[len(now):]
	}
	return logits, nil
}

// compute appends tokens by a program for n, which ignores what follows them.
func (d *Decoder) compute(ctx context.Context, p Predictor, n int, tokens []int32) ([]float32, error) {
	padded := make([]int32, n)
	copy(padded, tokens)
	out, err := p.Continue(ctx, d.state, d.length, len(tokens), tensor.Of(padded, 1, n),
		tensor.Of([]int32{int32(d.length)}, 1))
	if err != nil {
		return nil, err
	}
	want := []int{1, n, d.shape.Vocabulary}
	if len(out) != 1 || out[0].DType() != tensor.Float32 || !slices.Equal(out[0].Shape(), want) {
		return nil, fmt.Errorf("models: Decoder: the model for %d tokens has other outputs than keys, values, and logits, "+
			"float32 of shape %v: want those of Continue for CacheShape.Inputs(%d)", n, want, n)
	}
	d.length += len(tokens)
	return tensor.Data[float32](out[0])[(len(tokens)-1)*d.shape.Vocabulary:][:d.shape.Vocabulary], nil
}

// continuedInputs are the inputs of Continue.
type continuedInputs struct {
	tokens, length *graph.Node
	kept           []*graph.Node
}

func continued(inputs []*graph.Node) *continuedInputs {
	if len(inputs) < 4 || len(inputs)%2 != 0 || inputs[0].Rank() != 2 || inputs[1].Rank() != 1 || inputs[2].Rank() != 4 {
		panic(fmt.Errorf("Continue has %d inputs: want those of CacheShape.Inputs", len(inputs)))
	}
	return &continuedInputs{tokens: inputs[0], length: inputs[1], kept: inputs[2:]}
}

func (in *continuedInputs) rows() int      { return in.tokens.Shape().Dim(0) }
func (in *continuedInputs) positions() int { return in.tokens.Shape().Dim(1) }
func (in *continuedInputs) capacity() int  { return in.kept[0].Shape().Dim(2) }

// cache returns the keys and values of a block.
func (in *continuedInputs) cache(block int) layer.Cache {
	if 2*block+1 >= len(in.kept) {
		panic(fmt.Errorf("Continue has keys and values of %d blocks: want those of all", len(in.kept)/2))
	}
	return layer.Cache{Keys: in.kept[2*block], Values: in.kept[2*block+1], Length: in.length}
}

// places looks up the rows of a table of all positions for the new ones, (rows, positions, width). Padding beyond the
// last position gets the last one.
func (in *continuedInputs) places(table *graph.Node) *graph.Node {
	g := in.tokens.Graph()
	number := graph.Iota(g, shapes.Make(dtypes.Int32, in.rows(), in.positions()), 1)
	number = graph.Add(number, graph.BroadcastToShape(graph.Reshape(in.length, -1, 1), number.Shape()))
	number = graph.MinScalar(number, float64(in.capacity()-1))
	dtype := table.DType()
	if dtype == dtypes.BFloat16 || dtype == dtypes.Float16 {
		table = graph.ConvertDType(table, dtypes.Float32)
	}
	return graph.ConvertDType(graph.Gather(table, graph.InsertAxes(number, -1)), dtype)
}

// outputs returns the outputs of Continue.
func (in *continuedInputs) outputs(logits *graph.Node, kept []*graph.Node) []*graph.Node {
	out := []*graph.Node{logits}
	for _, x := range kept {
		out = append(out, graph.ConvertDType(x, dtypes.Float32))
	}
	return out
}
