package data

import (
	"context"
	"fmt"
	"iter"
	"math/rand/v2"
)

// Pipeline is a [Dataset] with methods that derive other pipelines from it. It is an immutable value: a
// method neither modifies nor reads it, so several pipelines can be derived from one, and any goroutine may
// use it. The zero value is an empty dataset.
//
// Methods panic on arguments that are always invalid, such as a batch of 0 rows.
type Pipeline struct {
	ds Dataset
}

// Of returns a pipeline that reads ds. It has random access if ds is [Indexed].
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

// FromTensors returns a pipeline of tensors in memory. Element i is row i of the first dimension of every
// tensor in e, without that dimension. The pipeline shares the memory, which must not be modified afterwards.
// It is an error if e has no tensor, a scalar, or tensors with different numbers of rows.
func FromTensors(e Element) (Pipeline, error) {
	t, err := newTable(e)
	if err != nil {
		return Pipeline{}, err
	}
	return Of(t), nil
}

// FromFunc returns a pipeline with random access of n elements, which at computes. at may be called by
// several goroutines at once.
func FromFunc(n int, at func(ctx context.Context, i int) (Element, error)) Pipeline {
	if n < 0 || at == nil {
		panic(fmt.Sprintf("data: FromFunc of %d elements, function given: %t", n, at != nil))
	}
	return Of(&function{n, at})
}

// FromSeq returns a pipeline of a sequence. seq is called once per iteration, and the sequence must satisfy
// the contract of [Dataset]. n is the number of elements, or -1 if it is unknown.
func FromSeq(n int, seq func(ctx context.Context) iter.Seq2[Element, error]) Pipeline {
	if n < -1 || seq == nil {
		panic(fmt.Sprintf("data: FromSeq of %d elements, function given: %t", n, seq != nil))
	}
	return Pipeline{&sequence{n, seq}}
}

// Iter reads the pipeline from its start, in the order of the epoch in ctx; see [Dataset].
func (p Pipeline) Iter(ctx context.Context) iter.Seq2[Element, error] {
	if p.ds == nil {
		return func(func(Element, error) bool) {}
	}
	return p.ds.Iter(ctx)
}

// Len returns the number of elements of one iteration, or -1 if it is unknown or infinite.
func (p Pipeline) Len() int {
	if p.ds == nil {
		return 0
	}
	return p.ds.Len()
}

// Map replaces each element by the result of f. The context passed to f has the epoch. If several goroutines
// read the dataset, as with [Pipeline.Workers], they call f concurrently.
func (p Pipeline) Map(f func(ctx context.Context, e Element) (Element, error)) Pipeline {
	return p.mapWith(0, func(ctx context.Context, _ int, e Element) (Element, error) { return f(ctx, e) })
}

// MapRandom is Map for a function that makes random choices with r, which f may use until it returns. The
// random numbers depend on the seed, the epoch and the element. With random access, the element is identified
// by its index (the same before and after Shuffle), otherwise by its position.
func (p Pipeline) MapRandom(seed int64, f func(ctx context.Context, r *rand.Rand, e Element) (Element,
	error),
) Pipeline {
	return p.mapWith(seed, func(ctx context.Context, i int, e Element) (Element, error) {
		var g rand.PCG
		reseed(&g, seed, forMap, uint64(Epoch(ctx)), uint64(i))
		return f(ctx, rand.New(&g), e)
	})
}

func (p Pipeline) mapWith(seed int64, f mapFunc) Pipeline {
	if v, ok := p.ds.(*view); ok {
		w := *v
		w.base = &mappedRows{v.base, f, seed}
		return Pipeline{&w}
	}
	return Pipeline{&mapped{p, f, seed}}
}

// Through passes the elements through f, which may drop, join or split them. f is called once per iteration.
// The sequence that it returns must satisfy the contract of [Dataset], and must pass on the errors of the
// sequence that it gets. The pipeline still knows the files that it reads, so it can be sharded by file. Its
// length is unknown, and so is its batch size until the next Batch.
func (p Pipeline) Through(f func(context.Context, iter.Seq2[Element, error]) iter.Seq2[Element, error]) Pipeline {
	if f == nil {
		panic("data: Through(nil)")
	}
	return Pipeline{&passed{p, f}}
}

// Shuffle puts all elements into a random order, which differs in every epoch. The order depends only on the
// seed, the epoch and the number of elements. It needs memory for a list of indices. Shuffle panics without
// random access; see [Pipeline.ShuffleBuffer].
func (p Pipeline) Shuffle(seed int64) Pipeline {
	return Pipeline{p.random("Shuffle").with(shuffled{seed})}
}

// ShuffleBuffer shuffles any dataset within a window. It holds size elements, and yields a random one of them
// when the next arrives. Elements that are far apart stay in order, so a sorted dataset needs a window of its
// full size. The order depends on the seed, the epoch and the size.
func (p Pipeline) ShuffleBuffer(seed int64, size int) Pipeline {
	if size < 1 {
		panic(fmt.Sprintf("data: ShuffleBuffer of %d elements: want at least 1", size))
	}
	return Pipeline{&buffered{p, seed, size}}
}

// Batch joins n elements at a time along a new first dimension of every tensor. The last batch may be
// smaller. Elements of one batch must have the same structure, dtypes and shapes; otherwise the iteration
// yields an error.
//
// The tensors of a batch are newly allocated, except that a batch of consecutive rows of tensors in memory
// shares their memory.
func (p Pipeline) Batch(n int) Pipeline { return p.batch(n, false) }

// BatchFull is Batch, but drops a last batch of fewer than n elements.
func (p Pipeline) BatchFull(n int) Pipeline { return p.batch(n, true) }

func (p Pipeline) batch(n int, full bool) Pipeline {
	if n < 1 {
		panic(fmt.Sprintf("data: Batch of %d elements: want at least 1", n))
	}
	return Pipeline{&batches{p, n, full}}
}

// Repeat reads the dataset n times, or endlessly if n is negative. Pass k of epoch e is read as epoch e·n+k
// (e·(2³¹-1)+k if endless), so that no order repeats. With random access, all passes must have as many elements as the
// first; otherwise reading returns an error.
func (p Pipeline) Repeat(n int) Pipeline { return Pipeline{&repeated{p, n}} }

// Take keeps only the first n elements.
func (p Pipeline) Take(n int) Pipeline {
	if n < 0 {
		panic(fmt.Sprintf("data: Take of %d elements", n))
	}
	if v, ok := p.ds.(*view); ok {
		return Pipeline{v.with(first{n})}
	}
	return Pipeline{&taken{p, n}}
}

// Skip skips the first n elements.
func (p Pipeline) Skip(n int) Pipeline {
	if n < 0 {
		panic(fmt.Sprintf("data: Skip of %d elements", n))
	}
	if v, ok := p.ds.(*view); ok {
		return Pipeline{v.with(rest{n})}
	}
	return Pipeline{&skipped{p, n}}
}

// Shard keeps every count-th element, starting with element index. The shards 0…count-1 partition the
// dataset, also after Shuffle with the same seed.
//
// It is for programs that distribute their data themselves. A multi-worker strategy does this automatically,
// and training with one rejects a dataset that has a Shard (see [Sharded]).
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

// ShardHint marks the stage at which a strategy may shard the elements, as [Pipeline.Shard] does. Without a
// strategy, the pipeline yields all elements. It is TensorFlow's shard(SHARD_HINT, SHARD_HINT).
func (p Pipeline) ShardHint() Pipeline { return Pipeline{&hinted{p}} }

// Split divides the dataset in two parts, for training and validation. held has the given fraction of the
// elements, rounded, chosen at random by the seed; kept has the others. Both preserve the dataset's order,
// and the parts are the same in every epoch.
//
// Split panics if fraction is not from 0 to 1, without random access, and after Shuffle, which would mix the
// parts between epochs. (Keras' validation_split holds out the last elements; use Skip and Take for that.)
func (p Pipeline) Split(fraction float64, seed int64) (kept, held Pipeline) {
	if !(fraction >= 0 && fraction <= 1) {
		panic(fmt.Sprintf("data: Split of %v: want a fraction from 0 to 1", fraction))
	}
	k, h := p.random("Split").split(fraction, seed)
	return Pipeline{k}, Pipeline{h}
}

// Prefetch reads ahead: a goroutine keeps up to n elements ready. The goroutine starts with the loop and has
// ended when the loop ends. A panic in the stages before it becomes an error of the iteration.
func (p Pipeline) Prefetch(n int) Pipeline {
	if n < 1 {
		panic(fmt.Sprintf("data: Prefetch of %d elements: want at least 1", n))
	}
	return Pipeline{&prefetch{p, n}}
}

// Workers reads the elements with n goroutines (PyTorch's num_workers): those of a dataset with random access, the
// rows of its batches, and the results of Map on a stream. The order stays the same. At most 2·n elements are read
// ahead; of batches, one at a time is read. It applies to all stages before it, whose functions and sources are
// then called concurrently. A panic in them becomes an error of the iteration.
func (p Pipeline) Workers(n int) Pipeline {
	if n < 1 {
		panic(fmt.Sprintf("data: Workers(%d): want at least 1", n))
	}
	if v, ok := p.ds.(*view); ok {
		w := *v
		w.workers = n
		return Pipeline{&w}
	}
	return Pipeline{&pooled{p, n}}
}

// random returns the view that p reads, or panics if p has no random access.
func (p Pipeline) random(method string) *view {
	switch ds := p.ds.(type) {
	case nil:
		return newView(&function{})
	case *view:
		return ds
	}
	panic("data: " + method + " without random access: put it before Batch, Repeat and Prefetch, and shuffle streams by " +
		"ShuffleBuffer")
}
