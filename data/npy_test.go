package data_test

import (
	"bytes"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestNPYOfNumPy reads what NumPy wrote (testdata/make.py).
func TestNPYOfNumPy(t *testing.T) {
	cube := make([]int32, 24)
	for i := range cube {
		cube[i] = int32(i) * 1000
	}
	for name, want := range map[string]*tensor.Tensor{
		"bool":     tensor.From([]bool{true, false}, 1, 2),
		"i1":       tensor.From([]int8{-3, -2, -1, 0, 1, 2}),
		"u1":       tensor.From([]uint8{0, 1, 2, 3, 4, 5}, 3, 2),
		"i2big":    tensor.From([]int16{-3, -2, -1, 0, 1, 2}),
		"u2":       tensor.From([]uint16{0, 1, 2, 3, 4, 5}),
		"i4":       tensor.From(cube, 2, 3, 4),
		"u4":       tensor.From([]uint32{math.MaxUint32}),
		"i8":       tensor.From([]int64{math.MinInt64, math.MaxInt64}),
		"u8":       tensor.From([]uint64{math.MaxUint64}),
		"f2":       tensor.From([]tensor.F16{0x3800, 0xfbff, 0x7c00}),
		"f4":       tensor.From([]float32{1.5, -2.5, 3.25, 1e10}, 2, 2),
		"f8big":    tensor.From([]float64{1e300, -0.1}),
		"scalar":   tensor.Scalar(7.5),
		"empty":    tensor.New(tensor.Float32, 0, 3),
		"version2": tensor.From([]int32{0, 1, 2}),
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join("testdata", "npy-"+name+".npy")
			got, err := data.LoadNPY(file)
			if err != nil || !got.Equal(want) {
				t.Errorf("got %v, %v, want %v", got, err, want)
			}
		})
	}
	t.Run("truncated", func(t *testing.T) {
		contents, err := os.ReadFile("testdata/npy-f4.npy")
		if err != nil {
			t.Fatal(err)
		}
		checkTruncated(t, contents, func(name string) error {
			_, err := data.LoadNPY(name)
			return err
		}, nil)
	})
}

// npy builds a file of version 1.
func npy(header string, elements ...byte) []byte {
	b := append([]byte("\x93NUMPY\x01\x00"), byte(len(header)), byte(len(header)>>8))
	return append(append(b, header...), elements...)
}

func TestNPYErrors(t *testing.T) {
	tests := []struct {
		name   string
		file   []byte
		offset int64
		want   string
	}{
		{"not NPY", []byte("PK\x03\x04 a zip"), 0, `"\x93NUMPY" expected, found "PK\x03\x04 a"`},
		{"version", []byte("\x93NUMPY\x04\x00\x00\x00"), 6, "version 4.0: want 1, 2 or 3"},
		{
			"header too long", []byte("\x93NUMPY\x02\x00\xff\xff\xff\xff"), 8,
			"a header of 4294967295 bytes: want at most 65536",
		},
		{"header truncated", npy("{'descr'")[:14], 10, "the header expected, 8 bytes; the file ends after 4"},
		{"no dict", npy("[]"), 10, `'{' expected`},
		{"no quotes", npy("{descr: 1}"), 11, "a quoted string expected"},
		{"no shape", npy("{'descr': '<f4', 'fortran_order': False}"), 50, `no "shape" in the header`},
		{"twice", npy("{'descr': '<f4', 'descr': '<f4'}"), 34, `a second "descr"`},
		{"key", npy("{'order': 'C'}"), 19, `key "order": want 'descr', 'fortran_order', 'shape'`},
		{"type", npy("{'descr': '<c8'}"), 20, `type "<c8": want a bool, int, uint or float, such as '<f4'`},
		{"type without order", npy("{'descr': '|f4'}"), 20, `type "|f4"`},
		{"shape", npy("{'shape': (2, x)}"), 24, "'shape': a dimension expected"},
		{"shape overflows", npy("{'shape': (99999999999999999999,)}"), 21, "'shape': a dimension expected"},
		{"negative shape", npy("{'shape': (-1,)}"), 21, "'shape': a dimension expected"},
		{
			"too large", npy("{'descr': '<f8', 'fortran_order': False, 'shape': (4611686018427387904, 2), }"), 10,
			"is more bytes than can be addressed",
		},
		{"order", npy("{'fortran_order': 0}"), 28, "'fortran_order': True or False expected"},
		{"after", npy("{'descr': '<i1', 'fortran_order': False, 'shape': (1,)} x", 1), 66, "end of the header expected"},
		{
			"too long", npy("{'descr': '|i1', 'fortran_order': False, 'shape': (1,)}", 1, 2), 66,
			"end of file expected after the elements of shape [1]",
		},
		{
			"elements truncated", npy("{'descr': '<i2', 'fortran_order': False, 'shape': (2,)}", 1, 2), 65,
			"elements of a int16 array of shape [2] expected, 4 bytes; the file ends after 2",
		},
		{"bool", npy("{'descr': '|b1', 'fortran_order': False, 'shape': (2,)}", 1, 2), 66, "a bool of value 2: want 0 or 1"},
	}
	for _, c := range tests {
		t.Run(c.name, func(t *testing.T) {
			name := writeFile(t, "a.npy", c.file)
			_, err := data.LoadNPY(name)
			checkFormatError(t, err, c.offset, c.want, name)
		})
	}
	for name, c := range map[string]struct {
		offset int64
		want   string
	}{
		"fortran": {44, "the array is in Fortran order: save numpy.ascontiguousarray of it"},
		"struct":  {20, "structured types are not supported"},
		"complex": {20, `type "<c8"`},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := data.LoadNPY("testdata/npy-" + name + ".npy")
			checkFormatError(t, err, c.offset, c.want)
		})
	}
}

func FuzzNPY(f *testing.F) {
	files, err := filepath.Glob("testdata/*.npy")
	if err != nil || len(files) == 0 {
		f.Fatal(err)
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add(zipped(npy("{'descr': '|i1', 'fortran_order': False, 'shape': (1,)}", 1)))
	f.Fuzz(func(t *testing.T, file []byte) {
		x, err := data.ReadNPY(bytes.NewReader(file))
		if decoded(t, err) && !bytes.HasPrefix(file, []byte{0x1f, 0x8b}) && x.Len()*x.DType().Bytes() > len(file) {
			t.Errorf("%d bytes became %v", len(file), x)
		}
	})
}
