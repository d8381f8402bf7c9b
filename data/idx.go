package data

import (
	"encoding/binary"
	"fmt"
	"io"
	"math"

	"github.com/lockstep-ml/lockstep/tensor"
)

// The IDX format, of MNIST (http://yann.lecun.com/exdb/mnist): two zero bytes, the type's code, the number of
// dimensions, the dimensions as big-endian uint32, and the elements, big-endian, in row-major order.
var idxTypes = map[byte]tensor.DType{
	0x08: tensor.Uint8,
	0x09: tensor.Int8,
	0x0b: tensor.Int16,
	0x0c: tensor.Int32,
	0x0d: tensor.Float32,
	0x0e: tensor.Float64,
}

// LoadIDX reads an IDX file, gzipped or not: the format of MNIST, Fashion-MNIST, EMNIST and others. The error
// is a *[FormatError] if the file is truncated, too long or not an IDX file.
func LoadIDX(name string) (*tensor.Tensor, error) {
	return readFile(name, "IDX", readIDX)
}

// ReadIDX is [LoadIDX] for a reader. It reads r to its end.
func ReadIDX(r io.Reader) (*tensor.Tensor, error) {
	return readFrom(r, "IDX", readIDX)
}

func readIDX(s *source) (*tensor.Tensor, error) {
	h, size, err := readIDXHeader(s)
	if err != nil {
		return nil, err
	}
	b, err := s.bytes(size, fmt.Sprintf("elements of a %v tensor of shape %v", h.dtype, h.shape))
	if err != nil {
		return nil, err
	}
	if err := s.end(fmt.Sprintf("the elements of shape %v", h.shape)); err != nil {
		return nil, err
	}
	return decode(b, h.order, h.dtype, h.shape), nil
}

// readIDXHeader returns the header and the number of bytes of the elements that follow it.
func readIDXHeader(s *source) (h arrayHeader, size int64, err error) {
	var head [4]byte
	if err := s.full(head[:], "a magic number"); err != nil {
		return h, 0, err
	}
	dtype, ok := idxTypes[head[2]]
	if head[0] != 0 || head[1] != 0 || !ok {
		return h, 0, s.wrong(0, fmt.Errorf("magic number 0x%08x is not IDX's: want 0x0000TTNN with type TT one of 08, 09, "+
			"0b, 0c, 0d, 0e",
			binary.BigEndian.Uint32(head[:])))
	}
	if head[3] == 0 {
		return h, 0, s.wrong(3, fmt.Errorf("no dimensions: want at least 1"))
	}
	shape := make([]int, head[3])
	for i := range shape {
		var dim [4]byte
		if err := s.full(dim[:], fmt.Sprintf("dimension %d of %d", i+1, len(shape))); err != nil {
			return h, 0, err
		}
		shape[i] = int(binary.BigEndian.Uint32(dim[:]))
	}
	if size, ok = sizeOf(dtype, shape); !ok {
		return h, 0, s.wrong(4, fmt.Errorf("shape %v of %v is more bytes than can be addressed", shape, dtype))
	}
	return arrayHeader{dtype, binary.BigEndian, shape}, size, nil
}

// WriteIDX writes t to w as an IDX file. The dtype must be uint8, int8, int16, int32, float32 or float64. It
// panics if it is another one, or if t has no dimensions, more than 255 dimensions, or a dimension above
// 2³²-1.
func WriteIDX(w io.Writer, t *tensor.Tensor) error {
	var code byte
	for c, d := range idxTypes {
		if d == t.DType() {
			code = c
		}
	}
	if code == 0 || t.Rank() == 0 || t.Rank() > 255 {
		panic(fmt.Sprintf("data: WriteIDX of %v%s", t.DType(), tensor.FormatShape(t.Shape())))
	}
	out := []byte{0, 0, code, byte(t.Rank())}
	for _, d := range t.Shape() {
		if int64(d) > math.MaxUint32 {
			panic(fmt.Sprintf("data: WriteIDX of shape %v", t.Shape()))
		}
		out = binary.BigEndian.AppendUint32(out, uint32(d))
	}
	_, err := w.Write(encode(out, t, binary.BigEndian))
	return err
}

// sizeOf returns the number of bytes of a tensor, or false if tensor.New would reject the shape.
func sizeOf(dtype tensor.DType, shape []int) (int64, bool) {
	n, empty := dtype.Bytes(), false
	for _, d := range shape {
		switch {
		case d == 0:
			empty = true
		case d < 0 || n > (math.MaxInt-7)/d:
			return 0, false
		default:
			n *= d
		}
	}
	if empty {
		return 0, true
	}
	return int64(n), true
}

// decode returns a tensor of elements in the given byte order. It may share b.
func decode(b []byte, order binary.ByteOrder, dtype tensor.DType, shape []int) *tensor.Tensor {
	if dtype == tensor.Uint8 && len(shape) > 0 {
		return tensor.Of(b, shape...)
	}
	t := tensor.New(dtype, shape...)
	out := t.Memory().HostBytes()
	switch dtype.Bytes() {
	case 1:
		copy(out, b)
	case 2:
		for i := 0; i < len(b); i += 2 {
			binary.NativeEndian.PutUint16(out[i:], order.Uint16(b[i:]))
		}
	case 4:
		for i := 0; i < len(b); i += 4 {
			binary.NativeEndian.PutUint32(out[i:], order.Uint32(b[i:]))
		}
	case 8:
		for i := 0; i < len(b); i += 8 {
			binary.NativeEndian.PutUint64(out[i:], order.Uint64(b[i:]))
		}
	}
	return t
}

// encode appends the elements of t in the given byte order.
func encode(dst []byte, t *tensor.Tensor, order binary.AppendByteOrder) []byte {
	in := t.Memory().HostBytes()
	switch t.DType().Bytes() {
	case 1:
		dst = append(dst, in...)
	case 2:
		for i := 0; i < len(in); i += 2 {
			dst = order.AppendUint16(dst, binary.NativeEndian.Uint16(in[i:]))
		}
	case 4:
		for i := 0; i < len(in); i += 4 {
			dst = order.AppendUint32(dst, binary.NativeEndian.Uint32(in[i:]))
		}
	case 8:
		for i := 0; i < len(in); i += 8 {
			dst = order.AppendUint64(dst, binary.NativeEndian.Uint64(in[i:]))
		}
	}
	return dst
}
