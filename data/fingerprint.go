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
	if f, ok := ds.(Fingerprinted); ok {
		return f.Fingerprint()
	}
	t := traitsOf(ds)
	switch {
	case t.src == nil, t.stream:
		return 0
	case t.text == "":
		return Fingerprint(t.src)
	}
	return describe(Fingerprint(t.src), t.text)
}

// Fingerprint implements [Fingerprinted].
func (v *view) Fingerprint() uint64 {
	f := describe(Fingerprint(v.base), fmt.Sprint(v.stages))
	var b []byte
	for chunk := range slices.Chunk(v.fixed, 1024) {
		b = b[:0]
		for _, i := range chunk {
			b = binary.LittleEndian.AppendUint64(b, uint64(i))
		}
		f = xxh3.HashSeed(b, f)
	}
	return f
}

// Fingerprint implements [Fingerprinted].
func (i indexed) Fingerprint() uint64 {
	if f, ok := i.Indexed.(Fingerprinted); ok {
		return f.Fingerprint()
	}
	return describe(0, fmt.Sprint("source of ", i.Len()))
}

// Fingerprint implements [Fingerprinted]: a stream has none.
func (x *interleavedStream) Fingerprint() uint64 { return 0 }

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

// contents is Fingerprint with the weights of examples, which are not in it.
func (t *table) contents() uint64 {
	if b, _ := t.like.(Batch); b.Weights != nil {
		for _, c := range t.columns {
			if c.rows == b.Weights {
				return hashColumn(&c, t.Fingerprint())
			}
		}
	}
	return t.Fingerprint()
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
