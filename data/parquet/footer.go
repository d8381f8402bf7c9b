package parquet

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/parquet-go/parquet-go/encoding/thrift"
)

// checkFooter returns an error if a file's footer has lists or texts that are longer than the footer itself. The
// library allocates them by the lengths that the footer states, before it reads them.
func checkFooter(f io.ReaderAt, size int64) error {
	const magic = 4
	var tail [4 + magic]byte
	if size < int64(len(tail)) {
		return nil // the library reports it
	}
	if _, err := f.ReadAt(tail[:], size-int64(len(tail))); err != nil {
		return err
	}
	n := int64(binary.LittleEndian.Uint32(tail[:]))
	if string(tail[4:]) != "PAR1" {
		return nil // the library reports it
	}
	if limit := size - int64(len(tail)) - magic; n > limit {
		return fmt.Errorf("its footer has %d bytes, and there are %d before it", n, max(limit, 0))
	}
	footer := make([]byte, n)
	if _, err := f.ReadAt(footer, size-int64(len(tail))-n); err != nil {
		return err
	}
	if _, err := structBytes(footer); err != nil {
		return fmt.Errorf("its footer is invalid: %w", err)
	}
	return nil
}

var errTruncated = errors.New("a value goes beyond its end")

// structBytes returns the length of the struct in Thrift's compact protocol with which b begins. It returns an error if
// a list, a map or a text in it is longer than b, or if its values are nested too deeply to be decoded.
func structBytes(b []byte) (int, error) {
	c := compact{new(thrift.CompactProtocol).NewReaderFromBytes(b), len(b)}
	err := recovered(func() error { return c.skip(thrift.STRUCT, 0) })
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = errTruncated
	}
	return c.BytesRead(), err
}

// compact reads size bytes of Thrift's compact protocol without keeping anything.
type compact struct {
	thrift.BytesReader
	size int
}

// skip reads a value. depth counts the structs and lists around it.
func (c compact) skip(kind thrift.Type, depth int) (err error) {
	if depth > 32 {
		return errors.New("its values are nested too deeply")
	}
	switch kind {
	case thrift.TRUE, thrift.FALSE: // of a list; a field has it in its type
		_, err = c.ReadBool()
	case thrift.I8:
		_, err = c.ReadInt8()
	case thrift.I16, thrift.I32, thrift.I64:
		_, err = c.ReadInt64()
	case thrift.DOUBLE:
		_, err = c.ReadFloat64()
	case thrift.BINARY:
		_, err = c.ReadBytes()
	case thrift.LIST, thrift.SET:
		l, err := c.ReadList()
		if err != nil {
			return err
		}
		return c.skipAll("list", l.Size, depth, l.Type)
	case thrift.MAP:
		m, err := c.ReadMap()
		if err != nil {
			return err
		}
		return c.skipAll("map", m.Size, depth, m.Key, m.Value)
	case thrift.STRUCT:
		return c.skipFields(depth)
	default:
		return fmt.Errorf("a value of the unknown type %d", kind)
	}
	return err
}

// skipAll reads the n elements of a list or a map.
func (c compact) skipAll(what string, n int32, depth int, kinds ...thrift.Type) error {
	if left := c.size - c.BytesRead(); int(n) > left { // each element has a byte at least
		return fmt.Errorf("a %s of %d elements in %d bytes", what, n, left)
	}
	for range n {
		for _, kind := range kinds {
			if err := c.skip(kind, depth+1); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c compact) skipFields(depth int) error {
	for {
		f, err := c.ReadField()
		if err != nil || f.Type == thrift.STOP {
			return err
		}
		if f.Type == thrift.TRUE || f.Type == thrift.FALSE {
			continue
		}
		if err := c.skip(f.Type, depth+1); err != nil {
			return err
		}
	}
}
