package pieces

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"testing"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute/internal/kinds"
	"github.com/lockstep-ml/lockstep/tensor"
)

// batches is a dataset of batches of the given sizes, whose rows are 0, 1, 2, ….
func batches(sizes ...int) data.Dataset {
	return data.FromSeq(len(sizes), func(context.Context) iter.Seq2[any, error] {
		return func(yield func(any, error) bool) {
			next := int32(0)
			for _, n := range sizes {
				t := tensor.New(tensor.Int32, n)
				for i := range n {
					tensor.Data[int32](t)[i] = next
					next++
				}
				if !yield(t, nil) {
					return
				}
			}
		}
	})
}

// counted is a source of one shape that counts what is read.
type counted struct {
	data.Indexed
	read []int
}

func (c *counted) Gather(_ context.Context, indices []int) (any, error) {
	c.read = append(c.read, indices...)
	out := make([]int32, len(indices))
	for i, index := range indices {
		out[i] = int32(index)
	}
	return tensor.Of(out), nil
}

func (c *counted) Len() int { return 7 }

// TestSplitReadsOwnRows checks that only the rows of one worker's parts are read, and one for a part without rows; and
// that whole batches are read if rows may differ in shape.
func TestSplitReadsOwnRows(t *testing.T) {
	own := func(part int) bool { return part > 0 }
	source := &counted{}
	for _, ds := range []data.Dataset{data.Of(source).Batch(5), data.Of(source).Batch(5).Repeat(1).Skip(0)} {
		source.read = nil
		if got := rows(t, Split(ds, 3, own)); got != "[[2 3] [4] [6] []]" {
			t.Errorf("got %s", got)
		}
		if got := fmt.Sprint(source.read); got != "[2 3 4 6 5]" {
			t.Errorf("read %s", got)
		}
	}
	var read []int
	ds := data.FromFunc(7, func(_ context.Context, i int) (any, error) {
		read = append(read, i)
		return tensor.Scalar(int32(i)), nil
	}).Batch(5)
	if got := rows(t, Split(ds, 3, own)); got != "[[2 3] [4] [6] []]" || len(read) != 7 {
		t.Errorf("got %s, read %v", got, read)
	}
}

// rows returns the rows of all pieces, as text.
func rows(t *testing.T, pieces Pieces) string {
	t.Helper()
	var all [][]int32
	for piece, err := range pieces(context.Background()) {
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, tensor.Data[int32](piece.(*tensor.Tensor)))
	}
	return fmt.Sprint(all)
}

func TestSplit(t *testing.T) {
	second := func(part int) bool { return part == 1 }
	for _, c := range []struct {
		name, got, want string
	}{
		{"all parts", rows(t, Split(batches(5, 1), 2, nil)), "[[0 1 2] [3 4] [5] []]"},
		{"one worker's", rows(t, Split(batches(5, 1), 2, second)), "[[3 4] []]"},
		{"more parts than rows", rows(t, Split(batches(2), 3, nil)), "[[0] [1] []]"},
		{"rebatched", rows(t, Rebatch(batches(3, 3), []int{2, 1})), "[[0 1] [2] [3 4] [5]]"},
		{"rebatched, with a smaller last piece", rows(t, Rebatch(batches(4, 1), []int{3})), "[[0 1 2] [3 4]]"},
		{"rebatched, with pieces without rows", rows(t, Rebatch(batches(1), []int{1, 0})), "[[0] []]"},
		{"sizes", fmt.Sprint(Sizes(5, []int{0, 1, 2}), Sizes(5, []int{1, 2, 0})), "[2 2 1] [2 1 2]"},
	} {
		if c.got != c.want {
			t.Errorf("%s: got %s, want %s", c.name, c.got, c.want)
		}
	}
}

// Elements that cannot be split are errors with a kind.
func TestInvalidElements(t *testing.T) {
	for name, element := range map[string]any{
		"a scalar": tensor.Scalar(int32(1)), "no tensor": 1, "nothing": []any{},
		"different numbers of rows": []any{tensor.New(tensor.Int32, 2), tensor.New(tensor.Int32, 3)},
	} {
		ds := data.FromSeq(1, func(context.Context) iter.Seq2[any, error] {
			return func(yield func(any, error) bool) { yield(element, nil) }
		})
		for _, err := range Split(ds, 2, nil)(context.Background()) {
			var e *kinds.Error
			if !errors.As(err, &e) {
				t.Errorf("%s: got %v, want an error with a kind", name, err)
			}
		}
	}
}
