// Package parquet reads Parquet files, as pandas, Spark and DuckDB write them, with random access to their rows:
//
//	f, err := parquet.Open(ctx, []string{"train.parquet"}, parquet.Options{Columns: []string{"x", "y"}})
//	examples := f.Rows.Map(func(_ context.Context, e data.Element) (data.Element, error) {
//		row := e.(map[string]*tensor.Tensor) // "x": float32 of shape (8), "y": an int64 scalar
//		return data.Batch{Inputs: []*tensor.Tensor{row["x"]}, Labels: []*tensor.Tensor{row["y"]}}, nil
//	})
//
// A small table is read into a [data.Frame] by [Load].
//
// # Columns
//
// A column is named by its path, with dots between its parts ("person.age"). Booleans, integers of 8 to 64 bits,
// floats of 16 to 64 bits, texts and bytes are read, dates as days since 1970 (int32), and times as int64 in the unit
// of the file. A list column has one name, without the parts that the format adds ("x", not "x.list.element"), and
// lists of one length. Decimals, lists of lists, and times of 96 bits are errors.
//
// # Row groups
//
// The rows of a file are in row groups, of which one is decoded as a whole. Decoded row groups are kept until they
// have Options.CacheBytes; those that were not used for the longest time are dropped first. So rows are read fast in
// order, and in any order if the chosen columns of the file fit. For larger files, shuffle when the file is written, or
// write small row groups (10,000 rows).
package parquet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/parquet-go/parquet-go"
	"github.com/parquet-go/parquet-go/format"
	"github.com/zeebo/xxh3"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Options configure [Open] and [Load]. The zero value reads all columns, which must have no nulls.
type Options struct {
	// Columns are the names of the columns to read, in this order. None: all.
	Columns []string
	// Fill has the value that replaces the nulls of a column: a float64 (math.NaN() for a column of floats), an int, a
	// bool or a string. A null in another column is an error. A list that is null has no replacement; its elements have.
	Fill map[string]any
	// Categories has an entry for each column of text that is read as int32 category numbers: the names of its
	// categories, in the order of their numbers. Another text is an error. Nil means the texts in the files, sorted;
	// Open reads the column for them. It is that of [data.CSV].
	Categories map[string][]string
	// CacheBytes is the size of the decoded row groups that are kept in memory. Default: 256 MiB.
	CacheBytes int64
	// RowGroupBytes limits the size of one decoded row group, of the columns that are read. A larger one is an error, as
	// the file may be damaged: a few bytes can encode billions of equal values. Default: 4 GiB.
	RowGroupBytes int64
	// Index specifies where the hashes of the files' contents are kept, by which workers compare their data.
	Index data.IndexOptions
}

// File is one table in one or more files, opened by [Open].
type File struct {
	Columns []Column
	// Rows has an element for each row: a map[string]*tensor.Tensor by column name, of scalars or, for lists, of rank 1.
	// A batch has tensors with the rows along the first dimension.
	Rows data.Pipeline
	// Categories has the names of the categories of each column in Options.Categories. Give it to Options to read another
	// file with the same numbers.
	Categories map[string][]string
}

// Column describes a column.
type Column struct {
	Name     string
	DType    tensor.DType // of the elements
	List     bool         // a row has a list
	Length   int          // of the lists
	Nullable bool         // the file's schema allows nulls
}

// ColumnError reports a column that cannot be read: name the others in Options.Columns. [Open] reads some that [Load]
// does not.
type ColumnError struct {
	Column string // its name
	Err    error
}

// Error implements error.
func (e *ColumnError) Error() string { return fmt.Sprintf("column %q %v", e.Column, e.Err) }

// Unwrap returns the cause.
func (e *ColumnError) Unwrap() error { return e.Err }

// shape returns the shape of the column's value in a row.
func (c *Column) shape() []int {
	if c.List {
		return []int{c.Length}
	}
	return []int{}
}

// expand replaces directories by their files *.parquet, and patterns by the files that match, sorted.
func expand(names []string) (files []string, err error) {
	for _, name := range names {
		pattern := name
		switch info, err := os.Stat(name); {
		case err == nil && info.IsDir():
			pattern = filepath.Join(escape.Replace(name), "*.parquet")
		case err == nil || !strings.ContainsAny(name, "*?["):
			files = append(files, name)
			continue
		}
		found, err := filepath.Glob(pattern)
		if err != nil {
			return nil, fmt.Errorf("parquet: %s: %w", name, err)
		}
		if len(found) == 0 {
			return nil, fmt.Errorf("parquet: no file matches %s: want a file, a directory with files *.parquet, or a pattern",
				pattern)
		}
		files = append(files, found...)
	}
	return files, nil
}

// escape quotes the characters of a directory's name that have a meaning in patterns.
var escape = strings.NewReplacer("[", "[[]", "*", "[*]", "?", "[?]")

// Open opens files with the same columns as one table: the rows of one file after those of another. A name may also be
// a directory, for its files *.parquet, or a pattern as in [filepath.Match]; their files are sorted. It reads the files
// once to hash their contents; see Options.Index. The error for invalid contents is a [data.FormatError].
func Open(ctx context.Context, names []string, o Options) (*File, error) {
	names, err := expand(names)
	if err != nil {
		return nil, err
	}
	t, err := open(names, o)
	if err != nil {
		return nil, err
	}
	if err := t.setCategories(ctx); err != nil {
		return nil, err
	}
	if t.hash, err = data.FingerprintFiles(ctx, "Parquet", names, o.Index); err != nil {
		return nil, err
	}
	for _, c := range t.columns {
		text := fmt.Sprintf("%q %v %v %q", c.Name, c.DType, o.Fill[c.Name], t.categories[c.Name])
		t.hash = xxh3.HashStringSeed(text, t.hash)
	}
	f := &File{Rows: data.Of(t), Categories: t.categories}
	for _, c := range t.columns {
		f.Columns = append(f.Columns, c.Column)
	}
	return f, nil
}

// Load reads a table into memory, as [data.LoadCSV] does: numbers and booleans as float64, nulls as missing values, and
// texts as categories, with or without an entry in Options.Categories. It returns a [ColumnError] for a list, and for
// an integer from 2⁵³ on, which a float64 may not hold.
func Load(ctx context.Context, names []string, o Options) (*data.Frame, error) {
	names, err := expand(names)
	if err != nil {
		return nil, err
	}
	t, err := open(names, o)
	if err != nil {
		return nil, err
	}
	o.Categories, o.Fill = maps.Clone(o.Categories), maps.Clone(o.Fill)
	frame := &data.Frame{}
	for _, c := range t.columns {
		if c.List {
			return nil, fmt.Errorf("parquet: %w", &ColumnError{c.Name, errors.New("has lists: want numbers and texts")})
		}
		if _, known := o.Categories[c.Name]; c.DType == tensor.String && !known {
			if o.Categories == nil {
				o.Categories = map[string][]string{}
			}
			o.Categories[c.Name] = nil
		}
		frame.Names = append(frame.Names, c.Name)
	}
	t.o.Categories = o.Categories
	if err := t.setCategories(ctx); err != nil {
		return nil, err
	}
	if len(t.categories) > 0 {
		frame.Categories = t.categories
	}
	width := len(t.columns)
	var values []float64
	for _, g := range t.groups {
		if err := context.Cause(ctx); err != nil {
			return nil, err
		}
		if int64(g.rows) > t.o.RowGroupBytes/int64(8*max(width, 1)) {
			return nil, t.tooLarge(g, "its numbers")
		}
		at := len(values)
		for k := range t.columns {
			col, err := t.decode(g, k, true, t.o.RowGroupBytes)
			if err != nil {
				return nil, err
			}
			if k == 0 { // the file has as many rows as its footer states
				values = append(values, make([]float64, g.rows*width)...)
			}
			for row, x := range col.values.Float64s() {
				if math.Abs(x) >= 1<<53 && wide(col.values.DType()) {
					return nil, t.wrong(g, &ColumnError{t.columns[k].Name, fmt.Errorf("has an integer of about %.4g in row "+
						"%d: from 2⁵³ on it is too large for a float64", x, g.first+row)})
				}
				if col.null != nil && col.null[row] {
					x = math.NaN()
				}
				values[at+row*width+k] = x
			}
		}
	}
	frame.Values = tensor.Of(values, t.Len(), width)
	return frame, nil
}

func wide(d tensor.DType) bool { return d == tensor.Int64 || d == tensor.Uint64 }

// table is the dataset of the rows of files.
type table struct {
	o          Options
	columns    []column
	groups     []*group
	ends       []int // by group: the number of rows up to its end
	categories map[string][]string
	numbers    []map[string]int32 // by column: of the categories; nil: it has none
	hash       uint64

	mu    sync.Mutex
	bytes int64 // of the decoded groups
	clock int64
}

// column is a column with its place in the files.
type column struct {
	Column
	index    int // among the leaves of its file's schema
	present  int // definition level of a value that is not null
	repeated int // definition level of a list that is not empty
}

// group is a row group of a file.
type group struct {
	file   string
	first  int // row of the file
	rows   int
	chunks []chunk // of table.columns

	mu      sync.Mutex // held while it is decoded
	decoded []*tensor.Tensor
	bytes   int64
	used    int64 // table.clock at the last use
}

// chunk is a column of a row group.
type chunk struct {
	parquet.ColumnChunk
	source file
	meta   *format.ColumnMetaData
	limit  int64 // Options.RowGroupBytes
}

// open reads the footers of the files.
func open(names []string, o Options) (*table, error) {
	if len(names) == 0 {
		return nil, errors.New("parquet: no files")
	}
	if o.CacheBytes < 0 || o.RowGroupBytes < 0 {
		return nil, fmt.Errorf("parquet: Options.CacheBytes is %d and Options.RowGroupBytes %d: want positive sizes, or 0 "+
			"for the defaults", o.CacheBytes, o.RowGroupBytes)
	}
	if o.CacheBytes == 0 {
		o.CacheBytes = 256 << 20
	}
	if o.RowGroupBytes == 0 {
		o.RowGroupBytes = 4 << 30
	}
	t := &table{o: o}
	for _, name := range names {
		if err := t.add(name); err != nil {
			return nil, err
		}
	}
	for name := range o.Fill {
		if err := t.checkFill(name); err != nil {
			return nil, err
		}
	}
	return t, t.setLengths()
}

// add opens a file. Its descriptor is opened again for each read: a table may have many files.
func (t *table) add(name string) error {
	info, err := os.Stat(name)
	if err != nil {
		return fmt.Errorf("parquet: %w", err)
	}
	source := file{name, info.Size(), info.ModTime()}
	if err := checkFooter(source, info.Size()); err != nil {
		return wrong(name, err)
	}
	var f *parquet.File
	err = recovered(func() (err error) {
		f, err = parquet.OpenFile(source, info.Size(), parquet.SkipPageIndex(true), parquet.SkipBloomFilters(true))
		return err
	})
	if err != nil {
		return wrong(name, err)
	}
	var columns []column
	if err = recovered(func() (err error) {
		columns, err = columnsOf(f, t.o.Columns)
		return err
	}); err != nil {
		return wrong(name, err)
	}
	if t.columns == nil {
		t.columns = columns
	}
	for i, c := range columns {
		want := t.columns[i]
		want.Nullable, want.present, want.repeated, want.index = c.Nullable, c.present, c.repeated, c.index
		if len(columns) != len(t.columns) || c != want {
			return wrong(name, fmt.Errorf("it has the columns %s, the first file %s: want the same columns in all files, "+
				"in the same order", describe(columns), describe(t.columns)))
		}
		if c.Nullable != t.columns[i].Nullable || c.present != t.columns[i].present || c.repeated != t.columns[i].repeated {
			return wrong(name, fmt.Errorf("column %q allows nulls in only one of this file and the first one: write both with "+
				"the same schema", c.Name))
		}
	}
	first := 0
	for at, g := range f.RowGroups() {
		chunks := make([]chunk, len(columns))
		meta := f.Metadata().RowGroups[at].Columns
		for i, c := range columns {
			all := g.ColumnChunks()
			if c.index >= len(all) || c.index >= len(meta) {
				return wrong(name, fmt.Errorf("a row group has %d columns, and column %q has number %d", len(all), c.Name, c.index))
			}
			chunks[i] = chunk{all[c.index], source, &meta[c.index].MetaData, t.o.RowGroupBytes}
		}
		t.groups = append(t.groups, &group{file: name, first: first, rows: int(g.NumRows()), chunks: chunks})
		if n := g.NumRows(); n < 0 || n > math.MaxInt32 {
			return wrong(name, fmt.Errorf("a row group of %d rows", n))
		}
		first += int(g.NumRows())
		t.ends = append(t.ends, t.Len()+int(g.NumRows()))
	}
	return nil
}

func describe(columns []column) string {
	var list []string
	for _, c := range columns {
		list = append(list, fmt.Sprintf("%s (%v)", c.Name, c.DType))
	}
	return strings.Join(list, ", ")
}

// file reads a file by offset, without keeping it open.
type file struct {
	name string
	size int64
	time time.Time // of its last change, when it was opened
}

// ReadAt implements io.ReaderAt. It returns an error if the file has changed since it was opened.
func (f file) ReadAt(b []byte, offset int64) (int, error) {
	r, err := os.Open(f.name)
	if err != nil {
		return 0, err
	}
	defer r.Close()
	info, err := r.Stat()
	if err != nil {
		return 0, err
	}
	if info.Size() != f.size || !info.ModTime().Equal(f.time) {
		return 0, fmt.Errorf("it was written at %s, after it was opened here: keep the file unchanged while it is read",
			info.ModTime().Format(time.RFC3339))
	}
	return r.ReadAt(b, offset)
}

// recovered calls f. The library panics on some invalid contents.
func recovered(f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("the contents are invalid: %v", v)
		}
	}()
	return f()
}

// columnsOf returns the named columns, or all.
func columnsOf(f *parquet.File, wanted []string) ([]column, error) {
	var leaves []format.SchemaElement
	for _, e := range f.Metadata().Schema {
		if _, ok := e.NumChildren.Get(); !ok {
			leaves = append(leaves, e)
		}
	}
	root := f.Root()
	var all []column
	failures := map[string]*ColumnError{}
	var walk func(c *parquet.Column, path []string, lists int)
	walk = func(c *parquet.Column, path []string, lists int) {
		if c.MaxRepetitionLevel() > lists && !c.Leaf() { // the group that the format adds to a list
			lists = c.MaxRepetitionLevel()
			path = path[:max(len(path)-1, 1)]
			for _, element := range c.Columns() {
				under := path
				if len(c.Columns()) > 1 {
					under = append(slices.Clip(path), element.Name())
				}
				walk(element, under, lists)
			}
			return
		}
		if !c.Leaf() {
			for _, x := range c.Columns() {
				walk(x, append(slices.Clip(path), x.Name()), lists)
			}
			return
		}
		x := column{index: c.Index(), present: c.MaxDefinitionLevel()}
		x.Name, x.List = strings.Join(path, "."), c.MaxRepetitionLevel() > 0
		x.repeated = listLevel(root, c)
		x.Nullable = c.MaxDefinitionLevel() > 0 && (!x.List || c.MaxDefinitionLevel() > x.repeated || x.repeated > 1)
		var err error
		if x.DType, err = dtypeOf(c, leaves[c.Index()]); err == nil && c.MaxRepetitionLevel() > 1 {
			err = errors.New("lists of lists: want lists of numbers")
		}
		if err != nil {
			failures[x.Name] = &ColumnError{x.Name, fmt.Errorf("has %w", err)}
		}
		all = append(all, x)
	}
	for _, c := range root.Columns() {
		walk(c, []string{c.Name()}, 0)
	}
	var names []string
	for _, c := range all {
		if slices.Contains(names, c.Name) {
			return nil, fmt.Errorf("two columns are named %q", c.Name)
		}
		names = append(names, c.Name)
	}
	if len(wanted) == 0 {
		wanted = names
	}
	var out []column
	for i, name := range wanted {
		at := slices.Index(names, name)
		switch {
		case at < 0:
			return nil, fmt.Errorf("no column %q: there are %s", name, strings.Join(names, ", "))
		case slices.Contains(wanted[:i], name):
			return nil, fmt.Errorf("Options.Columns has %q twice", name)
		case failures[name] != nil:
			return nil, failures[name]
		}
		out = append(out, all[at])
	}
	if len(out) == 0 {
		return nil, errors.New("no columns")
	}
	return out, nil
}

// listLevel returns the definition level of the repeated node above leaf, or 0.
func listLevel(root, leaf *parquet.Column) int {
	at, level := root, 0
	for _, part := range leaf.Path() {
		at = at.Column(part)
		if at.Repeated() {
			level = at.MaxDefinitionLevel()
		}
	}
	return level
}

// dtypeOf returns the type of a column's values. The library does not know float16, which only the file's schema has.
func dtypeOf(c *parquet.Column, e format.SchemaElement) (d tensor.DType, err error) {
	kind := c.Type().Kind()
	var logical format.LogicalTypeValue
	if l := c.Type().LogicalType(); l != nil {
		logical = l.Value
	}
	if _, ok := logical.(*format.DecimalType); ok {
		return 0, errors.New("decimals: want floats")
	}
	switch kind {
	case parquet.Boolean:
		return tensor.Bool, nil
	case parquet.Int32, parquet.Int64:
		integer, ok := logical.(*format.IntType)
		if !ok {
			integer = &format.IntType{BitWidth: 32, IsSigned: true}
			if kind == parquet.Int64 {
				integer.BitWidth = 64
			}
		}
		return integerType(integer, kind)
	case parquet.Float:
		return tensor.Float32, nil
	case parquet.Double:
		return tensor.Float64, nil
	case parquet.ByteArray:
		return tensor.String, nil
	case parquet.FixedLenByteArray:
		if _, ok := e.LogicalType.Value.(*format.Float16Type); ok && c.Type().Length() == 2 {
			return tensor.Float16, nil
		}
		return tensor.String, nil
	}
	return 0, fmt.Errorf("the type %v, which cannot be read: want numbers, booleans, texts, or times of 64 bits",
		c.Type())
}

// integerType returns the type of an annotated integer, which a column of the physical type kind stores.
func integerType(t *format.IntType, kind parquet.Kind) (tensor.DType, error) {
	list := map[int8]tensor.DType{8: tensor.Uint8, 16: tensor.Uint16, 32: tensor.Uint32, 64: tensor.Uint64}
	if t.IsSigned {
		list = map[int8]tensor.DType{8: tensor.Int8, 16: tensor.Int16, 32: tensor.Int32, 64: tensor.Int64}
	}
	d, ok := list[t.BitWidth]
	if !ok || t.BitWidth == 64 && kind == parquet.Int32 {
		return 0, fmt.Errorf("integers of %d bits in a column of the type %v: want 8, 16, 32 or 64 bits, at most those of "+
			"the column", t.BitWidth, kind)
	}
	return d, nil
}

// checkFill checks a value of Options.Fill.
func (t *table) checkFill(name string) error {
	k := slices.IndexFunc(t.columns, func(c column) bool { return c.Name == name })
	if k < 0 {
		return fmt.Errorf("parquet: Options.Fill has %q, which is none of the columns that are read: %s", name,
			describe(t.columns))
	}
	c, x := t.columns[k], t.o.Fill[name]
	if c.DType == tensor.String {
		if _, ok := x.(string); !ok {
			return fmt.Errorf("parquet: Options.Fill[%q] is %v (%T), and the column has text: want a string", name, x, x)
		}
		return nil
	}
	f, err := number(x)
	if err != nil {
		return fmt.Errorf("parquet: Options.Fill[%q]: %w", name, err)
	}
	one := tensor.New(c.DType, 1)
	if storeOf(one).number(0, f); !isFloat(c.DType) && one.Float64s()[0] != f {
		return fmt.Errorf("parquet: Options.Fill[%q] is %v, and the column has %v", name, x, c.DType)
	}
	return nil
}

func isFloat(d tensor.DType) bool {
	return d == tensor.Float16 || d == tensor.Float32 || d == tensor.Float64
}

// number returns a value of Options.Fill for a column of numbers.
func number(x any) (float64, error) {
	switch x := x.(type) {
	case float64:
		return x, nil
	case int:
		return float64(x), nil
	case bool:
		if x {
			return 1, nil
		}
		return 0, nil
	}
	return 0, fmt.Errorf("it is %v (%T): want a float64, an int or a bool", x, x)
}

// setLengths finds the length of the lists, in the first row.
func (t *table) setLengths() error {
	if len(t.groups) == 0 {
		return nil
	}
	i := slices.IndexFunc(t.groups, func(g *group) bool { return g.rows > 0 })
	for k := range t.columns {
		c := &t.columns[k]
		if !c.List || i < 0 {
			continue
		}
		g := t.groups[i]
		n := 0
		err := eachValue(g.chunks[k], func(v parquet.Value) bool {
			if v.RepetitionLevel() == 0 && n > 0 || v.DefinitionLevel() < c.repeated {
				return false
			}
			n++
			return true
		})
		if err != nil {
			return t.wrong(g, fmt.Errorf("column %q: %w", c.Name, err))
		}
		c.Length = n
	}
	return nil
}

// eachValue calls f for the values of a column until it returns false.
func eachValue(c chunk, f func(v parquet.Value) bool) error {
	if err := checkPages(c.source, c.meta, c.limit); err != nil {
		return err
	}
	return recovered(func() (err error) {
		pages := c.Pages()
		defer func() { err = errors.Join(err, pages.Close()) }()
		values := make([]parquet.Value, 1024)
		for {
			page, err := pages.ReadPage()
			if err == io.EOF {
				return nil
			}
			if err != nil {
				return err
			}
			more, err := valuesOf(page, values, f)
			parquet.Release(page)
			if err != nil || !more {
				return err
			}
		}
	})
}

func valuesOf(page parquet.Page, values []parquet.Value, f func(v parquet.Value) bool) (more bool, err error) {
	r := page.Values()
	for {
		n, err := r.ReadValues(values)
		for _, v := range values[:n] {
			if !f(v) {
				return false, nil
			}
		}
		if err == io.EOF {
			return true, nil
		}
		if err != nil {
			return false, err
		}
		if n == 0 {
			return false, io.ErrNoProgress
		}
	}
}

// setCategories collects the texts of the columns whose categories are not given.
func (t *table) setCategories(ctx context.Context) error {
	t.numbers = make([]map[string]int32, len(t.columns))
	for name, known := range t.o.Categories {
		k := slices.IndexFunc(t.columns, func(c column) bool { return c.Name == name })
		if k < 0 {
			return fmt.Errorf("parquet: Options.Categories has %q, which is none of the columns that are read: %s", name,
				describe(t.columns))
		}
		c := &t.columns[k]
		if c.DType != tensor.String {
			return fmt.Errorf("parquet: Options.Categories has column %q, which has %v: want a column of text", name, c.DType)
		}
		if known == nil {
			texts := map[string]bool{}
			for _, g := range t.groups {
				if err := context.Cause(ctx); err != nil {
					return err
				}
				err := eachValue(g.chunks[k], func(v parquet.Value) bool {
					if !v.IsNull() && !texts[string(v.ByteArray())] {
						texts[string(v.ByteArray())] = true
					}
					return true
				})
				if err != nil {
					return t.wrong(g, fmt.Errorf("column %q: %w", name, err))
				}
			}
			if fill, ok := t.o.Fill[name].(string); ok && !texts[fill] {
				texts[fill] = true
			}
			known = slices.Sorted(maps.Keys(texts))
		}
		if t.categories == nil {
			t.categories = map[string][]string{}
		}
		t.categories[name], t.numbers[k] = known, map[string]int32{}
		for i, text := range known {
			if first, again := t.numbers[k][text]; again {
				return fmt.Errorf("parquet: column %q: categories %d and %d are both %q", name, first, i, text)
			}
			t.numbers[k][text] = int32(i)
		}
		c.DType = tensor.Int32
	}
	return nil
}

func (t *table) wrong(g *group, err error) error { return wrong(g.file, err) }

func wrong(file string, err error) error {
	return &data.FormatError{File: file, Format: "Parquet", Offset: -1, Err: err}
}

// textBytes is what a text takes besides its own bytes.
const textBytes = 16

// decodedColumn is a column of a row group.
type decodedColumn struct {
	values *tensor.Tensor // [rows] or [rows, length]
	null   []bool         // by row, if nulls are kept; nil: none
}

// tooLarge returns the error of a row group with more than Options.RowGroupBytes.
func (t *table) tooLarge(g *group, what string) error {
	return t.wrong(g, fmt.Errorf("%s: the row group from row %d on is larger than Options.RowGroupBytes, %d bytes: the "+
		"file may be damaged; else raise the limit, or write smaller row groups", what, g.first, t.o.RowGroupBytes))
}

// size returns the number of elements of a column of a row group, and the bytes that they take, those of texts not
// included. It checks them before memory is allocated.
func (t *table) size(g *group, k int, limit int64) (n int, bytes int64, err error) {
	c := &t.columns[k]
	n = g.rows
	if c.List {
		if c.Length > 0 && g.rows > math.MaxInt/c.Length {
			return 0, 0, t.wrong(g, fmt.Errorf("column %q has %d lists of %d elements", c.Name, g.rows, c.Length))
		}
		n *= c.Length
	}
	if got := g.chunks[k].NumValues(); n > 0 && got < int64(g.rows) {
		return 0, 0, t.wrong(g, fmt.Errorf("column %q has %d values for %d rows", c.Name, got, g.rows))
	}
	each := c.DType.Bytes()
	switch {
	case t.numbers[k] != nil:
		each = tensor.Int32.Bytes() // the number of a category
	case c.DType == tensor.String:
		each = textBytes
	}
	if int64(n) > limit/int64(each) {
		return 0, 0, t.tooLarge(g, fmt.Sprintf("column %q", c.Name))
	}
	return n, int64(n) * int64(each), nil
}

// decode decodes a column of a row group. Without keep, nulls are filled, or an error.
// It must not have more bytes than limit.
func (t *table) decode(g *group, k int, keep bool, limit int64) (d decodedColumn, err error) {
	c := &t.columns[k]
	n, bytes, err := t.size(g, k, limit)
	if err != nil {
		return d, err
	}
	set := setter(c, n, t.numbers[k])
	fill, filled := t.o.Fill[c.Name]
	at, row, inRow := 0, -1, 0
	fail := func(format string, args ...any) bool {
		err = t.wrong(g, fmt.Errorf("column %q, row %d: "+format, append([]any{c.Name, g.first + row}, args...)...))
		return false
	}
	length := func() bool {
		if c.List && row >= 0 && inRow != c.Length {
			return fail("a list of %d elements, where the first row has %d: want lists of one length (pad them when the "+
				"file is written)", inRow, c.Length)
		}
		return true
	}
	failure := eachValue(g.chunks[k], func(v parquet.Value) bool {
		if v.RepetitionLevel() == 0 {
			if !length() {
				return false
			}
			row, inRow = row+1, 0
		}
		if row >= g.rows {
			return fail("the row group has only %d rows", g.rows)
		}
		if c.List && v.DefinitionLevel() < c.repeated { // an empty list, or none
			return true
		}
		if inRow++; c.List && inRow > c.Length {
			return length()
		}
		switch {
		case v.DefinitionLevel() == c.present && !v.IsNull():
			if text := set.value(at, v); text != nil {
				return fail("%q is none of its categories", *text)
			}
			if set.text != nil {
				if bytes += int64(len(set.text[at])); bytes > limit {
					err = t.tooLarge(g, fmt.Sprintf("column %q", c.Name))
					return false
				}
			}
		case keep && !filled:
			if d.null == nil {
				d.null = make([]bool, g.rows)
			}
			d.null[row] = true
		case !filled:
			return fail("the value is null: give the column a value in Options.Fill, or leave the column out")
		case !set.fill(at, fill):
			return fail("the value of Options.Fill, %q, is none of its categories", fill)
		}
		at++
		return true
	})
	if err == nil && failure == nil {
		length()
	}
	switch {
	case err != nil:
		return d, err
	case failure != nil:
		return d, t.wrong(g, fmt.Errorf("column %q: %w", c.Name, failure))
	case row+1 != g.rows:
		return d, t.wrong(g, fmt.Errorf("column %q has %d rows, its row group %d", c.Name, row+1, g.rows))
	}
	d.values = set.out
	if c.List {
		d.values = d.values.Reshape(g.rows, c.Length)
	}
	return d, nil
}

// sink writes values into a tensor.
type sink struct {
	out *tensor.Tensor
	store
	of   map[string]int32 // numbers of categories; nil: none
	text []string
}

// store writes into a tensor: a value of a column, or a number, rounded to the tensor's type.
type store struct {
	put    func(i int, v parquet.Value)
	number func(i int, f float64)
}

// setter returns a sink of n values of a column.
func setter(c *column, n int, categories map[string]int32) *sink {
	s := &sink{of: categories}
	switch {
	case categories != nil:
		list := make([]int32, n)
		s.out, s.put = tensor.Of(list, n), func(i int, v parquet.Value) { list[i] = categories[string(v.ByteArray())] }
	case c.DType == tensor.String:
		s.out = tensor.Strings(make([]string, n), n)
		s.text = s.out.StringData()
		s.put = func(i int, v parquet.Value) { s.text[i] = string(v.ByteArray()) }
	default:
		s.out = tensor.New(c.DType, n)
		s.store = storeOf(s.out)
	}
	return s
}

// storeOf returns the store of a tensor of numbers or booleans.
func storeOf(out *tensor.Tensor) store {
	switch out.DType() {
	case tensor.Bool:
		return storing(out, parquet.Value.Boolean, func(f float64) bool { return f != 0 })
	case tensor.Float16:
		return storing(out, half, func(f float64) tensor.F16 { return tensor.F16From(float32(f)) })
	case tensor.Float32:
		return numbers[float32](out, parquet.Value.Float)
	case tensor.Float64:
		return numbers[float64](out, parquet.Value.Double)
	case tensor.Int8:
		return numbers[int8](out, parquet.Value.Int32)
	case tensor.Int16:
		return numbers[int16](out, parquet.Value.Int32)
	case tensor.Int32:
		return numbers[int32](out, parquet.Value.Int32)
	case tensor.Int64:
		return numbers[int64](out, parquet.Value.Int64)
	case tensor.Uint8:
		return numbers[uint8](out, parquet.Value.Uint32)
	case tensor.Uint16:
		return numbers[uint16](out, parquet.Value.Uint32)
	case tensor.Uint32:
		return numbers[uint32](out, parquet.Value.Uint32)
	default: // dtypeOf has no other type
		return numbers[uint64](out, parquet.Value.Uint64)
	}
}

// numbers is storing for types that Go converts.
func numbers[T interface {
	int8 | int16 | int32 | int64 | uint8 | uint16 | uint32 | uint64 | float32 | float64
	tensor.Element
}, V int32 | int64 | uint32 | uint64 | float32 | float64](out *tensor.Tensor, get func(parquet.Value) V) store {
	return storing(out, func(v parquet.Value) T { return T(get(v)) }, func(f float64) T { return T(f) })
}

func storing[T tensor.Element](out *tensor.Tensor, of func(parquet.Value) T, from func(float64) T) store {
	x := tensor.Data[T](out)
	return store{
		put:    func(i int, v parquet.Value) { x[i] = of(v) },
		number: func(i int, f float64) { x[i] = from(f) },
	}
}

// half returns a value of float16, which the library has as two bytes.
func half(v parquet.Value) tensor.F16 {
	b := v.ByteArray()
	return tensor.F16(uint16(b[0]) | uint16(b[1])<<8)
}

// value stores a value that is not null. It returns a text that is not among the categories.
func (s *sink) value(i int, v parquet.Value) *string {
	if s.of != nil {
		if _, ok := s.of[string(v.ByteArray())]; !ok {
			text := string(v.ByteArray())
			return &text
		}
	}
	s.put(i, v)
	return nil
}

// fill stores a value of Options.Fill. It reports whether it is a category.
func (s *sink) fill(i int, x any) bool {
	text, isText := x.(string)
	switch {
	case s.of != nil:
		number, ok := s.of[text]
		tensor.Data[int32](s.out)[i] = number
		return ok
	case isText:
		s.text[i] = text
	default:
		f, _ := number(x)
		s.number(i, f)
	}
	return true
}

// Len implements [data.Dataset].
func (t *table) Len() int {
	if len(t.ends) == 0 {
		return 0
	}
	return t.ends[len(t.ends)-1]
}

// Iter implements [data.Dataset].
func (t *table) Iter(ctx context.Context) iter.Seq2[data.Element, error] { return data.Of(t).Iter(ctx) }

// Fingerprint implements [data.Fingerprinted].
func (t *table) Fingerprint() uint64 { return t.hash }

// At implements [data.Indexed].
func (t *table) At(ctx context.Context, i int) (data.Element, error) {
	return t.rows(ctx, []int{i}, false)
}

// Gather implements [data.Gatherer].
func (t *table) Gather(ctx context.Context, indices []int) (data.Element, error) {
	return t.rows(ctx, indices, true)
}

// rows returns rows, batched or one without the dimension of rows.
func (t *table) rows(ctx context.Context, indices []int, batched bool) (data.Element, error) {
	out := make([]*tensor.Tensor, len(t.columns))
	for k, c := range t.columns {
		out[k] = tensor.New(c.DType, append([]int{len(indices)}, c.shape()...)...)
	}
	order := make([]int, len(indices)) // by row group, so that each is decoded once
	for i := range order {
		order[i] = i
	}
	sort.SliceStable(order, func(a, b int) bool { return indices[order[a]] < indices[order[b]] })
	var g *group
	var decoded []*tensor.Tensor
	first, end := 0, 0
	for _, to := range order {
		at := indices[to]
		if g == nil || at >= end {
			i := sort.SearchInts(t.ends, at+1)
			g, end = t.groups[i], t.ends[i]
			first = end - g.rows
			var err error
			if decoded, err = t.use(ctx, g); err != nil {
				return nil, err
			}
		}
		for k, c := range t.columns {
			n := 1
			if c.List {
				n = c.Length
			}
			from := (at - first) * n
			if c.DType == tensor.String {
				copy(out[k].StringData()[to*n:(to+1)*n], decoded[k].StringData()[from:])
				continue
			}
			n *= c.DType.Bytes()
			from = (at - first) * n
			copy(out[k].Memory().HostBytes()[to*n:(to+1)*n], decoded[k].Memory().HostBytes()[from:])
		}
	}
	row := make(map[string]*tensor.Tensor, len(out))
	for k, c := range t.columns {
		row[c.Name] = out[k]
		if !batched {
			row[c.Name] = out[k].Reshape(c.shape()...)
		}
	}
	return row, nil
}

// use returns the columns of a row group, and decodes it if it is not kept.
func (t *table) use(ctx context.Context, g *group) ([]*tensor.Tensor, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	t.mu.Lock()
	t.clock++
	g.used = t.clock
	decoded := g.decoded
	t.mu.Unlock()
	if decoded != nil {
		return decoded, nil
	}
	bytes := int64(0)
	for k := range t.columns {
		if err := context.Cause(ctx); err != nil {
			return nil, err
		}
		d, err := t.decode(g, k, false, t.o.RowGroupBytes-bytes)
		if err != nil {
			return nil, err
		}
		decoded = append(decoded, d.values)
		bytes += int64(d.values.Memory().Bytes)
		for _, s := range d.values.StringData() {
			bytes += int64(len(s)) + textBytes
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	g.decoded, g.bytes = decoded, bytes
	t.bytes += bytes
	for t.bytes > t.o.CacheBytes {
		var oldest *group
		for _, other := range t.groups {
			if other != g && other.decoded != nil && (oldest == nil || other.used < oldest.used) {
				oldest = other
			}
		}
		if oldest == nil { // the current one is kept in any case
			break
		}
		t.bytes -= oldest.bytes
		oldest.decoded = nil
	}
	return decoded, nil
}
