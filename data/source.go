package data

import (
	"bufio"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/lockstep-ml/lockstep/internal/memlimit"
)

// FormatError reports that the contents of a file are invalid or truncated.
type FormatError struct {
	File   string // the name with which it was opened; empty for a reader
	Format string // "IDX", "CSV", …
	Line   int    // of a text file, from 1; 0 for other formats
	Offset int64  // in bytes, of the invalid or truncated part, in the uncompressed contents; negative: unknown
	Packed bool   // the file is compressed
	Err    error  // what was found, and what was expected
}

// Error implements error.
func (e *FormatError) Error() string {
	s := "data: "
	if e.File != "" {
		s += e.File + ": "
	}
	s += e.Format + ": "
	if e.Line > 0 {
		s += fmt.Sprintf("line %d, ", e.Line)
	}
	if e.Offset < 0 {
		return s + e.Err.Error()
	}
	s += fmt.Sprintf("offset %d", e.Offset)
	if e.Packed {
		s += " of the uncompressed contents"
	}
	return s + ": " + e.Err.Error()
}

// Unwrap returns Err.
func (e *FormatError) Unwrap() error { return e.Err }

// source reads a file or a reader, decompresses gzip, and tracks the offset.
type source struct {
	name   string
	format string
	r      *bufio.Reader
	offset int64 // of the next byte, uncompressed
	packed bool
	file   io.Closer
}

// openSource opens the named file. Close closes it.
func openSource(name, format string) (*source, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("data: %w", err)
	}
	s, err := newSource(f, name, format)
	if err != nil {
		f.Close()
		return nil, err
	}
	s.file = f
	return s, nil
}

// newSource returns a source that reads r. name may be empty.
func newSource(r io.Reader, name, format string) (*source, error) {
	s := &source{name: name, format: format, r: bufio.NewReaderSize(r, 1<<16)}
	head, err := s.r.Peek(recordHeadBytes)
	if err != nil && err != io.EOF {
		return nil, s.wrong(0, err)
	}
	if !isGzip(head, format) {
		return s, nil
	}
	s.packed = true
	packed := &countingReader{r: s.r}
	z, err := gzip.NewReader(packed)
	if err != nil {
		return nil, s.wrong(0, s.explain(err))
	}
	s.r = bufio.NewReaderSize(&unpackedReader{r: z, packed: packed}, 1<<16)
	return s, nil
}

// readFile reads the named file by read.
func readFile[T any](name, format string, read func(*source) (T, error)) (out T, err error) {
	s, err := openSource(name, format)
	if err != nil {
		return out, err
	}
	defer s.Close()
	return read(s)
}

// readFrom is readFile for a reader.
func readFrom[T any](r io.Reader, format string, read func(*source) (T, error)) (out T, err error) {
	s, err := newSource(r, "", format)
	if err != nil {
		return out, err
	}
	return read(s)
}

// isGzip reports whether the first recordHeadBytes of a file, or all if it has fewer, are those of a gzip stream. The
// length of a TFRecord may look like one, but not if the checksum of the length follows.
func isGzip(head []byte, format string) bool {
	if len(head) < 2 || head[0] != 0x1f || head[1] != 0x8b {
		return false
	}
	return format != formatTFRecord || len(head) < recordHeadBytes ||
		maskedCRC(head[:8]) != binary.LittleEndian.Uint32(head[8:])
}

// Decompressed contents may have unpackedRatioMax times their compressed length, and unpackedFreely bytes in
// any case. Data sets stay far below this ratio (MNIST 5, CSV files 3 to 20). gzip can reach 1,032, and turn
// a megabyte into a gigabyte.
const (
	unpackedRatioMax = 100
	unpackedFreely   = 64 << 20
)

// unpackedReader reads decompressed contents, and fails if they exceed these limits.
type unpackedReader struct {
	r      io.Reader
	packed *countingReader // what r reads
	n      int64
}

func (u *unpackedReader) Read(b []byte) (int, error) {
	n, err := u.r.Read(b)
	u.n += int64(n)
	if u.n > unpackedFreely && u.n/unpackedRatioMax > u.packed.n {
		return n, fmt.Errorf("%d compressed bytes decompress to more than %d, %d times as many; at most %d times is "+
			"expected: "+
			"if you trust the file, decompress it first (gunzip)", u.packed.n, u.n, u.n/max(u.packed.n, 1), unpackedRatioMax)
	}
	return n, err
}

// countingReader counts the bytes read. It is an io.ByteReader, so that gzip reads no more than it needs.
type countingReader struct {
	r *bufio.Reader
	n int64
}

func (c *countingReader) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.n += int64(n)
	return n, err
}

func (c *countingReader) ReadByte() (byte, error) {
	b, err := c.r.ReadByte()
	if err == nil {
		c.n++
	}
	return b, err
}

// Close closes the file.
func (s *source) Close() {
	if s.file != nil {
		s.file.Close()
	}
}

// wrong returns a FormatError for the byte at offset.
func (s *source) wrong(offset int64, err error) error {
	return &FormatError{File: s.name, Format: s.format, Offset: offset, Packed: s.packed, Err: err}
}

// explain adds the meaning of an error of the underlying reader.
func (s *source) explain(err error) error {
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF) && s.packed:
		return errors.New("the gzip stream ends too early: the file is truncated, or data was appended to it")
	case errors.Is(err, gzip.ErrHeader):
		return fmt.Errorf("a gzip header expected, or the end of the file: %w", err)
	case errors.Is(err, gzip.ErrChecksum):
		return fmt.Errorf("the contents do not match their checksum: the file is corrupt: %w", err)
	}
	return err
}

// full reads len(b) bytes. what names them in errors.
func (s *source) full(b []byte, what string) error {
	n, err := io.ReadFull(s.r, b)
	at := s.offset
	s.offset += int64(n)
	switch {
	case err == nil:
		return nil
	case err == io.EOF || err == io.ErrUnexpectedEOF && !s.packed:
		return s.wrong(at, fmt.Errorf("%s expected, %d bytes; the file ends after %d", what, len(b), n))
	}
	return s.wrong(s.offset, s.explain(err))
}

// firstRead is the most memory that is allocated before any data is read.
const firstRead = 1 << 20

// checkedBytes is the size from which a read is compared with the available memory before it starts.
const checkedBytes = 256 << 20

// bytes reads n bytes. what names them in errors. It allocates at most twice the number of bytes read so far,
// so that an invalid header cannot make it allocate much more than the size of the file.
func (s *source) bytes(n int64, what string) ([]byte, error) {
	start := s.offset
	if left, ok := memlimit.Available(); n >= checkedBytes && ok && n > left {
		return nil, s.wrong(start, fmt.Errorf("%s expected, %d bytes: only %d bytes of memory are available", what, n, left))
	}
	b := make([]byte, 0, min(n, firstRead))
	for int64(len(b)) < n {
		if len(b) == cap(b) {
			grown := make([]byte, len(b), min(n, 2*int64(cap(b))))
			copy(grown, b)
			b = grown
		}
		m, err := io.ReadFull(s.r, b[len(b):cap(b)])
		b = b[:len(b)+m]
		s.offset += int64(m)
		switch {
		case err == io.EOF || err == io.ErrUnexpectedEOF && !s.packed:
			return nil, s.wrong(start, fmt.Errorf("%s expected, %d bytes; the file ends after %d of them", what, n, len(b)))
		case err != nil:
			return nil, s.wrong(s.offset, s.explain(err))
		}
	}
	return b, nil
}

// end checks that the contents end here, and verifies the checksum of a compressed file.
func (s *source) end(after string) error {
	switch _, err := s.r.ReadByte(); {
	case err == io.EOF:
		return nil
	case err != nil:
		return s.wrong(s.offset, s.explain(err))
	}
	return s.wrong(s.offset, fmt.Errorf("end of file expected after %s, more bytes found", after))
}
