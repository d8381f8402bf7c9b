package layer

import (
	"cmp"
	"fmt"
	"math"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers/attention"
	"github.com/gomlx/gomlx/ml/layers/regularizer"
	"github.com/gomlx/gomlx/ml/model"

	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/internal/gradient"
)

// AttentionOptions are the settings of [SelfAttention].
type AttentionOptions struct {
	Heads  int  // divides the width; 0: 1
	Causal bool // a position attends only to itself and to earlier ones

	// Output initialises the weights of the output's dense layer; nil: the scope's initialiser.
	Output model.VariableInitializer
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
	qkv := s.In("qkv")
	g, dims, dtype := x.Graph(), x.Shape().Dimensions, x.DType()
	width := dims[2]
	weights := qkv.VariableWithShape("weights_qkv", shapes.Make(dtype, width, 3*width))
	if r := regularizer.FromScope(qkv); r != nil {
		r(g, weights)
	}
	in := []*graph.Node{graph.Reshape(x, -1, width), weights.NodeValue(g)}
	for _, name := range []string{"biases_q", "biases_k", "biases_v"} {
		in = append(in, qkv.VariableWithShape(name, shapes.Make(dtype, width)).NodeValue(g))
	}
	a := attentionShape{rows: dims[0], positions: dims[1], heads: heads, width: width / heads, causal: o.Causal}
	var y *graph.Node
	if fast(x) {
		y = a.byHeads(in)
	} else {
		y = a.plain(in)
	}
	output := s.In("output")
	if o.Output != nil {
		output = output.WithInitializer(o.Output)
	}
	return graph.Reshape(Dense(output, y, width), dims...)
}

// attentionShape holds the sizes of an attention; width is that of a head.
type attentionShape struct {
	rows, positions, heads, width int
	causal                        bool
}

// plain builds the attention from GoMLX's operations.
func (a attentionShape) plain(in []*graph.Node) *graph.Node {
	all := a.heads * a.width
	bias := graph.Concatenate(in[2:5], 0)
	qkv := graph.Add(graph.Dot(in[0], in[1]).MatMul(), graph.ExpandLeftToRank(bias, 2))
	var parts [3]*graph.Node
	for i := range parts {
		part := graph.Slice(qkv, graph.AxisRange(), graph.AxisRange(i*all, (i+1)*all))
		parts[i] = graph.TransposeAllAxes(graph.Reshape(part, a.rows, a.positions, a.heads, a.width), 0, 2, 1, 3)
	}
	batch := []int{0, 1}
	scores := graph.DotGeneral(graph.MulScalar(parts[0], a.scale()), []int{3}, batch, parts[1], []int{3}, batch)
	if a.causal {
		scores = graph.Add(scores, graph.ExpandLeftToRank(a.mask(scores), 4))
	}
	p := graph.ConvertDType(graph.Softmax(gomlx.AtLeastFloat32(scores), -1), scores.DType())
	y := graph.DotGeneral(p, []int{3}, batch, parts[2], []int{2}, batch)
	return graph.Reshape(graph.TransposeAllAxes(y, 0, 2, 1, 3), a.rows*a.positions, all)
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

// byHeads builds the attention without a transpose in the forward pass, for the Go backend: queries, keys and
// values of each head are products with the head's weights, and lie beside those of the other heads, in the
// order head, row, position.
func (a attentionShape) byHeads(in []*graph.Node) *graph.Node {
	all, batch := a.heads*a.width, a.heads*a.rows
	var weights, q, k, v, p, o *graph.Node // weights: those of all heads, columns in the order head, kind
	heads := func(parts []*graph.Node) *graph.Node {
		return graph.Reshape(graph.Concatenate(parts, 0), batch, a.positions, a.width)
	}
	return gradient.With(in, func(in []*graph.Node) *graph.Node {
		var ofHead, qs, ks, vs []*graph.Node
		for h := range a.heads {
			from := h * a.width
			var w, b []*graph.Node
			for i := range 3 {
				at := graph.AxisRange(i*all+from, i*all+from+a.width)
				w = append(w, graph.Slice(in[1], graph.AxisRange(), at))
				b = append(b, graph.Slice(in[2+i], graph.AxisRange(from, from+a.width)))
			}
			ofHead = append(ofHead, graph.Concatenate(w, 1))
			q, k, v := attention.QKVProjection(in[0], ofHead[h], b[0], b[1], b[2], a.width, a.width)
			qs, ks, vs = append(qs, q), append(ks, k), append(vs, v)
		}
		weights = graph.Concatenate(ofHead, 1)
		q, k, v = graph.MulScalar(heads(qs), a.scale()), heads(ks), heads(vs)
		scores := batchDot(q, k, 2)
		if a.causal {
			scores = graph.Add(scores, repeat(graph.Reshape(a.mask(scores), 1, a.positions, a.positions), batch))
		}
		p = graph.Softmax(scores, -1)
		o = batchDot(p, v, 1)
		return graph.Concatenate(a.split(o), 1)
	}, func(in []*graph.Node, _, adjoint *graph.Node) []*graph.Node {
		parts := make([]*graph.Node, a.heads)
		for h := range parts {
			parts[h] = graph.Slice(adjoint, graph.AxisRange(), graph.AxisRange(h*a.width, (h+1)*a.width))
		}
		do := heads(parts)
		dv := contractRows(p, do)
		// The gradient of a softmax p with adjoint dp is p·(dp - Σ p·dp); the sum is that of o·do.
		sums := rowSums(graph.Reshape(graph.Mul(o, do), batch*a.positions, a.width))
		ds := graph.Sub(batchDot(do, v, 2), graph.Reshape(rows(sums, a.positions), batch, a.positions, a.positions))
		ds = graph.Mul(p, ds)
		dk := contractRows(ds, q)
		dq := graph.MulScalar(batchDot(ds, k, 1), a.scale())
		var columns []*graph.Node // in the order of weights
		dqs, dks, dvs := a.split(dq), a.split(dk), a.split(dv)
		for h := range a.heads {
			columns = append(columns, dqs[h], dks[h], dvs[h])
		}
		d := graph.Concatenate(columns, 1)
		dx := dot(d, 1, weights, 1)
		dw, db := weightGradient(in[0], d), columnSums(d)
		gradients := []*graph.Node{dx, a.byKind(dw)}
		db = a.byKind(graph.Reshape(db, 1, -1))
		for i := range 3 {
			b := graph.Slice(db, graph.AxisElem(0), graph.AxisRange(i*all, (i+1)*all))
			gradients = append(gradients, graph.Reshape(b, all))
		}
		return gradients
	})
}

// split returns the parts of x, of shape (heads·rows, positions, width), that belong to each head, as matrices.
func (a attentionShape) split(x *graph.Node) []*graph.Node {
	tokens := a.rows * a.positions
	x = graph.Reshape(x, a.heads*tokens, a.width)
	parts := make([]*graph.Node, a.heads)
	for h := range parts {
		parts[h] = graph.Slice(x, graph.AxisRange(h*tokens, (h+1)*tokens), graph.AxisRange())
	}
	return parts
}

// byKind brings columns in the order head, kind (query, key, value) into the order kind, head.
func (a attentionShape) byKind(x *graph.Node) *graph.Node {
	var parts []*graph.Node
	for i := range 3 {
		for h := range a.heads {
			at := (3*h + i) * a.width
			parts = append(parts, graph.Slice(x, graph.AxisRange(), graph.AxisRange(at, at+a.width)))
		}
	}
	return graph.Concatenate(parts, 1)
}

// batchDot contracts the last axis of a with an axis of b, for each index of the first axis of both.
func batchDot(a, b *graph.Node, axis int) *graph.Node {
	return graph.DotGeneral(a, []int{2}, []int{0}, b, []int{axis}, []int{0})
}

// contractRows is aᵀ·b for each index of the first axis. It transposes either a, or b and the result, whichever
// moves fewer elements: see weightGradient.
func contractRows(a, b *graph.Node) *graph.Node {
	turn := func(x *graph.Node) *graph.Node { return graph.TransposeAllAxes(x, 0, 2, 1) }
	rows, m, n := a.Shape().Dim(1), a.Shape().Dim(2), b.Shape().Dim(2)
	if rows*m <= rows*n+m*n {
		return batchDot(turn(a), b, 1)
	}
	return turn(batchDot(turn(b), a, 1))
}

// rowSums returns the sums of the rows of a matrix, of shape (rows, 1).
func rowSums(x *graph.Node) *graph.Node {
	return dot(x, 1, graph.Ones(x.Graph(), shapes.Make(x.DType(), x.Shape().Dim(1), 1)), 0)
}
