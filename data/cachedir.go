package data

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/zeebo/xxh3"

	"github.com/lockstep-ml/lockstep/tensor"
)

// cachedIn is the dataset of CacheDir.
type cachedIn struct {
	src   Pipeline
	dir   string
	limit int64

	once sync.Once
	key  uint64 // of the subfolder; 0: the contents of the source are unknown

	mu       sync.Mutex
	where    map[uint64]cachePlace // by identity
	segments []*cacheSegment
	bytes    int64         // of all segments
	own      *cacheSegment // to which this process appends; nil: it has written nothing
	full     bool          // nothing more is written
}

// cachePlace is where the payload of an element is.
type cachePlace struct {
	segment *cacheSegment
	offset  int64
	size    int
}

// cacheSegment is a file of elements, which one process has written. A record is a header, the payload and the hash of
// the payload.
type cacheSegment struct {
	name    string
	file    *os.File
	scanned int64 // the records up to here are known
}

const (
	cacheMagic      = "lockstep data cache 1\n"
	cacheHeader     = 16      // identity, size of the payload, half of the hash of both
	cacheElementMax = 1 << 30 // bytes of a payload
	cacheSuffix     = ".cache"
)

// CacheDir keeps elements in files of a folder after they were read for the first time, up to limit bytes; the others
// are read every time. All processes of a host can use one folder at once, and later ones find what earlier ones have
// written: an element that another process writes is found at the next pass. A process that is killed loses at most the
// element it was writing. It needs random access, which it has too, and an element must not depend on the epoch: put it
// after an expensive Map, and before MapRandom. Elements must be tensors, of type [Batch], or maps of tensors.
//
// The elements are in a subfolder named by the [Fingerprint] of what is cached: other data, or other stages, have
// another one. The times of image files and the weights of examples in memory count too. The fingerprint does not cover
// the code of functions: remove the folder when a function has changed. Reading returns an error if a source has no
// fingerprint, as [FromFunc] has none.
//
// A folder that this process cannot write is an error, unless another process has filled it. If a file cannot be
// written later, because the disk is full for example, elements are read from their source as without CacheDir. The
// limit is that of the folder: a process counts what all have written when its pass begins, and what it writes itself.
// So n processes that fill an empty folder in one pass may write n times the limit.
func (p Pipeline) CacheDir(dir string, limit int64) Pipeline {
	if limit < 0 {
		panic(fmt.Sprintf("data: CacheDir of %d bytes: want at least 0", limit))
	}
	seekableParts("CacheDir", []Pipeline{p})
	return Pipeline{&view{base: &cachedIn{src: p, dir: dir, limit: limit, where: map[uint64]cachePlace{}}}}
}

// Len implements [Dataset].
func (c *cachedIn) Len() int { return c.src.Len() }

// Iter implements [Dataset].
func (c *cachedIn) Iter(ctx context.Context) iter.Seq2[Element, error] { return iterate(ctx, c) }

// Fingerprint implements [Fingerprinted].
func (c *cachedIn) Fingerprint() uint64 { return Fingerprint(c.src) }

// Open implements [Seekable].
func (c *cachedIn) Open(ctx context.Context) (Reader, error) {
	r, err := Open(ctx, c.src)
	if err == nil && r == nil {
		err = errors.New("data: CacheDir of a stream")
	}
	if err == nil {
		err = c.scan()
	}
	return &cachedInReader{r, c}, err
}

// folder returns the folder of the segments.
func (c *cachedIn) folder() (string, error) {
	c.once.Do(func() { c.key = contents(c.src) })
	if c.key == 0 {
		return "", errors.New("data: CacheDir: the contents of the source are unknown, so a cache could belong to others: " +
			"want a source with a Fingerprint (data.Fingerprinted)")
	}
	return filepath.Join(c.dir, fmt.Sprintf("%016x", c.key)), nil
}

// contents returns the fingerprint of ds with what only one host knows, or 0 if a source of ds has none. (That of a
// stage is not 0 then.)
func contents(ds Dataset) uint64 {
	t := traitsOf(ds)
	switch {
	case t.contents != nil:
		return t.contents()
	case t.src != nil:
		return also(contents(t.src), Fingerprint(ds))
	}
	h := uint64(0)
	if f, ok := ds.(Fingerprinted); ok {
		h = f.Fingerprint()
	}
	for _, p := range t.parts {
		h = also(contents(p), h)
	}
	return h
}

// also combines two hashes, of which each is 0 if unknown.
func also(a, b uint64) uint64 {
	if a == 0 || b == 0 {
		return 0
	}
	return describe(a, fmt.Sprint(b))
}

// scan finds the elements that were written since the last scan.
func (c *cachedIn) scan() error {
	dir, err := c.folder()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return cacheFolderError(c.dir, err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("data: CacheDir: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(entries) == 0 {
		f, err := os.CreateTemp(dir, "*.test")
		if err != nil {
			return cacheFolderError(c.dir, err)
		}
		_ = f.Close()
		if err := os.Remove(f.Name()); err != nil {
			return cacheFolderError(c.dir, err)
		}
	}
	for _, e := range entries {
		if filepath.Ext(e.Name()) != cacheSuffix {
			continue
		}
		name := filepath.Join(dir, e.Name())
		i := slices.IndexFunc(c.segments, func(s *cacheSegment) bool { return s.name == name })
		if i < 0 {
			f, err := os.Open(name)
			if err != nil {
				continue // removed, or of another user
			}
			i, c.segments = len(c.segments), append(c.segments, &cacheSegment{name: name, file: f})
		}
		if s := c.segments[i]; s != c.own {
			c.scanSegment(s)
		}
	}
	return nil
}

func cacheFolderError(dir string, err error) error {
	return fmt.Errorf("data: CacheDir: the folder %s cannot be written: %w: want another, or one that a process with the "+
		"same data has filled", dir, err)
}

// scanSegment adds the new elements of a segment, up to one that is not complete.
func (c *cachedIn) scanSegment(s *cacheSegment) {
	info, err := s.file.Stat()
	if err != nil {
		return
	}
	end := info.Size()
	if s.scanned == 0 {
		magic := make([]byte, len(cacheMagic))
		if _, err := s.file.ReadAt(magic, 0); err != nil || string(magic) != cacheMagic {
			return
		}
		s.scanned = int64(len(magic))
	}
	in := io.NewSectionReader(s.file, 0, end)
	var head [cacheHeader]byte
	for {
		if _, err := in.ReadAt(head[:], s.scanned); err != nil {
			return
		}
		id, size, ok := decodeCacheHeader(head)
		at := s.scanned + cacheHeader
		next := at + int64(size) + 8
		if !ok || next > end {
			return
		}
		if _, known := c.where[id]; !known {
			c.where[id] = cachePlace{s, at, size}
		}
		c.bytes += next - s.scanned
		s.scanned = next
	}
}

func encodeCacheHeader(id uint64, size int) (h [cacheHeader]byte) {
	binary.LittleEndian.PutUint64(h[:], id)
	binary.LittleEndian.PutUint32(h[8:], uint32(size))
	binary.LittleEndian.PutUint32(h[12:], uint32(xxh3.Hash(h[:12])))
	return h
}

func decodeCacheHeader(h [cacheHeader]byte) (id uint64, size int, ok bool) {
	n := binary.LittleEndian.Uint32(h[8:])
	return binary.LittleEndian.Uint64(h[:]), int(n), n <= cacheElementMax &&
		binary.LittleEndian.Uint32(h[12:]) == uint32(xxh3.Hash(h[:12]))
}

type cachedInReader struct {
	Reader
	c *cachedIn
}

// At implements [Reader].
func (r *cachedInReader) At(ctx context.Context, p int) (Element, error) {
	id := r.ID(p)
	if e, ok := r.c.read(id); ok {
		return e, nil
	}
	e, err := r.Reader.At(ctx, p)
	if err != nil {
		return nil, err
	}
	payload, err := encodeElement(e)
	if err != nil {
		return nil, fmt.Errorf("data: CacheDir: element %d: %w", p, err)
	}
	r.c.write(id, payload)
	return e, nil
}

// read returns a cached element. One that is not as it was written is forgotten.
func (c *cachedIn) read(id uint64) (Element, bool) {
	c.mu.Lock()
	at, ok := c.where[id]
	c.mu.Unlock()
	if !ok {
		return nil, false
	}
	b := make([]byte, at.size+8)
	if _, err := at.segment.file.ReadAt(b, at.offset); err == nil &&
		xxh3.Hash(b[:at.size]) == binary.LittleEndian.Uint64(b[at.size:]) {
		if e, err := decodeElement(b[:at.size]); err == nil {
			return e, true
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.where[id] == at {
		delete(c.where, id)
	}
	return nil, false
}

// write appends an element to this process' segment.
func (c *cachedIn) write(id uint64, payload []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, known := c.where[id]; known || c.full {
		return
	}
	head := encodeCacheHeader(id, len(payload))
	record := binary.LittleEndian.AppendUint64(slices.Concat(head[:], payload), xxh3.Hash(payload))
	if len(payload) > cacheElementMax || c.bytes+int64(len(record)) > c.limit {
		return // a smaller one may fit
	}
	if c.own == nil && !c.create() {
		c.full = true
		return
	}
	if _, err := c.own.file.WriteAt(record, c.own.scanned); err != nil {
		c.full = true
		_ = c.own.file.Truncate(c.own.scanned)
		return
	}
	c.where[id] = cachePlace{c.own, c.own.scanned + cacheHeader, len(payload)}
	c.own.scanned += int64(len(record))
	c.bytes += int64(len(record))
}

// create creates this process' segment. It reports whether that was possible.
func (c *cachedIn) create() bool {
	dir, err := c.folder()
	if err != nil {
		return false
	}
	f, err := os.CreateTemp(dir, "*"+cacheSuffix)
	if err != nil {
		return false
	}
	if _, err := f.WriteString(cacheMagic); err != nil || f.Chmod(0o666&^umask) != nil {
		f.Close()
		os.Remove(f.Name())
		return false
	}
	c.own = &cacheSegment{name: f.Name(), file: f, scanned: int64(len(cacheMagic))}
	c.segments = append(c.segments, c.own)
	return true
}

// The kinds of encoded elements.
const (
	oneTensor = iota
	oneBatch
	oneMap
)

// encodeElement encodes an element.
func encodeElement(e Element) ([]byte, error) {
	var b []byte
	list := func(ts []*tensor.Tensor) {
		b = binary.AppendUvarint(b, uint64(len(ts)))
		for _, t := range ts {
			b = appendTensor(b, t)
		}
	}
	switch e := e.(type) {
	case *tensor.Tensor:
		return appendTensor([]byte{oneTensor}, e), nil
	case Batch:
		b = []byte{oneBatch}
		list(e.Inputs)
		list(e.Labels)
		return appendTensor(b, e.Weights), nil
	case map[string]*tensor.Tensor:
		b = binary.AppendUvarint([]byte{oneMap}, uint64(len(e)))
		for _, key := range slices.Sorted(maps.Keys(e)) {
			b = append(binary.AppendUvarint(b, uint64(len(key))), key...)
			b = appendTensor(b, e[key])
		}
		return b, nil
	}
	return nil, fmt.Errorf("it is a %T: want *tensor.Tensor, data.Batch or map[string]*tensor.Tensor", e)
}

// appendTensor encodes a tensor, or nil.
func appendTensor(b []byte, t *tensor.Tensor) []byte {
	if t == nil {
		return append(b, byte(tensor.Invalid))
	}
	b = binary.AppendUvarint(append(b, byte(t.DType())), uint64(t.Rank()))
	for _, d := range t.Shape() {
		b = binary.AppendUvarint(b, uint64(d))
	}
	if t.DType() != tensor.String {
		return append(b, t.Memory().HostBytes()...)
	}
	for _, s := range t.StringData() {
		b = append(binary.AppendUvarint(b, uint64(len(s))), s...)
	}
	return b
}

var errCache = errors.New("data: not a valid element of a cache")

// decodeElement decodes an element. It shares no memory with b.
func decodeElement(b []byte) (e Element, err error) {
	d := decoder{b: b}
	list := func() (ts []*tensor.Tensor) {
		n := d.uvarint()
		for range n {
			if d.failed || len(d.b) == 0 {
				d.failed = true
				return nil
			}
			ts = append(ts, d.tensor())
		}
		return ts
	}
	switch d.byte() {
	case oneTensor:
		e = d.tensor()
	case oneBatch:
		e = Batch{Inputs: list(), Labels: list(), Weights: d.tensor()}
	case oneMap:
		m := map[string]*tensor.Tensor{}
		for range d.uvarint() {
			if d.failed || len(d.b) == 0 {
				return nil, errCache
			}
			key := d.text()
			m[key] = d.tensor()
		}
		e = m
	default:
		return nil, errCache
	}
	if d.failed || len(d.b) > 0 {
		return nil, errCache
	}
	return e, nil
}

// text decodes a string.
func (d *decoder) text() string {
	n := d.uvarint()
	if n > uint64(len(d.b)) {
		d.failed, d.b = true, nil
		return ""
	}
	return string(d.bytes(int(n)))
}

// tensor decodes a tensor.
func (d *decoder) tensor() *tensor.Tensor {
	dtype := tensor.DType(d.byte())
	if d.failed || dtype == tensor.Invalid {
		return nil
	}
	rank := d.uvarint()
	if !dtype.Valid() || rank > uint64(len(d.b)) {
		d.failed = true
		return nil
	}
	shape, n, empty := make([]int, rank), 1, false
	for i := range shape {
		size := d.uvarint()
		if size > cacheElementMax {
			d.failed = true
			return nil
		}
		shape[i] = int(size)
		if empty = empty || size == 0; size > 0 {
			n *= shape[i] // also of an empty tensor: its other dimensions must not overflow
		}
		if n > cacheElementMax {
			d.failed = true
			return nil
		}
	}
	if empty {
		n = 0
	}
	if dtype == tensor.String {
		if n > len(d.b) { // a string takes a byte at least
			d.failed = true
			return nil
		}
		t := tensor.New(dtype, shape...)
		for i := range t.StringData() {
			t.StringData()[i] = d.text()
		}
		return t
	}
	if n > len(d.b)/dtype.Bytes() {
		d.failed = true
		return nil
	}
	t := tensor.New(dtype, shape...)
	copy(t.Memory().HostBytes(), d.bytes(n*dtype.Bytes()))
	return t
}
