package layer

import (
	"cmp"
	"fmt"
	"math"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers/regularizer"
	"github.com/gomlx/gomlx/ml/model"

	"github.com/lockstep-ml/lockstep/engine/gomlx"
)

// AttentionOptions are the settings of [SelfAttention].
type AttentionOptions struct {
	Heads  int  // divides the width; 0: 1
	Causal bool // a position attends only to itself and to earlier ones

	// Output initialises the weights of the output's dense layer; nil: the scope's initialiser.
	Output model.VariableInitializer

	// Dropout is the rate of dropout of the weights of the attention, as in [Dropout].
	Dropout float64
}

// SelfAttention is multi-head attention of x to itself, of shape (rows, positions, width), with biases, and an
// output of the same shape. Scores are divided by the root of a head's width. The softmax of float16 and bfloat16
// is computed in float32.
//
// It is GoMLX's attention.SelfAttention(s, x, heads, width/heads).UseQKVProjection(). The variables are
// "MultiHeadAttention/qkv/weights_qkv", of shape (width, 3·width), "…/biases_q", "…/biases_k" and "…/biases_v",
// and those of a dense layer in "MultiHeadAttention/output". The hyperparameters for regularisation apply to the
// weights.
func SelfAttention(s *model.Scope, x *graph.Node, o AttentionOptions) *graph.Node {
	heads := cmp.Or(o.Heads, 1)
	if x.Rank() != 3 || heads < 1 || x.Shape().Dim(2)%heads != 0 {
		panic(fmt.Errorf("attention takes shape (rows, positions, width) and a number of heads that divides width, "+
			"not %s and %d", x.Shape(), heads))
	}
	s = s.In("MultiHeadAttention")
	dims, dtype := x.Shape().Dimensions, x.DType()
	width := dims[2]
	in := attentionInputs(s, x)
	a := attentionShape{rows: dims[0], positions: dims[1], heads: heads, width: width / heads, causal: o.Causal}
	weightShape := shapes.Make(dtype, a.rows, a.heads, a.positions, a.positions)
	mask := dropoutMask(s, x, weightShape, o.Dropout)
	y := a.attend(in, mask)
	output := s.In("output")
	if o.Output != nil {
		output = output.WithInitializer(o.Output)
	}
	return graph.Reshape(Dense(output, y, width), dims...)
}

// attentionInputs returns x as a matrix, and the variables that compute queries, keys and values from it.
func attentionInputs(s *model.Scope, x *graph.Node) []*graph.Node {
	qkv := s.In("qkv")
	g, dtype, width := x.Graph(), x.DType(), x.Shape().Dim(2)
	weights := qkv.VariableWithShape("weights_qkv", shapes.Make(dtype, width, 3*width))
	if r := regularizer.FromScope(qkv); r != nil {
		r(g, weights)
	}
	in := []*graph.Node{graph.Reshape(x, -1, width), weights.NodeValue(g)}
	for _, name := range []string{"biases_q", "biases_k", "biases_v"} {
		in = append(in, qkv.VariableWithShape(name, shapes.Make(dtype, width)).NodeValue(g))
	}
	return in
}

// attentionShape holds the sizes of an attention; width is that of a head.
type attentionShape struct {
	rows, positions, heads, width int
	causal                        bool
}

// attend builds the attention. The dropout of the weights is nil or of their shape,
// (rows, heads, positions, positions).
func (a attentionShape) attend(in []*graph.Node, dropout *graph.Node) *graph.Node {
	parts := a.project(in)
	batch := []int{0, 1}
	scores := graph.DotGeneral(graph.MulScalar(parts[0], a.scale()), []int{3}, batch, parts[1], []int{3}, batch)
	if a.causal {
		scores = graph.Add(scores, graph.ExpandLeftToRank(a.mask(scores), 4))
	}
	p := graph.ConvertDType(graph.Softmax(gomlx.AtLeastFloat32(scores), -1), scores.DType())
	if dropout != nil {
		p = graph.Mul(p, dropout)
	}
	y := graph.DotGeneral(p, []int{3}, batch, parts[2], []int{2}, batch)
	return graph.Reshape(graph.TransposeAllAxes(y, 0, 2, 1, 3), a.rows*a.positions, a.heads*a.width)
}

// project returns queries, keys and values, of shape (rows, heads, positions, width).
func (a attentionShape) project(in []*graph.Node) (parts [3]*graph.Node) {
	all := a.heads * a.width
	bias := graph.Concatenate(in[2:5], 0)
	qkv := graph.Add(graph.Dot(in[0], in[1]).MatMul(), graph.ExpandLeftToRank(bias, 2))
	for i := range parts {
		part := graph.Slice(qkv, graph.AxisRange(), graph.AxisRange(i*all, (i+1)*all))
		parts[i] = graph.TransposeAllAxes(graph.Reshape(part, a.rows, a.positions, a.heads, a.width), 0, 2, 1, 3)
	}
	return parts
}

func (a attentionShape) scale() float64 { return 1 / math.Sqrt(float64(a.width)) }

// mask is added to the scores: 0 where a position may attend, and otherwise so low a number that its
// exponential is 0. Shape (positions, positions).
func (a attentionShape) mask(scores *graph.Node) *graph.Node {
	g, dtype := scores.Graph(), scores.DType()
	low := -1e9
	if dtype == dtypes.Float16 {
		low = -6e4
	}
	return graph.Where(graph.LowerTriangular(g, a.positions), graph.ScalarZero(g, dtype), graph.Scalar(g, dtype, low))
}
