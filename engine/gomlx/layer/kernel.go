package layer

import (
	"fmt"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"

	"github.com/lockstep-ml/lockstep/engine/gomlx/internal/fused"
	"github.com/lockstep-ml/lockstep/engine/gomlx/internal/stages"
)

// kernels reports whether loops of package fused can replace operations on x: in a graph of the Go engine, for
// float32 and float64.
func kernels(x *graph.Node) bool { return fast(x) && stages.Records(x) }

// body is what a kernel does with its outputs and inputs.
type body[T fused.Float] func(out, in [][]T)

// kernel adds a kernel for the dtype of its inputs. attributes determine its results besides the inputs.
func kernel(name string, attributes []any, f32 body[float32], f64 body[float64], results []shapes.Shape,
	in ...*graph.Node,
) []*graph.Node {
	k := stages.Kernel{Name: fmt.Sprint(name, attributes), Run: f32.run}
	if in[0].DType() == dtypes.Float64 {
		k.Run = f64.run
	}
	return stages.Host(k, results, in...)
}

func (f body[T]) run(out, in []any) { f(typed[T](out), typed[T](in)) }

func typed[T any](list []any) [][]T {
	slices := make([][]T, len(list))
	for i, x := range list {
		slices[i] = x.([]T)
	}
	return slices
}

// leastKernel is the number of elements from which a kernel for a transpose or for sums of columns is worth the end
// of a stage, about 50 µs.
const leastKernel = 1 << 16

// transpose exchanges the last two axes of x.
func transpose(x *graph.Node) *graph.Node {
	last := x.Rank() - 1
	permutation := []int{0, 1, 2}[:x.Rank()]
	permutation[last-1], permutation[last] = last, last-1
	if x.Shape().Size() < leastKernel || !kernels(x) {
		return graph.TransposeAllAxes(x, permutation...)
	}
	rows, columns := x.Shape().Dim(last-1), x.Shape().Dim(last)
	dims := append([]int{}, x.Shape().Dimensions...)
	dims[last-1], dims[last] = columns, rows
	return kernel("transpose", nil, transposed[float32](rows, columns), transposed[float64](rows, columns),
		[]shapes.Shape{shapes.Make(x.DType(), dims...)}, x)[0]
}

func transposed[T fused.Float](rows, columns int) body[T] {
	return func(out, in [][]T) { fused.Transpose(out[0], in[0], rows, columns) }
}

// columnSums sums the rows of v, of shape (rows, columns).
func columnSums(v *graph.Node) *graph.Node {
	if v.Shape().Size() >= leastKernel && kernels(v) {
		return kernel("column sums", nil, sumColumns[float32], sumColumns[float64],
			[]shapes.Shape{shapes.Make(v.DType(), v.Shape().Dim(1))}, v)[0]
	}
	ones := graph.Ones(v.Graph(), shapes.Make(v.DType(), 1, v.Shape().Dim(0))) // a matrix product is fast
	return graph.Reshape(dot(ones, 1, v, 0), v.Shape().Dim(1))
}

func sumColumns[T fused.Float](out, in [][]T) { fused.ColumnSums(out[0], in[0]) }
