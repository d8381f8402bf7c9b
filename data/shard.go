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
	for {
		switch d := ds.(type) {
		case *batches:
			return d.n, d.full, true
		case *view:
			return d.table().rowsOfRows(), true, true
		case *longest:
			return d.n, false, true
		case *bucketed:
			return 0, false, true
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

// Files returns the names of the files that ds reads, or nil if it reads none.
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

// shard is the part that Shard keeps. The zero value is the whole dataset.
type shard struct{ index, count int }

// Sharded reports whether ds has only a part of its elements, by [Pipeline.Shard], or of its files, by
// [ShardFiles], and which part. It recognises only datasets of this package, not elements that a function or
// another package's dataset omits.
func Sharded(ds Dataset) (index, count int, ok bool) {
	for {
		var s shard
		switch d := ds.(type) {
		case *sharded:
			s = shard{d.index, d.count}
		case *view:
			s = d.shard
			for _, p := range d.parts() {
				if index, count, ok := Sharded(p); ok {
					return index, count, true
				}
			}
		case *interleavedStream:
			for _, p := range d.parts {
				if index, count, ok := Sharded(p); ok {
					return index, count, true
				}
			}
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
	src, with, ok := upstream(ds)
	if !ok {
		return ds
	}
	return with(rewrite(src, change))
}

// upstream returns the source of a stage, and a function that rebuilds the stage with another source.
func upstream(ds Dataset) (src Dataset, with func(Dataset) Dataset, ok bool) {
	switch d := ds.(type) {
	case Pipeline:
		return d.ds, func(src Dataset) Dataset { return Of(src) }, d.ds != nil
	case *batches:
		return d.src, func(src Dataset) Dataset { return &batches{Of(src), d.n, d.full} }, true
	case *longest:
		return d.src, func(src Dataset) Dataset { return &longest{Of(src), d.n, d.pad} }, true
	case *bucketed:
		return d.src, func(src Dataset) Dataset {
			return &bucketed{src: Of(src), b: d.b, lengths: &bucketLengths{list: d.b.Lengths}}
		}, true
	case *mapped:
		return d.src, func(src Dataset) Dataset { return &mapped{src, d.f, d.seed} }, true
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
	case *pooled:
		return d.src, func(src Dataset) Dataset { return &pooled{src, d.n} }, true
	case *prefetch:
		return d.src, func(src Dataset) Dataset { return &prefetch{src, d.n} }, true
	}
	return nil, nil, false
}
