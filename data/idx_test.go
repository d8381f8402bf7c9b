package data_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"path/filepath"
	"testing"

	"pgregory.net/rapid"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/tensor"
)

// idx builds a file by hand.
func idx(code byte, shape []uint32, elements ...byte) []byte {
	b := []byte{0, 0, code, byte(len(shape))}
	for _, d := range shape {
		b = binary.BigEndian.AppendUint32(b, d)
	}
	return append(b, elements...)
}

func TestIDX(t *testing.T) {
	tests := []struct {
		name string
		file []byte
		want *tensor.Tensor
	}{
		{"uint8", idx(0x08, []uint32{2, 2}, 0, 1, 2, 255), tensor.From([]uint8{0, 1, 2, 255}, 2, 2)},
		{"int8", idx(0x09, []uint32{2}, 1, 0xff), tensor.From([]int8{1, -1})},
		{"int16", idx(0x0b, []uint32{2}, 1, 2, 0xff, 0xfe), tensor.From([]int16{0x0102, -2})},
		{"int32", idx(0x0c, []uint32{1, 1}, 1, 2, 3, 4), tensor.From([]int32{0x01020304}, 1, 1)},
		{"float32", idx(0x0d, []uint32{1}, 0x3f, 0x80, 0, 0), tensor.From([]float32{1})},
		{"float64", idx(0x0e, []uint32{1}, 0x3f, 0xf0, 0, 0, 0, 0, 0, 0), tensor.From([]float64{1})},
		{"empty", idx(0x08, []uint32{0, 28, 28}), tensor.New(tensor.Uint8, 0, 28, 28)},
	}
	for _, c := range tests {
		t.Run(c.name, func(t *testing.T) {
			for _, file := range [][]byte{c.file, zipped(c.file)} {
				if got, err := data.ReadIDX(bytes.NewReader(file)); err != nil || !got.Equal(c.want) {
					t.Errorf("got %v, %v, want %v", got, err, c.want)
				}
			}
			var b bytes.Buffer
			if err := data.WriteIDX(&b, c.want); err != nil || !bytes.Equal(b.Bytes(), c.file) {
				t.Errorf("written % x, %v, want % x", b.Bytes(), err, c.file)
			}
			checkTruncated(t, c.file, func(name string) error {
				_, err := data.LoadIDX(name)
				return err
			}, nil)
		})
	}
}

func TestIDXErrors(t *testing.T) {
	good := idx(0x08, []uint32{2, 2}, 0, 1, 2, 255)
	damaged := zipped(good)
	damaged[len(damaged)-5]++ // in the checksum
	tests := []struct {
		name   string
		file   []byte
		offset int64
		want   []string
	}{
		{"empty", nil, 0, []string{"IDX: offset 0: a magic number expected, 4 bytes; the file ends after 0"}},
		{"not IDX", []byte("hello"), 0, []string{"offset 0: magic number 0x68656c6c is not IDX's: want 0x0000TTNN"}},
		{"type", idx(0x0a, []uint32{1}, 0), 0, []string{"magic number 0x00000a01"}},
		{"no dimensions", idx(0x08, nil, 1), 3, []string{"offset 3: no dimensions: want at least 1"}},
		{"dimensions truncated", good[:7], 4, []string{"dimension 1 of 2 expected, 4 bytes; the file ends after 3"}},
		{
			"elements truncated", good[:14], 12,
			[]string{"elements of a uint8 tensor of shape [2 2] expected, 4 bytes; the file " +
				"ends after 2 of them"},
		},
		{
			"too long", append(bytes.Clone(good), 0), 16,
			[]string{"offset 16: end of file expected after the elements of shape [2 2], more bytes found"},
		},
		{
			"too long, gzip", zipped(append(bytes.Clone(good), 0)), 16,
			[]string{"offset 16 of the uncompressed contents: end of file expected"},
		},
		{
			"overflow", idx(0x0e, []uint32{math.MaxUint32, math.MaxUint32}), 4,
			[]string{"shape [4294967295 4294967295] of float64 is more bytes than can be addressed"},
		},
		{
			"overflow, empty", idx(0x0e, []uint32{0, math.MaxUint32, math.MaxUint32}), 4,
			[]string{"more bytes than can be addressed"},
		},
		{"gzip checksum", damaged, 16, []string{"the contents do not match their checksum: the file is corrupt"}},
		{"gzip truncated", zipped(good)[:25], 16, []string{"the gzip stream ends too early: the file is truncated"}},
		{"gzip header", []byte{0x1f, 0x8b, 0xff, 0, 0, 0, 0, 0, 0, 0}, 0, []string{"gzip: invalid header"}},
	}
	for _, c := range tests {
		t.Run(c.name, func(t *testing.T) {
			if c.name == "gzip truncated" {
				whole := zipped(good)
				c.file = whole[:len(whole)-3]
			}
			name := writeFile(t, "images.idx", c.file)
			_, err := data.LoadIDX(name)
			checkFormatError(t, err, c.offset, append(c.want, "data: "+name+": IDX: offset ")...)
		})
	}
	t.Run("missing", func(t *testing.T) {
		name := filepath.Join(t.TempDir(), "nowhere")
		if _, err := data.LoadIDX(name); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("got %v", err)
		}
	})
}

// TestHeadersClaimMemory checks that a short file costs little memory, whatever it claims.
func TestHeadersClaimMemory(t *testing.T) {
	npy := []byte("\x93NUMPY\x01\x00\x46\x00{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776,), }   ")
	record := binary.LittleEndian.AppendUint64(nil, math.MaxInt32)
	record = binary.LittleEndian.AppendUint32(record, maskedCRC(record))
	for name, read := range map[string]func() error{
		"IDX": func() error {
			_, err := data.ReadIDX(bytes.NewReader(idx(0x08, []uint32{1 << 31, 1 << 30}, 1, 2, 3)))
			return err
		},
		"IDX gzip": func() error {
			_, err := data.ReadIDX(bytes.NewReader(zipped(idx(0x0d, []uint32{1 << 31, 1 << 28}, 1, 2, 3))))
			return err
		},
		"NPY": func() error {
			_, err := data.ReadNPY(bytes.NewReader(npy))
			return err
		},
		"TFRecord": func() error {
			_, err := firstError(t.Context(), data.TFRecords(writeFile(t, "r", record)))
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			var err error
			if bytes := allocated(func() { err = read() }); bytes > 4<<20 {
				t.Errorf("%d bytes were allocated", bytes)
			}
			var format *data.FormatError
			if !errors.As(err, &format) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestIDXRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		dtype := rapid.SampledFrom([]tensor.DType{
			tensor.Uint8, tensor.Int8, tensor.Int16, tensor.Int32, tensor.Float32,
			tensor.Float64,
		}).Draw(t, "dtype")
		x := tensor.New(dtype, rapid.SliceOfN(rapid.IntRange(0, 5), 1, 4).Draw(t, "shape")...)
		if x.Len() > 0 {
			copy(x.Memory().HostBytes(), rapid.SliceOfN(rapid.Byte(), x.Memory().Bytes, -1).Draw(t, "bytes"))
		}
		var b bytes.Buffer
		if err := data.WriteIDX(&b, x); err != nil {
			t.Fatal(err)
		}
		if got, err := data.ReadIDX(&b); err != nil || !got.Equal(x) {
			t.Fatalf("got %v, %v, want %v", got, err, x)
		}
	})
}

func TestWriteIDXPanics(t *testing.T) {
	for want, x := range map[string]*tensor.Tensor{
		"data: WriteIDX of bool(1,)":   tensor.New(tensor.Bool, 1),
		"data: WriteIDX of uint8()":    tensor.New(tensor.Uint8),
		"data: WriteIDX of string(1,)": tensor.New(tensor.String, 1),
	} {
		func() {
			defer func() {
				if got := fmt.Sprint(recover()); got != want {
					t.Errorf("got %q, want %q", got, want)
				}
			}()
			_ = data.WriteIDX(&bytes.Buffer{}, x)
		}()
	}
}

func FuzzIDX(f *testing.F) {
	f.Add(idx(0x08, []uint32{2, 2}, 0, 1, 2, 255))
	f.Add(idx(0x0e, []uint32{1}, 0x3f, 0xf0, 0, 0, 0, 0, 0, 0))
	f.Add(idx(0x0d, []uint32{1 << 31, 1 << 28}, 1, 2, 3))
	f.Add(zipped(idx(0x09, []uint32{2}, 1, 0xff)))
	f.Add([]byte("\x1f\x8b"))
	f.Fuzz(func(t *testing.T, file []byte) {
		x, err := data.ReadIDX(bytes.NewReader(file))
		if !decoded(t, err) || bytes.HasPrefix(file, []byte{0x1f, 0x8b}) {
			return
		}
		var b bytes.Buffer
		if err := data.WriteIDX(&b, x); err != nil || !bytes.Equal(b.Bytes(), file) {
			t.Errorf("% x became %v, and that % x", file, x, b.Bytes())
		}
	})
}

// decoded reports whether a decoder succeeded; if not, the error must be a *data.FormatError.
func decoded(t *testing.T, err error) bool {
	t.Helper()
	var format *data.FormatError
	if err != nil && !errors.As(err, &format) {
		t.Fatalf("got %T: %v", err, err)
	}
	return err == nil
}
