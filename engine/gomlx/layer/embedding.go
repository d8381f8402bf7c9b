package layer

import (
	"fmt"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"

	"github.com/lockstep-ml/lockstep/engine/gomlx"
)

// Embedding replaces every integer of x by a row of a trained table of the given dtype, with a row for each of
// vocabulary numbers. The output has the shape of x and a last axis of width elements. It is layers.Embedding:
// the variable is "embeddings", of shape (vocabulary, width). Its gradient adds the adjoints at the rows that
// were used, in float32 if the table is narrower.
func Embedding(s *model.Scope, x *graph.Node, dtype dtypes.DType, vocabulary, width int) *graph.Node {
	if !x.DType().IsInt() {
		panic(fmt.Errorf("layer.Embedding takes integers, not %s", x.Shape()))
	}
	table := s.VariableWithShape("embeddings", shapes.Make(dtype, vocabulary, width)).NodeValue(x.Graph())
	return graph.ConvertDType(graph.Gather(gomlx.AtLeastFloat32(table), graph.InsertAxes(x, -1)), dtype)
}

// Positions adds a trained vector for each position to x, of shape (rows, positions, width). The variable is
// "positions", of shape (positions, width).
func Positions(s *model.Scope, x *graph.Node) *graph.Node {
	if x.Rank() != 3 {
		panic(fmt.Errorf("layer.Positions takes shape (rows, positions, width), not %s", x.Shape()))
	}
	dims := x.Shape().Dimensions
	table := s.VariableWithShape("positions", shapes.Make(x.DType(), dims[1], dims[2])).NodeValue(x.Graph())
	return graph.Add(x, graph.ExpandLeftToRank(table, 3))
}
