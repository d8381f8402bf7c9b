package data

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/zeebo/xxh3"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Fingerprinted is a [Dataset] that knows a hash of its contents. It must be the same for equal contents on every
// machine, and should be known without reading all of them again.
type Fingerprinted interface {
	// Fingerprint returns the hash; 0 means unknown.
	Fingerprint() uint64
}

// Fingerprint returns a hash of what ds reads and in which order: the contents of its source, if the source is
// [Fingerprinted], and the stages with their seeds. Functions, and the weights of a source of [Batch] in memory,
// are not included. Workers compare it before they train. It is 0 if ds is a stream, or another package's dataset
// that is not Fingerprinted.
func Fingerprint(ds Dataset) uint64 {
	switch d := ds.(type) {
	case Pipeline:
		if d.ds == nil {
			return 0
		}
		return Fingerprint(d.ds)
	case *view:
		f := describe(Fingerprint(d.base), fmt.Sprint(d.stages))
		var b []byte
		for chunk := range slices.Chunk(d.fixed, 1024) {
			b = b[:0]
			for _, i := range chunk {
				b = binary.LittleEndian.AppendUint64(b, uint64(i))
			}
			f = xxh3.HashSeed(b, f)
		}
		return f
	case indexed:
		if f, ok := d.Indexed.(Fingerprinted); ok {
			return f.Fingerprint()
		}
		return describe(0, fmt.Sprint("source of ", d.Len()))
	case *mappedRows:
		return describe(Fingerprint(d.Seekable), fmt.Sprint("Map ", d.seed))
	case *mapped:
		return describe(Fingerprint(d.src), fmt.Sprint("Map ", d.seed))
	case *batches:
		return describe(Fingerprint(d.src), fmt.Sprint("Batch ", d.n, d.full))
	case *interleavedStream: // streams have none
		return 0
	case *longest:
		return describe(Fingerprint(d.src), fmt.Sprint("PaddedBatch ", d.n, d.pad.text()))
	case *bucketed:
		return describe(Fingerprint(d.src), fmt.Sprint("BucketByLength ", d.b.Boundaries, d.b.Rows, d.b.Full, d.b.text()))
	case *repeated:
		return describe(Fingerprint(d.src), fmt.Sprint("Repeat ", d.n))
	case *taken:
		return describe(Fingerprint(d.src), first{d.n}.String())
	case *skipped:
		return describe(Fingerprint(d.src), rest{d.n}.String())
	case *sharded:
		return describe(Fingerprint(d.src), every{d.index, d.count}.String())
	case *hinted:
		return Fingerprint(d.src)
	case *pooled:
		return Fingerprint(d.src)
	case *prefetch:
		return Fingerprint(d.src)
	case Fingerprinted:
		return d.Fingerprint()
	}
	return 0
}

// describe adds a description to a fingerprint.
func describe(of uint64, text string) uint64 { return xxh3.HashStringSeed(text, of) }

// Fingerprint implements [Fingerprinted].
func (t *table) Fingerprint() uint64 {
	t.hashOnce.Do(func() {
		b, _ := t.like.(Batch)
		for _, c := range t.columns {
			if c.rows != b.Weights {
				t.hash = hashColumn(&c, t.hash)
			}
		}
	})
	return t.hash
}

func hashColumn(c *column, seed uint64) uint64 {
	h := xxh3.HashSeed(c.rows.Memory().HostBytes(), seed)
	if c.dtype == tensor.String {
		for _, s := range c.rows.StringData() {
			h = xxh3.HashStringSeed(s, h)
		}
	}
	if c.value != nil {
		for _, x := range c.value {
			h = describe(h, fmt.Sprint(x))
		}
	}
	return describe(h, fmt.Sprint(c.dtype, c.shape, c.rows.Shape()))
}

// FingerprintFiles returns a hash of the contents of files, for a [Fingerprinted] source of another package. It reads
// the files once, in parallel, and keeps the hashes in an index beside each file; see [IndexOptions]. format names the
// files in errors.
func FingerprintFiles(ctx context.Context, format string, names []string, o IndexOptions) (uint64, error) {
	files, err := indexFiles(ctx, "array", format, names, o, nil)
	if err != nil {
		return 0, err
	}
	return fingerprint(format, files), nil
}
