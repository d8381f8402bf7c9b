package data_test

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/tensor"
)

func TestCSV(t *testing.T) {
	tests := []struct {
		name  string
		csv   data.CSV
		file  string
		names []string
		want  []float64
	}{
		{"plain", data.CSV{}, "a,b\n1,2\n3,4\n", []string{"a", "b"}, []float64{1, 2, 3, 4}},
		{"no line end at the end", data.CSV{}, "a,b\n1,2", []string{"a", "b"}, []float64{1, 2}},
		{"Windows", data.CSV{}, "\ufeffa,b\r\n1,2\r\n", []string{"a", "b"}, []float64{1, 2}},
		{"spaces and blank lines", data.CSV{}, "\n a , b\n\n 1 ,\t2\n  \n", []string{"a", "b"}, []float64{1, 2}},
		{
			"quotes",
			data.CSV{},
			"\"a, first\", \"say \"\"b\"\"\"\n\"1\",2\n",
			[]string{"a, first", `say "b"`},
			[]float64{1, 2},
		},
		{"semicolons", data.CSV{Comma: ';'}, "a;b\n1;2\n", []string{"a", "b"}, []float64{1, 2}},
		{"no header", data.CSV{NoHeader: true}, "1,2\n3,4\n", []string{"0", "1"}, []float64{1, 2, 3, 4}},
		{"only a header", data.CSV{}, "a,b\n", []string{"a", "b"}, []float64{}},
		{"numbers", data.CSV{}, "a\n-1.5e3\n+7\n.5\n", []string{"a"}, []float64{-1500, 7, .5}},
		{"columns", data.CSV{Columns: []string{"c", "a"}}, "a,b,c\n1,x,3\n4,,6\n", []string{"c", "a"}, []float64{3, 1, 6, 4}},
		{"some names are numbers", data.CSV{}, "1,b\n1,2\n", []string{"1", "b"}, []float64{1, 2}},
	}
	for _, c := range tests {
		t.Run(c.name, func(t *testing.T) {
			for _, file := range [][]byte{[]byte(c.file), zipped([]byte(c.file))} {
				got, err := data.ReadCSV(bytes.NewReader(file), c.csv)
				if err != nil {
					t.Fatal(err)
				}
				if !slices.Equal(got.Names, c.names) || !slices.Equal(tensor.Data[float64](got.Values), c.want) ||
					got.Rows() != len(c.want)/len(c.names) {
					t.Errorf("got %q, %v", got.Names, got.Values)
				}
			}
		})
	}
}

// TestCSVColumns checks that all columns that cannot be read are reported at once, and that columns are left out and
// dates read as days.
func TestCSVColumns(t *testing.T) {
	const file = "day,a,name,when,b\n1970-01-02,1,x,2024-12-31 18:00,1\n1969-12-31,2,y,2024-12-31T12:00:00-06:00,?\n"
	read := func(c data.CSV) (*data.Frame, error) { return data.ReadCSV(strings.NewReader(file), c) }
	_, err := read(data.CSV{})
	var field *data.FieldError
	if !errors.As(err, &field) || len(field.Others) != 3 || !field.Date || field.Others[0].Date || !field.Others[1].Date ||
		!strings.Contains(err.Error(), `line 2, offset 18: column "day": "1970-01-02" is not a number; column "name": "x" `+
			`is not a number; column "when": "2024-12-31 18:00" is not a number; column "b": "?" is not a number`) {
		t.Errorf("error %v", err)
	}
	c := data.CSV{Dates: []string{"day", "when"}, Drop: []string{"name"}, Missing: []string{"?"}}
	frame, err := read(c)
	if err != nil {
		t.Fatal(err)
	}
	got := fmt.Sprint(frame.Names, tensor.Data[float64](frame.Values))
	if got != "[day a when b] [1 1 20088.75 1 -1 2 20088.75 NaN]" {
		t.Errorf("got %s", got)
	}
	for want, c := range map[string]data.CSV{
		`no column "x", which Drop of CSV leaves out`:  {Drop: []string{"x"}},
		`no column "x", which CSV reads as dates`:      {Dates: []string{"x"}},
		"the Drop of CSV leaves out all columns":       {Columns: []string{"a"}, Drop: []string{"a"}},
		`column "a": "1" is not a date`:                {Columns: []string{"a"}, Dates: []string{"a"}},
		"CSV has categories for it, and reads it as d": {Categories: map[string][]string{"day": nil}, Dates: []string{"day"}},
	} {
		if _, err := read(c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %s", err, want)
		}
	}
}

func TestCSVErrors(t *testing.T) {
	tests := []struct {
		name   string
		csv    data.CSV
		file   string
		offset int64
		want   string
	}{
		{"empty", data.CSV{}, "", 0, "CSV: offset 0: the file is empty: a line with the columns' names expected"},
		{"blank", data.CSV{}, "\n \n", 3, "the file is empty"},
		{"no header", data.CSV{}, "1,2\n3,4\n", 0, "line 1, offset 0: only numbers: the columns' names expected (set " +
			"NoHeader for a file without them)"},
		{"no number", data.CSV{}, "a,b\n1,2\n3, four\n", 11, `line 3, offset 11: column "b": "four" is not a number`},
		{"missing value", data.CSV{}, "a,b\n1,\n", 4, `line 2, offset 4: column "b": "" is not a number`},
		{"too large", data.CSV{}, "a\n1e999\n", 2, `"1e999" is not a number`},
		{"fewer fields", data.CSV{}, "a,b\n1,2\n3\n", 8, "line 3, offset 8: 1 fields, where the first line has 2"},
		{"more fields", data.CSV{}, "a,b\n1,2,3\n", 4, "3 fields, where the first line has 2"},
		{"no such column", data.CSV{Columns: []string{"c"}}, "a,b\n1,2\n", 0, `no column "c": there are ["a" "b"]`},
		{"a column twice", data.CSV{Columns: []string{"b", "b"}}, "a,b\n1,2\n", 0, `the Columns of CSV have "b" twice`},
		{"names twice", data.CSV{}, "a,b,a\n", 0, `columns 1 and 3 are both named "a"`},
		{"quote open", data.CSV{}, "a,b\n1,\"2\n", 4, "quotes that do not match, or a field over several lines"},
		{
			"long field",
			data.CSV{},
			"a\n" + strings.Repeat("x", 100) + "\n", 2,
			strings.Repeat("x", 40) + "…\" is not a number",
		},
		{"no line ends", data.CSV{}, "a\n" + strings.Repeat("1", 17<<20), 2, "a line of more than 16777216 bytes"},
	}
	for _, c := range tests {
		t.Run(c.name, func(t *testing.T) {
			name := writeFile(t, "a.csv", []byte(c.file))
			_, err := data.LoadCSV(name, c.csv)
			checkFormatError(t, err, c.offset, c.want, name)
		})
	}
	t.Run("gzip truncated", func(t *testing.T) {
		file := zipped([]byte("a,b\n" + strings.Repeat("1,2\n", 100)))
		_, err := data.ReadCSV(bytes.NewReader(file[:len(file)-9]), data.CSV{})
		checkFormatError(t, err, 404, "of the uncompressed contents: the gzip stream ends too early")
	})
}

func TestFrame(t *testing.T) {
	f, err := data.ReadCSV(strings.NewReader("x,y,label\n1,0.1,3\n2,0.2,4\n"), data.CSV{})
	if err != nil {
		t.Fatal(err)
	}
	inputs, err := f.Floats(f.Without("label")...)
	if want := tensor.From([]float32{1, 0.1, 2, 0.2}, 2, 2); err != nil || !inputs.Equal(want) {
		t.Errorf("got %v, %v", inputs, err)
	}
	if got, err := f.Floats("label", "x"); err != nil || !got.Equal(tensor.From([]float32{3, 1, 4, 2}, 2, 2)) {
		t.Errorf("got %v, %v", got, err)
	}
	if got, err := f.Floats(); err != nil || !slices.Equal(got.Shape(), []int{2, 3}) {
		t.Errorf("got %v, %v", got, err)
	}
	if got, err := f.Ints("label"); err != nil || !got.Equal(tensor.From([]int32{3, 4})) {
		t.Errorf("got %v, %v", got, err)
	}
	for want, err := range map[string]error{
		`data: column "y", row 0: 0.1 is not an int32`:     second(f.Ints("y")),
		`data: no column "z": there are ["x" "y" "label"]`: second(f.Ints("z")),
		`data: no column "": there are ["x" "y" "label"]`:  second(f.Floats("x", "")),
	} {
		if err == nil || err.Error() != want {
			t.Errorf("got  %v\nwant %s", err, want)
		}
	}
}

// adult has the columns and the spelling of UCI's adult data set; its rows are made up.
const adult = `|a comment
41, Private, 120000, Bachelors, 13, Never-married, Sales, Husband, White, Male, 0, 0, 40, Italy, <=50K
28, ?, 90000, HS-grad, 9, Divorced, ?, Unmarried, Black, Female, 0, 0, 20, ?, >50K
?, State-gov, 100000, Bachelors, 13, Divorced, Tech-support, Wife, White, Female, 14084, 0, 38, Italy, >50K

`

var adultNames = []string{
	"age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation",
	"relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income",
}

func TestFrameOfCategories(t *testing.T) {
	texts := map[string][]string{}
	for _, name := range []string{
		"workclass", "education", "marital-status", "occupation", "relationship", "race", "sex",
		"native-country", "income",
	} {
		texts[name] = nil
	}
	csv := data.CSV{NoHeader: true, Names: adultNames, Comment: "|", Missing: []string{"?"}, Categories: texts}
	f, err := data.ReadCSV(strings.NewReader(adult), csv)
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"Private", "State-gov"}; f.Rows() != 3 || !slices.Equal(f.Categories["workclass"], want) {
		t.Errorf("%d rows, categories %v", f.Rows(), f.Categories)
	}
	if got, err := f.Ints("education"); err != nil || !got.Equal(tensor.From([]int32{0, 1, 0})) {
		t.Errorf("education: got %v, %v", got, err)
	}
	if got, err := f.OneHot("workclass"); err != nil || !got.Equal(tensor.From([]float32{1, 0, 0, 0, 0, 1}, 3, 2)) {
		t.Errorf("workclass: got %v, %v", got, err)
	}
	if mean, deviation, err := f.Mean("age"); err != nil || mean != 34.5 || deviation != 6.5 {
		t.Errorf("mean of ages: %v, %v, %v", mean, deviation, err)
	}
	for want, err := range map[string]error{
		`data: column "age", row 2: the value is missing: use Fill, or DropMissing`:       second(f.Floats("fnlwgt", "age")),
		`data: column "workclass", row 1: the value is missing: use Fill, or DropMissing`: second(f.Ints("workclass")),
		`data: column "sex" is text, of 2 categories: use Ints or OneHot`:                 second(f.Floats("sex")),
		`data: column "age" has no categories: give it an entry in CSV.Categories to read it as text`: second(
			f.OneHot("age")),
		`data: column "sex" is text: cannot fill it with 2: want a category's number, 0 to 1`: f.Fill("sex", 2),
	} {
		if err == nil || err.Error() != want {
			t.Errorf("got  %v\nwant %s", err, want)
		}
	}
	complete, err := f.DropMissing("age", "workclass")
	if err != nil || complete.Rows() != 1 {
		t.Errorf("complete rows: %v, %v", complete, err)
	}
	got, err := complete.Floats("age", "hours-per-week")
	if err != nil || !got.Equal(tensor.From([]float32{41, 40}, 1, 2)) {
		t.Errorf("got %v, %v", got, err)
	}
	two, err := f.Select([]int{2, 0})
	if err != nil || two.Rows() != 2 || !first(two.Ints("education")).Equal(tensor.From([]int32{0, 0})) ||
		!first(two.Floats("fnlwgt")).Equal(tensor.From([]float32{100000, 120000}, 2, 1)) {
		t.Errorf("selected: got %v, %v", two, err)
	}
	if _, err := f.Select([]int{3}); err == nil {
		t.Error("row 3 of 3 was selected")
	}
	if err := f.Fill("age", 34.5); err != nil {
		t.Error(err)
	}
	if got, err := f.Floats("age"); err != nil || !got.Equal(tensor.From([]float32{41, 28, 34.5}, 3, 1)) {
		t.Errorf("filled: got %v, %v", got, err)
	}

	// Another file with the categories of the first.
	csv.Categories = f.Categories
	line := "50, State-gov, 1, HS-grad, 9, Divorced, Sales, Wife, White, Male, 0, 0, 40, Italy, >50K\n"
	other, err := data.ReadCSV(strings.NewReader(line), csv)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := other.Ints("workclass"); err != nil || !got.Equal(tensor.From([]int32{1})) {
		t.Errorf("another file: got %v, %v", got, err)
	}
	_, err = data.ReadCSV(strings.NewReader(strings.Replace(line, "Sales", "Diver", 1)), csv)
	checkFormatError(t, err, 40, `line 1, offset 40: column "occupation": "Diver" is none of its categories, `+
		`["Sales" "Tech-support"]`)
	for want, wrong := range map[string]data.CSV{
		"15 fields, where CSV has 1 names":                {NoHeader: true, Names: []string{"age"}},
		"CSV with Names, but without NoHeader":            {Names: adultNames},
		`no column "color", for which CSV has categories`: {NoHeader: true, Categories: map[string][]string{"color": nil}},
		`column "1": categories 0 and 1 of CSV are both "same"`: {
			NoHeader: true, Categories: map[string][]string{"1": {"same", "same"}},
		},
	} {
		if _, err := data.ReadCSV(strings.NewReader(line), wrong); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q in it", err, want)
		}
	}
}

func first[T any](x T, _ error) T { return x }

func second[T any](_ T, err error) error { return err }

func TestCSVRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		width := rapid.IntRange(1, 4).Draw(t, "columns")
		rows := rapid.IntRange(0, 5).Draw(t, "rows")
		want := make([]float64, 0, rows*width)
		var file strings.Builder
		for i := range width {
			fmt.Fprintf(&file, "%sc%d", strings.Repeat(",", min(i, 1)), i)
		}
		for range rows {
			file.WriteString("\n")
			for i := range width {
				x := rapid.Float64().Draw(t, "x")
				want = append(want, x)
				file.WriteString(strings.Repeat(",", min(i, 1)) + strconv.FormatFloat(x, 'g', -1, 64))
			}
		}
		got, err := data.ReadCSV(strings.NewReader(file.String()), data.CSV{})
		if err != nil {
			t.Fatal(err)
		}
		if !got.Values.Equal(tensor.From(want, rows, width)) {
			t.Fatalf("got %v, want %v", got.Values, want)
		}
	})
}

func FuzzCSV(f *testing.F) {
	for _, s := range []string{
		"a,b\n1,2\n", "\ufeffa\r\n1\r\n", "\"a\",\"b\"\"\"\n1,\"2\"", "1,2\n",
		"a\nnan\ninf\n0x1p-2\n", ",\n,",
	} {
		f.Add([]byte(s), byte(','), false)
	}
	f.Add([]byte("1;2\n"), byte(';'), true)
	f.Add(zipped([]byte("a\n1\n")), byte(0), false)
	f.Fuzz(func(t *testing.T, file []byte, comma byte, noHeader bool) {
		frame, err := data.ReadCSV(bytes.NewReader(file), data.CSV{Comma: comma, NoHeader: noHeader})
		if !decoded(t, err) {
			return
		}
		if !slices.Equal(frame.Values.Shape(), []int{frame.Rows(), len(frame.Names)}) || len(frame.Names) == 0 {
			t.Errorf("%q became %v of %q", file, frame.Values, frame.Names)
		}
		for _, x := range tensor.Data[float64](frame.Values) {
			if !math.IsNaN(x) && !math.IsInf(x, 0) && !bytes.ContainsAny(file, "0123456789") &&
				!bytes.HasPrefix(file, []byte{0x1f, 0x8b}) {
				t.Errorf("%q holds no number, but gave %v", file, x)
			}
		}
	})
}

func TestLines(t *testing.T) {
	long := strings.Repeat("x", 200_000) // longer than any buffer
	name := writeFile(t, "a.txt", []byte("one\n\ntwo\r\n"+long+"\nlast"))
	packed := writeFile(t, "b.txt.gz", zipped([]byte("three\n")))
	p := data.Lines(name, packed)
	if got := strings1(t, p); !slices.Equal(got, []string{"one", "", "two", long, "last", "three"}) || p.Len() != -1 {
		t.Errorf("got %.300q", got)
	}
	if got := strings1(t, p.Take(1)); !slices.Equal(got, []string{"one"}) {
		t.Errorf("got %q", got)
	}
	n, err := firstError(t.Context(), data.Lines(name, name+"-missing"))
	if n != 5 || err == nil || !strings.Contains(err.Error(), name+"-missing") {
		t.Errorf("%d lines, then %v", n, err)
	}
	n, err = firstError(t.Context(), data.Lines(writeFile(t, "c", []byte("one\n"+strings.Repeat("x", 17<<20)))))
	if n != 1 {
		t.Errorf("%d lines, want 1", n)
	}
	checkFormatError(t, err, 4, "line 2, offset 4: a line of more than 16777216 bytes")
}

func FuzzLines(f *testing.F) {
	f.Add([]byte("one\ntwo"))
	f.Add([]byte("\r\n\n\r"))
	f.Add(zipped([]byte("one\n")))
	f.Fuzz(func(t *testing.T, file []byte) {
		name := writeFile(t, "r", file)
		if bytes.HasPrefix(file, []byte{0x1f, 0x8b}) {
			_, err := firstError(t.Context(), data.Lines(name))
			decoded(t, err)
			return
		}
		want := strings.Split(strings.TrimSuffix(string(file), "\n"), "\n")
		if len(file) == 0 {
			want = nil
		}
		for i := range want {
			want[i] = strings.TrimSuffix(want[i], "\r")
		}
		if got := strings1(t, data.Lines(name)); !slices.Equal(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	})
}

// TestCategoriesOfOtherColumns: categories of a column that is not read are ignored; those of one that the file does
// not have are an error that names its columns.
func TestCategoriesOfOtherColumns(t *testing.T) {
	text := "color,size,price\nred,1,2\nblue,3,4\n"
	categories := map[string][]string{"color": {"blue", "red"}}
	f, err := data.ReadCSV(strings.NewReader(text), data.CSV{Columns: []string{"size"}, Categories: categories})
	if err != nil || !slices.Equal(f.Names, []string{"size"}) || len(f.Categories) > 0 {
		t.Errorf("%+v, %v, want the column size alone", f, err)
	}
	_, err = data.ReadCSV(strings.NewReader(text), data.CSV{
		Columns: []string{"size"}, Categories: map[string][]string{"colour": nil},
	})
	if err == nil || !strings.Contains(err.Error(), `"color"`) {
		t.Errorf("categories of a column that does not exist: %v, want an error that names the columns", err)
	}
}
