package data

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"

	"github.com/lockstep-ml/lockstep/tensor"
)

// The NPY format (numpy.lib.format): "\x93NUMPY", major and minor version, the length of the header (uint16 in version
// 1, uint32 in 2 and 3, little-endian), the header, which is a Python dict of 'descr', 'fortran_order' and 'shape', and
// the elements.
var npyMagic = []byte("\x93NUMPY")

// npyHeaderBytesMax is the largest accepted header. numpy limits it to 10,000 bytes on load.
const npyHeaderBytesMax = 1 << 16

var npyTypes = map[string]tensor.DType{
	"b1": tensor.Bool,
	"i1": tensor.Int8,
	"i2": tensor.Int16,
	"i4": tensor.Int32,
	"i8": tensor.Int64,
	"u1": tensor.Uint8,
	"u2": tensor.Uint16,
	"u4": tensor.Uint32,
	"u8": tensor.Uint64,
	"f2": tensor.Float16,
	"f4": tensor.Float32,
	"f8": tensor.Float64,
}

// LoadNPY reads an array in the format of numpy.save, gzipped or not: booleans, integers or floats of either
// byte order, in row-major (C) order. The error is a *[FormatError] if the file is truncated, too long or has
// another format.
func LoadNPY(name string) (*tensor.Tensor, error) {
	return readFile(name, "NPY", readNPY)
}

// ReadNPY is [LoadNPY] for a reader. It reads r to its end.
func ReadNPY(r io.Reader) (*tensor.Tensor, error) {
	return readFrom(r, "NPY", readNPY)
}

func readNPY(s *source) (*tensor.Tensor, error) {
	h, size, err := readNPYHeader(s)
	if err != nil {
		return nil, err
	}
	at := s.offset
	b, err := s.bytes(size, fmt.Sprintf("elements of a %v array of shape %v", h.dtype, h.shape))
	if err != nil {
		return nil, err
	}
	if err := s.end(fmt.Sprintf("the elements of shape %v", h.shape)); err != nil {
		return nil, err
	}
	if i := firstNotBool(h.dtype, b); i >= 0 {
		return nil, s.wrong(at+int64(i), fmt.Errorf("a bool of value %d: want 0 or 1", b[i]))
	}
	return decode(b, h.order, h.dtype, h.shape), nil
}

// firstNotBool returns the index of the first byte that is not a valid Go bool, or -1 if dtype is another one.
func firstNotBool(dtype tensor.DType, b []byte) int {
	if dtype != tensor.Bool {
		return -1
	}
	return slices.IndexFunc(b, func(x byte) bool { return x > 1 })
}

// readNPYHeader returns the header and the number of bytes of the elements that follow it.
func readNPYHeader(s *source) (h arrayHeader, size int64, err error) {
	var start [8]byte
	if err := s.full(start[:], "a magic string and a version"); err != nil {
		return h, 0, err
	}
	if !bytes.HasPrefix(start[:], npyMagic) {
		return h, 0, s.wrong(0, fmt.Errorf("%q expected, found %q", npyMagic, start[:6]))
	}
	var length [4]byte
	switch start[6] {
	case 1:
		if err := s.full(length[:2], "the header's length"); err != nil {
			return h, 0, err
		}
	case 2, 3:
		if err := s.full(length[:], "the header's length"); err != nil {
			return h, 0, err
		}
	default:
		return h, 0, s.wrong(6, fmt.Errorf("version %d.%d: want 1, 2 or 3", start[6], start[7]))
	}
	n, at := binary.LittleEndian.Uint32(length[:]), s.offset
	if n > npyHeaderBytesMax {
		return h, 0, s.wrong(8, fmt.Errorf("a header of %d bytes: want at most %d", n, npyHeaderBytesMax))
	}
	text, err := s.bytes(int64(n), "the header")
	if err != nil {
		return h, 0, err
	}
	p := npyParser{text: text}
	h, err = p.header()
	if err != nil {
		return h, 0, s.wrong(at+int64(p.at), err)
	}
	size, ok := sizeOf(h.dtype, h.shape)
	if !ok {
		return h, 0, s.wrong(at, fmt.Errorf("shape %v of %v is more bytes than can be addressed", h.shape, h.dtype))
	}
	return h, size, nil
}

// arrayHeader describes the elements that follow it.
type arrayHeader struct {
	dtype tensor.DType
	order binary.ByteOrder
	shape []int
}

// npyParser parses the Python dict of a header. at is the current offset, and that of an error.
type npyParser struct {
	text []byte
	at   int
}

func (p *npyParser) header() (h arrayHeader, err error) {
	if err := p.expect('{'); err != nil {
		return h, err
	}
	seen := map[string]bool{}
	for !p.accept('}') {
		key, err := p.quoted()
		if err != nil {
			return h, err
		}
		if seen[key] {
			return h, fmt.Errorf("a second %q", key)
		}
		seen[key] = true
		if err := p.expect(':'); err != nil {
			return h, err
		}
		switch key {
		case "descr":
			h.dtype, h.order, err = p.descr()
		case "fortran_order":
			err = p.rowMajor()
		case "shape":
			h.shape, err = p.shape()
		default:
			err = fmt.Errorf("key %q: want 'descr', 'fortran_order', 'shape'", key)
		}
		if err != nil {
			return h, err
		}
		if !p.accept(',') {
			if err := p.expect('}'); err != nil {
				return h, err
			}
			break
		}
	}
	for _, key := range []string{"descr", "fortran_order", "shape"} {
		if !seen[key] {
			return h, fmt.Errorf("no %q in the header", key)
		}
	}
	if p.skip(); p.at < len(p.text) {
		return h, errors.New("end of the header expected")
	}
	return h, nil
}

func (p *npyParser) descr() (tensor.DType, binary.ByteOrder, error) {
	p.skip()
	at := p.at
	s, err := p.quoted()
	if err != nil {
		return 0, nil, fmt.Errorf("'descr': %w (structured types are not supported)", err)
	}
	var order binary.ByteOrder = binary.LittleEndian
	if len(s) == 3 {
		if s[0] == '>' {
			order = binary.BigEndian
		}
		if d, ok := npyTypes[s[1:]]; ok && bytes.IndexByte([]byte("<>|"), s[0]) >= 0 && (s[0] != '|' || d.Bytes() == 1) {
			return d, order, nil
		}
	}
	p.at = at
	return 0, nil, fmt.Errorf("type %q: want a bool, int, uint or float, such as '<f4'", clip([]byte(s)))
}

func (p *npyParser) rowMajor() error {
	p.skip()
	switch rest := p.text[p.at:]; {
	case bytes.HasPrefix(rest, []byte("False")):
		p.at += len("False")
		return nil
	case bytes.HasPrefix(rest, []byte("True")):
		return errors.New("the array is in Fortran order: save numpy.ascontiguousarray of it")
	}
	return errors.New("'fortran_order': True or False expected")
}

func (p *npyParser) shape() ([]int, error) {
	if err := p.expect('('); err != nil {
		return nil, err
	}
	shape := []int{}
	for !p.accept(')') {
		p.skip()
		start := p.at
		for p.at < len(p.text) && p.text[p.at] >= '0' && p.text[p.at] <= '9' {
			p.at++
		}
		d, err := strconv.ParseInt(string(p.text[start:p.at]), 10, 0)
		if err != nil {
			p.at = start
			return nil, errors.New("'shape': a dimension expected")
		}
		shape = append(shape, int(d))
		if !p.accept(',') {
			if err := p.expect(')'); err != nil {
				return nil, err
			}
			break
		}
	}
	return shape, nil
}

// quoted reads a string in single or double quotes; those of a header need no escapes.
func (p *npyParser) quoted() (string, error) {
	p.skip()
	if p.at < len(p.text) && (p.text[p.at] == '\'' || p.text[p.at] == '"') {
		rest := p.text[p.at+1:]
		if end := bytes.IndexByte(rest, p.text[p.at]); end >= 0 {
			p.at += end + 2
			return string(rest[:end]), nil
		}
	}
	return "", errors.New("a quoted string expected")
}

func (p *npyParser) expect(c byte) error {
	if !p.accept(c) {
		return fmt.Errorf("%q expected", c)
	}
	return nil
}

func (p *npyParser) accept(c byte) bool {
	p.skip()
	if p.at < len(p.text) && p.text[p.at] == c {
		p.at++
		return true
	}
	return false
}

// skip skips white space.
func (p *npyParser) skip() {
	for p.at < len(p.text) && bytes.IndexByte([]byte(" \t\r\n"), p.text[p.at]) >= 0 {
		p.at++
	}
}
