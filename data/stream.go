package data

import (
	"context"
	"iter"
	"math/rand/v2"
	"slices"
)

// The datasets of this file do not need random access to their source.

// sequence implements FromSeq.
type sequence struct {
	n   int
	seq func(ctx context.Context) iter.Seq2[Element, error]
}

func (s *sequence) Len() int { return s.n }

// Iter checks ctx between elements, so that it also ends a sequence that ignores ctx.
func (s *sequence) Iter(ctx context.Context) iter.Seq2[Element, error] {
	return func(yield func(Element, error) bool) {
		if ctx.Err() != nil {
			yield(nil, context.Cause(ctx))
			return
		}
		for e, err := range s.seq(ctx) {
			if err == nil && ctx.Err() != nil {
				err = context.Cause(ctx)
			}
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

// mapped is Map over a stream, or over what has random access but no view.
type mapped struct {
	src  Dataset
	f    mapFunc
	seed int64 // of MapRandom
}

func (m *mapped) Len() int { return m.src.Len() }

func (m *mapped) Iter(ctx context.Context) iter.Seq2[Element, error] {
	if n := workersOf(ctx); n > 1 {
		return parallel(ctx, n, func(yield func(func() (Element, error), error) bool) {
			i := 0
			for e, err := range m.src.Iter(ctx) {
				at := i
				if !yield(func() (Element, error) { return m.f(ctx, at, e) }, err) || err != nil {
					return
				}
				i++
			}
		})
	}
	return func(yield func(Element, error) bool) {
		i := 0
		for e, err := range m.src.Iter(ctx) {
			if err == nil {
				e, err = m.f(ctx, i, e)
			}
			if err != nil {
				yield(nil, err)
				return
			}
			if !yield(e, nil) {
				return
			}
			i++
		}
	}
}

// buffered is ShuffleBuffer.
type buffered struct {
	src  Dataset
	seed int64
	size int
}

func (b *buffered) Len() int { return b.src.Len() }

func (b *buffered) Iter(ctx context.Context) iter.Seq2[Element, error] {
	return func(yield func(Element, error) bool) {
		var g rand.PCG
		reseed(&g, b.seed, forShuffle, uint64(Epoch(ctx)), uint64(b.size))
		r := rand.New(&g)
		var window []Element
		for e, err := range b.src.Iter(ctx) {
			if err != nil {
				yield(nil, err)
				return
			}
			if len(window) < b.size {
				window = append(window, e)
				continue
			}
			i := r.IntN(len(window))
			e, window[i] = window[i], e
			if !yield(e, nil) {
				return
			}
		}
		for len(window) > 0 {
			i, last := r.IntN(len(window)), len(window)-1
			e := window[i]
			window[i] = window[last]
			window = slices.Delete(window, last, last+1)
			if !yield(e, nil) {
				return
			}
		}
	}
}

// endlessPasses is the number of passes that an endless Repeat reserves per epoch, to number them. It fits in
// a 32-bit int.
const endlessPasses = 1<<31 - 1

// repeated is Repeat.
type repeated struct {
	src Dataset
	n   int
}

func (r *repeated) Len() int {
	n := r.src.Len()
	switch {
	case r.n == 0 || n == 0:
		return 0
	case r.n < 0 || n < 0:
		return -1
	}
	return n * r.n
}

func (r *repeated) Iter(ctx context.Context) iter.Seq2[Element, error] {
	return func(yield func(Element, error) bool) {
		passes := r.n
		if passes < 0 {
			passes = endlessPasses
		}
		for k := 0; r.n < 0 || k < passes; k++ {
			empty := true
			for e, err := range r.src.Iter(WithEpoch(ctx, Epoch(ctx)*passes+k)) {
				empty = false
				if err != nil {
					yield(nil, err)
					return
				}
				if !yield(e, nil) {
					return
				}
			}
			if empty { // repeating an empty dataset endlessly would never return
				return
			}
		}
	}
}

// taken is Take.
type taken struct {
	src Dataset
	n   int
}

// Len is unknown for an endless source, because a length of -1 also means a source of unknown, possibly
// shorter, length.
func (t *taken) Len() int { return min(t.src.Len(), t.n) }

func (t *taken) Iter(ctx context.Context) iter.Seq2[Element, error] {
	return func(yield func(Element, error) bool) {
		left := t.n
		if left == 0 {
			return
		}
		for e, err := range t.src.Iter(ctx) {
			if left--; !yield(e, err) || err != nil || left == 0 {
				return
			}
		}
	}
}

// skipped is Skip.
type skipped struct {
	src Dataset
	n   int
}

func (s *skipped) Len() int {
	n := s.src.Len()
	if n < 0 {
		return -1
	}
	return n - min(n, s.n)
}

func (s *skipped) Iter(ctx context.Context) iter.Seq2[Element, error] {
	return func(yield func(Element, error) bool) {
		left := s.n
		for e, err := range s.src.Iter(ctx) {
			if left > 0 && err == nil {
				left--
				continue
			}
			if !yield(e, err) || err != nil {
				return
			}
		}
	}
}

// sharded is Shard.
type sharded struct {
	src          Dataset
	index, count int
}

func (s *sharded) Len() int {
	n := s.src.Len()
	if n < 0 {
		return -1
	}
	return shardLen(n, s.index, s.count)
}

func (s *sharded) Iter(ctx context.Context) iter.Seq2[Element, error] {
	return func(yield func(Element, error) bool) {
		i := 0
		for e, err := range s.src.Iter(ctx) {
			mine := i%s.count == s.index
			i++
			if err == nil && !mine {
				continue
			}
			if !yield(e, err) || err != nil {
				return
			}
		}
	}
}

// passed is the dataset of Through.
type passed struct {
	src Dataset
	f   func(context.Context, iter.Seq2[Element, error]) iter.Seq2[Element, error]
}

func (p *passed) Len() int { return -1 }

func (p *passed) Iter(ctx context.Context) iter.Seq2[Element, error] {
	s := sequence{-1, func(ctx context.Context) iter.Seq2[Element, error] { return p.f(ctx, p.src.Iter(ctx)) }}
	return s.Iter(ctx)
}
