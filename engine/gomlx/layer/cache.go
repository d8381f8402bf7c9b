package layer

import (
	"fmt"
	"math"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"

	"github.com/lockstep-ml/lockstep/engine/gomlx"
)

// Cache holds the keys and values of earlier positions, for [CachedAttention].
type Cache struct {
	Keys, Values *graph.Node // shape (rows, heads, positions, head width)
	Length       *graph.Node // int32, shape (rows): how many of the positions count; the others are ignored
}

// CachedAttention is causal attention of n new positions to themselves and to those of the cache, for inference. The
// queries have shape (rows, query heads, n, head width), keys and values (rows, heads, n, head width); each
// head of keys and values serves as many consecutive query heads. Scores are divided by the root of a head's
// width. The result has the shape of the queries. What it computes for a position is what causal attention over
// all positions computes, but for rounding.
func CachedAttention(q, k, v *graph.Node, c Cache) *graph.Node {
	dims, g := q.Shape().Dimensions, q.Graph()
	rows, heads, n, width := dims[0], k.Shape().Dim(1), dims[2], dims[3]
	capacity := c.Keys.Shape().Dim(2)
	if dims[1]%heads != 0 || c.Keys.Shape().Dim(1) != heads || c.Keys.Shape().Dim(3) != width {
		panic(fmt.Errorf("attention with queries of shape %s, keys of %s and cached keys of %s: want heads that divide "+
			"those of the queries, and one width", q.Shape(), k.Shape(), c.Keys.Shape()))
	}
	shared := dims[1] / heads
	batch := []int{0, 1}
	q = graph.Reshape(q, rows, heads, shared*n, width)
	scores := func(keys *graph.Node, positions int, visible *graph.Node) *graph.Node {
		s := graph.DotGeneral(q, []int{3}, batch, graph.ConvertDType(keys, q.DType()), []int{3}, batch)
		s = graph.MulScalar(gomlx.AtLeastFloat32(s), 1/math.Sqrt(float64(width)))
		s = graph.Reshape(s, rows, heads, shared, n, positions)
		low := graph.Where(visible, graph.ScalarZero(g, s.DType()), graph.Scalar(g, s.DType(), -1e9))
		return graph.Add(s, low)
	}
	number := graph.Iota(g, shapes.Make(dtypes.Int32, rows, 1, 1, 1, capacity), 4)
	earlier := graph.LessThan(number, graph.BroadcastToShape(graph.Reshape(c.Length, rows, 1, 1, 1, 1), number.Shape()))
	all := graph.Concatenate([]*graph.Node{
		scores(c.Keys, capacity, earlier),
		scores(k, n, graph.ExpandLeftToRank(graph.LowerTriangular(g, n), 5)),
	}, 4)
	p := graph.ConvertDType(graph.Softmax(all, -1), q.DType())
	p = graph.Reshape(p, rows, heads, shared*n, capacity+n)
	weigh := func(from, to int, values *graph.Node) *graph.Node {
		part := graph.Slice(p, graph.AxisRange(), graph.AxisRange(), graph.AxisRange(), graph.AxisRange(from, to))
		return graph.DotGeneral(part, []int{3}, batch, graph.ConvertDType(values, q.DType()), []int{2}, batch)
	}
	y := graph.Add(weigh(0, capacity, c.Values), weigh(capacity, capacity+n, v))
	return graph.Reshape(y, dims...)
}

// CachedSelfAttention is causal [SelfAttention] of n new positions, of shape (rows, n, width), to themselves and to
// those of a cache, with the same variables, for inference. It also returns the keys and values of the new positions,
// of shape (rows, heads, n, head width).
func CachedSelfAttention(s *model.Scope, x *graph.Node, heads int, c Cache) (y, keys, values *graph.Node) {
	s = s.In("MultiHeadAttention")
	dims := x.Shape().Dimensions
	in := attentionInputs(s, x)
	a := attentionShape{rows: dims[0], positions: dims[1], heads: heads, width: dims[2] / heads}
	parts := a.project(in)
	y = CachedAttention(parts[0], parts[1], parts[2], c)
	y = graph.Reshape(graph.TransposeAllAxes(y, 0, 2, 1, 3), dims[0]*dims[1], dims[2])
	return graph.Reshape(Dense(s.In("output"), y, dims[2]), dims...), parts[1], parts[2]
}
