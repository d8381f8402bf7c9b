package data_test

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/tensor"
)

// writeNew writes a file into a folder.
func writeNew(t testing.TB, dir, name string, contents []byte) string {
	t.Helper()
	name = filepath.Join(dir, name)
	if err := os.WriteFile(name, contents, 0o666); err != nil {
		t.Fatal(err)
	}
	return name
}

// tarOf returns an archive in the WebDataset format of n examples.
func tarOf(t testing.TB, first, n int) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	add := func(name string, contents []byte) {
		h := tar.Header{Name: name, Mode: 0o644, Size: int64(len(contents)), Typeflag: tar.TypeReg}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(contents); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.WriteHeader(&tar.Header{Name: "dir/", Typeflag: tar.TypeDir}); err != nil {
		t.Fatal(err)
	}
	// As in the archives of git archive.
	global := tar.Header{
		Typeflag: tar.TypeXGlobalHeader, Name: "pax_global_header",
		PAXRecords: map[string]string{"comment": strings.Repeat("1ad0", 10)},
	}
	if err := w.WriteHeader(&global); err != nil {
		t.Fatal(err)
	}
	for i := first; i < first+n; i++ {
		long := strings.Repeat("long", 30*(i%2)) // needs another header
		add(fmt.Sprintf("dir/%s%d.jpg", long, i), bytes.Repeat([]byte{byte(i)}, i*100))
		add(fmt.Sprintf("dir/%s%d.seg.cls", long, i), []byte(fmt.Sprint(i)))
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// npyOf returns an array in the format of numpy.save.
func npyOf(descr, shape string, elements []byte) []byte {
	header := fmt.Sprintf("{'descr': '%s', 'fortran_order': False, 'shape': (%s), }\n", descr, shape)
	return slices.Concat([]byte("\x93NUMPY\x01\x00"), []byte{byte(len(header)), 0}, []byte(header), elements)
}

// opened are datasets of files with random access, by name: how to open each, and a stream of the same elements.
func opened(t testing.TB, dir string) map[string]struct {
	open   func(o data.IndexOptions) (data.Pipeline, error)
	stream data.Pipeline
	files  []string
} {
	t.Helper()
	r := rand.New(rand.NewPCG(1, 1))
	var text bytes.Buffer
	for i := range 3000 {
		fmt.Fprint(&text, i, strings.Repeat("x", r.IntN(4000)))
		text.WriteString([]string{"\n", "\r\n", "\n\n"}[i%3])
	}
	lines := []string{writeNew(t, dir, "a.txt", text.Bytes()), writeNew(t, dir, "b.txt", nil), writeNew(t, dir, "c.txt",
		[]byte("last\nwithout end"))}
	var records []string
	for i := range 3 {
		var b []byte
		for k := range 40 * i {
			b = data.AppendTFRecord(b, bytes.Repeat([]byte{byte(k)}, k*k*7))
		}
		records = append(records, writeNew(t, dir, fmt.Sprint(i, ".tfrecord"), b))
	}
	tars := []string{writeNew(t, dir, "0.tar", tarOf(t, 0, 30)), writeNew(t, dir, "1.tar", tarOf(t, 30, 11))}
	csv := writeNew(t, dir, "x.csv", []byte("\ufeffa, b\n1,2\n\n\r\n3, \"4,5\"\r\n6,7\n\n"))
	idxFile := writeNew(t, dir, "x.idx", idx(0x0b, []uint32{5, 2}, []byte("0123456789abcdefghij")...))
	images, err := data.LoadIDX(idxFile)
	if err != nil {
		t.Fatal(err)
	}
	elements := make([]byte, 84)
	for i := range elements {
		elements[i] = byte(i)
	}
	npyFile := writeNew(t, dir, "x.npy", npyOf("<f4", "7, 3", elements))
	array, err := data.LoadNPY(npyFile)
	if err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	return map[string]struct {
		open   func(o data.IndexOptions) (data.Pipeline, error)
		stream data.Pipeline
		files  []string
	}{
		"lines": {func(o data.IndexOptions) (data.Pipeline, error) {
			return data.OpenLines(ctx, lines, o)
		}, data.Lines(lines...), lines},
		"TFRecord": {func(o data.IndexOptions) (data.Pipeline, error) {
			return data.OpenTFRecords(ctx, records, o)
		}, data.TFRecords(records...), records},
		"tar": {
			func(o data.IndexOptions) (data.Pipeline, error) { return data.OpenTar(ctx, tars, o) },
			data.FromFunc(41, func(_ context.Context, i int) (data.Element, error) {
				return map[string]*tensor.Tensor{
					"__key__": tensor.Strings([]string{fmt.Sprintf("dir/%s%d", strings.Repeat("long", 30*(i%2)), i)}, []int{}...),
					"jpg":     tensor.Strings([]string{strings.Repeat(string([]byte{byte(i)}), i*100)}, []int{}...),
					"seg.cls": tensor.Strings([]string{fmt.Sprint(i)}, []int{}...),
				}, nil
			}), tars,
		},
		"CSV": {func(o data.IndexOptions) (data.Pipeline, error) {
			f, err := data.OpenCSV(ctx, csv, data.CSV{}, o)
			if err != nil {
				return data.Pipeline{}, err
			}
			if !slices.Equal(f.Names, []string{"a", "b"}) {
				t.Errorf("the columns are %q", f.Names)
			}
			return f.Rows, nil
		}, fromTensors(tensor.Strings([]string{"1", "2", "3", "4,5", "6", "7"}, 3, 2)), []string{csv}},
		"IDX": {func(o data.IndexOptions) (data.Pipeline, error) {
			return data.OpenIDX(ctx, idxFile, o)
		}, fromTensors(images), []string{idxFile}},
		"NPY": {func(o data.IndexOptions) (data.Pipeline, error) {
			return data.OpenNPY(ctx, npyFile, o)
		}, fromTensors(array), []string{npyFile}},
	}
}

// TestOpen checks that files with random access have the elements that their streams have, in order, by batches and
// shuffled, from a new index and from a kept one.
func TestOpen(t *testing.T) {
	dir := t.TempDir()
	for name, c := range opened(t, dir) {
		t.Run(name, func(t *testing.T) {
			want := hashOf(t, c.stream)
			var prints []uint64
			for _, kept := range []bool{false, true} {
				built := int64(0)
				p, err := c.open(data.IndexOptions{Workers: 3, Progress: func(done, total int64) {
					if built = done; done > total {
						t.Errorf("%d of %d bytes are done", done, total)
					}
				}})
				if err != nil {
					t.Fatal(err)
				}
				if (built > 0) == kept {
					t.Errorf("the index was kept: %t, but %d bytes were read for it", kept, built)
				}
				if got := hashOf(t, p); got != want {
					t.Errorf("kept %t: the elements differ from the stream's", kept)
				}
				if got := hashOf(t, p.Workers(3).Prefetch(2)); got != want {
					t.Errorf("kept %t: the elements of several goroutines differ from the stream's", kept)
				}
				prints = append(prints, data.Fingerprint(p))
				n := 0
				for range collect(t, p.Shuffle(1), 0) {
					n++
				}
				if n != p.Len() {
					t.Errorf("%d elements of %d when shuffled", n, p.Len())
				}
				if name == "IDX" || name == "NPY" {
					if a, b := hashOf(t, p.Shuffle(1).Batch(2)), hashOf(t, c.stream.Shuffle(1).Batch(2)); a != b {
						t.Errorf("kept %t: batches differ", kept)
					}
				}
			}
			if prints[0] != prints[1] || prints[0] == 0 {
				t.Errorf("fingerprints %x", prints)
			}
		})
	}
}

// TestOpenCSVFormats opens one file as several formats, which differ in their rows and fingerprints.
func TestOpenCSVFormats(t *testing.T) {
	name := writeNew(t, t.TempDir(), "a.csv", []byte("#1;2\nx;y\n\n3;4\n#5\n\n5;6\n#"))
	prints := map[uint64]bool{}
	formats := []struct {
		data.CSV
		rows string
	}{
		{data.CSV{Comma: ';', Comment: "#"}, "[[3 4] [5 6]]"},
		{data.CSV{Comma: ';', NoHeader: true, Comment: "#"}, "[[x y] [3 4] [5 6]]"},
		{data.CSV{Comma: ';', Comment: "#", Columns: []string{"y"}}, "[[4] [6]]"},
		{data.CSV{NoHeader: true, Comment: "#"}, "[[x;y] [3;4] [5;6]]"},
		{data.CSV{NoHeader: true}, "[[#1;2] [x;y] [3;4] [#5] [5;6] [#]]"},
	}
	for _, c := range slices.Concat(formats, formats) { // the second time by the index
		f, err := data.OpenCSV(t.Context(), name, c.CSV, data.IndexOptions{})
		if err != nil {
			t.Fatal(err)
		}
		prints[data.Fingerprint(f.Rows)] = true
		var rows [][]string
		for _, e := range collect(t, f.Rows, 0) {
			rows = append(rows, e.(*tensor.Tensor).StringData())
		}
		if got := fmt.Sprint(rows); got != c.rows {
			t.Errorf("%+v: got %s, want %s", c.CSV, got, c.rows)
		}
	}
	if len(prints) != len(formats) {
		t.Errorf("%d fingerprints of %d formats", len(prints), len(formats))
	}
}

// TestOpenChanged checks that an index is built anew after its file has changed, and that an open file that changes
// gives an error.
func TestOpenChanged(t *testing.T) {
	dir := t.TempDir()
	file := writeNew(t, dir, "x.txt", []byte("a\nb\n"))
	before, err := data.OpenLines(t.Context(), []string{file}, data.IndexOptions{Dir: filepath.Join(dir, "cache")})
	if err != nil || before.Len() != 2 {
		t.Fatal(before.Len(), err)
	}
	writeNew(t, dir, "x.txt", []byte("a\nb\nc\n"))
	later := time.Now().Add(time.Hour)
	if err := os.Chtimes(file, later, later); err != nil {
		t.Fatal(err)
	}
	after, err := data.OpenLines(t.Context(), []string{file}, data.IndexOptions{Dir: filepath.Join(dir, "cache")})
	if err != nil || after.Len() != 3 || len(collect(t, after, 0)) != 3 {
		t.Fatal(after.Len(), err)
	}
	if _, err := os.Stat(file + ".lines.index"); err == nil {
		t.Error("an index is beside the file, where a folder for it was given")
	}
	if data.Fingerprint(before) == data.Fingerprint(after) {
		t.Error("a file that has changed has the same fingerprint")
	}
	if err := os.Truncate(file, 3); err != nil {
		t.Fatal(err)
	}
	if _, err := firstError(t.Context(), after); err == nil ||
		!strings.Contains(err.Error(), "x.txt: text: offset 3: the file ends here") {
		t.Errorf("a file that was truncated gives %v", err)
	}
}

// TestOpenErrors checks what files that cannot be read by record give.
func TestOpenErrors(t *testing.T) {
	dir := t.TempDir()
	whole := data.AppendTFRecord(nil, []byte("record"))
	for _, c := range []struct {
		name, want string
		contents   []byte
		open       func(name string) (data.Pipeline, error)
	}{
		{"gzip", "compressed by gzip", []byte{0x1f, 0x8b, 8}, func(name string) (data.Pipeline, error) {
			return data.OpenLines(t.Context(), []string{name}, data.IndexOptions{})
		}},
		{"no TFRecord", "offset 0: the length of the record has checksum", make([]byte, 30), func(name string) (
			data.Pipeline, error,
		) {
			return data.OpenTFRecords(t.Context(), []string{name}, data.IndexOptions{})
		}},
		{
			"short TFRecord", "offset 22: a record of 6 bytes expected; the file ends after 17",
			slices.Concat(whole, whole[:17]),
			func(name string) (data.Pipeline, error) {
				return data.OpenTFRecords(t.Context(), []string{name}, data.IndexOptions{})
			},
		},
		{"no tar", "tar: offset", bytes.Repeat([]byte("x"), 2000), func(name string) (data.Pipeline, error) {
			return data.OpenTar(t.Context(), []string{name}, data.IndexOptions{})
		}},
		{"short array", "20 bytes of elements of shape [5 2]", idx(0x0b, []uint32{5, 2}, 0, 1), func(name string) (
			data.Pipeline, error,
		) {
			return data.OpenIDX(t.Context(), name, data.IndexOptions{})
		}},
		{
			"scalar", "no dimensions", npyOf("|u1", "", []byte{1}),
			func(name string) (data.Pipeline, error) { return data.OpenNPY(t.Context(), name, data.IndexOptions{}) },
		},
		{"no names", "only numbers", []byte("1,2\n"), func(name string) (data.Pipeline, error) {
			f, err := data.OpenCSV(t.Context(), name, data.CSV{}, data.IndexOptions{})
			return data.Pipeline{}, errorOf(f, err)
		}},
		{"absent", "no such file", nil, func(name string) (data.Pipeline, error) {
			return data.OpenLines(t.Context(), []string{name + ".absent"}, data.IndexOptions{})
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			name := writeNew(t, dir, strings.ReplaceAll(c.name, " ", "_"), c.contents)
			if _, err := c.open(name); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
	file := writeNew(t, dir, "wide.csv", []byte("a,b\n1,2\n1,2,3\n"))
	f, err := data.OpenCSV(t.Context(), file, data.CSV{}, data.IndexOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if n, err := firstError(t.Context(), f.Rows); n != 1 || err == nil || !strings.Contains(err.Error(),
		"wide.csv: CSV: offset 8: 3 fields, where the first line has 2") {
		t.Errorf("after %d rows: %v", n, err)
	}
	damaged := slices.Clone(whole)
	damaged[14]++
	file = writeNew(t, dir, "damaged", damaged)
	p, err := data.OpenTFRecords(t.Context(), []string{file}, data.IndexOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := firstError(t.Context(), p); err == nil ||
		!strings.Contains(err.Error(), "the record of 6 bytes has checksum") {
		t.Errorf("a damaged record gives %v", err)
	}
}

func errorOf(_ any, err error) error { return err }

// TestManyFiles checks that more files than may be open can be read.
func TestManyFiles(t *testing.T) {
	dir := t.TempDir()
	var names []string
	for i := range 150 {
		names = append(names, writeNew(t, dir, fmt.Sprint(i), fmt.Appendln(nil, i)))
	}
	p, err := data.OpenLines(t.Context(), names, data.IndexOptions{Dir: filepath.Join(dir, "indices")})
	if err != nil {
		t.Fatal(err)
	}
	for i, e := range collect(t, p.Workers(8), 0) {
		if got := e.(*tensor.Tensor).StringData()[0]; got != fmt.Sprint(i) {
			t.Fatalf("line %d is %q", i, got)
		}
	}
}

// TestLinesOfGzip checks that the error for a compressed file names the function that reads it.
func TestLinesOfGzip(t *testing.T) {
	file := filepath.Join(t.TempDir(), "a.txt.gz")
	if err := os.WriteFile(file, zipped([]byte("a\nb\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := data.OpenLines(t.Context(), []string{file}, data.IndexOptions{})
	if err == nil || !strings.Contains(err.Error(), "decompress it (gunzip), or read it as a stream by data.Lines") {
		t.Errorf("error %v", err)
	}
}
