package data

import (
	"bytes"
	"encoding/binary"
	"slices"
	"testing"

	"github.com/zeebo/xxh3"
)

func testIndex() *fileIndex {
	return &fileIndex{kind: "lines", size: 1 << 40, time: -5, hashes: []uint64{1, 1 << 63}, starts: []int64{0, 3, 1 << 39}}
}

// FuzzIndex checks that no contents of an index file make its decoder fail, and that what it accepts is consistent.
func FuzzIndex(f *testing.F) {
	f.Add(testIndex().encode())
	f.Add((&fileIndex{}).encode())
	f.Add([]byte(indexMagic + "\x05lines"))
	f.Fuzz(func(t *testing.T, b []byte) {
		sealed := binary.LittleEndian.AppendUint64(slices.Clone(b), xxh3.Hash(b)) // so that more is decoded
		for _, b := range [][]byte{b, sealed} {
			x, err := decodeIndex(b)
			if err != nil {
				continue
			}
			if x.size < 0 || !slices.IsSorted(x.starts) || len(x.starts) > len(b) || len(x.hashes) > len(b) ||
				len(x.starts) > 0 && (x.starts[0] < 0 || x.starts[len(x.starts)-1] >= x.size) {
				t.Errorf("decoded %+v", x)
			}
		}
	})
}

// TestIndexCoding checks that an index is decoded as it was encoded, and no byte of it can change.
func TestIndexCoding(t *testing.T) {
	x := testIndex()
	b := x.encode()
	y, err := decodeIndex(b)
	if err != nil || y.kind != x.kind || y.size != x.size || y.time != x.time || !slices.Equal(y.hashes, x.hashes) ||
		!slices.Equal(y.starts, x.starts) || !bytes.Equal(y.encode(), b) {
		t.Errorf("got %+v, %v, want %+v", y, err, x)
	}
	for i := range b {
		c := slices.Clone(b)
		c[i] ^= 1
		if _, err := decodeIndex(c); err == nil {
			t.Errorf("byte %d was changed unnoticed", i)
		}
		if _, err := decodeIndex(b[:i]); err == nil {
			t.Errorf("the first %d bytes are a valid index", i)
		}
	}
}
