package data

import (
	"context"
	"fmt"
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

// Gatherer is an [Indexed] dataset that reads several elements faster together than one by one.
type Gatherer interface {
	Indexed
	// Gather returns the elements with the given indices, joined along a new first dimension of every tensor. Several
	// goroutines may call it concurrently.
	Gather(ctx context.Context, indices []int) (Element, error)
}

// view reads a dataset in another order. It starts from the elements listed in fixed, or from all if fixed is
// nil, and applies the stages in each epoch.
type view struct {
	base    Seekable
	fixed   []int
	stages  []stage
	shard   shard // of an earlier Shard, of which fixed may be the result
	workers int   // of Workers; 0: those of the context
}

func newView(base Indexed) *view { return &view{base: indexed{base}} }

func (v *view) with(s stage) *view {
	w := *v
	w.stages = append(slices.Clip(v.stages), s)
	return &w
}

// Len implements [Dataset].
func (v *view) Len() int {
	n := v.base.Len()
	if v.fixed != nil {
		n = len(v.fixed)
	}
	if n < 0 {
		return -1 // unknown until the lengths of examples are
	}
	for _, s := range v.stages {
		n = s.length(n)
	}
	return n
}

// Open implements [Seekable].
func (v *view) Open(ctx context.Context) (Reader, error) {
	base, err := v.base.Open(ctx)
	if err != nil {
		return nil, err
	}
	n := base.Len()
	if n < v.base.Len() && slices.ContainsFunc(v.fixed, func(i int) bool { return i >= n }) {
		return nil, fmt.Errorf("data: Split: epoch %d has %d elements, and the first one %d, whose parts Split lists: split "+
			"before Shuffle, Take and BucketByLength", Epoch(ctx), n, v.base.Len())
	}
	n, at := v.order(n, Epoch(ctx))
	return relocate(base, n, at), nil
}

// order returns the number of positions in one epoch, in which base has n elements, and the index into base of each.
func (v *view) order(n, epoch int) (positions int, at func(position int) int) {
	at = func(p int) int { return p }
	if v.fixed != nil {
		n, at = len(v.fixed), func(p int) int { return v.fixed[p] }
	}
	for _, s := range v.stages {
		at = s.order(n, epoch, at)
		n = s.length(n)
	}
	return n, at
}

// Iter implements [Dataset].
func (v *view) Iter(ctx context.Context) iter.Seq2[Element, error] {
	if v.workers > 0 {
		ctx = withWorkers(ctx, v.workers)
	}
	return iterate(ctx, v)
}

// root returns the dataset whose elements v reads, without the Maps.
func (v *view) root() (base Dataset) {
	for base = v.base; ; base = traitsOf(base).src {
		if traitsOf(base).src == nil {
			return base
		}
	}
}

// zips reports whether v reads a Zip, whose elements are those of no part.
func (v *view) zips() bool {
	_, ok := v.root().(*zipped)
	return ok
}

// mapping returns p with the Map stages that v has.
func (v *view) mapping(p Pipeline) Pipeline {
	var stages []*mappedRows // the last first
	for m, ok := v.base.(*mappedRows); ok; m, ok = m.Seekable.(*mappedRows) {
		stages = append(stages, m)
	}
	for _, m := range slices.Backward(stages) {
		p = p.mapWith(m.seed, m.f)
	}
	return p
}

// table returns the tensors in memory that v reads without a Map, or nil.
func (v *view) table() *table {
	i, _ := v.base.(indexed)
	t, _ := i.Indexed.(*table)
	return t
}

func (v *view) split(fraction float64, seed int64) (kept, held *view) {
	for _, s := range v.stages {
		if _, ok := s.(shuffled); ok {
			panic("data: Split after Shuffle would mix the parts between epochs: split first, then shuffle the parts")
		}
	}
	n, order := v.order(v.base.Len(), 0)
	chosen := make([]int, n)
	for i := range chosen {
		chosen[i] = i
	}
	var g rand.PCG
	reseed(&g, seed, forSplit)
	permute(&g, chosen)
	chosen = chosen[:int(math.RoundToEven(fraction*float64(n)))]
	slices.Sort(chosen)

	in, out := make([]int, 0, n-len(chosen)), make([]int, 0, len(chosen))
	for i := range n {
		base := order(i)
		if len(chosen) > 0 && chosen[0] == i {
			out = append(out, base)
			chosen = chosen[1:]
		} else {
			in = append(in, base)
		}
	}
	kept, held = &view{base: v.base, fixed: in, shard: v.shard, workers: v.workers}, &view{}
	*held = *kept
	held.fixed = out
	return kept, held
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

// mappedRows is Map over a dataset with random access.
type mappedRows struct {
	Seekable
	f    mapFunc
	seed int64 // of MapRandom
}

// Iter implements [Dataset].
func (m *mappedRows) Iter(ctx context.Context) iter.Seq2[Element, error] { return iterate(ctx, m) }

// Open implements [Seekable].
func (m *mappedRows) Open(ctx context.Context) (Reader, error) {
	src, err := m.Seekable.Open(ctx)
	if err != nil {
		return nil, err
	}
	return &mappedReader{src, m.f, Epoch(ctx)}, nil
}
