package data

import (
	"bytes"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Frame is a table with named columns, as read from a CSV file. Columns hold numbers, or one of several categories.
type Frame struct {
	Names []string // of the columns
	// Values are float64, [rows, columns]. A missing value is NaN, a category the index of its name in Categories.
	Values *tensor.Tensor
	// Categories has the names of the categories of each column of text. Give it to CSV to read another file, such as
	// the test data, with the same numbers.
	Categories map[string][]string
}

// CSV describes the format of a CSV file. The zero value means numbers, separated by commas, and names in the first
// line.
type CSV struct {
	Comma    byte     // between fields; 0: ','
	NoHeader bool     // the first line has values, not names; columns are named by Names, or "0", "1", …
	Names    []string // of the columns of a file without a header
	Columns  []string // to read, in this order; nil: all. Fields of other columns are ignored
	Drop     []string // columns to leave out of these
	Dates    []string // columns of dates and times, read as days since 1970-01-01 UTC: see LoadCSV
	Comment  string   // lines that start with it are ignored; empty: none
	Missing  []string // fields that mean a missing value, such as "?" or ""; without them, such a field is an error
	// Categories has an entry for each column of text: the names of its categories, in the order of their numbers. A
	// field with another text is an error. nil means the texts in the file, sorted. Those of a column that is not
	// among Columns are ignored.
	Categories map[string][]string
}

// LoadCSV reads a CSV file, gzipped or not, into memory. Every line must have as many fields as the first. Blank
// lines, and spaces around fields, are ignored. Fields may be quoted, but not span lines. A date is 2024-12-31 or
// 2024/12/31, alone or with a time such as 15:04 or 15:04:05.5, which is a part of a day, and a zone as in RFC 3339
// (default UTC).
//
// If fields of columns of numbers or dates are not numbers or dates (a *[FieldError], which has all these columns), a
// category is unknown, or the header is missing, the error is a *[FormatError] with line and offset.
func LoadCSV(name string, c CSV) (*Frame, error) {
	return readFile(name, "CSV", c.read)
}

// ReadCSV is [LoadCSV] for a reader. It reads r to its end.
func ReadCSV(r io.Reader, c CSV) (*Frame, error) {
	return readFrom(r, "CSV", c.read)
}

func (c CSV) read(s *source) (*Frame, error) {
	if c.Comma == 0 {
		c.Comma = ','
	}
	if c.Names != nil && !c.NoHeader {
		return nil, errors.New("data: CSV with Names, but without NoHeader: names are for a file without them")
	}
	var names, all []string
	var values []float64
	var columns []csvColumn
	var places []int // of the columns in a line
	var fields [][]byte
	var bad *FieldError // the first one, at a line and offset
	var badLine int
	var badOffset int64
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
		if len(bytes.TrimSpace(line)) == 0 || c.Comment != "" && bytes.HasPrefix(line, []byte(c.Comment)) {
			continue
		}
		if fields, err = c.fields(fields[:0], line); err != nil {
			return nil, s.wrongLine(number, start, err)
		}
		if names == nil {
			if all, err = c.names(fields); err == nil {
				names, places, err = c.chosen(all)
			}
			if err == nil {
				columns, err = c.columns(names, all)
			}
			if err != nil {
				return nil, s.wrongLine(number, start, err)
			}
			if !c.NoHeader {
				continue
			}
		}
		if len(fields) != len(all) {
			return nil, s.wrongLine(number, start, fmt.Errorf("%d fields, where the first line has %d", len(fields), len(all)))
		}
		for i, place := range places {
			f := fields[place]
			x, err := c.value(&columns[i], names[i], f)
			if found := (*FieldError)(nil); errors.As(err, &found) {
				if err, columns[i].bad = nil, true; bad == nil {
					bad, badLine, badOffset = found, number, start+offsetIn(line, f)
				} else {
					bad.Others = append(bad.Others, *found)
				}
			}
			if err != nil && bad != nil {
				return nil, s.wrongLine(badLine, badOffset, bad)
			}
			if err != nil {
				return nil, s.wrongLine(number, start+offsetIn(line, f), err)
			}
			values = append(values, x)
		}
	}
	if names == nil {
		return nil, s.wrong(s.offset, errors.New("the file is empty: a line with the columns' names expected"))
	}
	if bad != nil {
		return nil, s.wrongLine(badLine, badOffset, bad)
	}
	frame := &Frame{Names: names, Values: tensor.Of(values, len(values)/len(names), len(names))}
	for i := range columns {
		if columns[i].numbers != nil {
			frame.setCategories(i, &columns[i])
		}
	}
	return frame, nil
}

// csvColumn is a column while its file is read.
type csvColumn struct {
	numbers map[string]int // of the categories; nil for a column of numbers
	known   []string       // all categories; nil if those in the file are still collected
	date    bool
	bad     bool // a field could not be read
}

// chosen returns the names of the columns to read, and their places among all.
func (c CSV) chosen(all []string) (names []string, places []int, err error) {
	at := make(map[string]int, len(all)) // a table may have 100,000 columns
	for i, name := range all {
		at[name] = i
	}
	dropped := make(map[string]bool, len(c.Drop))
	for _, name := range c.Drop {
		if _, ok := at[name]; !ok {
			return nil, nil, fmt.Errorf("no column %q, which Drop of CSV leaves out: there are %s", name, quoteSome(all))
		}
		dropped[name] = true
	}
	wanted := c.Columns
	if len(wanted) == 0 {
		wanted = all
	}
	for _, name := range wanted {
		switch place, ok := at[name]; {
		case !ok:
			return nil, nil, fmt.Errorf("no column %q: there are %s", name, quoteSome(all))
		case place < 0:
			return nil, nil, fmt.Errorf("the Columns of CSV have %q twice", name)
		case !dropped[name]:
			names, places = append(names, name), append(places, place)
			at[name] = -1
		}
	}
	if len(names) == 0 {
		return nil, nil, errors.New("the Drop of CSV leaves out all columns")
	}
	return names, places, nil
}

// columns returns the columns with the given names, of all in the file.
func (c CSV) columns(names, all []string) ([]csvColumn, error) {
	columns := make([]csvColumn, len(names))
	for name, known := range c.Categories {
		i := slices.Index(names, name)
		if i < 0 && slices.Contains(all, name) {
			continue // it is not read
		}
		if i < 0 {
			return nil, fmt.Errorf("no column %q, for which CSV has categories: there are %s", name, quoteSome(all))
		}
		columns[i] = csvColumn{numbers: make(map[string]int), known: known}
		for k, text := range known {
			if first, again := columns[i].numbers[text]; again {
				return nil, fmt.Errorf("column %q: categories %d and %d of CSV are both %q", name, first, k, clip([]byte(text)))
			}
			columns[i].numbers[text] = k
		}
	}
	for _, name := range c.Dates {
		i := slices.Index(names, name)
		switch {
		case i < 0 && !slices.Contains(all, name):
			return nil, fmt.Errorf("no column %q, which CSV reads as dates: there are %s", name, quoteSome(all))
		case i >= 0 && columns[i].numbers != nil:
			return nil, fmt.Errorf("column %q: CSV has categories for it, and reads it as dates: want one", name)
		case i >= 0:
			columns[i].date = true
		}
	}
	return columns, nil
}

// FieldError reports a field that is not a number, in a column of numbers, or not a date, in one of CSV.Dates.
type FieldError struct {
	Column string // its name
	Field  string // the text that was found, shortened
	Want   string // "number" or "date"
	// Date reports that the field is a date, so that CSV.Dates can read the column.
	Date bool
	// Others has the first such field of each further column.
	Others []FieldError
}

// Error implements error.
func (e *FieldError) Error() string {
	text := fmt.Sprintf("column %q: %q is not a %s", e.Column, e.Field, e.Want)
	for i, o := range e.Others {
		if i == namesShown {
			return fmt.Sprintf("%s; and so on, in %d more columns", text, len(e.Others)-i)
		}
		text += fmt.Sprintf("; column %q: %q is not a %s", o.Column, o.Field, o.Want)
	}
	return text
}

// dateLayouts are the forms of dates in a CSV file.
var dateLayouts = []string{
	"2006-01-02", "2006-01-02 15:04", "2006-01-02 15:04:05", "2006-01-02T15:04", "2006-01-02T15:04:05",
	time.RFC3339, "2006-01-02 15:04:05Z07:00", "2006/01/02", "2006/01/02 15:04", "2006/01/02 15:04:05",
}

// daysOf returns the days from 1970-01-01 UTC to a date.
func daysOf(text string) (days float64, ok bool) {
	for _, layout := range dateLayouts {
		if t, err := time.Parse(layout, text); err == nil {
			return float64(t.Unix())/86400 + float64(t.Nanosecond())/86400e9, true
		}
	}
	return 0, false
}

// value returns the number of a field in the column of a name.
func (c CSV) value(column *csvColumn, name string, field []byte) (float64, error) {
	for _, missing := range c.Missing {
		if string(field) == missing {
			return math.NaN(), nil
		}
	}
	if column.bad {
		return 0, nil // it is reported
	}
	if column.date {
		x, ok := daysOf(string(field))
		if !ok {
			return 0, &FieldError{Column: name, Field: clip(field), Want: "date"}
		}
		return x, nil
	}
	if column.numbers == nil {
		x, err := strconv.ParseFloat(string(field), 64)
		if err != nil {
			_, date := daysOf(string(field))
			return 0, &FieldError{Column: name, Field: clip(field), Want: "number", Date: date}
		}
		return x, nil
	}
	k, ok := column.numbers[string(field)]
	if !ok && column.known != nil {
		return 0, fmt.Errorf("column %q: %q is none of its categories, %s", name, clip(field), quoteSome(column.known))
	}
	if !ok {
		k = len(column.numbers)
		column.numbers[string(field)] = k
	}
	return float64(k), nil
}

// setCategories sets the names of the categories of column i. If they are those in the file, it numbers them in
// sorted order.
func (f *Frame) setCategories(i int, column *csvColumn) {
	if f.Categories == nil {
		f.Categories = make(map[string][]string)
	}
	if column.known != nil {
		f.Categories[f.Names[i]] = column.known
		return
	}
	sorted := slices.Sorted(maps.Keys(column.numbers))
	f.Categories[f.Names[i]] = sorted
	order := make([]float64, len(sorted)) // from the number of first appearance
	for k, text := range sorted {
		order[column.numbers[text]] = float64(k)
	}
	values, width := tensor.Data[float64](f.Values), len(f.Names)
	for at := i; at < len(values); at += width {
		if !math.IsNaN(values[at]) {
			values[at] = order[int(values[at])]
		}
	}
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
	if c.Names != nil && len(c.Names) != len(fields) {
		return nil, fmt.Errorf("%d fields, where CSV has %d names", len(fields), len(c.Names))
	}
	names := make([]string, len(fields))
	numbers := 0
	for i, f := range fields {
		names[i] = string(f)
		if c.Names != nil {
			names[i] = c.Names[i]
		} else if c.NoHeader {
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
// returns all columns. It returns an error for an unknown name, a column of text, and a missing value.
func (f *Frame) Floats(names ...string) (*tensor.Tensor, error) {
	if len(names) == 0 {
		names = f.Names
	}
	columns, err := f.columns(names)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if f.Categories[name] != nil {
			return nil, fmt.Errorf("data: column %q is text, of %d categories: use Ints or OneHot", name,
				len(f.Categories[name]))
		}
	}
	values, width := tensor.Data[float64](f.Values), len(f.Names)
	out := make([]float32, 0, f.Rows()*len(columns))
	for row := range f.Rows() {
		for i, c := range columns {
			x := values[row*width+c]
			if math.IsNaN(x) {
				return nil, missingValue(names[i], row)
			}
			out = append(out, float32(x))
		}
	}
	return tensor.Of(out, f.Rows(), len(columns)), nil
}

func missingValue(name string, row int) error {
	return fmt.Errorf("data: column %q, row %d: the value is missing: use Fill, or DropMissing", name, row)
}

// Column returns a copy of the values of a column of numbers, of which missing ones are NaN. It returns an
// error for an unknown name, and a column of text.
func (f *Frame) Column(name string) ([]float64, error) {
	columns, err := f.columns([]string{name})
	if err != nil {
		return nil, err
	}
	if f.Categories[name] != nil {
		return nil, fmt.Errorf("data: column %q is text: use Ints or OneHot", name)
	}
	values, width := tensor.Data[float64](f.Values), len(f.Names)
	out := make([]float64, f.Rows())
	for row := range out {
		out[row] = values[row*width+columns[0]]
	}
	return out, nil
}

// Ints returns a column of integers or categories, such as labels, as a new int32 tensor [rows]. It returns an error
// for an unknown name, a missing value, and a value that is not an int32.
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
		if math.IsNaN(x) {
			return nil, missingValue(name, row)
		}
		if float64(out[row]) != x {
			return nil, fmt.Errorf("data: column %q, row %d: %v is not an int32", name, row, x)
		}
	}
	return tensor.Of(out), nil
}

// OneHot returns a column of text as a new float32 tensor [rows, categories]: 1 at the category of a row, 0
// elsewhere. A row whose value is missing has zeros only. It returns an error for an unknown name, and a column
// of numbers.
func (f *Frame) OneHot(name string) (*tensor.Tensor, error) {
	columns, err := f.columns([]string{name})
	if err != nil {
		return nil, err
	}
	n := len(f.Categories[name])
	if n == 0 {
		return nil, fmt.Errorf("data: column %q has no categories: give it an entry in CSV.Categories to read it as text",
			name)
	}
	values, width := tensor.Data[float64](f.Values), len(f.Names)
	out := make([]float32, f.Rows()*n)
	for row := range f.Rows() {
		if x := values[row*width+columns[0]]; !math.IsNaN(x) {
			out[row*n+int(x)] = 1
		}
	}
	return tensor.Of(out, f.Rows(), n), nil
}

// Fill replaces the missing values of a column by x, in f. It returns an error for an unknown name, and if x is not a
// category's number in a column of text.
func (f *Frame) Fill(name string, x float64) error {
	columns, err := f.columns([]string{name})
	if err != nil {
		return err
	}
	if n := len(f.Categories[name]); n > 0 && !(x >= 0 && x < float64(n) && x == math.Trunc(x)) {
		return fmt.Errorf("data: column %q is text: cannot fill it with %v: want a category's number, 0 to %d", name, x, n-1)
	}
	values, width := tensor.Data[float64](f.Values), len(f.Names)
	for at := columns[0]; at < len(values); at += width {
		if math.IsNaN(values[at]) {
			values[at] = x
		}
	}
	return nil
}

// Mean returns the mean and the standard deviation of the values of a column that are not missing, for [Frame.Fill]
// and to standardise inputs. Both are NaN without such values. It returns an error for an unknown name, and a
// column of text.
func (f *Frame) Mean(name string) (mean, deviation float64, err error) {
	columns, err := f.columns([]string{name})
	if err != nil {
		return 0, 0, err
	}
	if f.Categories[name] != nil {
		return 0, 0, fmt.Errorf("data: column %q is text: its mean has no meaning", name)
	}
	values, width := tensor.Data[float64](f.Values), len(f.Names)
	n, squares := 0.0, 0.0 // Welford's method
	for at := columns[0]; at < len(values); at += width {
		if x := values[at]; !math.IsNaN(x) {
			n++
			d := x - mean
			mean += d / n
			squares += d * (x - mean)
		}
	}
	if n == 0 {
		return math.NaN(), math.NaN(), nil
	}
	return mean, math.Sqrt(squares / n), nil
}

// Select returns a new frame of the rows with the given numbers, in this order. It returns an error for a number that
// is not from 0 to Rows()-1.
func (f *Frame) Select(rows []int) (*Frame, error) {
	values, width := tensor.Data[float64](f.Values), len(f.Names)
	out := make([]float64, 0, len(rows)*width)
	for _, row := range rows {
		if row < 0 || row >= f.Rows() {
			return nil, fmt.Errorf("data: row %d of a frame of %d rows", row, f.Rows())
		}
		out = append(out, values[row*width:(row+1)*width]...)
	}
	return &Frame{f.Names, tensor.Of(out, len(rows), width), f.Categories}, nil
}

// DropMissing returns a new frame of the rows in which no value of the named columns is missing. Without names, it
// looks at all columns. It returns an error for an unknown name.
func (f *Frame) DropMissing(names ...string) (*Frame, error) {
	if len(names) == 0 {
		names = f.Names
	}
	columns, err := f.columns(names)
	if err != nil {
		return nil, err
	}
	values, width := tensor.Data[float64](f.Values), len(f.Names)
	kept := make([]float64, 0, len(values))
	for ; len(values) > 0; values = values[width:] {
		if !slices.ContainsFunc(columns, func(c int) bool { return math.IsNaN(values[c]) }) {
			kept = append(kept, values[:width]...)
		}
	}
	return &Frame{f.Names, tensor.Of(kept, len(kept)/width, width), f.Categories}, nil
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
