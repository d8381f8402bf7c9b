package data

import (
	"context"
	"fmt"
	"iter"
	"math/rand/v2"
)

// Pipeline is a [Dataset] with methods that derive other datasets from it. It is a value: deriving changes and reads
// nothing, so one pipeline may be the start of several. The zero value is an empty dataset.
//
// Arguments that can never be right (a batch of 0 rows) panic.
type Pipeline struct {
	ds Dataset
}

// Of makes a pipeline of any dataset. If it is [Indexed], the pipeline has random access.
func Of(ds Dataset) Pipeline {
	switch ds := ds.(type) {
	case nil:
		return Pipeline{}
	case Pipeline:
		return ds
	case Indexed:
		return Pipeline{newView(ds)}
	}
	return Pipeline{ds}
}

// FromTensors makes a pipeline of tensors in memory: element i is row i of the first dimension of every tensor in e,
// without that dimension. The memory is shared and must not change any more. It panics if e holds no tensor, a scalar,
// or tensors of different numbers of rows.
func FromTensors(e Element) Pipeline {
	t, err := newTable(e)
	if err != nil {
		panic(err.Error())
	}
	return Of(t)
}

// FromFunc makes a pipeline with random access of n elements that at computes. Several goroutines may call at.
func FromFunc(n int, at func(ctx context.Context, i int) (Element, error)) Pipeline {
	if n < 0 || at == nil {
		panic(fmt.Sprintf("data: FromFunc of %d elements, function given: %t", n, at != nil))
	}
	return Of(&function{n, at})
}

// FromSeq makes a pipeline of a sequence that is read once per iteration: seq is called for each. n is the number of
// elements, or -1 if it is not known. The sequence keeps to the contract of [Dataset].
func FromSeq(n int, seq func(ctx context.Context) iter.Seq2[Element, error]) Pipeline {
	if n < -1 || seq == nil {
		panic(fmt.Sprintf("data: FromSeq of %d elements, function given: %t", n, seq != nil))
	}
	return Pipeline{&sequence{n, seq}}
}

// Iter reads the pipeline from its start, in the order of the context's epoch; see [Dataset].
func (p Pipeline) Iter(ctx context.Context) iter.Seq2[Element, error] {
	if p.ds == nil {
		return func(func(Element, error) bool) {}
	}
	return p.ds.Iter(ctx)
}

// Len returns the number of elements of one iteration, or -1 if that is not known or not finite.
func (p Pipeline) Len() int {
	if p.ds == nil {
		return 0
	}
	return p.ds.Len()
}

// Map replaces each element by f of it. The context that f gets carries the epoch. f may be called by several
// goroutines at once if the dataset is read by several.
func (p Pipeline) Map(f func(ctx context.Context, e Element) (Element, error)) Pipeline {
	return p.mapWith(func(ctx context.Context, _ int, e Element) (Element, error) { return f(ctx, e) })
}

// MapRandom is Map for a function that makes random choices, from r, which is f's until it returns. Its numbers depend
// on the seed, the epoch and which element it is: on the element's index if there is random access (before or after
// Shuffle alike), else on its position.
func (p Pipeline) MapRandom(seed int64, f func(ctx context.Context, r *rand.Rand, e Element) (Element, error)) Pipeline {
	return p.mapWith(func(ctx context.Context, i int, e Element) (Element, error) {
		var g rand.PCG
		reseed(&g, seed, forMap, uint64(Epoch(ctx)), uint64(i))
		return f(ctx, rand.New(&g), e)
	})
}

func (p Pipeline) mapWith(f mapFunc) Pipeline {
	if v, ok := p.ds.(*view); ok {
		return Pipeline{&view{base: &mappedIndexed{v.base, f}, fixed: v.fixed, stages: v.stages, shard: v.shard}}
	}
	return Pipeline{&mapped{p, f}}
}

// Through passes the elements through f, which may leave some out, join or divide them: what [FromSeq] is for a source.
// f is called once per iteration. The sequence that it returns keeps to the contract of [Dataset]; in it f must look at
// the errors of the one that it gets. The pipeline keeps knowing the files that it reads, so that workers can share it out by
// them; it does not know its length, nor its batch size before the next Batch.
func (p Pipeline) Through(f func(context.Context, iter.Seq2[Element, error]) iter.Seq2[Element, error]) Pipeline {
	if f == nil {
		panic("data: Through(nil)")
	}
	return Pipeline{&passed{p, f}}
}

// Shuffle puts all elements into a random order, every epoch into another one; the order depends on the seed, the epoch
// and the number of elements only. It costs a list of indices, and needs random access: it panics without (see
// [Pipeline.ShuffleBuffer]).
func (p Pipeline) Shuffle(seed int64) Pipeline {
	return Pipeline{p.random("Shuffle").with(shuffled{seed})}
}

// ShuffleBuffer shuffles any dataset within a window: it holds size elements, and yields a random one of them as the
// next arrives. Elements far apart stay in order, so a sorted dataset needs a window of its size. The order depends on
// the seed, the epoch and the size.
func (p Pipeline) ShuffleBuffer(seed int64, size int) Pipeline {
	if size < 1 {
		panic(fmt.Sprintf("data: ShuffleBuffer of %d elements: want at least 1", size))
	}
	return Pipeline{&buffered{p, seed, size}}
}

// Batch joins n elements at a time, along a new first dimension of every tensor. The last batch may be smaller.
// Elements of one batch must have the same structure, dtypes and shapes.
//
// The tensors of a batch are new. Only a batch of consecutive rows of tensors in memory shares theirs.
func (p Pipeline) Batch(n int) Pipeline { return p.batch(n, false) }

// BatchFull is Batch without a last batch of fewer than n elements: it is dropped.
func (p Pipeline) BatchFull(n int) Pipeline { return p.batch(n, true) }

func (p Pipeline) batch(n int, full bool) Pipeline {
	if n < 1 {
		panic(fmt.Sprintf("data: Batch of %d elements: want at least 1", n))
	}
	return Pipeline{&batches{p, n, full}}
}

// Repeat reads the dataset n times, for ever if n is negative. Pass k of epoch e is read as epoch e·n+k (e·(2³¹-1)+k if
// for ever), so that no order returns.
func (p Pipeline) Repeat(n int) Pipeline { return Pipeline{&repeated{p, n}} }

// Take keeps the first n elements.
func (p Pipeline) Take(n int) Pipeline {
	if n < 0 {
		panic(fmt.Sprintf("data: Take of %d elements", n))
	}
	if v, ok := p.ds.(*view); ok {
		return Pipeline{v.with(first{n})}
	}
	return Pipeline{&taken{p, n}}
}

// Skip leaves out the first n elements.
func (p Pipeline) Skip(n int) Pipeline {
	if n < 0 {
		panic(fmt.Sprintf("data: Skip of %d elements", n))
	}
	if v, ok := p.ds.(*view); ok {
		return Pipeline{v.with(rest{n})}
	}
	return Pipeline{&skipped{p, n}}
}

// Shard keeps every count-th element, beginning with number index: the parts 0…count-1 together are the whole. After
// Shuffle with one seed the parts are disjoint too.
//
// It is for programs that share out their data themselves. A strategy of several workers does that for them, and
// training over one refuses a dataset that has a Shard (see [Sharded]).
func (p Pipeline) Shard(index, count int) Pipeline {
	if count < 1 || index < 0 || index >= count {
		panic(fmt.Sprintf("data: Shard(%d, %d): want an index from 0 to count-1", index, count))
	}
	if v, ok := p.ds.(*view); ok {
		part := v.with(every{index, count})
		if count > 1 {
			part.shard = shard{index, count}
		}
		return Pipeline{part}
	}
	return Pipeline{&sharded{p, index, count}}
}

// ShardHint marks where a strategy may keep a worker's share of the elements, as [Pipeline.Shard] does; read as it is, the
// pipeline has all of them (TensorFlow's shard(SHARD_HINT, SHARD_HINT)).
func (p Pipeline) ShardHint() Pipeline { return Pipeline{&hinted{p}} }

// Split divides the dataset in two, for training and for validation: held has fraction of the elements, rounded, chosen
// at random by the seed; kept has the others. Both keep the dataset's order, and every epoch has the same two parts.
//
// It panics if the fraction is not from 0 to 1, without random access, and after Shuffle, which would mix the parts
// between epochs. (Keras' validation_split holds the last elements instead: Skip and Take do that.)
func (p Pipeline) Split(fraction float64, seed int64) (kept, held Pipeline) {
	if !(fraction >= 0 && fraction <= 1) {
		panic(fmt.Sprintf("data: Split of %v: want a fraction from 0 to 1", fraction))
	}
	k, h := p.random("Split").split(fraction, seed)
	return Pipeline{k}, Pipeline{h}
}

// Prefetch reads ahead: a goroutine keeps up to n elements ready while the loop uses others. It starts with the loop,
// and has ended when the loop has. A panic in the pipeline before it becomes an error of the iteration.
func (p Pipeline) Prefetch(n int) Pipeline {
	if n < 1 {
		panic(fmt.Sprintf("data: Prefetch of %d elements: want at least 1", n))
	}
	return Pipeline{&prefetch{p, n}}
}

// random returns the view behind p, or panics.
func (p Pipeline) random(method string) *view {
	switch ds := p.ds.(type) {
	case nil:
		return newView(&function{})
	case *view:
		return ds
	}
	panic("data: " + method + " without random access: put it before Batch, Repeat and Prefetch, and shuffle streams by ShuffleBuffer")
}
