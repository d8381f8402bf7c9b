package checkpoint

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"os"
	"slices"
	"strings"

	"github.com/lockstep-ml/lockstep/tensor"
)

// A TensorFlow checkpoint (a tensor bundle) is the file PREFIX.index, a table of LevelDB whose values are
// protocol buffers, and the files PREFIX.data-00000-of-00001, … with the elements.
const (
	bundleIndex    = ".index"
	bundleSuffix   = "/.ATTRIBUTES/VARIABLE_VALUE" // of a variable's name in an object-based checkpoint
	tableMagic     = 0xdb4775248b80fb57
	tableFooter    = 48
	blockTrailer   = 5 // one byte for the compression, four for the checksum
	bundleBytesMax = 1 << 30
)

// bundleTypes maps TensorFlow's numbers of dtypes.
var bundleTypes = map[uint64]tensor.DType{
	1: tensor.Float32, 2: tensor.Float64, 3: tensor.Int32, 4: tensor.Uint8, 5: tensor.Int16, 6: tensor.Int8,
	9: tensor.Int64, 10: tensor.Bool, 14: tensor.BFloat16, 17: tensor.Uint16, 19: tensor.Float16, 22: tensor.Uint32,
	23: tensor.Uint64,
}

const bundleString = 7 // the dtype of strings, such as the object graph, which are not weights

// bundleEntry describes one tensor of a bundle.
type bundleEntry struct {
	name         string
	dtype        tensor.DType
	shape        []int
	shard        uint64
	offset, size uint64
	checksum     uint32
}

// loadBundle reads the TensorFlow checkpoint with the given prefix, and verifies all checksums. Names lose the
// suffix that object-based checkpoints add. Tensors of strings are left out.
func loadBundle(prefix string) ([]Tensor, error) {
	path := prefix + bundleIndex
	if info, err := os.Stat(path); err == nil && info.Size() > bundleBytesMax {
		return nil, fmt.Errorf("checkpoint: %s has %d bytes: want at most %d", path, info.Size(), bundleBytesMax)
	}
	index, err := os.ReadFile(path)
	if err != nil {
		return nil, wrap(err)
	}
	entries, shards, err := parseBundle(index)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: %s: %w", path, err)
	}
	files := make([]*os.File, shards)
	defer func() {
		for _, f := range files {
			if f != nil {
				f.Close()
			}
		}
	}()
	var tensors []Tensor
	for _, e := range entries {
		name := fmt.Sprintf("%s.data-%05d-of-%05d", prefix, e.shard, shards)
		if files[e.shard] == nil {
			if files[e.shard], err = os.Open(name); err != nil {
				return nil, wrap(err)
			}
		}
		t, err := e.read(files[e.shard])
		if err != nil {
			return nil, fmt.Errorf("checkpoint: %s: tensor %q: %w", name, e.name, err)
		}
		tensors = append(tensors, Tensor{e.name, t})
	}
	slices.SortFunc(tensors, func(a, b Tensor) int { return cmp.Compare(a.Name, b.Name) })
	for i := range tensors[min(1, len(tensors)):] {
		if tensors[i].Name == tensors[i+1].Name {
			return nil, fmt.Errorf("checkpoint: %s: two tensors are called %q", path, tensors[i].Name)
		}
	}
	return tensors, nil
}

// read reads the elements of a tensor from its file.
func (e bundleEntry) read(f *os.File) (*tensor.Tensor, error) {
	if bigEndian() {
		return nil, errBigEndian
	}
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if size := uint64(info.Size()); e.offset > size || e.size > size-e.offset {
		return nil, fmt.Errorf("it takes %d bytes from byte %d, but the file has %d: truncated", e.size, e.offset, size)
	}
	t := tensor.New(e.dtype, e.shape...)
	data := t.Memory().HostBytes()
	if _, err := f.ReadAt(data, int64(e.offset)); err != nil {
		return nil, err
	}
	if got := maskedCRC(data); got != e.checksum {
		return nil, fmt.Errorf("checksum %08x, want %08x: the file is damaged", got, e.checksum)
	}
	return t, checkBooleans(t)
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// maskedCRC is the checksum of LevelDB and TensorFlow.
func maskedCRC(parts ...[]byte) uint32 {
	var c uint32
	for _, p := range parts {
		c = crc32.Update(c, castagnoli, p)
	}
	return (c>>15 | c<<17) + 0xa282ead8
}

// parseBundle returns the tensors that an index lists, except strings, and the number of data files.
func parseBundle(index []byte) ([]bundleEntry, uint64, error) {
	if len(index) < tableFooter || binary.LittleEndian.Uint64(index[len(index)-8:]) != tableMagic {
		return nil, 0, errors.New("no table at its end: it is not the index of a TensorFlow checkpoint, or truncated")
	}
	footer := reader{data: index[len(index)-tableFooter : len(index)-8]}
	footer.varint()
	footer.varint() // the block of filters, which is empty
	blocks, err := readBlock(index, footer.varint(), footer.varint())
	if err = cmp.Or(footer.err, err); err != nil {
		return nil, 0, err
	}
	var entries []bundleEntry
	var shards uint64
	last := ""
	for _, b := range blocks {
		handle := reader{data: b.value}
		rows, err := readBlock(index, handle.varint(), handle.varint())
		if err = cmp.Or(handle.err, err); err != nil {
			return nil, 0, err
		}
		for _, row := range rows {
			if shards > 0 && row.key <= last {
				return nil, 0, fmt.Errorf("the key %q follows %q: want ascending keys", row.key, last)
			}
			last = row.key
			if shards == 0 {
				if shards, err = parseBundleHeader(row); err != nil {
					return nil, 0, err
				}
				continue
			}
			e, isTensor, err := parseBundleEntry(row, shards)
			if err != nil {
				return nil, 0, fmt.Errorf("tensor %q: %w", row.key, err)
			}
			if isTensor {
				entries = append(entries, e)
			}
		}
	}
	if shards == 0 {
		return nil, 0, errors.New("the table has no header")
	}
	return entries, shards, nil
}

// row is one entry of a table.
type row struct {
	key   string
	value []byte
}

// readBlock verifies a block of a table and returns its entries.
func readBlock(table []byte, offset, size uint64) ([]row, error) {
	n := uint64(len(table))
	if offset > n || size > n-offset || n-offset-size < blockTrailer || size < 4 {
		return nil, fmt.Errorf("a block of %d bytes at byte %d does not fit the file's %d bytes", size, offset, n)
	}
	block, trailer := table[offset:offset+size], table[offset+size:offset+size+blockTrailer]
	if got, want := maskedCRC(block, trailer[:1]), binary.LittleEndian.Uint32(trailer[1:]); got != want {
		return nil, fmt.Errorf("the block at byte %d has checksum %08x, want %08x: the file is damaged", offset, got, want)
	}
	if trailer[0] != 0 {
		return nil, fmt.Errorf("the block at byte %d is compressed, which is not supported", offset)
	}
	restarts := uint64(binary.LittleEndian.Uint32(block[size-4:]))
	if restarts > (size-4)/4 {
		return nil, fmt.Errorf("the block at byte %d has %d restart points in %d bytes", offset, restarts, size)
	}
	r := reader{data: block[:size-4-4*restarts]}
	var rows []row
	key := ""
	for len(r.data) > 0 && r.err == nil {
		shared, rest, length := r.varint(), r.varint(), r.varint()
		suffix, value := r.bytes(rest), r.bytes(length)
		if shared > uint64(len(key)) {
			return nil, fmt.Errorf("the block at byte %d has a key that shares %d bytes with one of %d", offset, shared,
				len(key))
		}
		key = key[:shared] + string(suffix)
		rows = append(rows, row{key, value})
	}
	return rows, r.err
}

// parseBundleHeader returns the number of data files.
func parseBundleHeader(r row) (shards uint64, err error) {
	if r.key != "" {
		return 0, fmt.Errorf("the first key is %q: want that of the header, which is empty", r.key)
	}
	shards = 1 // as the format's own reader
	err = eachField(r.value, func(field uint64, number uint64, _ []byte) error {
		switch {
		case field == 1:
			shards = number
		case field == 2 && number != 0:
			return errors.New("the numbers are big-endian, which is not supported")
		}
		return nil
	})
	if err == nil && (shards < 1 || shards > 1<<20) {
		err = fmt.Errorf("the header names %d data files", shards)
	}
	return shards, err
}

// parseBundleEntry returns the entry of one tensor, or false for strings.
func parseBundleEntry(r row, shards uint64) (e bundleEntry, isTensor bool, err error) {
	e.name = strings.TrimSuffix(r.key, bundleSuffix)
	var dtype uint64
	err = eachField(r.value, func(field uint64, number uint64, data []byte) error {
		switch field {
		case 1:
			dtype = number
		case 2:
			return parseShape(data, &e.shape)
		case 3:
			e.shard = number
		case 4:
			e.offset = number
		case 5:
			e.size = number
		case 6:
			e.checksum = uint32(number)
		case 7:
			return errors.New("it is partitioned, which is not supported: save it in one piece")
		}
		return nil
	})
	if err != nil || dtype == bundleString {
		return e, false, err
	}
	known := false
	if e.dtype, known = bundleTypes[dtype]; !known {
		return e, false, fmt.Errorf("TensorFlow's dtype %d is not supported", dtype)
	}
	bytes, err := sizeOf(e.shape, e.dtype)
	switch {
	case err != nil:
		return e, false, err
	case bytes != e.size:
		return e, false, fmt.Errorf("it takes %d bytes, but %v%v has %d", e.size, e.dtype, e.shape, bytes)
	case e.shard >= shards:
		return e, false, fmt.Errorf("it is in data file %d of %d", e.shard, shards)
	case e.offset > math.MaxInt64:
		return e, false, fmt.Errorf("it begins at byte %d", e.offset)
	}
	return e, true, nil
}

// parseShape appends the dimensions of a TensorShapeProto.
func parseShape(data []byte, shape *[]int) error {
	return eachField(data, func(field uint64, number uint64, dim []byte) error {
		switch {
		case field == 2:
			size := 0
			err := eachField(dim, func(field uint64, number uint64, _ []byte) error {
				if field == 1 {
					if size = int(number); uint64(size) != number {
						return fmt.Errorf("a dimension of %d", int64(number))
					}
				}
				return nil
			})
			*shape = append(*shape, size)
			return err
		case field == 3 && number != 0:
			return errors.New("its shape is unknown")
		}
		return nil
	})
}

// eachField calls f for every field of a protocol buffer, with its number, or with its bytes.
func eachField(data []byte, f func(field, number uint64, data []byte) error) error {
	r := reader{data: data}
	for len(r.data) > 0 && r.err == nil {
		var number uint64
		var text []byte
		key := r.varint()
		switch key & 7 {
		case 0:
			number = r.varint()
		case 1:
			if b := r.bytes(8); r.err == nil {
				number = binary.LittleEndian.Uint64(b)
			}
		case 2:
			text = r.bytes(r.varint())
		case 5:
			if b := r.bytes(4); r.err == nil {
				number = uint64(binary.LittleEndian.Uint32(b))
			}
		default:
			return fmt.Errorf("a field has the wire type %d", key&7)
		}
		if r.err != nil {
			break
		}
		if err := f(key>>3, number, text); err != nil {
			return err
		}
	}
	return r.err
}

// reader takes numbers and bytes from the front of data, until the first error.
type reader struct {
	data []byte
	err  error
}

func (r *reader) varint() uint64 {
	x, n := binary.Uvarint(r.data)
	if n <= 0 {
		r.fail()
		return 0
	}
	r.data = r.data[n:]
	return x
}

func (r *reader) bytes(n uint64) []byte {
	if n > uint64(len(r.data)) {
		r.fail()
		return nil
	}
	b := r.data[:n]
	r.data = r.data[n:]
	return b
}

func (r *reader) fail() {
	r.data = nil
	r.err = cmp.Or(r.err, errors.New("the table is truncated inside an entry"))
}
