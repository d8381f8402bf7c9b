package data_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/tensor"
)

// numbers is a pipeline of the numbers from lo to hi-1.
func numbers(lo, hi int) data.Pipeline {
	x := make([]int32, 0, hi-lo)
	for i := lo; i < hi; i++ {
		x = append(x, int32(i))
	}
	return fromTensors(tensor.Of(x, len(x)))
}

// values returns the numbers of all elements.
func values(t *testing.T, p data.Dataset, epoch int) (list []int32) {
	t.Helper()
	for _, e := range collect(t, p, epoch) {
		list = append(list, tensor.Data[int32](e.(*tensor.Tensor))...)
	}
	return list
}

// checkPositions checks that a pipeline has as many identities as distinct elements, and the same elements by position.
func checkPositions(t *testing.T, p data.Pipeline, epoch int) {
	t.Helper()
	ctx := data.WithEpoch(t.Context(), epoch)
	r, err := data.Open(ctx, p)
	if err != nil || r == nil {
		t.Fatal(r, err)
	}
	want := collect(t, p, epoch)
	if r.Len() != len(want) || p.Len() != len(want) {
		t.Fatalf("%d elements, %d by position, Len %d", len(want), r.Len(), p.Len())
	}
	seen := map[uint64]data.Element{}
	for i := len(want) - 1; i >= 0; i-- {
		e, err := r.At(ctx, i)
		if err != nil || fmt.Sprint(text(e)) != fmt.Sprint(text(want[i])) {
			t.Fatalf("element %d is %v, %v, want %v", i, text(e), err, text(want[i]))
		}
		if other, ok := seen[r.ID(i)]; ok && text(other) != text(e) {
			t.Errorf("%v and %v have one identity", text(other), text(e))
		}
		seen[r.ID(i)] = e
	}
}

// text returns the contents of the tensors of an element.
func text(e data.Element) string {
	var b strings.Builder
	for _, leaf := range tensor.Flatten(e) {
		if x := leaf.(*tensor.Tensor); x != nil {
			fmt.Fprint(&b, x.Format(), " ")
		}
	}
	return b.String()
}

func TestConcat(t *testing.T) {
	p := data.Concat(numbers(0, 3), data.Pipeline{}, numbers(3, 4), numbers(4, 9).Shuffle(2))
	if got := values(t, p, 0); len(got) != 9 || !slices.Equal(got[:4], []int32{0, 1, 2, 3}) {
		t.Errorf("got %v", got)
	}
	checkPositions(t, p, 1)
	checkPositions(t, p.Shuffle(3).Take(7).Workers(2), 1)
	got := values(t, p.Shuffle(3).Batch(4), 2)
	slices.Sort(got)
	if !slices.Equal(got, []int32{0, 1, 2, 3, 4, 5, 6, 7, 8}) {
		t.Errorf("shuffled: %v", got)
	}
	if _, _, ok := data.Sharded(data.Concat(numbers(0, 3), numbers(0, 3).Shard(0, 2)).Shuffle(1).Batch(2)); !ok {
		t.Error("a Shard in a part is not found")
	}
}

func TestMix(t *testing.T) {
	const n = 5000
	p := data.Mix(n, 7, []float64{1, 2, 0.0001}, numbers(0, 1000), numbers(1000, 1010).Shuffle(1), numbers(2000, 2001))
	var count [3]int
	var first []int32
	for _, x := range values(t, p, 0) {
		count[x/1000]++
		if x < 1000 {
			first = append(first, x)
		}
	}
	if count[0] < 1640 || count[0] > 1690 || count[2] < 1 || count[2] > 6 {
		t.Errorf("the parts have %v of %d elements, want a third, two thirds, and some", count, n)
	}
	for i, x := range first {
		if x != int32(i%1000) {
			t.Fatalf("element %d of the first part is %d: its order has changed", i, x)
		}
	}
	if slices.Equal(values(t, p, 0), values(t, p, 1)) || !slices.Equal(values(t, p, 1), values(t, p, 1)) {
		t.Error("two epochs have one order, or one epoch has two")
	}
	checkPositions(t, p.Take(2000), 3)
}

// TestMixSmallWeights checks that each part with a small weight has elements.
func TestMixSmallWeights(t *testing.T) {
	p := data.Mix(10240, 7, []float64{1, 1e-4, 1e-4}, numbers(0, 10), numbers(1000, 1010), numbers(2000, 2010))
	var count [3]int
	for _, x := range values(t, p, 0) {
		count[x/1000]++
	}
	if count != [3]int{10220, 10, 10} {
		t.Errorf("the parts have %v elements", count)
	}
}

func TestZip(t *testing.T) {
	x, y := numbers(0, 6), numbers(10, 16)
	p := data.Zip([]data.Pipeline{x}, []data.Pipeline{y}).Shuffle(1)
	for what, p := range map[string]data.Pipeline{
		"gathered": p.Batch(4),
		"by element": data.Zip([]data.Pipeline{x.Map(func(_ context.Context, e data.Element) (data.Element, error) {
			return e, nil
		})}, []data.Pipeline{y}).Shuffle(1).Batch(4),
	} {
		n := 0
		for _, e := range collect(t, p, 0) {
			b := e.(data.Batch)
			for i, v := range tensor.Data[int32](b.Inputs[0]) {
				if tensor.Data[int32](b.Labels[0])[i] != v+10 {
					t.Errorf("%s: got %v and %v", what, b.Inputs[0].Format(), b.Labels[0].Format())
				}
				n++
			}
		}
		if n != 6 {
			t.Errorf("%s: %d examples", what, n)
		}
	}
	checkPositions(t, p, 2)
}

func TestCache(t *testing.T) {
	var reads atomic.Int64
	p := numbers(0, 10).Map(func(_ context.Context, e data.Element) (data.Element, error) {
		reads.Add(1)
		return e, nil
	})
	for _, c := range []struct{ limit, reads int64 }{{1 << 20, 10}, {16, 4 + 3*6}, {0, 30}} {
		reads.Store(0)
		q := p.Cache(c.limit).Shuffle(1).Workers(2).Batch(3)
		for epoch := range 3 {
			got := values(t, q, epoch)
			slices.Sort(got)
			if len(got) != 10 || got[9] != 9 {
				t.Errorf("got %v", got)
			}
		}
		if reads.Load() != c.reads {
			t.Errorf("%d bytes: %d elements were read, want %d", c.limit, reads.Load(), c.reads)
		}
	}
}

// TestCacheOfBatches caches batches of several shuffled passes, some of which begin with the same row.
func TestCacheOfBatches(t *testing.T) {
	x := tensor.From([]int32{0, 1, 2, 3, 4, 5, 6, 7})
	plain := fromTensors(data.Batch{Inputs: []*tensor.Tensor{x}}).Shuffle(3).Repeat(40).Batch(3)
	got := collect(t, plain.Cache(1<<20), 0)
	for i, want := range collect(t, plain, 0) {
		if a, b := want.(data.Batch).Inputs[0], got[i].(data.Batch).Inputs[0]; !a.Equal(b) {
			t.Fatalf("batch %d: got %v, want %v", i, b, a)
		}
	}
}

func TestCombineMisuse(t *testing.T) {
	stream := sources(3)["seq"]
	one, two := numbers(0, 1), numbers(0, 2)
	for want, f := range map[string]func(){
		"data: Concat: part 1 is a stream":                   func() { data.Concat(numbers(0, 1), stream.Batch(2)) },
		"data: Cache: part 0 is a stream":                    func() { stream.Cache(1) },
		"data: Zip: part 1 has 2 elements, the first one 1":  func() { data.Zip([]data.Pipeline{one}, []data.Pipeline{two}) },
		"data: Mix: weight 0 of 1 parts is -1":               func() { data.Mix(1, 1, []float64{-1}, numbers(0, 1)) },
		"data: Mix: weight 0 of 1 parts is 1":                func() { data.Mix(1, 1, []float64{1}, data.Pipeline{}) },
		"data: Mix of 1 elements of 2 parts with 1 weights:": func() { data.Mix(1, 1, []float64{1}, one, one) },
	} {
		func() {
			defer func() {
				if got := fmt.Sprint(recover()); !strings.HasPrefix(got, want) {
					t.Errorf("got %q, want %q", got, want)
				}
			}()
			f()
		}()
	}
}
