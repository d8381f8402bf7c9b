package data

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"iter"

	"github.com/lockstep-ml/lockstep/tensor"
)

// lineBytesMax is the longest accepted line, so that a file without line ends is not read into memory
// completely.
const lineBytesMax = 16 << 20

// line reads the next line, without its end ("\n" or "\r\n"). The result is valid until the next read. At the
// end of the file, line returns io.EOF. number is the line's number, from 1, for errors.
func (s *source) line(number int) ([]byte, error) {
	var long []byte // the start of a line that is longer than the reader's buffer
	for {
		part, err := s.r.ReadSlice('\n')
		if len(long)+len(part) > lineBytesMax {
			return nil, s.wrongLine(number, s.offset, fmt.Errorf("a line of more than %d bytes", lineBytesMax))
		}
		if err == bufio.ErrBufferFull {
			long = append(long, part...)
			continue
		}
		if long != nil {
			part = append(long, part...)
		}
		switch {
		case err == io.EOF && len(part) == 0:
			return nil, io.EOF
		case err != nil && err != io.EOF:
			return nil, s.wrongLine(number, s.offset+int64(len(part)), s.explain(err))
		}
		s.offset += int64(len(part))
		return bytes.TrimSuffix(bytes.TrimSuffix(part, []byte("\n")), []byte("\r")), nil
	}
}

func (s *source) wrongLine(line int, offset int64, err error) error {
	return &FormatError{File: s.name, Format: s.format, Line: line, Offset: offset, Packed: s.packed, Err: err}
}

// Lines returns a pipeline of the lines of text files, gzipped or not, in the order of names. Each line is a
// string scalar without its line end. The files are opened when they are read.
func Lines(names ...string) Pipeline {
	return Pipeline{&files{format: "text", names: names, next: (*source).line}}
}

// files is the dataset of the lines or records of files, in order. Each is a string scalar.
type files struct {
	format string
	names  []string
	next   func(s *source, number int) ([]byte, error) // the element of a number, from 1; io.EOF at the end
	shard  shard                                       // which of the original files ShardFiles kept
}

// Len implements [Dataset].
func (f *files) Len() int { return -1 }

// Iter implements [Dataset].
func (f *files) Iter(ctx context.Context) iter.Seq2[Element, error] {
	return (&sequence{-1, func(context.Context) iter.Seq2[Element, error] {
		return func(yield func(Element, error) bool) {
			for _, name := range f.names {
				if !f.one(name, yield) {
					return
				}
			}
		}
	}}).Iter(ctx)
}

// one yields the elements of one file, and reports whether to continue with the next.
func (f *files) one(name string, yield func(Element, error) bool) bool {
	s, err := openSource(name, f.format)
	if err != nil {
		yield(nil, err)
		return false
	}
	defer s.Close()
	for number := 1; ; number++ {
		b, err := f.next(s, number)
		switch {
		case err == io.EOF:
			return true
		case err != nil:
			yield(nil, err)
			return false
		case !yield(stringScalar(string(b)), nil):
			return false
		}
	}
}

func stringScalar(s string) *tensor.Tensor {
	return tensor.Strings([]string{s}, []int{}...)
}
