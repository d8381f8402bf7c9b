package layer

import (
	"fmt"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
)

// Dropout sets each element of x to 0 with probability rate, and divides the others by 1-rate, in training. Otherwise
// it returns x. It is layers.DropoutStatic, in fewer operations. It panics unless rate is at least 0 and below 1.
func Dropout(s *model.Scope, x *graph.Node, rate float64) *graph.Node {
	if mask := dropoutMask(s, x, x.Shape(), rate); mask != nil {
		return graph.Mul(x, mask)
	}
	return x
}

// dropoutMask returns the factors of dropout for a value of a shape in the graph of x, or nil if there is none.
func dropoutMask(s *model.Scope, x *graph.Node, shape shapes.Shape, rate float64) *graph.Node {
	if !(rate >= 0 && rate < 1) {
		panic(fmt.Errorf("dropout with rate %v: want at least 0, and below 1", rate))
	}
	g := x.Graph()
	if rate == 0 || !s.IsTraining(g) {
		return nil
	}
	uniform := s.RandomUniform(g, shapes.Make(dtypes.Float32, shape.Dimensions...))
	kept := graph.ConvertDType(graph.GreaterOrEqual(uniform, graph.Scalar(g, dtypes.Float32, rate)), shape.DType)
	return graph.StopGradient(graph.MulScalar(kept, 1/(1-rate)))
}
