package checkpoint

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/bits"
	"os"
	"slices"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Tensor is one named tensor of a file.
type Tensor struct {
	Name  string         // unique in the file, not empty
	Value *tensor.Tensor // any dtype except String, in host memory
}

// Save atomically writes tensors to the file path, in the format of [Write]; see [WriteFile]. metadata may be
// nil.
func Save(path string, tensors []Tensor, metadata map[string]string) error {
	return WriteFile(path, func(w io.Writer) error { return Write(w, tensors, metadata) })
}

// Load reads the file path; see [Read]. Errors name the file. The caller owns the tensors.
func Load(path string) ([]Tensor, map[string]string, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, nil, fmt.Errorf("checkpoint: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, nil, fmt.Errorf("checkpoint: %w", err)
	}
	tensors, metadata, err := Read(f, info.Size())
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	return tensors, metadata, nil
}

const (
	metadataKey    = "__metadata__"
	headerBytesMax = 100 << 20 // the limit of the format's own reader
)

// names maps dtypes to their names in the format.
var names = map[tensor.DType]string{
	tensor.Bool: "BOOL", tensor.Int8: "I8", tensor.Int16: "I16", tensor.Int32: "I32", tensor.Int64: "I64",
	tensor.Uint8: "U8", tensor.Uint16: "U16", tensor.Uint32: "U32", tensor.Uint64: "U64",
	tensor.Float16: "F16", tensor.BFloat16: "BF16", tensor.Float32: "F32", tensor.Float64: "F64",
}

// entry is one tensor in the header.
type entry struct {
	DType   string    `json:"dtype"`
	Shape   []int     `json:"shape"`
	Offsets [2]uint64 `json:"data_offsets"`
}

// Write writes tensors to w in the safetensors format. It orders them by element size, largest first, then by
// name, so that every tensor is aligned and equal contents give equal bytes. Names must be unique and not
// empty; otherwise, or for a tensor of strings or in device memory, Write returns an error. metadata may be
// nil.
func Write(w io.Writer, tensors []Tensor, metadata map[string]string) error {
	if bigEndian() {
		return errBigEndian
	}
	sorted := slices.Clone(tensors)
	slices.SortFunc(sorted, func(a, b Tensor) int {
		return cmp.Or(cmp.Compare(b.Value.DType().Bytes(), a.Value.DType().Bytes()), cmp.Compare(a.Name, b.Name))
	})
	var at uint64
	header := make(map[string]any, len(sorted)+1)
	if len(metadata) > 0 {
		header[metadataKey] = metadata
	}
	for _, t := range sorted {
		dtype, ok := names[t.Value.DType()]
		switch _, twice := header[t.Name]; {
		case t.Name == "" || t.Name == metadataKey:
			return fmt.Errorf("checkpoint: a tensor cannot have the name %q", t.Name)
		case twice:
			return fmt.Errorf("checkpoint: two tensors have the name %q", t.Name)
		case !ok || t.Value.Memory().Kind == tensor.Device:
			return fmt.Errorf("checkpoint: tensor %q (%v) cannot be written: want numbers in host memory", t.Name,
				t.Value.DType())
		}
		e := entry{dtype, dimensions(t.Value), [2]uint64{at, at + uint64(t.Value.Memory().Bytes)}}
		header[t.Name], at = e, e.Offsets[1]
	}
	text, err := json.Marshal(header) // keys sorted
	if err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	text = append(text, "       "[:(8-len(text)%8)%8]...) // so that the data are aligned
	if _, err := w.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(text)))); err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	if _, err := w.Write(text); err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	for _, t := range sorted {
		if _, err := w.Write(t.Value.Memory().HostBytes()); err != nil {
			return fmt.Errorf("checkpoint: tensor %q: %w", t.Name, err)
		}
	}
	return nil
}

// Read reads a safetensors file of size bytes. It returns the tensors, sorted by name, and the metadata,
// which is empty but not nil if there is none. It returns an error if the file is truncated, has bytes that
// belong to no tensor, or is inconsistent in any other way. The caller owns the tensors.
func Read(r io.ReaderAt, size int64) ([]Tensor, map[string]string, error) {
	if bigEndian() {
		return nil, nil, errBigEndian
	}
	var lead [8]byte
	if size < 8 {
		return nil, nil, fmt.Errorf("checkpoint: the file has %d bytes: a safetensors file has at least 8", size)
	}
	if _, err := r.ReadAt(lead[:], 0); err != nil {
		return nil, nil, fmt.Errorf("checkpoint: reading the header's length: %w", err)
	}
	length := binary.LittleEndian.Uint64(lead[:])
	if length > headerBytesMax || length > uint64(size-8) {
		return nil, nil, fmt.Errorf("checkpoint: the first 8 bytes give a header of %d bytes, but %d bytes follow (and %d "+
			"is the most): not a safetensors file, or truncated",
			length, size-8, headerBytesMax)
	}
	text := make([]byte, length)
	if _, err := r.ReadAt(text, 8); err != nil {
		return nil, nil, fmt.Errorf("checkpoint: reading the header: %w", err)
	}
	entries, metadata, err := parseHeader(text)
	if err != nil {
		return nil, nil, err
	}
	base := 8 + int64(length)
	if err := checkLayout(entries, uint64(size-base)); err != nil {
		return nil, nil, err
	}
	out := make([]Tensor, len(entries))
	for i, e := range entries {
		t := tensor.New(e.dtype, e.Shape...)
		if t.Memory().Bytes > 0 {
			if _, err := r.ReadAt(t.Memory().HostBytes(), base+int64(e.Offsets[0])); err != nil {
				return nil, nil, fmt.Errorf("checkpoint: tensor %q at byte %d: %w", e.name, base+int64(e.Offsets[0]), err)
			}
		}
		if err := checkBooleans(t); err != nil {
			return nil, nil, fmt.Errorf("checkpoint: tensor %q: %w", e.name, err)
		}
		out[i] = Tensor{e.name, t}
	}
	slices.SortFunc(out, func(a, b Tensor) int { return cmp.Compare(a.Name, b.Name) })
	return out, metadata, nil
}

// checkBooleans returns an error if a tensor of booleans has a byte that is none: Go programs would behave arbitrarily.
func checkBooleans(t *tensor.Tensor) error {
	if t.DType() == tensor.Bool && slices.ContainsFunc(t.Memory().HostBytes(), func(b byte) bool { return b > 1 }) {
		return errors.New("a boolean is neither 0 nor 1")
	}
	return nil
}

// namedEntry is an entry with its name and parsed dtype.
type namedEntry struct {
	entry
	name  string
	dtype tensor.DType
}

// parseHeader reads the header token by token, because encoding/json would accept duplicate names.
func parseHeader(text []byte) ([]namedEntry, map[string]string, error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return nil, nil, errors.New("checkpoint: the header is not a JSON object")
	}
	var entries []namedEntry
	metadata := map[string]string{}
	seen := map[string]bool{}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return nil, nil, fmt.Errorf("checkpoint: header, byte %d: %w", d.InputOffset(), err)
		}
		name := key.(string) // a key of an object
		if seen[name] {
			return nil, nil, fmt.Errorf("checkpoint: the header names %q twice", name)
		}
		seen[name] = true
		if name == metadataKey {
			err = d.Decode(&metadata)
		} else {
			e := namedEntry{name: name}
			err = d.Decode(&e.entry)
			entries = append(entries, e)
		}
		if err != nil {
			return nil, nil, fmt.Errorf("checkpoint: header, %q: %w", name, err)
		}
	}
	if _, err := d.Token(); err != nil {
		return nil, nil, fmt.Errorf("checkpoint: header, byte %d: %w", d.InputOffset(), err)
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, nil, fmt.Errorf("checkpoint: header, byte %d: unexpected data after the JSON object", d.InputOffset())
	}
	if metadata == nil { // "__metadata__": null
		metadata = map[string]string{}
	}
	return entries, metadata, nil
}

// checkLayout sets each entry's dtype, and checks that the tensors fill the bytes [0, size) without gaps or
// overlaps.
func checkLayout(entries []namedEntry, size uint64) error {
	slices.SortFunc(entries, func(a, b namedEntry) int {
		return cmp.Or(cmp.Compare(a.Offsets[0], b.Offsets[0]), cmp.Compare(a.Offsets[1], b.Offsets[1]),
			cmp.Compare(a.name, b.name))
	})
	var at uint64
	for i := range entries {
		e := &entries[i]
		for dtype, name := range names {
			if name == e.DType {
				e.dtype = dtype
			}
		}
		if e.dtype == tensor.Invalid {
			return fmt.Errorf("checkpoint: tensor %q has the dtype %q, which is not supported", e.name, e.DType)
		}
		bytes, err := sizeOf(e.Shape, e.dtype)
		if err != nil {
			return fmt.Errorf("checkpoint: tensor %q: %w", e.name, err)
		}
		begin, end := e.Offsets[0], e.Offsets[1]
		switch {
		case begin != at:
			return fmt.Errorf("checkpoint: tensor %q begins at byte %d, want %d: tensors must follow one another without gaps",
				e.name, begin, at)
		case end < begin || end-begin != bytes:
			return fmt.Errorf("checkpoint: tensor %q takes the bytes [%d, %d), but %s%v has %d bytes", e.name, begin, end,
				e.DType, e.Shape, bytes)
		case end > size:
			return fmt.Errorf("checkpoint: tensor %q ends at byte %d of %d: the file is truncated", e.name, end, size)
		}
		at = end
	}
	if at != size {
		return fmt.Errorf("checkpoint: %d bytes follow the last tensor", size-at)
	}
	return nil
}

// dimensions returns a tensor's shape for JSON. That of a scalar is not nil, which would be written as null.
func dimensions(t *tensor.Tensor) []int { return append([]int{}, t.Shape()...) }

// sizeOf returns the number of bytes of a tensor, or an error if it overflows. It checks every partial
// product of dimensions, so that a 0 does not hide an overflow.
func sizeOf(shape []int, dtype tensor.DType) (uint64, error) {
	n, zero := uint64(dtype.Bytes()), false
	for _, d := range shape {
		if d < 0 {
			return 0, fmt.Errorf("negative dimension in shape %v", shape)
		}
		if d == 0 {
			zero = true
			continue
		}
		hi, lo := bits.Mul64(n, uint64(d))
		if hi != 0 || lo > math.MaxInt {
			return 0, fmt.Errorf("shape %v is too large", shape)
		}
		n = lo
	}
	if zero {
		return 0, nil
	}
	return n, nil
}

var errBigEndian = errors.New("checkpoint: safetensors files are little-endian, and this machine is not")

func bigEndian() bool { return binary.NativeEndian.Uint16([]byte{1, 0}) != 1 }
