package sparse

import (
	"errors"
	"slices"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute/internal/kinds"
	"github.com/lockstep-ml/lockstep/tensor"
)

func slicesOf(indices []int32, values ...float32) *tensor.IndexedSlices {
	return &tensor.IndexedSlices{
		Values: tensor.From(values, len(indices), len(values)/max(len(indices), 1)), Indices: tensor.From(indices),
		DenseShape: tensor.From([]int64{4, 2}),
	}
}

// Rows with one index add up, whether they are converted at once or by their union.
func TestDensify(t *testing.T) {
	s := slicesOf([]int32{3, 0, 3}, 1, 2, 3, 4, 5, 6)
	want := tensor.From([]float32{3, 4, 0, 0, 0, 0, 6, 8}, 4, 2)
	got, err := Densify(s)
	if err != nil || !got.Equal(want) {
		t.Errorf("got %v, %v, want %v", got, err, want)
	}
	union := Union(s.Indices)
	if !slices.Equal(union, []int64{0, 3}) {
		t.Errorf("the union of the indices is %v", union)
	}
	combined := &tensor.IndexedSlices{
		Values: Block(s, union), Indices: Indices(union, tensor.Int32), DenseShape: s.DenseShape,
	}
	if got, err := Densify(combined); err != nil || !got.Equal(want) {
		t.Errorf("by the union: got %v, %v, want %v", got, err, want)
	}
}

// Indices of different dtypes become int64; rows keep their order.
func TestConcat(t *testing.T) {
	wide := slicesOf([]int32{2}, 5, 6)
	wide.Indices = tensor.From([]int64{2})
	all, err := Concat([]any{slicesOf([]int32{1, 0}, 1, 2, 3, 4), wide})
	if err != nil || !all.Indices.Equal(tensor.From([]int64{1, 0, 2})) ||
		!all.Values.Equal(tensor.From([]float32{1, 2, 3, 4, 5, 6}, 3, 2)) {
		t.Errorf("got %v, %v", all, err)
	}
	_, err = Concat([]any{slicesOf([]int32{1}, 1, 2), slicesOf([]int32{1}, 1, 2, 3)})
	if !errors.Is(err, kinds.Mismatch) {
		t.Errorf("rows of different lengths: got %v, want a mismatch", err)
	}
}

func TestInvalidSlices(t *testing.T) {
	noShape := slicesOf([]int32{1}, 1, 2)
	noShape.DenseShape = nil
	for name, s := range map[string]*tensor.IndexedSlices{
		"no dense shape":               noShape,
		"an index behind the last row": slicesOf([]int32{4}, 1, 2),
		"a negative index":             slicesOf([]int32{-1}, 1, 2),
		"more indices than rows":       {Values: tensor.New(tensor.Float32, 1, 2), Indices: tensor.From([]int32{0, 1})},
		"rows of another length":       slicesOf([]int32{1}, 1, 2, 3),
		"values without a sum": {
			Values: tensor.New(tensor.Bool, 1, 2), Indices: tensor.From([]int32{0}), DenseShape: tensor.From([]int64{4, 2}),
		},
	} {
		if _, err := Densify(s); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
