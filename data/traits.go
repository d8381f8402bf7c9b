package data

import "fmt"

// builtin is a dataset of this package. What asks about a pipeline ([Fingerprint], [Sharded], [BatchSize], …) goes by
// its traits, so a new stage states them in one place.
type builtin interface {
	Dataset
	traits() traits
}

// traits are what the functions that ask about a pipeline need to know of one stage. The zero value is that of a
// dataset that reads no other one.
type traits struct {
	src   Dataset                   // whose elements it reads; nil: none, or parts
	with  func(src Dataset) Dataset // returns the stage over another source; nil: it has none that can be replaced
	parts []Pipeline                // which it combines
	text  string                    // of the stage, for Fingerprint; "": the elements and their order are those of src

	stream bool  // no random access, whatever it reads
	shard  shard // which Shard or ShardFiles kept
	batch  *rows // what BatchSize returns; nil: that of src
	// contents returns the fingerprint with what only one host knows, for CacheDir; nil: it follows from src or parts.
	contents func() uint64
}

// rows are the numbers of rows of the elements of a dataset: see [BatchSize].
type rows struct {
	n           int
	full, known bool
}

// traitsOf returns the traits of ds: none if another package has created it.
func traitsOf(ds Dataset) traits {
	if b, ok := ds.(builtin); ok {
		return b.traits()
	}
	return traits{}
}

func (p Pipeline) traits() traits {
	return traits{src: p.ds, with: func(src Dataset) Dataset { return Of(src) }}
}

func (v *view) traits() traits {
	return traits{
		parts: traitsOf(v.root()).parts, shard: v.shard, batch: &rows{v.table().rowsOfRows(), true, true},
		contents: func() uint64 { return also(contents(v.base), Fingerprint(v)) },
	}
}

func (i indexed) traits() traits {
	return traits{contents: func() uint64 { return contents(i.Indexed) }}
}

func (t *table) traits() traits { return traits{contents: t.contents} }

func (f *imageFiles) traits() traits { return traits{contents: f.version} }

func (f *files) traits() traits {
	return traits{stream: true, shard: f.shard, batch: &rows{0, true, true}}
}

func (m *mappedRows) traits() traits { return traits{src: m.Seekable, text: mapText(m.seed)} }

func (m *mapped) traits() traits {
	batch := &rows{}
	if n, full, _ := BatchSize(m.src); full {
		batch = &rows{n, true, true}
	}
	with := func(src Dataset) Dataset { return &mapped{src, m.f, m.seed} }
	return traits{src: m.src, with: with, text: mapText(m.seed), batch: batch}
}

func mapText(seed int64) string { return fmt.Sprint("Map ", seed) }

func (j *joined) traits() traits { return traits{parts: j.parts} }

func (m *mixed) traits() traits { return traits{parts: m.parts} }

func (z *zipped) traits() traits { return traits{parts: z.parts} }

func (x *interleaved) traits() traits { return traits{parts: x.parts} }

func (x *interleavedStream) traits() traits { return traits{parts: x.parts, stream: true} }

func (c *cached) traits() traits {
	return traits{parts: []Pipeline{c.src}, contents: func() uint64 { return contents(c.src) }}
}

func (c *cachedIn) traits() traits {
	return traits{parts: []Pipeline{c.src}, contents: func() uint64 { return contents(c.src) }}
}

func (b *batches) traits() traits {
	with := func(src Dataset) Dataset { return &batches{Of(src), b.n, b.full} }
	return traits{src: b.src, with: with, text: fmt.Sprint("Batch ", b.n, b.full), batch: &rows{b.n, b.full, true}}
}

func (l *longest) traits() traits {
	with := func(src Dataset) Dataset { return &longest{Of(src), l.n, l.pad} }
	text := fmt.Sprint("PaddedBatch ", l.n, l.pad.text())
	return traits{src: l.src, with: with, text: text, batch: &rows{l.n, false, true}}
}

func (b *bucketed) traits() traits {
	with := func(src Dataset) Dataset {
		return &bucketed{src: Of(src), b: b.b, lengths: &bucketLengths{list: b.b.Lengths}}
	}
	text := fmt.Sprint("BucketByLength ", b.b.Boundaries, b.b.Rows, b.b.Full, b.b.text())
	return traits{src: b.src, with: with, text: text, batch: &rows{0, false, true}}
}

func (b *buffered) traits() traits {
	return traits{src: b.src, with: func(src Dataset) Dataset { return &buffered{src, b.seed, b.size} }, stream: true}
}

func (r *repeated) traits() traits {
	with := func(src Dataset) Dataset { return &repeated{src, r.n} }
	return traits{src: r.src, with: with, text: fmt.Sprint("Repeat ", r.n)}
}

func (t *taken) traits() traits {
	return traits{src: t.src, with: func(src Dataset) Dataset { return &taken{src, t.n} }, text: first{t.n}.String()}
}

func (s *skipped) traits() traits {
	return traits{src: s.src, with: func(src Dataset) Dataset { return &skipped{src, s.n} }, text: rest{s.n}.String()}
}

func (s *sharded) traits() traits {
	with := func(src Dataset) Dataset { return &sharded{src, s.index, s.count} }
	return traits{src: s.src, with: with, text: every{s.index, s.count}.String(), shard: shard{s.index, s.count}}
}

func (h *hinted) traits() traits {
	return traits{src: h.src, with: func(src Dataset) Dataset { return &hinted{src} }}
}

func (p *passed) traits() traits {
	return traits{src: p.src, with: func(src Dataset) Dataset { return &passed{src, p.f} }, stream: true, batch: &rows{}}
}

func (p *pooled) traits() traits {
	return traits{src: p.src, with: func(src Dataset) Dataset { return &pooled{src, p.n} }}
}

func (p *prefetch) traits() traits {
	return traits{src: p.src, with: func(src Dataset) Dataset { return &prefetch{src, p.n} }}
}
