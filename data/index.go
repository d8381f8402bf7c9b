package data

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"sync"

	"github.com/zeebo/xxh3"
)

// IndexOptions configure the indices of files that are read by record. The zero value is usable.
type IndexOptions struct {
	// Dir is the folder for the indices. Default: the file's folder, or lockstep in the user's cache folder if the
	// former cannot be written. An index is used as long as the size and the time of modification of its file stay
	// the same.
	Dir string
	// Progress, if not nil, is called while indices are built, with the bytes of all files that are done and to do.
	// Calls do not overlap.
	Progress func(done, total int64)
	// Workers is the number of goroutines that build indices. Default: GOMAXPROCS.
	Workers int
}

// fileIndex records where the records of a file begin, and what the file contains.
type fileIndex struct {
	kind   string // of the records: "lines", "CSV" (lines with values), "TFRecord", "tar"; "array" has none
	size   int64
	time   int64 // of modification, in nanoseconds
	hashes []uint64
	starts []int64
}

// blockBytes is the number of bytes of a file that are hashed together.
const blockBytes = 4 << 20

const indexMagic = "lockstep data index 1\n"

// encode returns the contents of an index file.
func (x *fileIndex) encode() []byte {
	b := append([]byte(indexMagic), byte(len(x.kind)))
	b = append(b, x.kind...)
	b = binary.AppendUvarint(b, uint64(x.size))
	b = binary.LittleEndian.AppendUint64(b, uint64(x.time))
	b = binary.AppendUvarint(b, uint64(len(x.hashes)))
	for _, h := range x.hashes {
		b = binary.LittleEndian.AppendUint64(b, h)
	}
	b = binary.AppendUvarint(b, uint64(len(x.starts)))
	last := int64(0)
	for _, at := range x.starts {
		b = binary.AppendUvarint(b, uint64(at-last))
		last = at
	}
	return binary.LittleEndian.AppendUint64(b, xxh3.Hash(b))
}

var errIndex = errors.New("data: not a valid index")

// decodeIndex decodes an index file.
func decodeIndex(b []byte) (*fileIndex, error) {
	if len(b) < len(indexMagic)+9 || !bytes.HasPrefix(b, []byte(indexMagic)) {
		return nil, errIndex
	}
	body, sum := b[:len(b)-8], binary.LittleEndian.Uint64(b[len(b)-8:])
	if xxh3.Hash(body) != sum {
		return nil, errIndex
	}
	d := decoder{b: body[len(indexMagic):]}
	x := &fileIndex{kind: string(d.bytes(int(d.byte()))), size: int64(d.uvarint()), time: int64(d.uint64())}
	if n := d.uvarint(); n <= uint64(len(d.b)/8) {
		x.hashes = make([]uint64, n)
		for i := range x.hashes {
			x.hashes[i] = d.uint64()
		}
	} else {
		d.failed = true
	}
	n := d.uvarint()
	if n > uint64(len(d.b)) { // a start takes a byte at least
		return nil, errIndex
	}
	x.starts = make([]int64, n)
	last := uint64(0)
	for i := range x.starts {
		delta := d.uvarint()
		if last += delta; delta == 0 && i > 0 || last < delta || last >= uint64(max(x.size, 0)) {
			return nil, errIndex
		}
		x.starts[i] = int64(last)
	}
	if d.failed || len(d.b) > 0 || x.size < 0 {
		return nil, errIndex
	}
	return x, nil
}

// decoder reads numbers from b. After a failure it returns zeros.
type decoder struct {
	b      []byte
	failed bool
}

func (d *decoder) bytes(n int) []byte {
	if n > len(d.b) {
		d.failed, d.b = true, nil
		return make([]byte, min(n, 8))
	}
	b := d.b[:n]
	d.b = d.b[n:]
	return b
}

func (d *decoder) byte() byte { return d.bytes(1)[0] }

func (d *decoder) uint64() uint64 { return binary.LittleEndian.Uint64(d.bytes(8)) }

func (d *decoder) uvarint() uint64 {
	x, n := binary.Uvarint(d.b)
	if n <= 0 {
		d.failed, d.b = true, nil
		return 0
	}
	d.b = d.b[n:]
	return x
}

// recordScanner finds the starts of the records of a file, after the blocks were read.
type recordScanner func(f *indexedFile) ([]int64, error)

// indexFiles opens files whose records begin where scan finds them; without scan they have none. It reads their
// indices, or builds them. Files of the formats "text" and "CSV" have lines.
func indexFiles(ctx context.Context, kind, format string, names []string, o IndexOptions, scan recordScanner,
) ([]*indexedFile, error) {
	var list []*indexedFile
	var todo int64
	for _, name := range names {
		f, err := newIndexedFile(name, format)
		if err != nil {
			return nil, err
		}
		if !f.load(kind, o.Dir) {
			todo += f.index.size
		}
		list = append(list, f)
	}
	if o.Workers < 0 {
		return nil, fmt.Errorf("data: IndexOptions.Workers is %d: want at least 1, or 0 for GOMAXPROCS", o.Workers)
	}
	if o.Workers == 0 {
		o.Workers = runtime.GOMAXPROCS(0)
	}
	var mu sync.Mutex
	done := int64(0)
	progress := func(n int64) {
		if o.Progress == nil {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		done += n
		o.Progress(done, todo)
	}
	type block struct {
		f      *indexedFile
		number int
	}
	var blocks []block // of all files: one large file is read in parallel too
	for _, f := range list {
		if f.loaded {
			continue
		}
		n := int((f.index.size + blockBytes - 1) / blockBytes)
		f.index.hashes, f.lines = make([]uint64, n), make([][]int64, n)
		for i := range n {
			blocks = append(blocks, block{f, i})
		}
	}
	if err := together(ctx, o.Workers, len(blocks), func(i int) error {
		b := blocks[i]
		n, err := b.f.readBlock(b.number, format == "text" || format == "CSV")
		progress(n)
		return err
	}); err != nil {
		return nil, err
	}
	return list, together(ctx, o.Workers, len(list), func(i int) (err error) {
		f := list[i]
		if f.loaded {
			return nil
		}
		if scan != nil {
			f.index.starts, err = scan(f)
		}
		if err == nil {
			f.lines = nil
			f.save(kind, o.Dir)
		}
		return err
	})
}

// indexedFile is a file with an index.
type indexedFile struct {
	name, format string
	index        *fileIndex
	loaded       bool      // from an index file
	lines        [][]int64 // by block: the offsets after line ends, while the index is built
}

func newIndexedFile(name, format string) (*indexedFile, error) {
	f := &indexedFile{name: name, format: format}
	info, err := os.Stat(name)
	if err != nil {
		return nil, fmt.Errorf("data: %w", err)
	}
	f.index = &fileIndex{size: info.Size(), time: info.ModTime().UnixNano()}
	head := make([]byte, recordHeadBytes)
	n, err := f.readAt(head, 0)
	if err != nil && n > 0 && err != io.EOF {
		return nil, f.wrong(0, err)
	}
	if isGzip(head[:n], format) {
		stream := map[string]string{"text": " by data.Lines", formatTFRecord: " by data.TFRecords"}[format]
		return nil, f.wrong(0, fmt.Errorf("the file is compressed by gzip, so its records cannot be read separately: "+
			"decompress it (gunzip), or read it as a stream%s", stream))
	}
	return f, nil
}

func (f *indexedFile) wrong(offset int64, err error) error {
	return &FormatError{File: f.name, Format: f.format, Offset: offset, Err: err}
}

// readBlock hashes a block and, if wanted, finds the lines in it.
func (f *indexedFile) readBlock(number int, lines bool) (int64, error) {
	at := int64(number) * blockBytes
	b := make([]byte, min(blockBytes, f.index.size-at))
	if _, err := f.readAt(b, at); err != nil {
		return 0, f.wrong(at, fmt.Errorf("reading %d bytes: %w", len(b), err))
	}
	f.index.hashes[number] = xxh3.Hash(b)
	if lines {
		for i := 0; ; {
			n := bytes.IndexByte(b[i:], '\n')
			if n < 0 {
				break
			}
			i += n + 1
			f.lines[number] = append(f.lines[number], at+int64(i))
		}
	}
	return int64(len(b)), nil
}

// joinLines returns the starts of lines.
func (f *indexedFile) joinLines() (starts []int64, _ error) {
	if f.index.size > 0 {
		starts = []int64{0}
	}
	for _, block := range f.lines {
		starts = append(starts, block...)
	}
	if n := len(starts); n > 0 && starts[n-1] == f.index.size { // after the last line end
		starts = starts[:n-1]
	}
	return starts, nil
}

// csvLines returns the starts of lines that are not empty, nor begin with comment. A line before others than these
// ends at its first line end.
func (f *indexedFile) csvLines(comment string) (starts []int64, err error) {
	all, err := f.joinLines()
	in := newHopper(f)
	head := make([]byte, max(2, len(comment)))
	for i, at := range all {
		end := f.index.size
		if i+1 < len(all) {
			end = all[i+1]
		}
		if comment != "" || end-at <= 2 {
			line := head[:min(end-at, int64(len(head)))]
			if err = in.readAt(line, at); err != nil {
				return nil, f.wrong(at, err)
			}
			if comment != "" && bytes.HasPrefix(line, []byte(comment)) || end-at <= 2 && len(bytes.TrimSpace(line)) == 0 {
				continue
			}
		}
		starts = append(starts, at)
	}
	return starts, err
}

// indexNames returns where the index may be, the preferred one first.
func (f *indexedFile) indexNames(kind, dir string) (names []string) {
	suffix := "." + kind + ".index"
	if dir == "" {
		names = append(names, f.name+suffix)
		cache, err := os.UserCacheDir()
		if err != nil {
			return names
		}
		dir = filepath.Join(cache, "lockstep", "index")
	}
	path, err := filepath.Abs(f.name)
	if err != nil {
		path = f.name
	}
	base := fmt.Sprintf("%s-%016x%s", filepath.Base(f.name), xxh3.HashString(path), suffix)
	return append(names, filepath.Join(dir, base))
}

// load reads the index from a file, and reports whether one is there and belongs to the file as it is.
func (f *indexedFile) load(kind, dir string) bool {
	for _, name := range f.indexNames(kind, dir) {
		b, err := os.ReadFile(name)
		if err != nil {
			continue
		}
		x, err := decodeIndex(b)
		if err == nil && x.kind == kind && x.size == f.index.size && x.time == f.index.time {
			f.index, f.loaded = x, true
			return true
		}
	}
	return false
}

// save writes the index to the first place where that is possible. Without one, it is built again next time.
func (f *indexedFile) save(kind, dir string) {
	f.index.kind = kind
	b := f.index.encode()
	for i, name := range f.indexNames(kind, dir) {
		if i > 0 || dir != "" {
			_ = os.MkdirAll(filepath.Dir(name), 0o777)
		}
		if writeAtomically(name, b) == nil {
			return
		}
	}
}

// writeAtomically writes a file completely or not at all.
func writeAtomically(name string, b []byte) error {
	f, err := os.CreateTemp(filepath.Dir(name), filepath.Base(name)+".*.tmp")
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	err = errors.Join(err, f.Chmod(0o666&^umask), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}

// umask restricts who may write an index that was written.
const umask = 0o022

// readAt reads len(b) bytes at an offset of the file.
func (f *indexedFile) readAt(b []byte, offset int64) (int, error) {
	key := handleKey{f.name, f.index.size, f.index.time}
	file, err := openFiles.acquire(key)
	if err != nil {
		return 0, err
	}
	defer openFiles.release(key)
	n, err := file.ReadAt(b, offset)
	if n == len(b) {
		err = nil
	}
	return n, err
}

// read returns the bytes from lo to hi.
func (f *indexedFile) read(lo, hi int64) ([]byte, error) {
	b := make([]byte, hi-lo)
	n, err := f.readAt(b, lo)
	switch {
	case err == io.EOF:
		return nil, f.wrong(lo+int64(n), fmt.Errorf("the file ends here, where it had %d bytes when it was opened: open it "+
			"again after it has changed", f.index.size))
	case err != nil:
		return nil, f.wrong(lo, err)
	}
	return b, nil
}

// span returns where record i is.
func (f *indexedFile) span(i int) (lo, hi int64) {
	hi = f.index.size
	if i+1 < len(f.index.starts) {
		hi = f.index.starts[i+1]
	}
	return f.index.starts[i], hi
}

// fingerprint returns a hash of the contents of files, whose names and times do not matter.
func fingerprint(kind string, files []*indexedFile) uint64 {
	h := xxh3.HashString(kind)
	var b [8]byte
	for _, f := range files {
		h = describe(h, fmt.Sprint(f.index.size))
		for _, x := range f.index.hashes {
			binary.LittleEndian.PutUint64(b[:], x)
			h = xxh3.HashSeed(b[:], h)
		}
	}
	return h
}

// openFiles are the files that are open for reading by offset.
var openFiles = handles{files: map[handleKey]*handle{}}

// handlesKept is the number of files that stay open while none of their records is read.
const handlesKept = 64

type handles struct {
	mu    sync.Mutex
	files map[handleKey]*handle
	clock int64
}

// handleKey is a file as it was when its index was read or built.
type handleKey struct {
	name       string
	size, time int64
}

type handle struct {
	file  *os.File
	users int
	used  int64 // when it was last acquired
}

// acquire opens a file, or returns the one that is open.
func (h *handles) acquire(key handleKey) (*os.File, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.clock++
	if f, ok := h.files[key]; ok {
		f.users, f.used = f.users+1, h.clock
		return f.file, nil
	}
	file, err := os.Open(key.name)
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	if err == nil && (info.Size() != key.size || info.ModTime().UnixNano() != key.time) {
		err = fmt.Errorf("%s has changed since it was opened: it had %d bytes and has %d: open it again", key.name, key.size,
			info.Size())
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	h.files[key] = &handle{file, 1, h.clock}
	return file, nil
}

// release ends the use of a file. It closes the one that was not used for the longest time, if too many are open.
func (h *handles) release(key handleKey) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.files[key].users--
	if len(h.files) <= handlesKept {
		return
	}
	var oldest *handle
	for k, f := range h.files {
		if f.users == 0 && (oldest == nil || f.used < oldest.used) {
			oldest, key = f, k
		}
	}
	if oldest != nil {
		oldest.file.Close()
		delete(h.files, key)
	}
}
