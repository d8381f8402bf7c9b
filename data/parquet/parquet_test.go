package parquet_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	library "github.com/parquet-go/parquet-go"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/data/parquet"
	"github.com/lockstep-ml/lockstep/tensor"
)

// row is a row of the tests' tables.
type row struct {
	B    bool      `parquet:"b"`
	I8   int8      `parquet:"i8,int(8)"`
	U16  uint16    `parquet:"u16,uint(16)"`
	I32  int32     `parquet:"i32"`
	I64  int64     `parquet:"i64"`
	F32  float32   `parquet:"f32"`
	F64  *float64  `parquet:"f64,optional"`
	Text string    `parquet:"text,dict"`
	List []float32 `parquet:"list,list"`
	In   struct {
		Age *int32 `parquet:"age,optional"`
	} `parquet:"in"`
}

// rowOf returns a row. Some values of the optional columns are null.
func rowOf(i int) row {
	r := row{
		B: i%3 == 0, I8: int8(-i), U16: uint16(i * 501), I32: int32(-i * 1000), I64: int64(i) << 40, F32: float32(i) / 8,
		Text: []string{"red", "green", "", "blue"}[i%4], List: []float32{float32(i), -float32(i), 0.5},
	}
	if i%5 != 0 {
		r.F64, r.In.Age = new(float64(i)/3), new(int32(i))
	}
	return r
}

// write writes a file of the rows from lo to hi, in row groups of so many.
func write[T any](t testing.TB, dir, name string, group int, rows []T) string {
	t.Helper()
	var b bytes.Buffer
	w := library.NewGenericWriter[T](&b)
	for chunk := range slices.Chunk(rows, group) {
		if _, err := w.Write(chunk); err != nil {
			t.Fatal(err)
		}
		if err := w.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	name = filepath.Join(dir, name)
	if err := os.WriteFile(name, b.Bytes(), 0o666); err != nil {
		t.Fatal(err)
	}
	return name
}

func rowsOf(lo, hi int) (list []row) {
	for i := lo; i < hi; i++ {
		list = append(list, rowOf(i))
	}
	return list
}

// want returns what a row is read as.
func want(i int) map[string]*tensor.Tensor {
	r := rowOf(i)
	f64, age := math.NaN(), int32(-1)
	if r.F64 != nil {
		f64, age = *r.F64, *r.In.Age
	}
	return map[string]*tensor.Tensor{
		"b": tensor.Scalar(r.B), "i8": tensor.Scalar(r.I8), "u16": tensor.Scalar(r.U16), "i32": tensor.Scalar(r.I32),
		"i64": tensor.Scalar(r.I64), "f32": tensor.Scalar(r.F32), "f64": tensor.Scalar(f64),
		"text": tensor.Strings([]string{r.Text}, []int{}...), "list": tensor.From(r.List), "in.age": tensor.Scalar(age),
	}
}

var fill = map[string]any{"f64": math.NaN(), "in.age": -1}

// equal compares elements. NaN equals NaN.
func equal(t testing.TB, what string, got data.Element, want map[string]*tensor.Tensor) {
	t.Helper()
	all, ok := got.(map[string]*tensor.Tensor)
	if !ok || len(all) != len(want) {
		t.Fatalf("%s: got %v, want %v", what, got, want)
	}
	for name, w := range want {
		if g := all[name]; g == nil || g.DType() != w.DType() || !g.SameShape(w) || !slices.Equal(g.StringData(),
			w.StringData()) || !bytes.Equal(g.Memory().HostBytes(), w.Memory().HostBytes()) {
			t.Errorf("%s: column %q is %v, want %v", what, name, g.Format(), w.Format())
		}
	}
}

// TestOpen reads two files in every order that a pipeline has, with a cache that holds no two row groups.
func TestOpen(t *testing.T) {
	dir := t.TempDir()
	names := []string{
		write(t, dir, "a.parquet", 7, rowsOf(0, 50)), write(t, dir, "none.parquet", 7, []row(nil)),
		write(t, dir, "b.parquet", 1000, rowsOf(50, 61)),
	}
	for _, cache := range []int64{0, 1} {
		f, err := parquet.Open(t.Context(), names, parquet.Options{Fill: fill, CacheBytes: cache})
		if err != nil {
			t.Fatal(err)
		}
		if n := f.Rows.Len(); n != 61 {
			t.Fatalf("%d rows", n)
		}
		var columns []string
		for _, c := range f.Columns {
			columns = append(columns, fmt.Sprint(c))
		}
		if got := strings.Join(columns, " "); got != "{b bool false 0 false} {i8 int8 false 0 false} "+
			"{u16 uint16 false 0 false} {i32 int32 false 0 false} {i64 int64 false 0 false} {f32 float32 false 0 false} "+
			"{f64 float64 false 0 true} {text string false 0 false} {list float32 true 3 false} {in.age int32 false 0 true}" {
			t.Errorf("columns %s", got)
		}
		i := 0
		for e, err := range f.Rows.Iter(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			equal(t, fmt.Sprint("row ", i), e, want(i))
			i++
		}
		seen := map[int]bool{}
		for e, err := range f.Rows.Shuffle(3).Workers(4).Iter(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			i := int(-tensor.Data[int32](e.(map[string]*tensor.Tensor)["i32"])[0] / 1000)
			equal(t, fmt.Sprint("shuffled row ", i), e, want(i))
			seen[i] = true
		}
		if len(seen) != 61 {
			t.Errorf("%d rows when shuffled", len(seen))
		}
		for e, err := range f.Rows.Shuffle(3).Batch(8).Iter(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			batch := e.(map[string]*tensor.Tensor)
			for k, x := range tensor.Data[int32](batch["i32"]) {
				one := map[string]*tensor.Tensor{}
				for name, of := range batch {
					one[name] = of.Rows(k, k+1).Reshape(of.Shape()[1:]...)
				}
				equal(t, "row of a batch", one, want(int(-x/1000)))
			}
		}
	}
}

// TestChoice reads some columns, in another order, and a column of text as categories.
func TestChoice(t *testing.T) {
	dir := t.TempDir()
	names := []string{write(t, dir, "a.parquet", 9, rowsOf(0, 20))}
	o := parquet.Options{Columns: []string{"text", "list"}, Categories: map[string][]string{"text": nil}}
	f, err := parquet.Open(t.Context(), names, o)
	if err != nil {
		t.Fatal(err)
	}
	if texts := f.Categories["text"]; !slices.Equal(texts, []string{"", "blue", "green", "red"}) {
		t.Errorf("categories %q", texts)
	}
	for e, err := range f.Rows.Skip(5).Take(1).Iter(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		equal(t, "row 5", e, map[string]*tensor.Tensor{
			"text": tensor.Scalar(int32(2)), "list": tensor.From([]float32{5, -5, 0.5}),
		})
	}
	other, err := parquet.Open(t.Context(), names, parquet.Options{Columns: []string{"list", "text"}})
	if err != nil {
		t.Fatal(err)
	}
	again, err := parquet.Open(t.Context(), names, o)
	if err != nil {
		t.Fatal(err)
	}
	a, b, c := data.Fingerprint(f.Rows), data.Fingerprint(other.Rows), data.Fingerprint(again.Rows)
	if a == 0 || a == b || a != c {
		t.Errorf("fingerprints %x, %x, %x", a, b, c)
	}
}

// TestOtherPlaces reads columns that have other places in the second file.
func TestOtherPlaces(t *testing.T) {
	type first struct {
		A int32   `parquet:"a"`
		B float64 `parquet:"b"`
	}
	type second struct {
		A  int32   `parquet:"a"`
		AA string  `parquet:"aa"`
		B  float64 `parquet:"b"`
	}
	dir := t.TempDir()
	names := []string{write(t, dir, "1", 9, []first{{1, 2}}), write(t, dir, "2", 9, []second{{3, "x", 4}})}
	frame, err := parquet.Load(t.Context(), names, parquet.Options{Columns: []string{"b", "a"}})
	if err != nil {
		t.Fatal(err)
	}
	if got := tensor.Data[float64](frame.Values); !slices.Equal(got, []float64{2, 1, 4, 3}) {
		t.Errorf("got %v", got)
	}
}

// TestDirectory checks that a directory and a pattern open the files in them, in the order of their names.
func TestDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a[1]")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, dir, "b.parquet", 9, rowsOf(20, 30))
	a := write(t, dir, "a.parquet", 9, rowsOf(0, 20))
	if err := os.WriteFile(filepath.Join(dir, "_SUCCESS"), nil, 0o600); err != nil { // Spark writes it
		t.Fatal(err)
	}
	t.Chdir(dir)
	o := parquet.Options{Columns: []string{"i64"}}
	for _, name := range []string{dir, "*.parquet", "[ab].parquet"} {
		frame, err := parquet.Load(t.Context(), []string{name}, o)
		if err != nil {
			t.Fatal(err)
		}
		first, err := parquet.Load(t.Context(), []string{a}, o)
		if err != nil {
			t.Fatal(err)
		}
		got, want := tensor.Data[float64](frame.Values), tensor.Data[float64](first.Values)
		if len(got) != 30 || !slices.Equal(got[:20], want) {
			t.Errorf("%s: %v, want 30 rows, first those of a.parquet", name, got)
		}
		if f, err := parquet.Open(t.Context(), []string{name}, o); err != nil || f.Rows.Len() != 30 {
			t.Errorf("%s: %v: want 30 rows", name, err)
		}
	}
	if _, err := parquet.Load(t.Context(), []string{"c*.parquet"}, o); err == nil ||
		!strings.Contains(err.Error(), "no file matches c*.parquet: want a file, a directory with files *.parquet, or a "+
			"pattern") {
		t.Errorf("error %v", err)
	}
}

func TestLoad(t *testing.T) {
	names := []string{write(t, t.TempDir(), "a.parquet", 9, rowsOf(0, 20))}
	frame, err := parquet.Load(t.Context(), names, parquet.Options{Columns: []string{"text", "b", "f64", "i64"}})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(frame.Names, []string{"text", "b", "f64", "i64"}) || frame.Rows() != 20 ||
		len(frame.Categories) != 1 {
		t.Errorf("%q, %d rows, %q", frame.Names, frame.Rows(), frame.Categories)
	}
	x := tensor.Data[float64](frame.Values)
	if got := fmt.Sprint(x[:8]); got != "[3 1 NaN 0 2 0 0.3333333333333333 1.099511627776e+12]" {
		t.Errorf("first rows %s", got)
	}
	if err := frame.Fill("f64", 7); err != nil {
		t.Error(err)
	}
	if _, err := frame.OneHot("text"); err != nil {
		t.Error(err)
	}
}

// TestMisuse checks the errors for files and options that do not fit.
func TestMisuse(t *testing.T) {
	type ragged struct {
		X []float32 `parquet:"x,list"`
	}
	type nested struct {
		X []ragged `parquet:"x,list"`
		Y int32    `parquet:"y"`
	}
	type decimal struct {
		D int64 `parquet:"d,decimal(2:12)"`
	}
	type huge struct {
		I int64 `parquet:"i"`
	}
	dir := t.TempDir()
	good := write(t, dir, "good", 9, rowsOf(0, 20))
	other := write(t, dir, "other", 9, []nested{{Y: 1}})
	lists := write(t, dir, "lists", 2, []ragged{{[]float32{1, 2}}, {[]float32{1, 2}}, {[]float32{1}}})
	long := write(t, dir, "long", 2, []ragged{{[]float32{1, 2}}, {[]float32{1, 2, 3}}})
	none := write(t, dir, "no list", 3, []ragged{{[]float32{1, 2}}, {nil}, {[]float32{1, 2}}})
	money := write(t, dir, "money", 2, []decimal{{5}})
	large := write(t, dir, "large", 2, []huge{{1<<53 + 1}})
	text := filepath.Join(dir, "text")
	if err := os.WriteFile(text, []byte("not Parquet"), 0o666); err != nil {
		t.Fatal(err)
	}
	read := func(o parquet.Options, names ...string) error {
		f, err := parquet.Open(context.Background(), names, o)
		if err != nil {
			return err
		}
		_, err = data.Hash(context.Background(), f.Rows)
		return err
	}
	load := func(o parquet.Options, names ...string) error {
		_, err := parquet.Load(context.Background(), names, o)
		return err
	}
	texts := func(list ...string) map[string][]string { return map[string][]string{"text": list} }
	for _, c := range []struct {
		err  error
		want string
	}{
		{read(parquet.Options{}), "no files"},
		{read(parquet.Options{}, filepath.Join(dir, "none")), "no such file"},
		{read(parquet.Options{}, text), "data: " + text + ": Parquet: "},
		{read(parquet.Options{}, good), `column "f64", row 0: the value is null: give the column a value in Options.Fill`},
		{read(parquet.Options{Columns: []string{"x"}}, good), `no column "x": there are b, i8, u16`},
		{read(parquet.Options{Columns: []string{"b", "b"}}, good), `has "b" twice`},
		{read(parquet.Options{Columns: []string{"x"}}, lists, money), `no column "x"`},
		{read(parquet.Options{}, lists, large), "want the same columns in all files"},
		{read(parquet.Options{}, other), `column "x.x" has lists of lists`},
		{read(parquet.Options{Columns: []string{"y"}}, other), ""},
		{read(parquet.Options{}, lists), `column "x", row 2: a list of 1 elements, where the first row has 2`},
		{read(parquet.Options{}, long), `column "x", row 1: a list of 3 elements, where the first row has 2`},
		{read(parquet.Options{}, none), `column "x", row 1: a list of 0 elements, where the first row has 2`},
		{read(parquet.Options{}, money), `column "d" has decimals: want floats`},
		{
			read(parquet.Options{Columns: []string{"text"}, Categories: texts("red", "blue")}, good),
			`row 1: "green" is none of its categories`,
		},
		{
			read(parquet.Options{Columns: []string{"text"}, Categories: texts("red", "red")}, good),
			`categories 0 and 1 are both "red"`,
		},
		{
			read(parquet.Options{Columns: []string{"b"}, Categories: texts()}, good),
			`has "text", which is none of the columns`,
		},
		{read(parquet.Options{Categories: map[string][]string{"b": nil}}, good), `column "b", which has bool`},
		{read(parquet.Options{Fill: map[string]any{"x": 1}}, good), `Options.Fill has "x"`},
		{read(parquet.Options{Fill: map[string]any{"text": 1}}, good), "want a string"},
		{read(parquet.Options{Fill: map[string]any{"in.age": 1.5}}, good), "is 1.5, and the column has int32"},
		{read(parquet.Options{Fill: map[string]any{"f64": "x"}}, good), "want a float64, an int or a bool"},
		{load(parquet.Options{}, good), `column "list" has lists`},
		{load(parquet.Options{}, large), "too large for a float64"},
	} {
		if c.want == "" && c.err != nil || c.want != "" && (c.err == nil || !strings.Contains(c.err.Error(), c.want)) {
			t.Errorf("got %v, want %q", c.err, c.want)
		}
	}
}

// TestCorrupt flips bytes of a file: reading it gives an error or values, and neither a panic nor an endless loop.
func TestCorrupt(t *testing.T) {
	dir := t.TempDir()
	good, err := os.ReadFile(write(t, dir, "good", 9, rowsOf(0, 20)))
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(dir, "bad")
	r := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		bad := bytes.Clone(good)
		if r.IntN(4) == 0 {
			bad = bad[:r.IntN(len(bad))]
		}
		for range r.IntN(3) {
			if len(bad) > 0 {
				bad[r.IntN(len(bad))] ^= byte(1 << r.IntN(8))
			}
		}
		if err := os.WriteFile(name, bad, 0o666); err != nil {
			t.Fatal(err)
		}
		f, err := parquet.Open(t.Context(), []string{name}, parquet.Options{Fill: fill})
		if err == nil {
			_, err = data.Hash(t.Context(), f.Rows)
		}
		var format *data.FormatError
		if err != nil && !errors.As(err, &format) && !strings.Contains(err.Error(), "Options.Fill") {
			t.Errorf("%v (%T)", err, err)
		}
	}
}

// TestRewritten checks that a file that is written again after Open is an error.
func TestRewritten(t *testing.T) {
	dir := t.TempDir()
	name := write(t, dir, "a", 9, rowsOf(0, 20))
	f, err := parquet.Open(t.Context(), []string{name}, parquet.Options{Fill: fill})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(write(t, dir, "b", 9, rowsOf(1, 21)), name); err != nil {
		t.Fatal(err)
	}
	later := time.Now().Add(time.Minute)
	if err := os.Chtimes(name, later, later); err != nil {
		t.Fatal(err)
	}
	if _, err := data.Hash(t.Context(), f.Rows); err == nil || !strings.Contains(err.Error(), "after it was opened") {
		t.Errorf("reading a file that was written again: %v", err)
	}
}

// TestRowGroupBytes checks the limit for numbers and texts.
func TestRowGroupBytes(t *testing.T) {
	type of struct {
		X int64
		S string
	}
	rows := make([]of, 1000)
	for i := range rows {
		rows[i].S = "a text of 30 bytes, more or less"
	}
	name := write(t, t.TempDir(), "rows", 1000, rows)
	for _, c := range []struct {
		column string
		limit  int64
		fails  bool
	}{{"X", 7999, true}, {"X", 8000, false}, {"S", 15999, true}, {"S", 47999, true}, {"S", 48000, false}} {
		f, err := parquet.Open(t.Context(), []string{name}, parquet.Options{
			Columns: []string{c.column}, RowGroupBytes: c.limit,
		})
		if err != nil {
			t.Fatal(err)
		}
		_, err = data.Hash(t.Context(), f.Rows)
		if c.fails != (err != nil) || err != nil && !strings.Contains(err.Error(), "larger than Options.RowGroupBytes") {
			t.Errorf("column %s with %d bytes: %v", c.column, c.limit, err)
		}
	}
	for _, limit := range []int64{15999, 16000} { // two columns of float64
		_, err := parquet.Load(t.Context(), []string{name}, parquet.Options{RowGroupBytes: limit})
		if (limit < 16000) != (err != nil) {
			t.Errorf("loading with %d bytes: %v", limit, err)
		}
	}
}

// TestPython reads a file that pyarrow wrote, in each of its versions of the format.
func TestPython(t *testing.T) {
	python := os.Getenv("LOCKSTEP_PYARROW_PYTHON")
	if python == "" {
		t.Skip("LOCKSTEP_PYARROW_PYTHON names no Python with pyarrow")
	}
	dir := t.TempDir()
	script := `
import json, sys, datetime
import pyarrow as pa, pyarrow.parquet as pq
n = 1000
cols = {
  "bool": pa.array([None if i % 7 == 0 else i % 3 == 0 for i in range(n)], pa.bool_()),
  "i8": pa.array([i % 256 - 128 for i in range(n)], pa.int8()),
  "u32": pa.array([i * 4000000 for i in range(n)], pa.uint32()),
  "u64": pa.array([2**64 - 1 - i for i in range(n)], pa.uint64()),
  "f16": pa.array([i / 4 for i in range(n)], pa.float16()),
  "f32": pa.array([None if i % 5 == 0 else i / 8 for i in range(n)], pa.float32()),
  "day": pa.array([datetime.date(1970, 1, 1) + datetime.timedelta(i) for i in range(n)], pa.date32()),
  "when": pa.array([i * 1000 for i in range(n)], pa.timestamp("us")),
  "word": pa.array([None if i % 11 == 0 else "word %d é" % (i % 10) for i in range(n)]).dictionary_encode(),
  "raw": pa.array([bytes([i % 256, 0]) for i in range(n)], pa.binary()),
  "fixed": pa.array([[i, i + 1, i + 2] for i in range(n)], pa.list_(pa.int32(), 3)),
  "list": pa.array([[i / 2, None if i % 9 == 0 else 1.0] for i in range(n)], pa.list_(pa.float64())),
  "person": pa.array([{"age": i, "name": str(i)} for i in range(n)]),
}
table = pa.table(cols)
out = sys.argv[1]
for k, o in enumerate([dict(), dict(version="1.0", compression="gzip", use_dictionary=False),
                       dict(compression="zstd", data_page_version="2.0", data_page_size=500),
                       dict(compression="none", row_group_size=64, use_dictionary=["word"],
                            column_encoding={"f32": "BYTE_STREAM_SPLIT", "u32": "DELTA_BINARY_PACKED"})]):
  chosen = table if "version" not in o else table.drop_columns(["f16"])
  pq.write_table(chosen, "%s/%d.parquet" % (out, k), **{"row_group_size": 300, **o})
rows = table.to_pylist()
for r in rows:
  r["raw"] = list(r["raw"]); r["day"] = (r["day"] - datetime.date(1970, 1, 1)).days
  r["when"] = round((r["when"] - datetime.datetime(1970, 1, 1)).total_seconds() * 1000000)
  r["u64"] = str(r["u64"])
json.dump(rows, open(out + "/rows.json", "w"))
`
	if out, err := exec.Command(python, "-c", script, dir).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	text, err := os.ReadFile(filepath.Join(dir, "rows.json"))
	if err != nil {
		t.Fatal(err)
	}
	var rows []struct {
		Bool   *bool
		I8     int8
		U32    uint32
		U64    string
		F16    float32
		F32    *float32
		Day    int32
		When   int64
		Word   *string
		Raw    []int
		Fixed  []int32
		List   []*float64
		Person struct {
			Age  int64
			Name string
		}
	}
	if err := json.Unmarshal(text, &rows); err != nil {
		t.Fatal(err)
	}
	for k := range 4 {
		f, err := parquet.Open(t.Context(), []string{filepath.Join(dir, fmt.Sprint(k, ".parquet"))}, parquet.Options{
			Fill: map[string]any{"bool": true, "f32": -1, "word": "none", "list": -2.0},
		})
		if err != nil {
			t.Fatal(err)
		}
		if f.Rows.Len() != len(rows) {
			t.Fatalf("file %d has %d rows", k, f.Rows.Len())
		}
		i := 0
		for e, err := range f.Rows.Iter(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			r := rows[i]
			or := func(x *float64, missing float64) float64 {
				if x == nil {
					return missing
				}
				return *x
			}
			word, f32, yes := "none", float32(-1), true
			if r.Word != nil {
				word = *r.Word
			}
			if r.F32 != nil {
				f32 = *r.F32
			}
			if r.Bool != nil {
				yes = *r.Bool
			}
			var u64 uint64
			if _, err := fmt.Sscan(r.U64, &u64); err != nil {
				t.Fatal(err)
			}
			w := map[string]*tensor.Tensor{
				"bool": tensor.Scalar(yes), "i8": tensor.Scalar(r.I8), "u32": tensor.Scalar(r.U32), "u64": tensor.Scalar(u64),
				"f16": tensor.Scalar(tensor.F16From(r.F16)), "f32": tensor.Scalar(f32), "day": tensor.Scalar(r.Day),
				"when": tensor.Scalar(r.When), "word": tensor.Strings([]string{word}, []int{}...),
				"raw":   tensor.Strings([]string{string([]byte{byte(r.Raw[0]), byte(r.Raw[1])})}, []int{}...),
				"fixed": tensor.From(r.Fixed), "list": tensor.From([]float64{or(r.List[0], -2), or(r.List[1], -2)}),
				"person.age": tensor.Scalar(r.Person.Age), "person.name": tensor.Strings([]string{r.Person.Name}, []int{}...),
			}
			if k == 1 { // version 1.0 has no unsigned integers of 32 bits, and no float16
				delete(w, "f16")
				w["u32"] = tensor.Scalar(int64(r.U32))
			}
			equal(t, fmt.Sprintf("file %d, row %d", k, i), e, w)
			if t.Failed() {
				return
			}
			i++
		}
	}
}

// TestFlippedFooterBits checks that no wrong bit in a footer makes the package panic, or gives a column no type.
func TestFlippedFooterBits(t *testing.T) {
	type narrow struct {
		A int8   `parquet:"a,int(8)"`
		B uint16 `parquet:"b,uint(16)"`
		C int64  `parquet:"c"`
	}
	name := write(t, t.TempDir(), "narrow.parquet", 4, []narrow{{1, 2, 3}, {-4, 5, 6}})
	whole, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	footer := len(whole) - 8 - int(binary.LittleEndian.Uint32(whole[len(whole)-8:]))
	widths := 0
	for bit := 8 * footer; bit < 8*len(whole); bit++ {
		b := bytes.Clone(whole)
		b[bit/8] ^= 1 << (bit % 8)
		if err := os.WriteFile(name, b, 0o666); err != nil {
			t.Fatal(err)
		}
		frame, err := parquet.Load(t.Context(), []string{name}, parquet.Options{})
		if err != nil && strings.Contains(err.Error(), "want 8, 16, 32 or 64 bits, at most those of the column") {
			widths++
		}
		if err == nil && frame.Values == nil {
			t.Errorf("bit %d: no values and no error", bit)
		}
	}
	if widths < 10 {
		t.Errorf("%d flipped bits made a width that no integer has, or that its column does not hold", widths)
	}
}
