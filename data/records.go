package data

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"path"
	"slices"
	"sort"
	"strings"

	"github.com/zeebo/xxh3"

	"github.com/lockstep-ml/lockstep/tensor"
)

// records is the dataset of the records of indexed files.
type records struct {
	files  []*indexedFile
	ends   []int // by file: the number of records up to its end
	decode func(f *indexedFile, record int, offset int64, raw []byte) (Element, error)
	hash   uint64
}

// newRecords returns a pipeline of the records from number skip of each file on. format says how they are decoded, for
// the fingerprint.
func newRecords(format string, files []*indexedFile, skip int,
	decode func(f *indexedFile, record int, offset int64, raw []byte) (Element, error),
) Pipeline {
	r := &records{files: files, hash: fingerprint(format, files), decode: decode}
	n := 0
	for _, f := range files {
		n += max(len(f.index.starts)-skip, 0)
		r.ends = append(r.ends, n)
	}
	if skip > 0 {
		for _, f := range files {
			x := *f.index
			x.starts = x.starts[min(skip, len(x.starts)):]
			f.index = &x
		}
	}
	return Of(r)
}

// Len implements [Dataset].
func (r *records) Len() int {
	if len(r.ends) == 0 {
		return 0
	}
	return r.ends[len(r.ends)-1]
}

// Iter implements [Dataset].
func (r *records) Iter(ctx context.Context) iter.Seq2[Element, error] { return newView(r).Iter(ctx) }

// At implements [Indexed].
func (r *records) At(_ context.Context, i int) (Element, error) {
	file := sort.SearchInts(r.ends, i+1)
	if file > 0 {
		i -= r.ends[file-1]
	}
	f := r.files[file]
	lo, hi := f.span(i)
	if hi-lo > recordBytesMax {
		return nil, f.wrong(lo, fmt.Errorf("a record of %d bytes: at most %d expected", hi-lo, recordBytesMax))
	}
	raw, err := f.read(lo, hi)
	if err != nil {
		return nil, err
	}
	return r.decode(f, i, lo, raw)
}

// Fingerprint implements [Fingerprinted].
func (r *records) Fingerprint() uint64 { return r.hash }

// OpenLines returns a pipeline of the lines of text files, like [Lines], with random access: each line is a string
// scalar. It reads the files once to build an index; see [IndexOptions].
func OpenLines(ctx context.Context, names []string, o IndexOptions) (Pipeline, error) {
	files, err := indexFiles(ctx, "lines", "text", names, o, (*indexedFile).joinLines)
	if err != nil {
		return Pipeline{}, err
	}
	return newRecords("lines", files, 0, func(f *indexedFile, i int, offset int64, raw []byte) (Element, error) {
		line, err := f.line(i, offset, raw)
		return stringScalar(string(line)), err
	}), nil
}

// line returns a line without its end.
func (f *indexedFile) line(number int, offset int64, raw []byte) ([]byte, error) {
	if len(raw) > lineBytesMax {
		return nil, &FormatError{
			File: f.name, Format: f.format, Line: number + 1, Offset: offset,
			Err: fmt.Errorf("a line of more than %d bytes", lineBytesMax),
		}
	}
	return bytes.TrimSuffix(bytes.TrimSuffix(raw, []byte("\n")), []byte("\r")), nil
}

// firstLine returns a line without the blank ones and comments after it.
func firstLine(raw []byte) []byte {
	if i := bytes.IndexByte(raw, '\n'); i >= 0 {
		return raw[:i+1]
	}
	return raw
}

// CSVFile is a CSV file whose rows are read from the file.
type CSVFile struct {
	Names []string // of the columns
	// Rows has an element for each row: a string tensor with the row's fields, without spaces around them.
	Rows Pipeline
}

// OpenCSV opens a CSV file with random access, for files that do not fit in memory. It reads the file once to build
// an index; see [IndexOptions]. The fields are text, which a Map converts. Lines are as for [LoadCSV], but a line of
// spaces only is an error.
func OpenCSV(ctx context.Context, name string, c CSV, o IndexOptions) (*CSVFile, error) {
	kind := "CSV"
	if c.Comment != "" {
		kind = fmt.Sprintf("CSV-%016x", xxh3.HashString(c.Comment)) // for the name of the index
	}
	files, err := indexFiles(ctx, kind, "CSV", []string{name}, o, func(f *indexedFile) ([]int64, error) {
		return f.csvLines(c.Comment)
	})
	if err != nil {
		return nil, err
	}
	f := files[0]
	if c.Comma == 0 {
		c.Comma = ','
	}
	if len(f.index.starts) == 0 {
		return nil, f.wrong(0, errors.New("the file is empty: a line with the columns' names expected"))
	}
	lo, hi := f.span(0)
	raw, err := f.read(lo, min(hi, lo+lineBytesMax+1))
	if err != nil {
		return nil, err
	}
	head, err := f.line(0, 0, firstLine(raw))
	if err != nil {
		return nil, err
	}
	bom := []byte("\ufeff")
	fields, err := c.fields(nil, bytes.TrimPrefix(head, bom))
	var all, names []string
	var places []int // of the columns in a line
	if err == nil {
		all, err = c.names(fields)
	}
	if err == nil {
		names, places, err = c.chosen(all)
	}
	if err != nil {
		return nil, &FormatError{File: name, Format: "CSV", Line: 1, Err: err}
	}
	skip := 1
	if c.NoHeader {
		skip = 0
	}
	format := fmt.Sprintf("CSV %q %v %q", c.Comma, c.NoHeader, c.Comment)
	if len(c.Columns)+len(c.Drop) > 0 {
		format += fmt.Sprintf(" %q", names)
	}
	rows := newRecords(format, files, skip, func(f *indexedFile, i int, offset int64, raw []byte) (Element, error) {
		line, err := f.line(i+skip, offset, firstLine(raw))
		if err != nil {
			return nil, err
		}
		fields, err := c.fields(nil, bytes.TrimPrefix(line, bom))
		if err == nil && len(fields) != len(all) {
			err = fmt.Errorf("%d fields, where the first line has %d", len(fields), len(all))
		}
		if err != nil {
			return nil, f.wrong(offset, err)
		}
		out := make([]string, len(places))
		for i, place := range places {
			out[i] = string(fields[place])
		}
		return tensor.Strings(out), nil
	})
	return &CSVFile{names, rows}, nil
}

// OpenTFRecords returns a pipeline of the records of TFRecord files, like [TFRecords], with random access. It reads
// the files once to build an index; see [IndexOptions].
func OpenTFRecords(ctx context.Context, names []string, o IndexOptions) (Pipeline, error) {
	files, err := indexFiles(ctx, formatTFRecord, formatTFRecord, names, o, scanTFRecords)
	if err != nil {
		return Pipeline{}, err
	}
	return newRecords(formatTFRecord, files, 0, func(f *indexedFile, _ int, offset int64, raw []byte) (Element, error) {
		s := &source{name: f.name, format: f.format, r: bufio.NewReader(bytes.NewReader(raw)), offset: offset}
		record, err := s.record(0)
		if err != nil {
			return nil, err
		}
		return stringScalar(string(record)), nil
	}), nil
}

// scanTFRecords finds the records of a TFRecord file by their lengths, whose checksums it verifies.
func scanTFRecords(f *indexedFile) (starts []int64, err error) {
	in := newHopper(f)
	for at := int64(0); at < f.index.size; {
		var head [recordHeadBytes]byte
		if err := in.readAt(head[:], at); err != nil {
			return nil, f.wrong(at, fmt.Errorf("a record's length and its checksum expected, %d bytes: %w", len(head), err))
		}
		n, err := recordLength(head)
		if err != nil {
			return nil, f.wrong(at, err)
		}
		next := at + recordHeadBytes + n + recordFootBytes
		if next > f.index.size {
			return nil, f.wrong(at, fmt.Errorf("a record of %d bytes expected; the file ends after %d", n, f.index.size-at))
		}
		starts = append(starts, at)
		at = next
	}
	return starts, nil
}

// hopper reads small parts of a file at increasing offsets.
type hopper struct {
	f  *indexedFile
	at int64 // of b
	b  []byte
}

func newHopper(f *indexedFile) *hopper { return &hopper{f: f} }

// readAt reads len(b) bytes, at most the size of the buffer.
func (h *hopper) readAt(b []byte, offset int64) error {
	if offset < h.at || offset+int64(len(b)) > h.at+int64(len(h.b)) {
		buffer := slices.Grow(h.b[:0], 1<<16)[:1<<16]
		n, err := h.f.readAt(buffer, offset)
		if err != nil && err != io.EOF {
			return err
		}
		h.at, h.b = offset, buffer[:n]
		if len(h.b) < len(b) {
			return io.ErrUnexpectedEOF
		}
	}
	copy(b, h.b[offset-h.at:])
	return nil
}

// OpenTar returns a pipeline of the examples of tar files in the WebDataset format, with random access: successive
// files of an archive whose names are equal up to the first dot after the last slash are one example. An element is a
// map[string]*tensor.Tensor with a string scalar of the contents for each of its files, under the rest of its name
// ("jpg", "cls"), and of the common part of the name under "__key__". OpenTar reads the archives once to build an
// index; see [IndexOptions].
func OpenTar(ctx context.Context, names []string, o IndexOptions) (Pipeline, error) {
	files, err := indexFiles(ctx, "tar", "tar", names, o, scanTar)
	if err != nil {
		return Pipeline{}, err
	}
	return newRecords("tar", files, 0, func(f *indexedFile, _ int, offset int64, raw []byte) (Element, error) {
		example := map[string]*tensor.Tensor{}
		in := tar.NewReader(bytes.NewReader(raw))
		for {
			h, err := in.Next()
			if err == io.EOF {
				return example, nil
			}
			var contents []byte
			if err == nil && h.Typeflag == tar.TypeReg {
				contents, err = io.ReadAll(in)
			}
			if err != nil {
				return nil, f.wrong(offset, err)
			}
			if h.Typeflag != tar.TypeReg {
				continue
			}
			key, rest := tarKey(h.Name)
			if example[rest] != nil {
				return nil, f.wrong(offset, fmt.Errorf("example %q has two files %q", key, rest))
			}
			example["__key__"] = stringScalar(key)
			example[rest] = stringScalar(string(contents))
		}
	}), nil
}

// tarKey divides the name of a file in an archive into the name of its example and the rest.
func tarKey(name string) (key, rest string) {
	dir, base := path.Split(name)
	base, rest, _ = strings.Cut(base, ".")
	return dir + base, rest
}

// scanTar finds the examples of a tar file.
func scanTar(f *indexedFile) (starts []int64, err error) {
	in := &tarInput{f: newHopper(f)}
	r := tar.NewReader(in)
	last, next := "", int64(0)
	for {
		h, err := r.Next()
		if err == io.EOF {
			return starts, nil
		}
		if err != nil {
			return nil, f.wrong(in.at, err)
		}
		at := next // of the headers of this file
		next = in.at + (h.Size+511)&^511
		if h.Typeflag != tar.TypeReg {
			next = (in.at + 511) &^ 511 // after a PAX global header, whose padding is not read yet
			continue
		}
		if key, _ := tarKey(h.Name); len(starts) == 0 || key != last {
			starts, last = append(starts, at), key
		}
	}
}

// tarInput reads an archive, and skips the contents of its files.
type tarInput struct {
	f  *hopper
	at int64
}

func (t *tarInput) Read(b []byte) (int, error) {
	n := int(min(int64(len(b)), t.f.f.index.size-t.at, 512))
	if n == 0 {
		return 0, io.EOF
	}
	if err := t.f.readAt(b[:n], t.at); err != nil {
		return 0, err
	}
	t.at += int64(n)
	return n, nil
}

// Seek lets the reader of the archive skip contents.
func (t *tarInput) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		offset += t.at
	case io.SeekEnd:
		offset += t.f.f.index.size
	}
	t.at = offset
	return offset, nil
}

// rowsOfFile is the dataset of the rows of an array in a file.
type rowsOfFile struct {
	f      *indexedFile
	header arrayHeader
	offset int64 // of the elements
	row    int   // bytes
	hash   uint64
}

// OpenNPY returns a pipeline of the rows of an array in the format of numpy.save, which are read from the file when
// they are needed. Element i is row i of the first dimension. It reads the file once to hash its contents, which it
// keeps in an index; see [IndexOptions].
func OpenNPY(ctx context.Context, name string, o IndexOptions) (Pipeline, error) {
	return openArray(ctx, "NPY", name, o, readNPYHeader)
}

// OpenIDX is [OpenNPY] for an IDX file.
func OpenIDX(ctx context.Context, name string, o IndexOptions) (Pipeline, error) {
	return openArray(ctx, "IDX", name, o, readIDXHeader)
}

func openArray(ctx context.Context, format, name string, o IndexOptions,
	header func(s *source) (arrayHeader, int64, error),
) (Pipeline, error) {
	files, err := indexFiles(ctx, "array", format, []string{name}, o, nil)
	if err != nil {
		return Pipeline{}, err
	}
	f := files[0]
	s, err := openSource(name, format)
	if err != nil {
		return Pipeline{}, err
	}
	defer s.Close()
	h, size, err := header(s)
	switch {
	case err != nil:
		return Pipeline{}, err
	case len(h.shape) == 0:
		return Pipeline{}, s.wrong(0, errors.New("an array of no dimensions has no rows"))
	case s.offset+size != f.index.size:
		return Pipeline{}, s.wrong(s.offset, fmt.Errorf("%d bytes of elements of shape %v expected; the file has %d", size,
			h.shape, f.index.size-s.offset))
	}
	r := &rowsOfFile{f: f, header: h, offset: s.offset, hash: fingerprint(format, files)}
	if h.shape[0] > 0 {
		r.row = int(size / int64(h.shape[0]))
	}
	return Of(r), nil
}

// Len implements [Dataset].
func (r *rowsOfFile) Len() int { return r.header.shape[0] }

// Iter implements [Dataset].
func (r *rowsOfFile) Iter(ctx context.Context) iter.Seq2[Element, error] { return newView(r).Iter(ctx) }

// Fingerprint implements [Fingerprinted].
func (r *rowsOfFile) Fingerprint() uint64 { return r.hash }

// At implements [Indexed].
func (r *rowsOfFile) At(_ context.Context, i int) (Element, error) {
	return r.rows([]int{i}, r.header.shape[1:])
}

// Gather implements [Gatherer].
func (r *rowsOfFile) Gather(_ context.Context, indices []int) (Element, error) {
	return r.rows(indices, append([]int{len(indices)}, r.header.shape[1:]...))
}

// rows reads rows as a tensor of the given shape. Consecutive rows are read together.
func (r *rowsOfFile) rows(indices []int, shape []int) (Element, error) {
	b := make([]byte, len(indices)*r.row)
	for i := 0; i < len(indices); {
		n := 1
		for i+n < len(indices) && indices[i+n] == indices[i]+n {
			n++
		}
		at := r.offset + int64(indices[i])*int64(r.row)
		part := b[i*r.row : (i+n)*r.row]
		if _, err := r.f.readAt(part, at); err != nil {
			return nil, r.f.wrong(at, fmt.Errorf("reading %d rows: %w", n, err))
		}
		if k := firstNotBool(r.header.dtype, part); k >= 0 {
			return nil, r.f.wrong(at+int64(k), fmt.Errorf("a bool of value %d: want 0 or 1", part[k]))
		}
		i += n
	}
	return decode(b, r.header.order, r.header.dtype, shape), nil
}
