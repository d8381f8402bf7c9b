package data

import (
	"context"
	"iter"
	"math"
	"math/rand/v2"
	"slices"
)

// Indexed is a [Dataset] with random access, which can be shuffled completely and split exactly.
type Indexed interface {
	Dataset
	// At returns element i, 0 ≤ i < Len(). Several goroutines may call it concurrently.
	At(ctx context.Context, i int) (Element, error)
}

// view reads an Indexed dataset in another order. It starts from the elements listed in fixed, or from all if
// fixed is nil, and applies the stages in each epoch.
type view struct {
	base   Indexed
	fixed  []int
	stages []stage
	shard  shard // of an earlier Shard, of which fixed may be the result
}

// stage transforms an order, possibly in place.
type stage interface {
	length(n int) int
	apply(order []int, epoch int) []int
}

func newView(base Indexed) *view { return &view{base: base} }

func (v *view) with(s stage) *view {
	return &view{v.base, v.fixed, append(slices.Clip(v.stages), s), v.shard}
}

// Len implements [Dataset].
func (v *view) Len() int {
	n := v.base.Len()
	if v.fixed != nil {
		n = len(v.fixed)
	}
	for _, s := range v.stages {
		n = s.length(n)
	}
	return n
}

// order returns the indices into base of one epoch, as a new slice.
func (v *view) order(epoch int) []int {
	order := slices.Clone(v.fixed)
	if v.fixed == nil {
		order = make([]int, v.base.Len())
		for i := range order {
			order[i] = i
		}
	}
	for _, s := range v.stages {
		order = s.apply(order, epoch)
	}
	return order
}

// Iter implements [Dataset].
func (v *view) Iter(ctx context.Context) iter.Seq2[Element, error] {
	return func(yield func(Element, error) bool) {
		for _, i := range v.order(Epoch(ctx)) {
			if ctx.Err() != nil {
				yield(nil, context.Cause(ctx))
				return
			}
			e, err := v.base.At(ctx, i)
			if err != nil {
				yield(nil, err)
				return
			}
			if !yield(e, nil) {
				return
			}
		}
	}
}

func (v *view) split(fraction float64, seed int64) (kept, held *view) {
	for _, s := range v.stages {
		if _, ok := s.(shuffled); ok {
			panic("data: Split after Shuffle would mix the parts between epochs: split first, then shuffle the parts")
		}
	}
	order := v.order(0)
	chosen := make([]int, len(order))
	for i := range chosen {
		chosen[i] = i
	}
	var g rand.PCG
	reseed(&g, seed, forSplit)
	permute(&g, chosen)
	chosen = chosen[:int(math.RoundToEven(fraction*float64(len(order))))]
	slices.Sort(chosen)

	in, out := make([]int, 0, len(order)-len(chosen)), make([]int, 0, len(chosen))
	for i, base := range order {
		if len(chosen) > 0 && chosen[0] == i {
			out = append(out, base)
			chosen = chosen[1:]
		} else {
			in = append(in, base)
		}
	}
	return &view{base: v.base, fixed: in, shard: v.shard}, &view{base: v.base, fixed: out, shard: v.shard}
}

// shuffled is the stage of Shuffle.
type shuffled struct{ seed int64 }

func (s shuffled) length(n int) int { return n }

func (s shuffled) apply(order []int, epoch int) []int {
	var g rand.PCG
	reseed(&g, s.seed, forShuffle, uint64(epoch))
	permute(&g, order)
	return order
}

// first is the stage of Take.
type first struct{ n int }

func (s first) length(n int) int { return min(n, s.n) }

func (s first) apply(order []int, _ int) []int { return order[:min(len(order), s.n)] }

// rest is the stage of Skip.
type rest struct{ n int }

func (s rest) length(n int) int { return n - min(n, s.n) }

func (s rest) apply(order []int, _ int) []int { return order[min(len(order), s.n):] }

// every is the stage of Shard.
type every struct{ index, count int }

func (s every) length(n int) int { return shardLen(n, s.index, s.count) }

func (s every) apply(order []int, _ int) []int {
	n := 0
	for i := s.index; i < len(order); i += s.count {
		order[n] = order[i]
		n++
	}
	return order[:n]
}

// shardLen returns how many of n elements have a position of index modulo count.
func shardLen(n, index, count int) int { return (n - index + count - 1) / count }

// function is the dataset of FromFunc.
type function struct {
	n  int
	at func(ctx context.Context, i int) (Element, error)
}

// Len implements [Dataset].
func (f *function) Len() int { return f.n }

// At implements [Indexed].
func (f *function) At(ctx context.Context, i int) (Element, error) { return f.at(ctx, i) }

// Iter implements [Dataset].
func (f *function) Iter(ctx context.Context) iter.Seq2[Element, error] { return newView(f).Iter(ctx) }

// mapFunc is a function over elements; i is the element's index, or its position.
type mapFunc func(ctx context.Context, i int, e Element) (Element, error)

// mappedIndexed is Map over an Indexed dataset.
type mappedIndexed struct {
	Indexed
	f mapFunc
}

// At implements [Indexed].
func (m *mappedIndexed) At(ctx context.Context, i int) (Element, error) {
	e, err := m.Indexed.At(ctx, i)
	if err != nil {
		return nil, err
	}
	return m.f(ctx, i, e)
}

// Iter implements [Dataset].
func (m *mappedIndexed) Iter(ctx context.Context) iter.Seq2[Element, error] {
	return newView(m).Iter(ctx)
}
