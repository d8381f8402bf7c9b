package parquet

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/parquet-go/parquet-go/encoding/thrift"
	"github.com/parquet-go/parquet-go/format"
)

// ratioMax has the largest ratio of the sizes of a page, decompressed and compressed, by codec. Snappy and LZ4 copy at
// most 64 and 255 bytes for each byte; DEFLATE 1,032 (zlib's technical notes); Zstandard a block of 128 KiB for 4 bytes
// (RFC 8878, 3.1.1.2); Brotli a block of 16 MiB for a few (RFC 7932, 9.2).
var ratioMax = map[format.CompressionCodec]int64{
	format.Uncompressed: 1, format.Snappy: 64, format.Lz4Raw: 255, format.Gzip: 1032, format.Zstd: 1 << 15,
	format.Brotli: 1 << 22,
}

// pageMax is a size that a page may have with any Options.RowGroupBytes: programs write pages of about 1 MiB.
const pageMax = 16 << 20

// headerMax is the largest header of a page that is read: it has the smallest and the largest value, which may be
// texts.
const headerMax = 16 << 20

// checkPages checks the headers of the pages of a column of a row group, for which the library allocates memory
// before it reads the page: no page may be larger than what is left of the column, decompress to more than its codec
// allows or than limit bytes, or have more values than the column has.
func checkPages(source file, c *format.ColumnMetaData, limit int64) error {
	at := c.DataPageOffset
	if c.DictionaryPageOffset != 0 {
		at = c.DictionaryPageOffset
	}
	if at < 0 || c.TotalCompressedSize < 0 || at > source.size || c.TotalCompressedSize > source.size-at {
		return fmt.Errorf("%d bytes from %d on, in a file of %d", c.TotalCompressedSize, at, source.size)
	}
	end := at + c.TotalCompressedSize
	for page := 0; at < end; page++ {
		h, bytes, err := readHeader(source, at, end)
		if err != nil {
			return fmt.Errorf("the header of page %d: %w", page, err)
		}
		at += bytes
		if err := h.check(c, end-at, limit); err != nil {
			return fmt.Errorf("the header of page %d: %w", page, err)
		}
		at += h.compressed
	}
	return nil
}

// pageHeader is the part of a page's header by which the library allocates memory.
type pageHeader struct {
	kind                     format.PageType
	uncompressed, compressed int64
	values                   int64
}

// readHeader reads the header of a page, and returns its length.
func readHeader(r io.ReaderAt, at, end int64) (h pageHeader, bytes int64, err error) {
	for size := int64(256); ; size *= 16 {
		buffer := make([]byte, min(size, end-at))
		if _, err := r.ReadAt(buffer, at); err != nil {
			return h, 0, err
		}
		n, err := structBytes(buffer)
		if errors.Is(err, errTruncated) && size < min(end-at, headerMax) {
			continue
		}
		if err == nil {
			h, err = decodeHeader(buffer[:n])
		}
		return h, int64(n), err
	}
}

// decodeHeader decodes the header of a page, which structBytes has checked.
func decodeHeader(b []byte) (h pageHeader, err error) {
	var of format.PageHeader
	err = recovered(func() error { return thrift.Unmarshal(new(thrift.CompactProtocol), b, &of) })
	values := map[format.PageType]int32{
		format.DataPage: of.DataPageHeader.V.NumValues, format.DictionaryPage: of.DictionaryPageHeader.V.NumValues,
		format.DataPageV2: of.DataPageHeaderV2.V.NumValues,
	}[of.Type]
	return pageHeader{of.Type, int64(of.UncompressedPageSize), int64(of.CompressedPageSize), int64(values)}, err
}

// check compares the header with its column, of which so many bytes follow the header.
func (h pageHeader) check(c *format.ColumnMetaData, left, limit int64) error {
	if h.compressed < 0 || h.compressed > left {
		return fmt.Errorf("it has %d bytes, and %d are left of the column", h.compressed, left)
	}
	ratio, known := ratioMax[c.Codec]
	if !known {
		var names []string
		for _, codec := range slices.Sorted(maps.Keys(ratioMax)) {
			names = append(names, codec.String())
		}
		return fmt.Errorf("the compression %v: supported are %s", c.Codec, strings.Join(names, ", "))
	}
	switch most := min(h.compressed*ratio, max(limit, pageMax)); {
	case h.uncompressed < 0 || h.uncompressed > most:
		return fmt.Errorf("its %d bytes decompress to %d: want at most %d (%v, Options.RowGroupBytes)", h.compressed,
			h.uncompressed, most, c.Codec)
	case h.values < 0 || h.kind == format.DictionaryPage && h.values > h.uncompressed:
		return fmt.Errorf("a dictionary of %d values in %d bytes", h.values, h.uncompressed)
	case h.kind != format.DictionaryPage && h.values > c.NumValues:
		return fmt.Errorf("it has %d values, and the column %d", h.values, c.NumValues)
	}
	return nil
}
