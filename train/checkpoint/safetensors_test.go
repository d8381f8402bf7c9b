package checkpoint

import (
	"bytes"
	"encoding/binary"
	"maps"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/tensor"
)

func sample() []Tensor {
	return []Tensor{
		{"/dense/weights", tensor.Of([]float32{1, -2, float32(math.NaN()), 4, 5, 6}, 2, 3)},
		{"/dense/biases", tensor.Of([]float32{0.5, math.SmallestNonzeroFloat32}, 2)},
		{"step", tensor.Scalar[int64](-7)},
		{"mask", tensor.Of([]bool{true, false, true}, 3)},
		{"half", tensor.Of([]tensor.F16{1, 2}, 1, 2)},
		{"bhalf", tensor.Of([]tensor.BF16{3}, 1)},
		{"empty \"name\" ü", tensor.New(tensor.Float64, 0, 4)},
		{"wide", tensor.Of([]float64{math.Pi}, 1)},
		{"bytes", tensor.Of([]uint8{1, 2, 3}, 3)},
	}
}

func TestSaveThenLoad(t *testing.T) {
	path := filepath.Join(t.TempDir(), "weights.safetensors")
	if err := Save(path, sample(), map[string]string{"seed": "1"}); err != nil {
		t.Fatal(err)
	}
	got, metadata, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	if !maps.Equal(metadata, map[string]string{"seed": "1"}) {
		t.Errorf("metadata %v", metadata)
	}
	if len(got) != len(sample()) {
		t.Fatalf("got %d tensors, want %d", len(got), len(sample()))
	}
	for _, want := range sample() {
		found := false
		for _, g := range got {
			if g.Name == want.Name {
				found = true
				if !g.Value.Equal(want.Value) {
					t.Errorf("%s: got %v, want %v", want.Name, g.Value, want.Value)
				}
			}
		}
		if !found {
			t.Errorf("%s is missing", want.Name)
		}
	}
	files, _ := os.ReadDir(filepath.Dir(path))
	if len(files) != 1 {
		t.Errorf("Save left other files behind: %v", files)
	}
}

// TestBytes compares the format with a file written by hand.
func TestBytes(t *testing.T) {
	var b bytes.Buffer
	if err := Write(&b, []Tensor{{"w", tensor.Of([]float32{1, 2}, 2, 1)}}, map[string]string{"a": "b"}); err != nil {
		t.Fatal(err)
	}
	header := `{"__metadata__":{"a":"b"},"w":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]}}       `
	want := string(binary.LittleEndian.AppendUint64(nil, uint64(len(header)))) + header +
		"\x00\x00\x80\x3f\x00\x00\x00\x40"
	if len(header)%8 != 0 {
		t.Fatalf("the header of this test has %d bytes", len(header))
	}
	if b.String() != want {
		t.Errorf("got  %q\nwant %q", b.String(), want)
	}
}

func TestWriteErrors(t *testing.T) {
	one := tensor.Scalar[float32](1)
	for name, c := range map[string]struct {
		tensors []Tensor
		want    string
	}{
		"twice":    {[]Tensor{{"a", one}, {"a", one}}, `two tensors have the name "a"`},
		"no name":  {[]Tensor{{"", one}}, `cannot have the name ""`},
		"reserved": {[]Tensor{{"__metadata__", one}}, `cannot have the name "__metadata__"`},
		"strings":  {[]Tensor{{"s", tensor.Strings([]string{"x"})}}, `tensor "s" (string) cannot be written`},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			err := Save(filepath.Join(dir, "f"), c.tensors, nil)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q in it", err, c.want)
			}
			if files, _ := os.ReadDir(dir); len(files) != 0 {
				t.Errorf("a failed Save left %v", files)
			}
		})
	}
}

func file(header, data string) []byte {
	return []byte(string(binary.LittleEndian.AppendUint64(nil, uint64(len(header)))) + header + data)
}

func TestReadErrors(t *testing.T) {
	for name, c := range map[string]struct {
		file []byte
		want string
	}{
		"empty":         {nil, "the file has 0 bytes"},
		"short header":  {file("{}", "")[:9], "header of 2 bytes, but 1 bytes follow"},
		"huge header":   {[]byte("\xff\xff\xff\xff\xff\xff\xff\xff{}"), "not a safetensors file"},
		"no object":     {file("[]", ""), "not a JSON object"},
		"broken":        {file(`{"a":{`, ""), `header, "a"`},
		"not closed":    {file(`{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}`, ""), "header, byte"},
		"trailing":      {file("{} {}", ""), "unexpected data after the JSON object"},
		"unknown field": {file(`{"a":{"dtype":"F32","x":1}}`, ""), "unknown field"},
		"twice": {
			file(`{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},`+
				`"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}`, ""),
			`names "a" twice`,
		},
		"dtype":    {file(`{"a":{"dtype":"F8","shape":[1],"data_offsets":[0,1]}}`, "x"), `the dtype "F8"`},
		"negative": {file(`{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}`, "x"), "negative dimension"},
		"overflow": {
			file(`{"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}}`, ""),
			"too large",
		},
		"overflow behind a 0": {
			file(`{"a":{"dtype":"U8","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}}`, ""),
			"too large",
		},
		"gap":        {file(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}`, "xx"), "begins at byte 1, want 0"},
		"wrong size": {file(`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}`, "xxxx"), "has 8 bytes"},
		"reversed": {
			file(`{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},`+
				`"b":{"dtype":"U8","shape":[1],"data_offsets":[0,-1]}}`, "x"),
			`header, "b"`,
		},
		"truncated": {file(`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}`, "xxxx"), "the file is truncated"},
		"rest": {
			file(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, "xyz"),
			"2 bytes follow the last tensor",
		},
		"metadata": {file(`{"__metadata__":{"a":1}}`, ""), `header, "__metadata__"`},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := Read(bytes.NewReader(c.file), int64(len(c.file)))
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q in it", err, c.want)
			}
		})
	}
	_, _, err := Load(filepath.Join(t.TempDir(), "absent"))
	if !os.IsNotExist(err) && (err == nil || !strings.Contains(err.Error(), "no such file")) {
		t.Errorf("absent file: %v", err)
	}
}

// FuzzRead checks that Write gives back the same tensors for everything that Read accepts.
func FuzzRead(f *testing.F) {
	var b bytes.Buffer
	if err := Write(&b, sample(), map[string]string{"k": "v"}); err != nil {
		f.Fatal(err)
	}
	f.Add(b.Bytes())
	f.Add(file("{}", ""))
	f.Add(file(`{"a":{"dtype":"BF16","shape":[2,1],"data_offsets":[0,4]}}`, "wxyz"))
	f.Fuzz(func(t *testing.T, in []byte) {
		tensors, metadata, err := Read(bytes.NewReader(in), int64(len(in)))
		if err != nil {
			return
		}
		for _, x := range tensors {
			if x.Name == "" { // readable, not writable
				return
			}
		}
		var b bytes.Buffer
		if err := Write(&b, tensors, metadata); err != nil {
			t.Fatal(err)
		}
		again, metadata2, err := Read(bytes.NewReader(b.Bytes()), int64(b.Len()))
		if err != nil {
			t.Fatal(err)
		}
		if !maps.Equal(metadata, metadata2) || len(again) != len(tensors) {
			t.Fatalf("%d tensors and %v became %d and %v", len(tensors), metadata, len(again), metadata2)
		}
		for i := range again {
			if again[i].Name != tensors[i].Name || !again[i].Value.Equal(tensors[i].Value) {
				t.Errorf("%s changed", tensors[i].Name)
			}
		}
	})
}

// TestBooleans: a byte of a boolean that is neither 0 nor 1 is an error.
func TestBooleans(t *testing.T) {
	var file bytes.Buffer
	if err := Write(&file, []Tensor{{"mask", tensor.Of([]bool{true, false, true}, 3)}}, nil); err != nil {
		t.Fatal(err)
	}
	b := file.Bytes()
	b[len(b)-2] = 2
	_, _, err := Read(bytes.NewReader(b), int64(len(b)))
	if err == nil || !strings.Contains(err.Error(), `"mask": a boolean`) {
		t.Errorf("got %v", err)
	}
}
