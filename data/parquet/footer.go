package parquet

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
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
	c := compact{footer}
	if err := c.skip(structType, 0); err != nil {
		return fmt.Errorf("its footer is invalid: %w", err)
	}
	return nil
}

// The types of Thrift's compact protocol.
const (
	stopType   = 0
	trueType   = 1
	falseType  = 2
	byteType   = 3
	int16Type  = 4
	int32Type  = 5
	int64Type  = 6
	doubleType = 7
	binaryType = 8
	listType   = 9
	setType    = 10
	mapType    = 11
	structType = 12
)

// compact reads Thrift's compact protocol without keeping anything.
type compact struct{ left []byte }

var errTruncated = errors.New("a value goes beyond its end")

// skip reads a value. depth counts the structs and lists around it.
func (c *compact) skip(kind byte, depth int) error {
	if depth > 32 {
		return errors.New("its values are nested too deeply")
	}
	switch kind {
	case trueType, falseType: // of a list; a field has it in its type
		return c.drop(1)
	case byteType:
		return c.drop(1)
	case int16Type, int32Type, int64Type:
		_, err := c.varint()
		return err
	case doubleType:
		return c.drop(8)
	case binaryType:
		n, err := c.varint()
		if err != nil {
			return err
		}
		return c.drop(n)
	case listType, setType:
		return c.skipList(depth)
	case mapType:
		return c.skipMap(depth)
	case structType:
		return c.skipStruct(depth)
	}
	return fmt.Errorf("a value of the unknown type %d", kind)
}

func (c *compact) skipList(depth int) error {
	head, err := c.byte()
	if err != nil {
		return err
	}
	n := uint64(head >> 4)
	if n == 15 {
		if n, err = c.varint(); err != nil {
			return err
		}
	}
	if n > uint64(len(c.left)) { // each element has a byte at least
		return fmt.Errorf("a list of %d elements in %d bytes", n, len(c.left))
	}
	for range n {
		if err := c.skip(head&15, depth+1); err != nil {
			return err
		}
	}
	return nil
}

func (c *compact) skipMap(depth int) error {
	n, err := c.varint()
	if err != nil || n == 0 {
		return err
	}
	kinds, err := c.byte()
	if err != nil {
		return err
	}
	if n > uint64(len(c.left)) {
		return fmt.Errorf("a map of %d elements in %d bytes", n, len(c.left))
	}
	for range n {
		for _, kind := range []byte{kinds >> 4, kinds & 15} {
			if err := c.skip(kind, depth+1); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *compact) skipStruct(depth int) error {
	for {
		head, err := c.byte()
		if err != nil {
			return err
		}
		kind := head & 15
		if kind == stopType {
			return nil
		}
		if head>>4 == 0 { // the field's number follows
			if _, err := c.varint(); err != nil {
				return err
			}
		}
		if kind == trueType || kind == falseType {
			continue
		}
		if err := c.skip(kind, depth+1); err != nil {
			return err
		}
	}
}

func (c *compact) byte() (byte, error) {
	if len(c.left) == 0 {
		return 0, errTruncated
	}
	b := c.left[0]
	c.left = c.left[1:]
	return b, nil
}

func (c *compact) varint() (uint64, error) {
	x, n := binary.Uvarint(c.left)
	if n <= 0 {
		return 0, errTruncated
	}
	c.left = c.left[n:]
	return x, nil
}

func (c *compact) drop(n uint64) error {
	if n > uint64(len(c.left)) {
		return errTruncated
	}
	c.left = c.left[n:]
	return nil
}
