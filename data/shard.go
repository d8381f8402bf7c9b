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

// BatchSize returns how many rows a batch of ds has: 0 if its elements are no batches. full says that every batch has as
// many, and known is false for a dataset that package data did not make, or that passes [Pipeline.Through] a function after
// its last Batch.
func BatchSize(ds Dataset) (rows int, full, known bool) {
	for {
		switch d := ds.(type) {
		case *batches:
			return d.n, d.full, true
		case *view, *files:
			return 0, true, true
		case *passed:
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
