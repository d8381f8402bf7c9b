package data_test

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/tensor"
)

// ragged returns sequences of the given lengths: sequence i has i+1 in each place, and the label 100+i.
func ragged(lengths []int) data.Pipeline {
	return data.FromFunc(len(lengths), func(_ context.Context, i int) (data.Element, error) {
		return data.Batch{
			Inputs: []*tensor.Tensor{tensor.Of(slices.Repeat([]int32{int32(i + 1)}, lengths[i]))},
			Labels: []*tensor.Tensor{tensor.Of(slices.Repeat([]float32{float32(i)}, lengths[i])), tensor.Scalar(int32(100 + i))},
		}, nil
	})
}

// asStream hides the random access of a pipeline.
func asStream(p data.Pipeline) data.Pipeline {
	return p.Through(func(_ context.Context, s iter.Seq2[data.Element, error]) iter.Seq2[data.Element, error] { return s })
}

// TestPaddedBatch checks the contents of padded batches, with and without a length.
func TestPaddedBatch(t *testing.T) {
	p := ragged([]int{1, 3, 2})
	pad := data.Padding{Also: []int{1}, Value: 7, Label: new(-1.0), Mask: true, LabelMask: true}
	want := []string{
		"[[1 7 7] [2 2 2]] [[1 0 0] [1 1 1]] [[0 -1 -1] [1 1 1]] [100 101] [[1 0 0] [1 1 1]]",
		"[[3 3]] [[1 1]] [[2 2]] [102] [[1 1]]",
	}
	for _, ds := range []data.Pipeline{p.PaddedBatch(2, 0, pad), asStream(p).PaddedBatch(2, 0, pad)} {
		if got := plainTexts(t, ds); !slices.Equal(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	want[1] = "[[3 3 7]] [[1 1 0]] [[2 2 -1]] [102] [[1 1 0]]"
	for _, ds := range []data.Pipeline{p.PaddedBatch(2, 3, pad), asStream(p).PaddedBatch(2, 3, pad)} {
		if got := plainTexts(t, ds); !slices.Equal(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	checkPositions(t, p.PaddedBatch(2, 3, pad), 0)
	checkPositions(t, p.PaddedBatch(2, 0, pad), 0)
	for text, ds := range map[string]data.Pipeline{
		"element 1: its length is 3, which is more than the 2": p.PaddedBatch(2, 2, pad),
		"padding of 1.5 in a tensor of int32":                  p.PaddedBatch(2, 3, data.Padding{Value: 1.5}),
		"is missing or a scalar":                               numbers(0, 3).PaddedBatch(2, 3, data.Padding{}),
		"a mask for a *tensor.Tensor": fromTensors(tensor.New(tensor.Int32, 2, 2)).PaddedBatch(2, 3,
			data.Padding{Mask: true}),
		"element 1: its length is 3: want at most the last boundary, 2": p.BucketByLength(data.Buckets{
			Boundaries: []int{1, 2}, Rows: []int{2},
		}),
		"element 2": asStream(p).BucketByLength(data.Buckets{ // the first one that is padded
			Boundaries: []int{1, 3}, Rows: []int{2}, Padding: data.Padding{Value: 1.5},
		}),
		"tensor 2 has the shape [], and Padding.Also": p.PaddedBatch(2, 3, data.Padding{Also: []int{2}}),
		"Padding.Also has tensor 3: it has 3 tensors": p.PaddedBatch(2, 3, data.Padding{Also: []int{1, 3}}),
		"has no length": p.BucketByLength(data.Buckets{Boundaries: []int{3}, Rows: []int{2}, Lengths: []int{1, 3}}),
	} {
		if _, err := data.Hash(t.Context(), ds); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("got %v, want %q", err, text)
		}
	}
}

// TestRepeatOfOtherLengths checks that reading by position refuses passes of other numbers of batches than the first.
func TestRepeatOfOtherLengths(t *testing.T) {
	lengths := []int{1, 1, 1, 9, 9, 9}
	p := ragged(lengths).Shuffle(1).Take(3).BucketByLength(data.Buckets{
		Boundaries: []int{1, 9}, Rows: []int{3}, Lengths: lengths,
	})
	for _, ds := range []data.Pipeline{p.Repeat(9), p.Repeat(-1).Take(20), data.Mix(20, 1, []float64{1}, p)} {
		r, err := data.Open(t.Context(), ds)
		if err != nil {
			t.Fatal(err)
		}
		for at := 0; err == nil && at < r.Len(); at++ {
			_, err = r.At(t.Context(), at)
		}
		if err == nil || !strings.Contains(err.Error(), "want passes of one length") {
			t.Errorf("got %v", err)
		}
	}
}

// plainTexts returns the tensors of each element.
func plainTexts(t *testing.T, p data.Pipeline) (list []string) {
	t.Helper()
	for _, e := range collect(t, p, 0) {
		var texts []string
		for _, leaf := range tensor.Flatten(e) {
			if x := leaf.(*tensor.Tensor); x != nil {
				rows := []string{}
				if x.Rank() < 2 {
					rows = append(rows, fmt.Sprint(x.Float64s()))
				} else {
					for i := range x.Shape()[0] {
						rows = append(rows, fmt.Sprint(x.Rows(i, i+1).Float64s()))
					}
					rows = []string{"[" + strings.Join(rows, " ") + "]"}
				}
				texts = append(texts, rows...)
			}
		}
		list = append(list, strings.Join(texts, " "))
	}
	return list
}

// TestJoinedBuckets reads pipelines whose epochs have different numbers of batches, joined.
func TestJoinedBuckets(t *testing.T) {
	lengths := []int{1, 1, 1, 9, 9, 1, 9, 1, 1, 9, 9, 1}
	buckets := func(seed int64) data.Pipeline {
		return ragged(lengths).Shuffle(seed).Take(6).BucketByLength(data.Buckets{
			Boundaries: []int{3, 9}, Rows: []int{3}, Padding: data.Padding{Also: []int{1}},
		})
	}
	counts := map[int]bool{}
	for epoch := range 20 {
		parts := []data.Pipeline{buckets(1), buckets(2)}
		want := 0
		for _, p := range parts {
			want += len(collect(t, p, epoch))
		}
		counts[want] = true
		for what, p := range map[string]data.Pipeline{
			"Concat": data.Concat(parts...), "Interleave": data.Interleave(2, 1, parts...),
			"a shuffled Concat": data.Concat(parts...).Shuffle(3),
		} {
			p.Len() // that of the first epoch is kept
			if got := len(collect(t, p, epoch)); got != want {
				t.Errorf("epoch %d of %s has %d batches, want %d", epoch, what, got, want)
			}
			r, err := data.Open(data.WithEpoch(t.Context(), epoch), p)
			if err != nil {
				t.Fatal(err)
			}
			if r.Len() != want {
				t.Errorf("epoch %d of %s has %d batches by position, want %d", epoch, what, r.Len(), want)
			}
			for at := range r.Len() {
				if _, err := r.At(t.Context(), at); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	if len(counts) < 2 {
		t.Errorf("all epochs have %v batches: this tests nothing", counts)
	}
}

// TestBucketByLength compares batches of buckets with those of a slow loop, by stream and by position, in several
// epochs, with and without given lengths.
func TestBucketByLength(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		lengths := rapid.SliceOfN(rapid.IntRange(0, 9), 0, 30).Draw(rt, "lengths")
		b := data.Buckets{
			Boundaries: rapid.SampledFrom([][]int{{9}, {3, 9}, {1, 2, 5, 12}}).Draw(rt, "boundaries"),
			Full:       rapid.Bool().Draw(rt, "full"),
			Padding:    data.Padding{Also: []int{1}, Value: float64(rapid.IntRange(-1, 1).Draw(rt, "value"))},
		}
		b.Rows = rapid.SliceOfN(rapid.IntRange(1, 4), len(b.Boundaries), len(b.Boundaries)).Draw(rt, "rows")
		if rapid.Bool().Draw(rt, "given") {
			b.Lengths = append([]int{}, lengths...)
		}
		p := ragged(lengths).Shuffle(1)
		epoch := rapid.IntRange(0, 2).Draw(rt, "epoch")
		ctx := data.WithEpoch(t.Context(), epoch)
		var want []string
		lists := make([][]int, len(b.Boundaries))
		add := func(k int) {
			text := fmt.Sprint(b.Boundaries[k])
			for _, i := range lists[k] {
				text += fmt.Sprint(" ", i)
			}
			want, lists[k] = append(want, text), nil
		}
		for _, e := range collect(t, p, epoch) {
			i := int(tensor.Data[int32](e.(data.Batch).Labels[1])[0]) - 100
			k := slices.IndexFunc(b.Boundaries, func(boundary int) bool { return boundary >= lengths[i] })
			if lists[k] = append(lists[k], i); len(lists[k]) == b.Rows[k] {
				add(k)
			}
		}
		for k := range lists {
			if len(lists[k]) > 0 && !b.Full {
				add(k)
			}
		}
		textOf := func(e data.Element) string {
			batch := e.(data.Batch)
			out := fmt.Sprint(batch.Inputs[0].Shape()[1])
			for row, label := range tensor.Data[int32](batch.Labels[1]) {
				i := int(label) - 100
				out += fmt.Sprint(" ", i)
				for k, x := range batch.Inputs[0].Rows(row, row+1).Float64s() {
					if k < lengths[i] && x != float64(i+1) || k >= lengths[i] && x != b.Value {
						rt.Errorf("row %d has %v", row, batch.Inputs[0].Format())
					}
				}
			}
			return out
		}
		ds := p.BucketByLength(b)
		for name, ds := range map[string]data.Pipeline{"random access": ds, "stream": asStream(p).BucketByLength(b)} {
			var got []string
			for e, err := range ds.Iter(ctx) {
				if err != nil {
					rt.Fatal(err)
				}
				got = append(got, textOf(e))
			}
			if !slices.Equal(got, want) {
				rt.Fatalf("%s: got %q, want %q", name, got, want)
			}
		}
		r, err := data.Open(ctx, ds.Prefetch(2))
		if err != nil || r.Len() != len(want) || ds.Len() != len(want) {
			rt.Fatalf("%d batches, Len %d, %v", r.Len(), ds.Len(), err)
		}
		rows := r.(data.SizedReader)
		for i := len(want) - 1; i >= 0; i-- {
			e, err := r.At(ctx, i)
			if err != nil || textOf(e) != want[i] {
				rt.Fatalf("batch %d is %q, %v, want %q", i, textOf(e), err, want[i])
			}
			last := rows.Rows(i) - 1
			e, ids, err := rows.ReadRows(ctx, i, []int{last, 0})
			if err != nil || ids[0] != rows.RowID(i, last) || e.(data.Batch).Rows() != 2 || rows.Size(i) <= last {
				rt.Fatalf("rows of batch %d: %v, %v, %v", i, e, ids, err)
			}
		}
		samples, err := data.Shapes(ctx, ds.Take(100).Prefetch(2))
		if err != nil {
			rt.Fatal(err)
		}
		for _, s := range samples {
			length := s.Element.(data.Batch).Inputs[0].Shape()[1]
			if k := slices.Index(b.Boundaries, length); s.Rows != b.Rows[k] {
				rt.Errorf("batches of length %d have %d rows, want %d", length, s.Rows, b.Rows[k])
			}
		}
	})
}

// TestPaddingIsDeclared checks that a tensor whose first dimension happens to be the length stays as it is.
func TestPaddingIsDeclared(t *testing.T) {
	p := data.FromFunc(3, func(_ context.Context, i int) (data.Element, error) {
		return data.Batch{
			Inputs: []*tensor.Tensor{tensor.New(tensor.Int32, i+1)},
			Labels: []*tensor.Tensor{tensor.Of([]float32{1, 2}), tensor.New(tensor.Int32, i+1)}, // one box, one class an element
		}, nil
	})
	ds := p.PaddedBatch(3, 4, data.Padding{Also: []int{2, 0, 2}, Label: new(-1.0)})
	for _, e := range collect(t, ds, 0) {
		b := e.(data.Batch)
		if got := fmt.Sprint(b.Inputs[0].Shape(), b.Labels[0].Shape(), b.Labels[1].Float64s()); got !=
			"[3 4] [3 2] [0 -1 -1 -1 0 0 -1 -1 0 0 0 -1]" {
			t.Errorf("got %s", got)
		}
	}
}

// TestShapesOfJoinedBuckets checks that the shapes of buckets in several parts are found, with the stages after them.
func TestShapesOfJoinedBuckets(t *testing.T) {
	part := func(boundary ...int) data.Pipeline {
		return ragged([]int{1, 2, 3, 1}).BucketByLength(data.Buckets{
			Boundaries: boundary, Rows: []int{2}, Padding: data.Padding{Also: []int{1}},
		}).Map(
			func(_ context.Context, e data.Element) (data.Element, error) {
				b := e.(data.Batch)
				return data.Batch{Inputs: b.Inputs}, nil
			})
	}
	for name, ds := range map[string]data.Pipeline{
		"Concat":     data.Concat(part(1, 3), part(2, 3), part(1, 3)),
		"Interleave": data.Interleave(2, 1, part(1, 3), part(2, 3)).Prefetch(1),
		"Mix":        data.Mix(9, 1, []float64{1, 2}, part(1, 3), part(2, 3)).Take(5),
	} {
		samples, err := data.Shapes(t.Context(), ds.Map(func(_ context.Context, e data.Element) (data.Element, error) {
			b := e.(data.Batch)
			return data.Batch{Inputs: append(b.Inputs, b.Inputs[0])}, nil
		}))
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, s := range samples {
			b := s.Element.(data.Batch)
			got = append(got, fmt.Sprint(s.Rows, len(b.Inputs), b.Inputs[1].Shape()[1:]))
		}
		if want := []string{"2 2 [1]", "2 2 [3]", "2 2 [2]"}; !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	if samples, err := data.Shapes(t.Context(), data.Concat(numbers(0, 4).Batch(2))); err != nil || samples != nil {
		t.Errorf("without buckets: %v, %v", samples, err)
	}
}
