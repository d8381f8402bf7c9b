package data

import (
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/lockstep-ml/lockstep/tensor"
)

const (
	optdigitsSide  = 8  // pixels a side
	optdigitsWhite = 16 // the largest value: a count over 4×4 dots
)

// LoadOptdigits reads a file of UCI's optical digits (optdigits.tra, optdigits.tes), gzipped or not. images
// is uint8 [n, 8, 8] with values 0…16, and labels is uint8 [n]. A line has 64 pixels and the digit, separated
// by commas; a first line of names is skipped. An invalid file gives a *[FormatError]. Package data/digits
// embeds the data set.
func LoadOptdigits(name string) (images, labels *tensor.Tensor, err error) {
	s, err := openSource(name, "optdigits")
	if err != nil {
		return nil, nil, err
	}
	defer s.Close()
	return readOptdigits(s)
}

func readOptdigits(s *source) (images, labels *tensor.Tensor, err error) {
	const pixels = optdigitsSide * optdigitsSide
	var px, digits []byte
	var fields [][]byte
	for number := 1; ; number++ {
		start := s.offset
		line, err := s.line(number)
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, nil, err
		}
		if fields, err = (CSV{Comma: ','}).fields(fields[:0], line); err != nil {
			return nil, nil, s.wrongLine(number, start, err)
		}
		if len(fields) != pixels+1 {
			return nil, nil, s.wrongLine(number, start,
				fmt.Errorf("%d fields: want %d pixels and the digit", len(fields), pixels))
		}
		if _, err := strconv.ParseFloat(string(fields[pixels]), 64); number == 1 && err != nil {
			continue // names
		}
		for i, f := range fields {
			limit := uint64(optdigitsWhite)
			if i == pixels {
				limit = 9
			}
			x, err := strconv.ParseUint(string(f), 10, 8)
			if err != nil || x > limit {
				return nil, nil, s.wrongLine(number, start+offsetIn(line, f),
					fmt.Errorf("field %d is %q: want a number from 0 to %d", i+1, clip(f), limit))
			}
			if i < pixels {
				px = append(px, byte(x))
			} else {
				digits = append(digits, byte(x))
			}
		}
	}
	if len(digits) == 0 {
		return nil, nil, s.wrong(s.offset, errors.New("the file contains no examples"))
	}
	return tensor.Of(px, len(digits), optdigitsSide, optdigitsSide), tensor.Of(digits), nil
}
