package data

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"sync"

	"github.com/zeebo/xxh3"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Tokenizer converts text to tokens and back. Several goroutines may use it at once. [Bytes] is one, and package
// data/tokenizer reads those of Hugging Face.
type Tokenizer interface {
	// Encode returns the tokens of a text, each from 0 to Size()-1. It adds no special tokens.
	Encode(text string) ([]int32, error)
	// Decode returns the text of tokens.
	Decode(tokens []int32) string
	// Size returns the size of the vocabulary.
	Size() int
}

// Bytes is the [Tokenizer] whose tokens are the bytes of the text. Its vocabulary has 256 tokens.
type Bytes struct{}

// Encode implements [Tokenizer]. It returns no error.
func (Bytes) Encode(text string) ([]int32, error) {
	tokens := make([]int32, len(text))
	for i := range tokens {
		tokens[i] = int32(text[i])
	}
	return tokens, nil
}

// Decode implements [Tokenizer]. It drops tokens that are not bytes.
func (Bytes) Decode(tokens []int32) string {
	text := make([]byte, 0, len(tokens))
	for _, t := range tokens {
		if t >= 0 && t < 256 {
			text = append(text, byte(t))
		}
	}
	return string(text)
}

// Size implements [Tokenizer]. It returns 256.
func (Bytes) Size() int { return 256 }

// LoadText reads text files, gzipped or not, and returns the tokens of all, one after the other, in the order of
// names. The result is a vector of uint8 for [Bytes], of uint16 for vocabularies of at most 65,536 tokens, and of
// int32 for larger ones. LoadText reads whole files into memory.
func LoadText(t Tokenizer, names ...string) (*tensor.Tensor, error) {
	if len(names) == 0 {
		return nil, errors.New("data: LoadText of no files")
	}
	if _, ok := t.(Bytes); ok {
		text, err := readTexts(names)
		return tensor.Of(text), err
	}
	var tokens []int32
	for _, name := range names { // each file by itself, so that no token spans two files
		text, err := readTexts([]string{name})
		if err != nil {
			return nil, err
		}
		more, err := t.Encode(string(text))
		if err != nil {
			return nil, fmt.Errorf("data: %s: %w", name, err)
		}
		tokens = append(tokens, more...)
	}
	for i, token := range tokens {
		if token < 0 || int(token) >= t.Size() {
			return nil, fmt.Errorf("data: the tokenizer gave %d as token %d: want 0 to %d", token, i, t.Size()-1)
		}
	}
	if t.Size() > math.MaxUint16+1 {
		return tensor.Of(tokens), nil
	}
	narrow := make([]uint16, len(tokens))
	for i, token := range tokens {
		narrow[i] = uint16(token)
	}
	return tensor.Of(narrow), nil
}

// readTexts returns the contents of files, one after the other.
func readTexts(names []string) ([]byte, error) {
	var text bytes.Buffer
	for _, name := range names {
		s, err := openSource(name, "text")
		if err != nil {
			return nil, err
		}
		n, err := text.ReadFrom(s.r)
		s.Close()
		if err != nil {
			return nil, s.wrong(n, s.explain(err))
		}
	}
	return text.Bytes(), nil
}

// Sequences returns a pipeline for language models. Element i is a [Batch] with one input, the length tokens that
// start at token i·length, and one label, the token that follows each of them; both are int32 [length]. tokens is a
// vector of integers, such as the result of [LoadText], whose memory is shared and must not be modified afterwards.
// The last tokens are dropped if they do not fill a sequence. Sequences returns an error if tokens has another shape
// or dtype, or fewer than length+1 tokens.
//
// With random access; use Shuffle to draw the sequences in random order, and Skip and Take to hold out the end of
// a text.
func Sequences(tokens *tensor.Tensor, length int) (Pipeline, error) {
	switch {
	case length < 1:
		return Pipeline{}, fmt.Errorf("data: Sequences of %d tokens: want at least 1", length)
	case tokens.Rank() != 1 || !tokens.DType().IsInteger():
		return Pipeline{}, fmt.Errorf("data: Sequences of %v%s: want a vector of integers", tokens.DType(),
			tensor.FormatShape(tokens.Shape()))
	case tokens.Len() <= length:
		return Pipeline{}, fmt.Errorf("data: %d tokens are too few for one sequence of %d and the token after it: use a "+
			"longer text, or shorter sequences", tokens.Len(), length)
	}
	t := &tokenSequences{tokens: tokens, length: length}
	switch tokens.DType() {
	case tensor.Uint8:
		t.read = tokenReader[uint8](tokens)
	case tensor.Uint16:
		t.read = tokenReader[uint16](tokens)
	case tensor.Int32:
		t.read = tokenReader[int32](tokens)
	default:
		wide := tokens.Float64s()
		narrow := make([]int32, len(wide))
		for i, x := range wide {
			if narrow[i] = int32(x); float64(narrow[i]) != x {
				return Pipeline{}, fmt.Errorf("data: token %d is %v, which is not an int32", i, x)
			}
		}
		t.read = tokenReader[int32](tensor.Of(narrow))
	}
	return Of(t), nil
}

// tokenSequences is the dataset of Sequences.
type tokenSequences struct {
	tokens   *tensor.Tensor
	length   int
	read     func(dst []int32, from int)
	hash     uint64
	hashOnce sync.Once
}

// Len implements [Dataset].
func (t *tokenSequences) Len() int { return (t.tokens.Len() - 1) / t.length }

// Iter implements [Dataset].
func (t *tokenSequences) Iter(ctx context.Context) iter.Seq2[Element, error] {
	return newView(t).Iter(ctx)
}

// At implements [Indexed].
func (t *tokenSequences) At(_ context.Context, i int) (Element, error) {
	return t.batch([]int{i}, t.length), nil
}

// Gather implements [Gatherer].
func (t *tokenSequences) Gather(_ context.Context, indices []int) (Element, error) {
	return t.batch(indices, len(indices), t.length), nil
}

// batch returns the sequences with the given indices, as tensors of the shape.
func (t *tokenSequences) batch(indices []int, shape ...int) Batch {
	inputs, labels := make([]int32, len(indices)*t.length), make([]int32, len(indices)*t.length)
	for k, i := range indices {
		t.read(inputs[k*t.length:(k+1)*t.length], i*t.length)
		t.read(labels[k*t.length:(k+1)*t.length], i*t.length+1)
	}
	return Batch{
		Inputs: []*tensor.Tensor{tensor.Of(inputs, shape...)}, Labels: []*tensor.Tensor{tensor.Of(labels, shape...)},
	}
}

// Fingerprint implements [Fingerprinted].
func (t *tokenSequences) Fingerprint() uint64 {
	t.hashOnce.Do(func() {
		t.hash = describe(xxh3.Hash(t.tokens.Memory().HostBytes()), fmt.Sprint(t.tokens.DType(), t.length))
	})
	return t.hash
}

// tokenReader returns a function that reads tokens as int32.
func tokenReader[T uint8 | uint16 | int32](tokens *tensor.Tensor) func(dst []int32, from int) {
	all := tensor.Data[T](tokens)
	return func(dst []int32, from int) {
		for i, token := range all[from : from+len(dst)] {
			dst[i] = int32(token)
		}
	}
}
