package data

import (
	"bytes"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Frame is a table of numbers with named columns, as read from a CSV file.
type Frame struct {
	Names  []string       // of the columns
	Values *tensor.Tensor // float64, [rows, columns]
}

// CSV describes the format of a CSV file. The zero value means fields separated by commas, and names in the
// first line.
type CSV struct {
	Comma    byte // between fields; 0: ','
	NoHeader bool // the first line has numbers, not names; columns are named "0", "1", …
}

// LoadCSV reads a CSV file of numbers, gzipped or not. Every line must have as many fields as the first.
// Blank lines, and spaces around fields, are ignored. Fields may be quoted, but not span lines. If a field is
// not a number, or the header is missing, the error is a *[FormatError] with line and offset.
func LoadCSV(name string, c CSV) (*Frame, error) {
	s, err := openSource(name, "CSV")
	if err != nil {
		return nil, err
	}
	defer s.Close()
	return c.read(s)
}

// ReadCSV is [LoadCSV] for a reader. It reads r to its end.
func ReadCSV(r io.Reader, c CSV) (*Frame, error) {
	s, err := newSource(r, "", "CSV")
	if err != nil {
		return nil, err
	}
	return c.read(s)
}

func (c CSV) read(s *source) (*Frame, error) {
	if c.Comma == 0 {
		c.Comma = ','
	}
	var names []string
	var values []float64
	var fields [][]byte
	for number := 1; ; number++ {
		start := s.offset
		line, err := s.line(number)
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, err
		}
		if number == 1 {
			line = bytes.TrimPrefix(line, []byte("\ufeff"))
		}
		if len(bytes.TrimSpace(line)) == 0 {
			continue
		}
		if fields, err = c.fields(fields[:0], line); err != nil {
			return nil, s.wrongLine(number, start, err)
		}
		if names == nil {
			if names, err = c.names(fields); err != nil {
				return nil, s.wrongLine(number, start, err)
			}
			if !c.NoHeader {
				continue
			}
		}
		if len(fields) != len(names) {
			return nil, s.wrongLine(number, start, fmt.Errorf("%d fields, where the first line has %d", len(fields), len(names)))
		}
		for i, f := range fields {
			x, err := strconv.ParseFloat(string(f), 64)
			if err != nil {
				return nil, s.wrongLine(number, start+offsetIn(line, f),
					fmt.Errorf("column %q: %q is not a number", names[i], clip(f)))
			}
			values = append(values, x)
		}
	}
	if names == nil {
		return nil, s.wrong(s.offset, errors.New("the file is empty: a line with the columns' names expected"))
	}
	return &Frame{names, tensor.Of(values, len(values)/len(names), len(names))}, nil
}

// fields appends the fields of a line to dst. They share its memory unless it has quotes.
func (c CSV) fields(dst [][]byte, line []byte) ([][]byte, error) {
	if bytes.IndexByte(line, '"') >= 0 {
		r := csv.NewReader(bytes.NewReader(line))
		r.Comma, r.TrimLeadingSpace = rune(c.Comma), true
		record, err := r.Read()
		if err != nil {
			return nil, fmt.Errorf("quotes that do not match, or a field over several lines: %w", err)
		}
		for _, f := range record {
			dst = append(dst, []byte(strings.TrimSpace(f)))
		}
		return dst, nil
	}
	for {
		i := bytes.IndexByte(line, c.Comma)
		if i < 0 {
			return append(dst, bytes.TrimSpace(line)), nil
		}
		dst = append(dst, bytes.TrimSpace(line[:i]))
		line = line[i+1:]
	}
}

// names returns the names of the columns, from the first line.
func (c CSV) names(fields [][]byte) ([]string, error) {
	names := make([]string, len(fields))
	numbers := 0
	for i, f := range fields {
		names[i] = string(f)
		if c.NoHeader {
			names[i] = strconv.Itoa(i)
		} else if _, err := strconv.ParseFloat(names[i], 64); err == nil {
			numbers++
		}
	}
	if numbers == len(names) {
		return nil, errors.New("only numbers: the columns' names expected (set NoHeader for a file without them)")
	}
	at := make(map[string]int, len(names))
	for i, name := range names {
		if first, again := at[name]; again {
			return nil, fmt.Errorf("columns %d and %d are both named %q", first+1, i+1, clip([]byte(name)))
		}
		at[name] = i
	}
	return names, nil
}

// offsetIn returns the offset of f in line, or 0 if f does not share its memory.
func offsetIn(line, f []byte) int64 {
	if at := cap(line) - cap(f); len(f) > 0 && at >= 0 && at < len(line) && &line[at] == &f[0] {
		return int64(at)
	}
	return 0
}

// clip shortens text to quote in an error.
func clip(b []byte) string {
	if len(b) > 40 {
		return string(b[:40]) + "…"
	}
	return string(b)
}

// Rows returns the number of rows.
func (f *Frame) Rows() int { return f.Values.Shape()[0] }

// Floats returns the named columns as a new float32 tensor [rows, len(names)], rounded. Without names, it
// returns all columns. It returns an error for an unknown name.
func (f *Frame) Floats(names ...string) (*tensor.Tensor, error) {
	if len(names) == 0 {
		names = f.Names
	}
	columns, err := f.columns(names)
	if err != nil {
		return nil, err
	}
	values, width := tensor.Data[float64](f.Values), len(f.Names)
	out := make([]float32, 0, f.Rows()*len(columns))
	for row := range f.Rows() {
		for _, c := range columns {
			out = append(out, float32(values[row*width+c]))
		}
	}
	return tensor.Of(out, f.Rows(), len(columns)), nil
}

// Ints returns a column of integers, such as labels, as a new int32 tensor [rows]. It returns an error for an
// unknown name, or a value that is not an int32.
func (f *Frame) Ints(name string) (*tensor.Tensor, error) {
	columns, err := f.columns([]string{name})
	if err != nil {
		return nil, err
	}
	values, width := tensor.Data[float64](f.Values), len(f.Names)
	out := make([]int32, f.Rows())
	for row := range out {
		x := values[row*width+columns[0]]
		out[row] = int32(x)
		if float64(out[row]) != x {
			return nil, fmt.Errorf("data: column %q, row %d: %v is not an int32", name, row, x)
		}
	}
	return tensor.Of(out), nil
}

// Without returns the names of all columns except the given ones: for example, the inputs without the labels.
func (f *Frame) Without(names ...string) []string {
	out := make(map[string]bool, len(names))
	for _, name := range names {
		out[name] = true
	}
	return slices.DeleteFunc(slices.Clone(f.Names), func(n string) bool { return out[n] })
}

func (f *Frame) columns(names []string) ([]int, error) {
	at := make(map[string]int, len(f.Names))
	for i, name := range f.Names {
		at[name] = i
	}
	columns := make([]int, len(names))
	for i, name := range names {
		column, ok := at[name]
		if !ok {
			return nil, fmt.Errorf("data: no column %q: there are %s", name, quoteSome(f.Names))
		}
		columns[i] = column
	}
	return columns, nil
}

// namesShown is the most columns that an error lists.
const namesShown = 50

// quoteSome lists names, the first ones if there are many.
func quoteSome(names []string) string {
	if len(names) <= namesShown {
		return fmt.Sprintf("%q", names)
	}
	return fmt.Sprintf("%q and %d more", names[:namesShown], len(names)-namesShown)
}
