package distribute_test

import (
	"context"
	"fmt"
	"math"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestGradients compares the gradients of collectives with finite differences of a loss. Each replica's loss is
// the sum of c·sin(y) over its result y. The numbers c, and so the gradients, differ between replicas.
func TestGradients(t *testing.T) {
	for _, dtype := range []tensor.DType{tensor.Float32, tensor.Float64} {
		step, tolerance := 1e-5, 1e-8
		if dtype == tensor.Float32 {
			step, tolerance = 1e-2, 1e-3
		}
		for name, c := range gradientCases {
			for _, n := range []int{1, 2, 3} {
				t.Run(fmt.Sprintf("%s/%v/%d", name, dtype, n), func(t *testing.T) {
					g := &gradientCheck{t, mirrored(t, n), dtype, c}
					g.check(step, tolerance)
				})
			}
		}
	}
}

// gradientCase is a collective with its gradient.
type gradientCase struct {
	make     func(dtype tensor.DType, replica int) distribute.Value
	forward  func(ctx context.Context, r *distribute.Replica, x distribute.Value) (distribute.Value, error)
	backward func(ctx context.Context, r *distribute.Replica, x, dy distribute.Value) (distribute.Value, error)
}

var gradientCases = map[string]gradientCase{
	"sum": reduceCase(distribute.Sum, denseNest), "mean": reduceCase(distribute.Mean, denseNest),
	"sum of slices": reduceCase(distribute.Sum, someSlices), "mean of slices": reduceCase(distribute.Mean, someSlices),
	"sum of slices and tensors": reduceCase(distribute.Sum,
		mixedLeaf), "mean of slices and tensors": reduceCase(distribute.Mean, mixedLeaf),
	"gather": gatherCase(0), "gather along the last axis": gatherCase(-1),
}

func reduceCase(op distribute.ReduceOp, value func(tensor.DType, int) distribute.Value) gradientCase {
	return gradientCase{
		value,
		func(ctx context.Context, r *distribute.Replica, x distribute.Value) (distribute.Value, error) {
			return distribute.AllReduce(ctx, r, op, x)
		},
		func(ctx context.Context, r *distribute.Replica, x, dy distribute.Value) (distribute.Value, error) {
			return distribute.AllReduceGradient(ctx, r, op, x, dy)
		},
	}
}

func gatherCase(axis int) gradientCase {
	return gradientCase{
		func(d tensor.DType, replica int) distribute.Value {
			rows, columns := 2, replica+1
			if axis == 0 {
				rows, columns = replica+1, 2
			}
			return []any{numbered(d, replica, rows, columns), map[string]any{"b": numbered(d, 7+replica, rows, columns)}}
		},
		func(ctx context.Context, r *distribute.Replica, x distribute.Value) (distribute.Value, error) {
			return distribute.AllGather(ctx, r, x, axis)
		},
		func(ctx context.Context, r *distribute.Replica, x, dy distribute.Value) (distribute.Value, error) {
			return distribute.AllGatherGradient(ctx, r, x, dy, axis)
		},
	}
}

// numbered returns a tensor of different small numbers.
func numbered(d tensor.DType, start int, shape ...int) *tensor.Tensor {
	t := tensor.New(d, shape...)
	for i := range t.Len() {
		setNumber(t, i, math.Sin(float64(start*31+i*7))/2)
	}
	return t
}

func denseNest(d tensor.DType, replica int) distribute.Value {
	return []any{numbered(d, replica, 2, 3), map[string]any{"w": numbered(d, 9+replica)}}
}

func someSlices(d tensor.DType, replica int) distribute.Value {
	rows := replica + 1 // with equal indices
	indices := tensor.New(tensor.Int64, rows)
	for i := range rows {
		tensor.Data[int64](indices)[i] = int64(i*replica) % 3
	}
	return []any{&tensor.IndexedSlices{
		Values: numbered(d, replica, rows, 2), Indices: indices,
		DenseShape: tensor.From([]int64{3, 2}),
	}, numbered(d, 5, 2)}
}

// mixedLeaf is IndexedSlices on replica 1 and a tensor on the others.
func mixedLeaf(d tensor.DType, replica int) distribute.Value {
	if replica == 1 {
		return someSlices(d, replica).([]any)[0]
	}
	return numbered(d, replica, 3, 2)
}

type gradientCheck struct {
	*testing.T
	s     *distribute.Strategy
	dtype tensor.DType
	gradientCase
}

// numbersOf returns the tensors of a nest; for IndexedSlices, their values.
func numbersOf(v distribute.Value) []*tensor.Tensor {
	var out []*tensor.Tensor
	for _, leaf := range tensor.Flatten(v) {
		if s, ok := leaf.(*tensor.IndexedSlices); ok {
			leaf = s.Values
		}
		out = append(out, leaf.(*tensor.Tensor))
	}
	return out
}

// weight is the weight of an element of a replica's result in its loss.
func weight(replica, leaf, i int) float64 { return math.Cos(float64(replica*17 + leaf*5 + i)) }

// loss runs the collective and returns the sum of all replicas' losses, computed in float64.
func (g *gradientCheck) loss(xs []distribute.Value) float64 {
	losses, err := distribute.Run(g.Context(), g.s,
		func(ctx context.Context, r *distribute.Replica, x distribute.Value) (float64, error) {
			y, err := g.forward(ctx, r, x)
			if err != nil {
				return 0, err
			}
			sum := 0.0
			for k, t := range numbersOf(y) {
				for i, v := range t.Float64s() {
					sum += weight(r.ID(), k, i) * math.Sin(v)
				}
			}
			return sum, nil
		}, xs)
	if err != nil {
		g.Fatal(err)
	}
	total := 0.0
	for _, l := range losses {
		total += l
	}
	return total
}

// gradients returns the library's gradients.
func (g *gradientCheck) gradients(xs []distribute.Value) []distribute.Value {
	out, err := distribute.Run(g.Context(), g.s,
		func(ctx context.Context, r *distribute.Replica, x distribute.Value) (distribute.Value, error) {
			y, err := g.forward(ctx, r, x)
			if err != nil {
				return nil, err
			}
			var dys []any
			for k, t := range numbersOf(y) {
				dy := tensor.New(t.DType(), t.Shape()...)
				for i, v := range t.Float64s() {
					setNumber(dy, i, weight(r.ID(), k, i)*math.Cos(v))
				}
				dys = append(dys, dy)
			}
			dy, err := tensor.Pack(x, dys)
			if err != nil {
				return nil, err
			}
			return g.backward(ctx, r, x, dy)
		}, xs)
	if err != nil {
		g.Fatal(err)
	}
	return out
}

func (g *gradientCheck) check(step, tolerance float64) {
	xs := make([]distribute.Value, g.s.NumReplicasInSync())
	for i := range xs {
		xs[i] = g.make(g.dtype, i)
	}
	gradients := g.gradients(xs)
	for r, x := range xs {
		leaves := numbersOf(gradients[r])
		for k, t := range numbersOf(x) {
			if leaves[k].DType() != t.DType() || !leaves[k].SameShape(t) {
				g.Fatalf("the gradient of %v is %v", t, leaves[k])
			}
			for i, v := range t.Float64s() {
				at := func(d float64) float64 {
					setNumber(t, i, v+d)
					defer setNumber(t, i, v)
					return g.loss(xs)
				}
				// Of fourth order: its error is far below the tolerance, and so is that of rounding.
				want := (8*(at(step)-at(-step)) - (at(2*step) - at(-2*step))) / (12 * step)
				if got := leaves[k].Float64s()[i]; math.Abs(got-want) > tolerance*(1+math.Abs(want)) {
					g.Errorf("replica %d, leaf %d, element %d: the gradient is %v, by differences %v", r, k, i, got, want)
				}
			}
		}
	}
}
