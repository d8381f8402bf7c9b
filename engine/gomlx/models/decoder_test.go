package models_test

import (
	"context"
	"errors"
	"math"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train"
)

// languageModel is a model with and without a cache.
type languageModel interface {
	Forward(s *model.Scope, inputs []*graph.Node) []*graph.Node
	Continue(s *model.Scope, inputs []*graph.Node) []*graph.Node
	Cache(positions int) models.CacheShape
}

// TestDecoder compares the logits of a sequence whose tokens come one by one, in blocks, and after a reset,
// with those of the whole sequence at once, which has no dropout outside training. The weights are arbitrary, or
// Hugging Face's.
func TestDecoder(t *testing.T) {
	const positions = 11
	e, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	for _, name := range []string{"gpt", "gpt2", "llama", "llama-tied"} {
		t.Run(name, func(t *testing.T) {
			var m languageModel = models.GPT{Vocabulary: 53, Width: 12, Heads: 3, Blocks: 2, Dropout: 0.5}
			var weights []train.Weight
			if name == "gpt" {
				weights = arbitrary(t, e, m.Forward, positions)
			} else {
				lm, _, _ := pretrained(t, name)
				m = lm
				if weights, err = train.LoadWeights(filepath.Join("testdata", "transformers", name)); err != nil {
					t.Fatal(err)
				}
			}
			predictor := func(forward models.Forward, inputs []engine.Feature) *train.Predictor {
				p, err := train.NewPredictor(t.Context(), &gomlx.Model{Forward: forward}, train.PredictorConfig{
					Engine: e, Inputs: inputs, Batch: 1, Weights: weights,
				})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { p.Close() })
				return p
			}
			tokens := make([]int32, positions)
			for i := range tokens {
				tokens[i] = int32(i * i * 7 % 53)
			}
			whole := predictor(m.Forward, []engine.Feature{{DType: tensor.Int32, Shape: []int{positions}}})
			out, err := whole.Predict(t.Context(), tensor.Of(tokens, 1, positions))
			if err != nil {
				t.Fatal(err)
			}
			want := tensor.Data[float32](out[0])
			c := m.Cache(positions)
			step := predictor(m.Continue, c.Inputs(1))
			block, err := step.ForInputs(t.Context(), c.Inputs(4)...)
			if err != nil {
				t.Fatal(err)
			}
			defer block.Close()
			sent := &counted{Predictor: step}
			d, err := models.NewDecoder(c, sent, &counted{Predictor: block}, 4)
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			other := &fromHost{c: c, step: step, block: block}
			at := 0
			for _, n := range []int{1, 1, 6, 1, 2, 0, 5, 1, 4, 1, 0, 11} { // 0: from the beginning
				if n == 0 {
					d.Reset()
					other.reset()
					at = 0
					continue
				}
				got, err := d.Append(t.Context(), tokens[at:at+n]...)
				if at += n; err != nil || d.Len() != at {
					t.Fatalf("%d tokens after %d: length %d, %v", n, at-n, d.Len(), err)
				}
				same := other.append(t, 4, tokens[at-n:at]...)
				for i, x := range got {
					if x != same[i] {
						t.Fatalf("%d tokens, of which %d were new: logit %d is %v, and %v with keys and values of the host", at, n, i, x,
							same[i])
					}
					if w := want[(at-1)*c.Vocabulary+i]; math.Abs(float64(x-w)) > 2e-5 {
						t.Fatalf("%d tokens, of which %d were new: logit %d is %v, want %v", at, n, i, x, w)
					}
				}
			}
			if sent.in != 8*sent.calls || sent.out != 4*c.Vocabulary*sent.calls || sent.calls == 0 {
				t.Errorf("%d tokens sent %d bytes and received %d: want token and position, 8 bytes, and logits", sent.calls,
					sent.in, sent.out)
			}
			if _, err := d.Append(t.Context(), 1); err == nil || !strings.Contains(err.Error(), "11 positions") {
				t.Errorf("a token too many: got %v", err)
			}
			if _, err := d.Append(t.Context()); err == nil || d.Len() != positions {
				t.Errorf("no tokens: got %v, length %d", err, d.Len())
			}
		})
	}
}

// arbitrary returns values for the variables of a model of sequences.
func arbitrary(t *testing.T, e engine.Engine, forward models.Forward, positions int) (weights []train.Weight) {
	t.Helper()
	x, err := (&gomlx.Model{Forward: forward}).CompileInference(t.Context(), e, engine.Spec{
		Rows: 1, Devices: e.Devices()[:1], Inputs: []engine.Feature{{DType: tensor.Int32, Shape: []int{positions}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	for _, v := range x.Variables() {
		value := tensor.New(v.DType, v.Shape...)
		for i, list := 0, tensor.Data[float32](value); i < len(list); i++ {
			list[i] = float32(0.5 * math.Sin(float64(i*i+len(v.Name))))
		}
		weights = append(weights, train.Weight{Name: v.Name, Value: value})
	}
	return weights
}

// counted counts the bytes between host and predictor.
type counted struct {
	models.Predictor
	calls, in, out int
}

func (c *counted) Continue(ctx context.Context, s engine.State, at, count int, inputs ...*tensor.Tensor) (
	[]*tensor.Tensor, error,
) {
	out, err := c.Predictor.Continue(ctx, s, at, count, inputs...)
	c.calls++
	for _, x := range inputs {
		c.in += x.Memory().Bytes
	}
	for _, x := range out {
		c.out += x.Memory().Bytes
	}
	return out, err
}

// fromHost computes logits with Predict of Continue, with keys and values that the host keeps.
type fromHost struct {
	c           models.CacheShape
	step, block *train.Predictor
	kept        []*tensor.Tensor
	length      int
}

func (h *fromHost) reset() { h.kept, h.length = nil, 0 }

func (h *fromHost) append(t *testing.T, inBlock int, tokens ...int32) (logits []float32) {
	t.Helper()
	for len(h.kept) < 2*h.c.Blocks {
		h.kept = append(h.kept, tensor.New(tensor.Float32, 1, h.c.Heads, h.c.Positions, h.c.HeadWidth))
	}
	for len(tokens) > 0 {
		p, n := h.step, 1
		if len(tokens) > 1 {
			p, n = h.block, inBlock
		}
		padded := make([]int32, n)
		count := copy(padded, tokens)
		in := []*tensor.Tensor{tensor.Of(padded, 1, n), tensor.Of([]int32{int32(h.length)}, 1)}
		out, err := p.Predict(t.Context(), append(in, h.kept...)...)
		if err != nil {
			t.Fatal(err)
		}
		for i, x := range out[1:] {
			to, from := tensor.Data[float32](h.kept[i]), tensor.Data[float32](x)
			for head := range h.c.Heads {
				copy(to[(head*h.c.Positions+h.length)*h.c.HeadWidth:][:count*h.c.HeadWidth], from[head*n*h.c.HeadWidth:])
			}
		}
		logits = tensor.Data[float32](out[0])[(count-1)*h.c.Vocabulary:][:h.c.Vocabulary]
		tokens, h.length = tokens[count:], h.length+count
	}
	return logits
}

// TestDecoderErrors checks that a failed call changes nothing, and that another model is refused.
func TestDecoderErrors(t *testing.T) {
	c := models.GPT{Width: 4, Heads: 1, Blocks: 1}.Cache(5)
	broken := errors.New("broken")
	d := newDecoder(t, c, predict(func() ([]*tensor.Tensor, error) { return nil, broken }))
	if _, err := d.Append(t.Context(), 1, 2); !errors.Is(err, broken) || d.Len() != 0 {
		t.Errorf("got %v, length %d", err, d.Len())
	}
	d = newDecoder(t, c, predict(func() ([]*tensor.Tensor, error) {
		return []*tensor.Tensor{tensor.New(tensor.Float32, 1, 1, 255)}, nil
	}))
	if _, err := d.Append(t.Context(), 1); err == nil || !strings.Contains(err.Error(), "shape [1 1 256]") {
		t.Errorf("got %v", err)
	}
}

func newDecoder(t *testing.T, c models.CacheShape, p models.Predictor) *models.Decoder {
	t.Helper()
	d, err := models.NewDecoder(c, p, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

type predict func() ([]*tensor.Tensor, error)

func (f predict) NewState(int, int) (engine.State, error) { return nil, nil }

func (f predict) Continue(context.Context, engine.State, int, int, ...*tensor.Tensor) ([]*tensor.Tensor, error) {
	return f()
}
