package models

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"strings"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers/activation"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/model/initializer"

	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
)

// CausalLM is a language model of Hugging Face's library transformers: GPT-2 or Llama. Its variables have the
// names and shapes of the library's, with slashes for dots, such as /model/layers/0/mlp/up_proj/weight. So weights
// of the library need no map of names. For the library, the names of an export must be written with dots again
// (docs/weights.md). Inputs and outputs are those of [GPT].
type CausalLM struct {
	Type string // "gpt2", "llama"

	Vocabulary int
	Width      int
	Blocks     int
	Heads      int
	KVHeads    int // heads of keys and values, a divisor of Heads
	HeadWidth  int
	Inner      int // width of the perceptron
	Positions  int // the longest sequence

	Activation    string  // "gelu_new", "gelu", "silu"
	Epsilon       float64 // of the norms
	RopeBase      float64 // Llama: of the rotary embedding
	TiedHead      bool    // the head's weights are those of the embedding
	AttentionBias bool    // Llama: the attention's dense layers have biases
	InnerBias     bool    // Llama: the perceptron's dense layers have biases
}

// causalConfig is the part of config.json that determines the model.
type causalConfig struct {
	ModelType string `json:"model_type"`
	Tied      *bool  `json:"tie_word_embeddings"`
	Vocab     int    `json:"vocab_size"`

	// GPT-2
	Positions  int     `json:"n_positions"`
	Embd       int     `json:"n_embd"`
	Layer      int     `json:"n_layer"`
	Head       int     `json:"n_head"`
	Inner      int     `json:"n_inner"`
	Activation string  `json:"activation_function"`
	Epsilon    float64 `json:"layer_norm_epsilon"`
	Scale      *bool   `json:"scale_attn_weights"`
	ScaleByI   bool    `json:"scale_attn_by_inverse_layer_idx"`

	// Llama
	Hidden       int     `json:"hidden_size"`
	Intermediate int     `json:"intermediate_size"`
	Layers       int     `json:"num_hidden_layers"`
	Heads        int     `json:"num_attention_heads"`
	KVHeads      int     `json:"num_key_value_heads"`
	HeadDim      int     `json:"head_dim"`
	MaxPositions int     `json:"max_position_embeddings"`
	HiddenAct    string  `json:"hidden_act"`
	RMSEpsilon   float64 `json:"rms_norm_eps"`
	RopeTheta    float64 `json:"rope_theta"`
	RopeScaling  any     `json:"rope_scaling"`
	Rope         struct {
		Type  string  `json:"rope_type"`
		Theta float64 `json:"rope_theta"`
	} `json:"rope_parameters"`
	AttentionBias bool `json:"attention_bias"`
	MLPBias       bool `json:"mlp_bias"`
}

// LoadCausalLM returns the model that a config.json of Hugging Face describes. Its weights are in the same
// folder; train.LoadWeights reads them.
func LoadCausalLM(path string) (*CausalLM, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("models: %w", err)
	}
	m, err := parseCausalLM(text)
	if err != nil {
		return nil, fmt.Errorf("models: %s: %w", path, err)
	}
	return m, nil
}

func parseCausalLM(text []byte) (*CausalLM, error) {
	var c causalConfig
	if err := json.Unmarshal(text, &c); err != nil {
		return nil, err
	}
	m := &CausalLM{Type: c.ModelType, Vocabulary: c.Vocab}
	switch c.ModelType {
	case "gpt2":
		m.Width, m.Blocks, m.Heads, m.KVHeads, m.Positions = c.Embd, c.Layer, c.Head, c.Head, c.Positions
		m.Inner, m.Activation, m.Epsilon = orDefault(c.Inner, 4*c.Embd), c.Activation, c.Epsilon
		m.TiedHead = c.Tied == nil || *c.Tied
		if c.Scale != nil && !*c.Scale || c.ScaleByI {
			return nil, fmt.Errorf("scale_attn_weights and scale_attn_by_inverse_layer_idx: want true and false, others are " +
				"not supported")
		}
		if m.Heads > 0 {
			m.HeadWidth = m.Width / m.Heads
		}
	case "llama":
		m.Width, m.Blocks, m.Heads, m.KVHeads = c.Hidden, c.Layers, c.Heads, orDefault(c.KVHeads, c.Heads)
		m.Positions, m.Inner, m.Activation, m.Epsilon = c.MaxPositions, c.Intermediate, c.HiddenAct, c.RMSEpsilon
		m.TiedHead, m.AttentionBias, m.InnerBias = c.Tied != nil && *c.Tied, c.AttentionBias, c.MLPBias
		m.RopeBase, m.HeadWidth = 10000, c.HeadDim
		for _, base := range []float64{c.RopeTheta, c.Rope.Theta} {
			if base > 0 {
				m.RopeBase = base
			}
		}
		if c.RopeScaling != nil || c.Rope.Type != "" && c.Rope.Type != "default" {
			return nil, fmt.Errorf("the rotary embedding is scaled, which is not supported: want rope_type default")
		}
		if m.HeadWidth == 0 && m.Heads > 0 {
			m.HeadWidth = m.Width / m.Heads
		}
	default:
		return nil, fmt.Errorf("model_type %q is not supported: want gpt2 or llama", c.ModelType)
	}
	return m, m.check()
}

// check returns an error if a number is missing or impossible.
func (m *CausalLM) check() error {
	for _, n := range []int{m.Vocabulary, m.Width, m.Blocks, m.Heads, m.KVHeads, m.HeadWidth, m.Inner, m.Positions} {
		if n < 1 {
			return fmt.Errorf("a size of the model is missing or not positive: %+v", *m)
		}
	}
	_, known := m.activation()
	switch {
	case m.Heads%m.KVHeads != 0:
		return fmt.Errorf("%d heads share keys and values of %d: want a divisor", m.Heads, m.KVHeads)
	case m.Type == "gpt2" && m.HeadWidth*m.Heads != m.Width:
		return fmt.Errorf("%d heads do not divide the width %d", m.Heads, m.Width)
	case m.Type == "llama" && m.HeadWidth%2 != 0:
		return fmt.Errorf("the width of a head is %d: want an even number for the rotary embedding", m.HeadWidth)
	case !(m.Epsilon > 0):
		return fmt.Errorf("the epsilon of the norms is %v: want a positive number", m.Epsilon)
	case !known:
		return fmt.Errorf("the activation %q is not supported: want gelu_new, gelu or silu", m.Activation)
	}
	return nil
}

func (m *CausalLM) activation() (f func(*graph.Node) *graph.Node, known bool) {
	switch m.Activation {
	case "gelu_new", "gelu_pytorch_tanh":
		return layer.GeluTanh, true
	case "gelu":
		return layer.Gelu, true
	case "silu", "swish":
		return activation.Swish, true
	}
	return nil, false
}

// Forward is the model function. Dropout is not applied.
func (m *CausalLM) Forward(s *model.Scope, inputs []*graph.Node) []*graph.Node {
	tokens := inputs[0]
	if tokens.Rank() != 2 || tokens.Shape().Dim(1) > m.Positions {
		panic(fmt.Errorf("models.CausalLM takes integers of shape (rows, positions) with at most %d positions, not %s",
			m.Positions, tokens.Shape()))
	}
	return []*graph.Node{m.builder(s, tokens).logits(tokens)}
}

// Cache returns the sizes of the keys and values for [CausalLM.Continue], of a sequence of at most the given
// number of positions; 0 means those of the model.
func (m *CausalLM) Cache(positions int) CacheShape {
	return CacheShape{
		Blocks: m.Blocks, Heads: m.KVHeads, HeadWidth: m.HeadWidth, Positions: orDefault(positions, m.Positions),
		Vocabulary: m.Vocabulary,
	}
}

// Continue is the model function for new tokens of a sequence whose earlier keys and values are kept
// ([CacheShape]). It has the variables of Forward.
func (m *CausalLM) Continue(s *model.Scope, inputs []*graph.Node) []*graph.Node {
	in := continued(inputs)
	if in.capacity() > m.Positions {
		panic(fmt.Errorf("models.CausalLM has at most %d positions, not %d", m.Positions, in.capacity()))
	}
	b := m.builder(s, in.tokens)
	b.continued = in
	logits := b.logits(in.tokens)
	return in.outputs(logits, b.kept)
}

func (m *CausalLM) builder(s *model.Scope, tokens *graph.Node) *causalBuilder {
	if err := m.check(); err != nil {
		panic(fmt.Errorf("models.CausalLM: %w", err))
	}
	return &causalBuilder{
		CausalLM: m, s: s, g: tokens.Graph(), dtype: gomlx.ComputeDType(tokens.Graph()),
		rows: tokens.Shape().Dim(0), positions: tokens.Shape().Dim(1),
	}
}

// logits returns the logits of the tokens, of shape (rows, positions, vocabulary).
func (b *causalBuilder) logits(tokens *graph.Node) *graph.Node {
	m := b.CausalLM
	var x, table *graph.Node
	if m.Type == "gpt2" {
		x, table = b.gpt2(tokens)
	} else {
		x, table = b.llama(tokens)
	}
	if !m.TiedHead {
		table = b.matrix("lm_head.weight", m.Vocabulary, m.Width)
	}
	return graph.Reshape(times(x, table, 1), b.rows, b.positions, m.Vocabulary)
}

// causalBuilder builds the graph of a model. Values between layers have the shape (rows·positions, width).
type causalBuilder struct {
	*CausalLM
	s               *model.Scope
	g               *graph.Graph
	dtype           dtypes.DType
	rows, positions int

	continued *continuedInputs // of Continue; nil: none
	kept      []*graph.Node    // the new keys and values of each block, with continued
}

// gpt2 returns the last hidden values, and the embedding.
func (b *causalBuilder) gpt2(tokens *graph.Node) (x, table *graph.Node) {
	activate, _ := b.activation()
	table = b.matrix("transformer.wte.weight", b.Vocabulary, b.Width)
	places := b.matrix("transformer.wpe.weight", b.Positions, b.Width)
	x = b.embed(table, tokens)
	if b.continued != nil {
		places = b.continued.places(places)
	} else {
		places = graph.ExpandLeftToRank(graph.Slice(places, graph.AxisRange(0, b.positions), graph.AxisRange()), 3)
	}
	x = graph.Reshape(graph.Add(graph.Reshape(x, b.rows, b.positions, b.Width), places), -1, b.Width)
	for i := range b.Blocks {
		h := fmt.Sprintf("transformer.h.%d.", i)
		qkv := b.linear(b.norm(x, h+"ln_1"), h+"attn.c_attn", 3*b.Width, true)
		parts := make([]*graph.Node, 3)
		for k := range parts {
			parts[k] = graph.Slice(qkv, graph.AxisRange(), graph.AxisRange(k*b.Width, (k+1)*b.Width))
		}
		y := b.attention(b.heads(parts[0], b.Heads), b.heads(parts[1], b.Heads), b.heads(parts[2], b.Heads))
		x = graph.Add(x, b.linear(y, h+"attn.c_proj", b.Width, true))
		y = activate(b.linear(b.norm(x, h+"ln_2"), h+"mlp.c_fc", b.Inner, true))
		x = graph.Add(x, b.linear(y, h+"mlp.c_proj", b.Width, true))
	}
	return b.norm(x, "transformer.ln_f"), table
}

// llama returns the last hidden values, and the embedding.
func (b *causalBuilder) llama(tokens *graph.Node) (x, table *graph.Node) {
	activate, _ := b.activation()
	table = b.matrix("model.embed_tokens.weight", b.Vocabulary, b.Width)
	x = b.embed(table, tokens)
	cos, sin := b.rotary()
	for i := range b.Blocks {
		h := fmt.Sprintf("model.layers.%d.", i)
		y := b.norm(x, h+"input_layernorm")
		project := func(name string, heads int) *graph.Node {
			return b.heads(b.linear(y, h+"self_attn."+name, heads*b.HeadWidth, b.AttentionBias), heads)
		}
		q, k, v := project("q_proj", b.Heads), project("k_proj", b.KVHeads), project("v_proj", b.KVHeads)
		y = b.attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
		x = graph.Add(x, b.linear(y, h+"self_attn.o_proj", b.Width, b.AttentionBias))
		y = b.norm(x, h+"post_attention_layernorm")
		gate := activate(b.linear(y, h+"mlp.gate_proj", b.Inner, b.InnerBias))
		y = graph.Mul(gate, b.linear(y, h+"mlp.up_proj", b.Inner, b.InnerBias))
		x = graph.Add(x, b.linear(y, h+"mlp.down_proj", b.Width, b.InnerBias))
	}
	return b.norm(x, "model.norm"), table
}

// variable returns the variable of a dotted name.
func (b *causalBuilder) variable(name string, init model.VariableInitializer, dtype dtypes.DType, dims ...int,
) *graph.Node {
	parts := strings.Split(name, ".")
	s := b.s.WithInitializer(init)
	for _, part := range parts[:len(parts)-1] {
		s = s.At("%s", part)
	}
	return s.VariableWithShape(parts[len(parts)-1], shapes.Make(dtype, dims...)).NodeValue(b.g)
}

// matrix returns a matrix or a table, with the initial values of both models.
func (b *causalBuilder) matrix(name string, dims ...int) *graph.Node {
	return b.variable(name, normal(b.s, 0.02), b.dtype, dims...)
}

// embed looks up the rows of a table.
func (b *causalBuilder) embed(table, tokens *graph.Node) *graph.Node {
	x := graph.Gather(gomlx.AtLeastFloat32(table), graph.InsertAxes(graph.Reshape(tokens, -1), -1))
	return graph.ConvertDType(x, b.dtype)
}

// linear is a dense layer with the library's layout: (in, out) for GPT-2's Conv1D, (out, in) for nn.Linear.
func (b *causalBuilder) linear(x *graph.Node, name string, width int, bias bool) *graph.Node {
	in := x.Shape().Dim(-1)
	var y *graph.Node
	if b.Type == "gpt2" {
		y = times(x, b.matrix(name+".weight", in, width), 0)
	} else {
		y = times(x, b.matrix(name+".weight", width, in), 1)
	}
	if bias {
		y = graph.Add(y, graph.ExpandLeftToRank(b.variable(name+".bias", initializer.Zero, b.dtype, width), 2))
	}
	return y
}

// times multiplies the features of x with an axis of w.
func times(x, w *graph.Node, axis int) *graph.Node {
	return graph.DotGeneral(x, []int{1}, nil, w, []int{axis}, nil)
}

// norm is GPT-2's layer normalization, or Llama's division by the root of the mean square.
func (b *causalBuilder) norm(x *graph.Node, name string) *graph.Node {
	dtype := gomlx.VariableDType(x)
	gain := b.variable(name+".weight", initializer.One, dtype, b.Width)
	y := gomlx.AtLeastFloat32(x)
	if b.Type == "gpt2" {
		y = graph.Sub(y, graph.ReduceAndKeep(y, graph.ReduceMean, -1))
	}
	square := graph.ReduceAndKeep(graph.Square(y), graph.ReduceMean, -1)
	y = graph.Mul(y, graph.Reciprocal(graph.Sqrt(graph.AddScalar(square, b.Epsilon))))
	y = graph.Mul(y, graph.ExpandLeftToRank(gomlx.AtLeastFloat32(gain), 2))
	if b.Type == "gpt2" {
		offset := b.variable(name+".bias", initializer.Zero, dtype, b.Width)
		y = graph.Add(y, graph.ExpandLeftToRank(gomlx.AtLeastFloat32(offset), 2))
	}
	return graph.ConvertDType(y, b.dtype)
}

// heads returns x in the shape (rows, heads, positions, head width).
func (b *causalBuilder) heads(x *graph.Node, heads int) *graph.Node {
	return graph.TransposeAllAxes(graph.Reshape(x, b.rows, b.positions, heads, b.HeadWidth), 0, 2, 1, 3)
}

// attention is causal attention of values in the shape of heads. Several query heads share one of keys and
// values.
func (b *causalBuilder) attention(q, k, v *graph.Node) *graph.Node {
	if b.continued != nil {
		y := layer.CachedAttention(q, k, v, b.continued.cache(len(b.kept)/2))
		b.kept = append(b.kept, k, v)
		return graph.Reshape(graph.TransposeAllAxes(y, 0, 2, 1, 3), b.rows*b.positions, b.Heads*b.HeadWidth)
	}
	shared := b.Heads / b.KVHeads
	// The query heads of one head of keys are rows of one product.
	q = graph.Reshape(q, b.rows, b.KVHeads, shared*b.positions, b.HeadWidth)
	batch := []int{0, 1}
	scores := graph.DotGeneral(q, []int{3}, batch, k, []int{3}, batch)
	scores = graph.MulScalar(gomlx.AtLeastFloat32(scores), 1/math.Sqrt(float64(b.HeadWidth)))
	scores = graph.Reshape(scores, b.rows, b.KVHeads, shared, b.positions, b.positions)
	mask := graph.Where(graph.LowerTriangular(b.g, b.positions), graph.ScalarZero(b.g, scores.DType()),
		graph.Scalar(b.g, scores.DType(), -1e9))
	p := graph.Softmax(graph.Add(scores, graph.ExpandLeftToRank(mask, 5)), -1)
	p = graph.Reshape(graph.ConvertDType(p, b.dtype), b.rows, b.KVHeads, shared*b.positions, b.positions)
	y := graph.DotGeneral(p, []int{3}, batch, v, []int{2}, batch)
	y = graph.Reshape(y, b.rows, b.Heads, b.positions, b.HeadWidth)
	return graph.Reshape(graph.TransposeAllAxes(y, 0, 2, 1, 3), b.rows*b.positions, b.Heads*b.HeadWidth)
}

// rotary returns cosine and sine of the rotary embedding's angles, of the shape (1, 1, positions, half a head's
// width) or, if earlier positions are kept, (rows, 1, positions, half a head's width).
func (b *causalBuilder) rotary() (cos, sin *graph.Node) {
	half := b.HeadWidth / 2
	positions := b.positions
	if b.continued != nil {
		positions = b.continued.capacity()
	}
	c, s := make([][]float32, positions), make([][]float32, positions)
	for p := range positions {
		for i := range half {
			// In float32, as in the library.
			frequency := float32(1 / math.Pow(b.RopeBase, float64(2*i)/float64(b.HeadWidth)))
			angle := float64(float32(p) * frequency)
			c[p], s[p] = append(c[p], float32(math.Cos(angle))), append(s[p], float32(math.Sin(angle)))
		}
	}
	cos, sin = graph.Const(b.g, c), graph.Const(b.g, s)
	if b.continued != nil {
		return graph.InsertAxes(b.continued.places(cos), 1), graph.InsertAxes(b.continued.places(sin), 1)
	}
	return graph.ExpandLeftToRank(cos, 4), graph.ExpandLeftToRank(sin, 4)
}

// rotate applies the rotary embedding: it rotates the first half of a head's features against the second.
func rotate(x, cos, sin *graph.Node) *graph.Node {
	half := x.Shape().Dim(3) / 2
	wide := gomlx.AtLeastFloat32(x)
	part := func(from int) *graph.Node {
		return graph.Slice(wide, graph.AxisRange(), graph.AxisRange(), graph.AxisRange(), graph.AxisRange(from, from+half))
	}
	a, b := part(0), part(half)
	cos, sin = graph.ConvertDType(cos, wide.DType()), graph.ConvertDType(sin, wide.DType())
	y := graph.Concatenate([]*graph.Node{
		graph.Sub(graph.Mul(a, cos), graph.Mul(b, sin)), graph.Add(graph.Mul(b, cos), graph.Mul(a, sin)),
	}, 3)
	return graph.ConvertDType(y, x.DType())
}
