package distribute_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"testing"

	"pgregory.net/rapid"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/distribute/internal/sparse"
	"github.com/lockstep-ml/lockstep/tensor"
)

// drawSlices draws IndexedSlices of a table of some rows, for each of n replicas.
func drawSlices(rt *rapid.T, n int) []*tensor.IndexedSlices {
	dtype := rapid.SampledFrom([]tensor.DType{tensor.Float32, tensor.BFloat16, tensor.Float64, tensor.Int64}).Draw(rt,
		"dtype")
	table := rapid.IntRange(1, 9).Draw(rt, "table")
	width := rapid.IntRange(0, 3).Draw(rt, "width")
	out := make([]*tensor.IndexedSlices, n)
	for i := range out {
		rows := rapid.IntRange(0, 12).Draw(rt, "rows")
		s := &tensor.IndexedSlices{
			Values: tensor.New(dtype, rows, width), Indices: tensor.New(tensor.Int64, rows),
			DenseShape: tensor.From([]int64{int64(table), int64(width)}),
		}
		for j := range rows * width {
			x := rapid.Float64Range(-9, 9).Draw(rt, "x")
			if math.Abs(x) < 1e-30 {
				x = 0 // the mean of the smallest numbers is -0, which is 0 once it is added to a dense tensor
			}
			setNumber(s.Values, j, x)
		}
		for j := range rows {
			tensor.Data[int64](s.Indices)[j] = int64(rapid.IntRange(0, table-1).Draw(rt, "index"))
		}
		if rapid.Bool().Draw(rt, "int32") {
			narrow := tensor.New(tensor.Int32, rows)
			for j, x := range tensor.Data[int64](s.Indices) {
				tensor.Data[int32](narrow)[j] = int32(x)
			}
			s.Indices = narrow
		}
		out[i] = s
	}
	return out
}

// densified returns the dense tensor of a reduced value.
func densified(v distribute.Value) (*tensor.Tensor, error) {
	if s, ok := v.(*tensor.IndexedSlices); ok {
		return sparse.Densify(s)
	}
	return v.(*tensor.Tensor), nil
}

// TestSparseWays: gathered, reduced, dense or chosen, by collectives or by one device, slices give the bits of
// the reduction of their dense tensors, on every replica.
func TestSparseWays(t *testing.T) {
	strategies := map[int][]*distribute.Strategy{}
	for n := 2; n <= 4; n++ {
		strategies[n] = []*distribute.Strategy{
			mirrored(t, n),
			mirrored(t, n, onOneDevice),
		}
	}
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(2, 4).Draw(rt, "replicas")
		slices := drawSlices(rt, n)
		op := rapid.SampledFrom([]distribute.ReduceOp{distribute.Sum, distribute.Mean}).Draw(rt, "op")
		var dense []distribute.Value
		for _, s := range slices {
			d, err := sparse.Densify(s)
			if err != nil {
				rt.Fatal(err)
			}
			dense = append(dense, d)
		}
		want, err := reduceWith(context.Background(), distribute.NewReductionToOneDevice("", nil), op,
			distribute.NewComponents(dense...), "CPU:0")
		if err != nil {
			rt.Fatal(err)
		}
		for _, s := range strategies[n] {
			for _, way := range []distribute.Sparse{
				distribute.SparseAuto, distribute.SparseGather, distribute.SparseReduce,
				distribute.SparseDense,
			} {
				all, err := distribute.Run(context.Background(), s,
					func(ctx context.Context, r *distribute.Replica, x *tensor.IndexedSlices) (distribute.Value, error) {
						return distribute.AllReduce[distribute.Value](ctx, r, op, x, distribute.Options{Sparse: way})
					}, slices)
				if err != nil {
					rt.Fatalf("%v by %v: %v", way, s.CrossDeviceOps(), err)
				}
				for i, v := range all {
					got, err := densified(v)
					if err != nil {
						rt.Fatal(err)
					}
					if !got.OnDevice(0).Equal(want.(*tensor.Tensor)) {
						rt.Fatalf("%v by %v, replica %d: %v stands for %v, want %v", way, s.CrossDeviceOps(), i, v, got, want)
					}
					_, isSparse := v.(*tensor.IndexedSlices)
					if isSparse && way == distribute.SparseDense || !isSparse &&
						(way == distribute.SparseGather || way == distribute.SparseReduce) {
						rt.Fatalf("%v gave a %T", way, v)
					}
				}
			}
		}
	})
}

// TestSparseKeep: by default every replica gets all rows, in the order of the replicas, with every implementation.
func TestSparseKeep(t *testing.T) {
	one := mirrored(t, 3)
	other := mirrored(t, 3,
		onOneDevice)
	rapid.Check(t, func(rt *rapid.T) {
		slices := drawSlices(rt, 3)
		op := rapid.SampledFrom([]distribute.ReduceOp{distribute.Sum, distribute.Mean}).Draw(rt, "op")
		var answers []string
		for _, s := range []*distribute.Strategy{one, other} {
			all, err := distribute.Run(context.Background(), s,
				func(ctx context.Context, r *distribute.Replica, x *tensor.IndexedSlices) (distribute.Value, error) {
					return distribute.AllReduce(ctx, r, op, x)
				}, slices)
			if err != nil {
				rt.Fatal(err)
			}
			for _, v := range all {
				answers = append(answers, fmt.Sprint(v))
			}
		}
		rows := 0
		for _, s := range slices {
			rows += s.Indices.Len()
		}
		for i, a := range answers {
			if a != answers[0] {
				rt.Fatalf("answer %d is %s, the first %s", i, a, answers[0])
			}
		}
	})
}

// TestSparseChoice: few rows of a large table are gathered, equal rows of all replicas are summed, and most rows of
// a table become a tensor.
func TestSparseChoice(t *testing.T) {
	const table, width = 1000, 16
	s := mirrored(t, 4)
	reduce := func(index func(replica, row int) int64, rows int) distribute.Value {
		all, err := distribute.Run(t.Context(), s,
			func(ctx context.Context, r *distribute.Replica, _ int) (distribute.Value, error) {
				x := &tensor.IndexedSlices{
					Values: tensor.New(tensor.Float32, rows, width), Indices: tensor.New(tensor.Int64, rows),
					DenseShape: tensor.From([]int64{table, width}),
				}
				for i := range rows {
					tensor.Data[int64](x.Indices)[i] = index(r.ID(), i)
				}
				return distribute.AllReduce[distribute.Value](ctx, r, distribute.Sum, x,
					distribute.Options{Sparse: distribute.SparseAuto})
			}, nil)
		if err != nil {
			t.Fatal(err)
		}
		return all[0]
	}
	apart := reduce(func(replica, row int) int64 { return int64(replica*10 + row) }, 10)
	if v, ok := apart.(*tensor.IndexedSlices); !ok || v.Indices.Len() != 40 {
		t.Errorf("40 different rows of 1000: got %v", apart)
	}
	same := reduce(func(_, row int) int64 { return int64(100 - row) }, 10)
	if v, ok := same.(*tensor.IndexedSlices); !ok || v.Indices.Len() != 10 || tensor.Data[int64](v.Indices)[0] != 91 {
		t.Errorf("the same 10 rows on all replicas: got %v", same)
	}
	if most := reduce(func(_, row int) int64 { return int64(row) }, table); !isTensor(most) {
		t.Errorf("all rows on all replicas: got %v", most)
	}
}

func isTensor(v distribute.Value) bool {
	_, ok := v.(*tensor.Tensor)
	return ok
}

func TestSparseErrors(t *testing.T) {
	s := mirrored(t, 2, func(cfg *distribute.MirroredConfig) { cfg.Logger = quiet })
	f32 := func(shape ...int) *tensor.Tensor { return tensor.New(tensor.Float32, shape...) }
	ok := &tensor.IndexedSlices{
		Values: f32(1, 2), Indices: tensor.From([]int64{0}),
		DenseShape: tensor.From([]int64{3, 2}),
	}
	for _, c := range []struct {
		name    string
		x       *tensor.IndexedSlices
		way     distribute.Sparse
		kind    error
		message string
	}{
		{
			"other dtype", &tensor.IndexedSlices{Values: tensor.New(tensor.Float64, 1, 2), Indices: tensor.From([]int64{0})}, 0,
			distribute.ErrMismatch, "expected to be a float32 tensor",
		},
		{
			"other rows", &tensor.IndexedSlices{Values: f32(1, 3), Indices: tensor.From([]int64{0})}, 0, distribute.ErrMismatch,
			"must have the same size and shape",
		},
		{"no indices", &tensor.IndexedSlices{Values: f32(1, 2)}, 0, distribute.ErrInvalid, "no values or no indices"},
		{
			"indices of floats", &tensor.IndexedSlices{Values: f32(1, 2), Indices: f32(1)}, 0, distribute.ErrInvalid,
			"want a vector of int32 or int64",
		},
		{
			"too many indices", &tensor.IndexedSlices{Values: f32(1, 2), Indices: tensor.From([]int64{0, 1})}, 0,
			distribute.ErrInvalid, "1 rows with 2 indices",
		},
		{
			"no rows", &tensor.IndexedSlices{Values: f32(), Indices: tensor.From([]int64{})}, 0, distribute.ErrInvalid,
			"values of IndexedSlices are a scalar",
		},
		{
			"a dense shape of another rank",
			&tensor.IndexedSlices{
				Values: f32(1, 2), Indices: tensor.From([]int64{0}),
				DenseShape: tensor.From([]int64{3}),
			}, 0, distribute.ErrInvalid, "want 2 dimensions",
		},
		{
			"an index outside, dense", &tensor.IndexedSlices{Values: f32(1, 2), Indices: tensor.From([]int64{3})},
			distribute.SparseDense, distribute.ErrInvalid, "outside of the 3 rows",
		},
	} {
		err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
			x := ok
			if r.ID() == 1 {
				x = c.x
			}
			_, err := distribute.AllReduce(ctx, r, distribute.Sum, x, distribute.Options{Sparse: c.way})
			return err
		})
		if !errors.Is(err, c.kind) || !containsAll(err.Error(), c.message) {
			t.Errorf("%s: got %v, want %v with %q", c.name, err, c.kind, c.message)
		}
	}
	if err := (distribute.Options{Sparse: 99}).Validate(); !errors.Is(err, distribute.ErrInvalid) {
		t.Errorf("no way: got %v", err)
	}
}
