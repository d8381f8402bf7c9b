package data

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
)

// ErrNoFiles says that a dataset does not read files, so that it cannot be shared out by them.
var ErrNoFiles = errors.New("data: the dataset reads no files")

// hinted is ShardHint.
type hinted struct{ src Dataset }

// Len implements [Dataset].
func (h *hinted) Len() int { return h.src.Len() }

// Iter implements [Dataset].
func (h *hinted) Iter(ctx context.Context) iter.Seq2[Element, error] { return h.src.Iter(ctx) }

// BatchSize returns how many rows an element of ds has: a batch, or a tensor of a dataset in memory, and 0 if elements have no
// rows, or some other number than others have. full says that every element has as many. known is false for a dataset that package
// data did not make, that passes [Pipeline.Through] a function after its last Batch, or [Pipeline.Map] one after a last Batch that
// is not full: what the function makes of the smaller batch at the end is not known (TensorFlow's compute_batch_size).
func BatchSize(ds Dataset) (rows int, full, known bool) {
	for {
		switch d := ds.(type) {
		case *batches:
			return d.n, d.full, true
		case *view:
			t, _ := d.base.(*table)
			return t.rowsOfRows(), true, true
		case *files:
			return 0, true, true
		case *passed:
			return 0, false, false
		case *mapped:
			if rows, full, _ = BatchSize(d.src); full {
				return rows, true, true
			}
			return 0, false, false
		}
		src, _, ok := upstream(ds)
		if !ok {
			return 0, false, false
		}
		ds = src
	}
}

// Files returns the names of the files that ds reads, or nothing.
func Files(ds Dataset) []string {
	for {
		if f, ok := ds.(*files); ok {
			return slices.Clone(f.names)
		}
		src, _, ok := upstream(ds)
		if !ok {
			return nil
		}
		ds = src
	}
}

// shard is the part that Shard keeps; the zero value is the whole.
type shard struct{ index, count int }

// Sharded reports whether ds keeps only a part of its elements by [Pipeline.Shard], or of its files by [ShardFiles],
// and which. It sees what package data made; not what a function, or a dataset of another package, leaves out.
func Sharded(ds Dataset) (index, count int, ok bool) {
	for {
		var s shard
		switch d := ds.(type) {
		case *sharded:
			s = shard{d.index, d.count}
		case *view:
			s = d.shard
		case *files:
			s = d.shard
		}
		if s.count > 1 {
			return s.index, s.count, true
		}
		src, _, ok := upstream(ds)
		if !ok {
			return 0, 0, false
		}
		ds = src
	}
}

// ShardFiles returns ds reading only the files index, index+count, … of those that it reads: one worker's share. A dataset
// that reads none is an error that matches [ErrNoFiles]; one that has fewer than count is one, too.
func ShardFiles(ds Dataset, index, count int) (Dataset, error) {
	n := len(Files(ds))
	switch {
	case n == 0:
		return nil, ErrNoFiles
	case n < count:
		return nil, fmt.Errorf("data: could not apply FILE based sharding: the dataset only has %d file(s), which is not enough for the required %d shards/workers. Share it out by its data, or split it into more files", n, count)
	}
	return rewrite(ds, func(ds Dataset) Dataset {
		f, ok := ds.(*files)
		if !ok {
			return nil
		}
		mine := &files{format: f.format, read: f.read}
		if count > 1 {
			mine.shard = shard{index, count}
		}
		for i := index; i < n; i += count {
			mine.names = append(mine.names, f.names[i])
		}
		return mine
	}), nil
}

// ShardHinted returns ds with one worker's share of the elements where [Pipeline.ShardHint] marks it.
func ShardHinted(ds Dataset, index, count int) Dataset {
	return rewrite(ds, func(ds Dataset) Dataset {
		if h, ok := ds.(*hinted); ok {
			return Of(h.src).Shard(index, count)
		}
		return nil
	})
}

// rewrite returns ds with its outermost part for which change does not return nil replaced by what that returns; ds itself
// if there is none.
func rewrite(ds Dataset, change func(Dataset) Dataset) Dataset {
	if other := change(ds); other != nil {
		return other
	}
	src, with, ok := upstream(ds)
	if !ok {
		return ds
	}
	return with(rewrite(src, change))
}

// upstream returns what a stage of a pipeline reads, and how the stage is made of another one.
func upstream(ds Dataset) (src Dataset, with func(Dataset) Dataset, ok bool) {
	switch d := ds.(type) {
	case Pipeline:
		return d.ds, func(src Dataset) Dataset { return Of(src) }, d.ds != nil
	case *batches:
		return d.src, func(src Dataset) Dataset { return &batches{Of(src), d.n, d.full} }, true
	case *mapped:
		return d.src, func(src Dataset) Dataset { return &mapped{src, d.f} }, true
	case *buffered:
		return d.src, func(src Dataset) Dataset { return &buffered{src, d.seed, d.size} }, true
	case *repeated:
		return d.src, func(src Dataset) Dataset { return &repeated{src, d.n} }, true
	case *taken:
		return d.src, func(src Dataset) Dataset { return &taken{src, d.n} }, true
	case *skipped:
		return d.src, func(src Dataset) Dataset { return &skipped{src, d.n} }, true
	case *sharded:
		return d.src, func(src Dataset) Dataset { return &sharded{src, d.index, d.count} }, true
	case *hinted:
		return d.src, func(src Dataset) Dataset { return &hinted{src} }, true
	case *passed:
		return d.src, func(src Dataset) Dataset { return &passed{src, d.f} }, true
	case *prefetch:
		return d.src, func(src Dataset) Dataset { return &prefetch{src, d.n} }, true
	}
	return nil, nil, false
}
