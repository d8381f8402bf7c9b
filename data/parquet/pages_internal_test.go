package parquet

import (
	"bytes"
	"cmp"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/parquet-go/parquet-go"
	"github.com/parquet-go/parquet-go/encoding/thrift"
	"github.com/parquet-go/parquet-go/format"
)

// headerOf returns the header of a page: its type, sizes, and the number of its values in the header of the type.
func headerOf(kind format.PageType, uncompressed, compressed, values int32) []byte {
	h := format.PageHeader{Type: kind, UncompressedPageSize: uncompressed, CompressedPageSize: compressed}
	switch kind {
	case format.DataPage:
		h.DataPageHeader.Set(format.DataPageHeader{NumValues: values})
	case format.DictionaryPage:
		h.DictionaryPageHeader.Set(format.DictionaryPageHeader{NumValues: values})
	default:
		h.DataPageHeaderV2.Set(format.DataPageHeaderV2{NumValues: values})
	}
	b, err := thrift.Marshal(new(thrift.CompactProtocol), &h)
	if err != nil {
		panic(err)
	}
	return b
}

// TestHostilePages checks headers of pages that state more than their column has.
func TestHostilePages(t *testing.T) {
	const most = math.MaxInt32
	for want, c := range map[string]struct {
		header []byte
		codec  format.CompressionCodec
	}{
		"it has 2147483647 bytes, and 100 are left": {headerOf(format.DataPage, 100, most, 10), format.Snappy},
		"it has -1 bytes":                                 {headerOf(format.DataPage, 100, -1, 10), format.Snappy},
		"its 100 bytes decompress to 2147483647":          {headerOf(format.DataPage, most, 100, 10), format.Zstd},
		"its 100 bytes decompress to 101":                 {headerOf(format.DataPageV2, 101, 100, 10), format.Uncompressed},
		"it has 2147483647 values, and the column 10":     {headerOf(format.DataPage, 100, 100, most), format.Gzip},
		"it has 11 values, and the column 10":             {headerOf(format.DataPageV2, 100, 100, 11), format.Brotli},
		"a dictionary of 2147483647 values in 100 bytes":  {headerOf(format.DictionaryPage, 100, 100, most), format.Lz4Raw},
		"the compression LZO: supported are UNCOMPRESSED": {headerOf(format.DataPage, 100, 100, 10), format.LZO},
		"a value goes beyond its end":                     {bytes.Repeat([]byte{0x15}, 50), format.Snappy},
	} {
		name := filepath.Join(t.TempDir(), "pages")
		if err := os.WriteFile(name, append(c.header, make([]byte, 100)...), 0o600); err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(name)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(want, "beyond") {
			err = os.Truncate(name, int64(len(c.header)))
			info, _ = os.Stat(name)
		}
		meta := &format.ColumnMetaData{Codec: c.codec, NumValues: 10, TotalCompressedSize: info.Size()}
		if err == nil {
			err = checkPages(file{name, info.Size(), info.ModTime()}, meta, 4<<30)
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	meta := &format.ColumnMetaData{DataPageOffset: 1 << 40, TotalCompressedSize: 100}
	if err := checkPages(file{name: "none", size: 1000}, meta, 4<<30); err == nil {
		t.Error("a column beyond the end of the file passes")
	}
}

// TestPageHeaders compares the headers that are read with those of the library's writer, in every compression.
func TestPageHeaders(t *testing.T) {
	type of struct {
		X int64
		S string `parquet:",dict"`
	}
	rows := make([]of, 5000)
	for i := range rows {
		rows[i] = of{int64(i), strings.Repeat("text", i%7)}
	}
	for _, version := range []int{1, 2} {
		for codec := range ratioMax {
			name := filepath.Join(t.TempDir(), "rows.parquet")
			f, err := os.Create(name)
			if err != nil {
				t.Fatal(err)
			}
			w := parquet.NewGenericWriter[of](f, parquet.Compression(parquet.LookupCompressionCodec(codec)),
				parquet.DataPageVersion(version), parquet.PageBufferSize(1000))
			_, err = w.Write(rows)
			if err = cmp.Or(err, w.Close(), f.Close()); err != nil {
				t.Fatal(err)
			}
			table, err := open([]string{name}, Options{})
			if err != nil {
				t.Fatal(err)
			}
			for _, g := range table.groups {
				for k, c := range g.chunks {
					values := int64(0)
					for at := c.meta.DataPageOffset; at < c.meta.DataPageOffset+c.meta.TotalCompressedSize; {
						h, n, err := readHeader(c.source, at, c.source.size)
						if err != nil || h.kind == format.DictionaryPage || values == c.NumValues() {
							break
						}
						values += h.values
						at += n + h.compressed
					}
					if values != c.NumValues() {
						t.Errorf("%v, version %d, column %d: pages of %d values, want %d", codec, version, k, values, c.NumValues())
					}
					if err := checkPages(c.source, c.meta, 4<<30); err != nil {
						t.Errorf("%v, version %d, column %d: %v", codec, version, k, err)
					}
				}
			}
		}
	}
}

func FuzzPageHeader(f *testing.F) {
	f.Add(headerOf(format.DataPage, 100, 90, 10))
	f.Add(headerOf(format.DictionaryPage, math.MaxInt32, -1, math.MaxInt32))
	f.Fuzz(func(t *testing.T, header []byte) {
		n, err := structBytes(header)
		if err == nil {
			_, err = decodeHeader(header[:n])
		}
		if err == nil && (n <= 0 || n > len(header)) {
			t.Errorf("it reads %d bytes of %d", n, len(header))
		}
	})
}
