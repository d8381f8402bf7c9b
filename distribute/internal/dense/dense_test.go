package dense

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute/internal/kinds"
	"github.com/lockstep-ml/lockstep/tensor"
)

// counting returns a tensor of the numbers from first on.
func counting(first int64, shape ...int) *tensor.Tensor {
	t := tensor.New(tensor.Int64, shape...)
	for i := range t.Len() {
		tensor.Data[int64](t)[i] = first + int64(i)
	}
	return t
}

// Columns returns the parts of a concatenation, for every axis.
func TestColumnsOfAConcatenation(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		shape := make([]int, 1+rng.IntN(4))
		for i := range shape {
			shape[i] = 1 + rng.IntN(3)
		}
		axis := rng.IntN(len(shape))
		parts := make([]*tensor.Tensor, 1+rng.IntN(4))
		for i := range parts {
			of := slices.Clone(shape)
			of[axis] = rng.IntN(4)
			parts[i] = counting(int64(100*i), of...)
		}
		all, err := Concat(parts, axis-len(shape)*rng.IntN(2)) // from the front or from the end
		if err != nil {
			t.Fatal(err)
		}
		from := 0
		for i, want := range parts {
			n := want.Shape()[axis]
			if got := Columns(all, axis, from, n); !got.Equal(want) {
				t.Errorf("part %d of %v along axis %d: got %v, want %v", i, all, axis, got, want)
			}
			from += n
		}
	}
}

func TestConcatErrors(t *testing.T) {
	for _, c := range []struct {
		name  string
		parts []*tensor.Tensor
		axis  int
		kind  error
	}{
		{"dtypes", []*tensor.Tensor{counting(0, 2), tensor.New(tensor.Float32, 2)}, 0, kinds.Mismatch},
		{"ranks", []*tensor.Tensor{counting(0, 2), counting(0, 2, 1)}, 0, kinds.Mismatch},
		{"another dimension", []*tensor.Tensor{counting(0, 2, 3), counting(0, 2, 2)}, 0, kinds.Mismatch},
		{"scalars", []*tensor.Tensor{counting(0), counting(0)}, 0, kinds.Invalid},
		{"axis", []*tensor.Tensor{counting(0, 2), counting(0, 2)}, 1, kinds.Invalid},
	} {
		if _, err := Concat(c.parts, c.axis); !errors.Is(err, c.kind) {
			t.Errorf("%s: got %v, want %v", c.name, err, c.kind)
		}
	}
}

// SumAxes equals sums by nested loops.
func TestSumAxes(t *testing.T) {
	x := counting(1, 2, 3, 4)
	for _, axes := range [][]int{{}, {0}, {1}, {-1}, {0, 2}, {2, 1, 0}} {
		got, count, err := SumAxes(x, axes)
		if err != nil {
			t.Fatal(err)
		}
		reduced := func(d int) bool { return slices.Contains(axes, d) || slices.Contains(axes, d-3) }
		want, elements := map[string]int64{}, 0
		for i := range 2 {
			for j := range 3 {
				for k := range 4 {
					at := []int{i, j, k}
					for d := range at {
						if reduced(d) {
							at[d] = 0
						}
					}
					want[fmt.Sprint(at)] += tensor.Data[int64](x)[12*i+4*j+k]
					if fmt.Sprint(at) == "[0 0 0]" {
						elements++
					}
				}
			}
		}
		sums := slices.Sorted(slices.Values(tensor.Data[int64](got)))
		if w := slices.Sorted(maps.Values(want)); !slices.Equal(sums, w) || count != elements {
			t.Errorf("axes %v: got %v of %d elements, want %v of %d", axes, sums, count, w, elements)
		}
	}
	for _, axes := range [][]int{{3}, {-4}, {0, 0}, {0, -3}} {
		if _, _, err := SumAxes(x, axes); !errors.Is(err, kinds.Invalid) {
			t.Errorf("axes %v: got %v, want an invalid argument", axes, err)
		}
	}
}

// A quotient has the dtype of a true division; the mean of no floats is NaN.
func TestDivide(t *testing.T) {
	for _, c := range []struct {
		of   *tensor.Tensor
		by   int
		want *tensor.Tensor
	}{
		{tensor.From([]int32{3}), 2, tensor.From([]float64{1.5})},
		{tensor.From([]int64{-3}), 2, tensor.From([]float64{-1.5})},
		{tensor.From([]int8{3}), 2, tensor.From([]float32{1.5})},
		{tensor.From([]float32{3}), 2, tensor.From([]float32{1.5})},
		{tensor.From([]float64{3}), 4, tensor.From([]float64{0.75})},
	} {
		if got := Divide(c.of, c.by); !got.Equal(c.want) {
			t.Errorf("%v / %d: got %v, want %v", c.of, c.by, got, c.want)
		}
	}
	if got := Divide(tensor.From([]float32{0}), 0).Float64s()[0]; !math.IsNaN(got) {
		t.Errorf("0 / 0: got %v, want NaN", got)
	}
}

// The tree of three leaves adds the first two before the third, and a mean divides once.
func TestReduce(t *testing.T) {
	terms := []*tensor.Tensor{
		tensor.From([]float32{1e8}), tensor.From([]float32{1}), tensor.From([]float32{-1e8}),
	}
	if got := tensor.Data[float32](Reduce(collective.Sum, terms, collective.AccumulateDType))[0]; got != 0 {
		t.Errorf("got %v, want (1e8 + 1) - 1e8 in float32, which is 0", got)
	}
	ints := []*tensor.Tensor{tensor.From([]int32{1}), tensor.From([]int32{2})}
	if got := Reduce(collective.Mean, ints, collective.AccumulateDType); !got.Equal(tensor.From([]float64{1.5})) {
		t.Errorf("the mean of 1 and 2 is %v, want 1.5", got)
	}
}

// Rows with the same index are applied in order; the operand is unchanged.
func TestScatter(t *testing.T) {
	old := tensor.From([]float32{1, 2, 3, 4}, 2, 2)
	rows := &tensor.IndexedSlices{
		Values: tensor.From([]float32{10, 20, 2, 4}, 2, 2), Indices: tensor.From([]int64{1, 1}),
	}
	for op, want := range map[ScatterOp][]float32{
		ScatterAdd: {1, 2, 15, 28}, ScatterSub: {1, 2, -9, -20}, ScatterMul: {1, 2, 60, 320},
		ScatterMin: {1, 2, 2, 4}, ScatterMax: {1, 2, 10, 20}, ScatterUpdate: {1, 2, 2, 4},
	} {
		if got := Scatter(op, old, rows); !got.Equal(tensor.From(want, 2, 2)) {
			t.Errorf("%v: got %v, want %v", op, got, want)
		}
	}
	if !old.Equal(tensor.From([]float32{1, 2, 3, 4}, 2, 2)) {
		t.Errorf("the operand has changed to %v", old)
	}
}

// TestNegateAndConvert checks every numeric dtype, and that the elements are read once.
func TestNegateAndConvert(t *testing.T) {
	const n = 60 // bfloat16 represents these values exactly
	xs := make([]float64, n)
	for i := range xs {
		xs[i] = float64(i) + 0.75
	}
	for _, d := range tensor.DTypes {
		if !d.IsNumeric() {
			continue
		}
		converted := Convert(tensor.Of(xs, n), d)
		negated := Negate(converted)
		for i, x := range xs {
			want := x
			if d.IsInteger() {
				want = float64(i)
			}
			if got := converted.Float64s()[i]; got != want {
				t.Errorf("%v: %v converted is %v, want %v", d, x, got, want)
			}
			if back := Negate(negated).Float64s()[i]; back != want {
				t.Errorf("%v: %v negated twice is %v", d, want, back)
			}
		}
		if signed := d.IsFloat() || d <= tensor.Int64; signed && negated.Float64s()[2] >= 0 {
			t.Errorf("%v: the negated value is %v", d, negated.Float64s()[2])
		}
		if allocations := testing.AllocsPerRun(10, func() { Negate(converted) }); allocations > 10 {
			t.Errorf("%v: Negate of %d elements makes %v allocations, want at most 10", d, n, allocations)
		}
	}
}
