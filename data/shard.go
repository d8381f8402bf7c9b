package data

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
)

// ErrNoFiles reports that a dataset does not read files, so it cannot be sharded by file.
var ErrNoFiles = errors.New("data: the dataset reads no files")

// hinted is ShardHint.
type hinted struct{ src Dataset }

// Len implements [Dataset].
func (h *hinted) Len() int { return h.src.Len() }

// Iter implements [Dataset].
func (h *hinted) Iter(ctx context.Context) iter.Seq2[Element, error] { return h.src.Iter(ctx) }

// BatchSize returns the number of rows of an element of ds: of a batch, or of a tensor of a dataset in
// memory. It returns 0 if elements have no rows, or different numbers of them. full reports that every
// element has exactly that many rows. known is false in three cases: package data did not create ds; a
// [Pipeline.Through] follows the last Batch; or a [Pipeline.Map] follows a last Batch that is not full,
// because its result for the smaller last batch is unknown. It is TensorFlow's compute_batch_size.
func BatchSize(ds Dataset) (rows int, full, known bool) {
	t := traitsOf(ds)
	switch {
	case t.batch != nil:
		return t.batch.n, t.batch.full, t.batch.known
	case t.src != nil:
		return BatchSize(t.src)
	}
	return 0, false, false
}

// Files returns the names of the files that ds reads, or nil if it reads none.
func Files(ds Dataset) []string {
	for ; ds != nil; ds = traitsOf(ds).src {
		if f, ok := ds.(*files); ok {
			return slices.Clone(f.names)
		}
	}
	return nil
}

// shard is the part that Shard keeps. The zero value is the whole dataset.
type shard struct{ index, count int }

// Sharded reports whether ds has only a part of its elements, by [Pipeline.Shard], or of its files, by
// [ShardFiles], and which part. It recognises only datasets of this package, not elements that a function or
// another package's dataset omits.
func Sharded(ds Dataset) (index, count int, ok bool) {
	for ; ds != nil; ds = traitsOf(ds).src {
		t := traitsOf(ds)
		for _, p := range t.parts {
			if index, count, ok := Sharded(p); ok {
				return index, count, true
			}
		}
		if t.shard.count > 1 {
			return t.shard.index, t.shard.count, true
		}
	}
	return 0, 0, false
}

// ShardFiles returns ds restricted to the files index, index+count, …: one worker's shard. If ds reads no
// files, the error matches [ErrNoFiles]. If it has fewer than count files, ShardFiles also returns an error.
func ShardFiles(ds Dataset, index, count int) (Dataset, error) {
	n := len(Files(ds))
	switch {
	case n == 0:
		return nil, ErrNoFiles
	case n < count:
		return nil, fmt.Errorf("data: could not apply FILE based sharding: the dataset only has %d file(s), which is not "+
			"enough for the required %d shards/workers. Shard it by its data, or split it into more files", n, count)
	}
	return rewrite(ds, func(ds Dataset) Dataset {
		f, ok := ds.(*files)
		if !ok {
			return nil
		}
		mine := &files{format: f.format, next: f.next}
		if count > 1 {
			mine.shard = shard{index, count}
		}
		for i := index; i < n; i += count {
			mine.names = append(mine.names, f.names[i])
		}
		return mine
	}), nil
}

// ShardHinted returns ds sharded at the stage that [Pipeline.ShardHint] marks: it keeps every count-th
// element there, starting with index.
func ShardHinted(ds Dataset, index, count int) Dataset {
	return rewrite(ds, func(ds Dataset) Dataset {
		if h, ok := ds.(*hinted); ok {
			return Of(h.src).Shard(index, count)
		}
		return nil
	})
}

// rewrite replaces the outermost stage of ds for which change returns a dataset, by that dataset. It returns
// ds if there is no such stage.
func rewrite(ds Dataset, change func(Dataset) Dataset) Dataset {
	if other := change(ds); other != nil {
		return other
	}
	t := traitsOf(ds)
	if t.src == nil || t.with == nil {
		return ds
	}
	return t.with(rewrite(t.src, change))
}
