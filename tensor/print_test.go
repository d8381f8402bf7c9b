package tensor_test

import (
	"encoding/json"
	"os"
	"strconv"
	"testing"
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
)

// TestFormatNumPy compares Format and Repr with what NumPy printed (testdata/print.py).
func TestFormatNumPy(t *testing.T) {
	text, err := os.ReadFile("testdata/print.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Name  string
		DType string
		Shape []int
		Data  []string
		Step  float64 // if not 0, Data has the first element of an arithmetic sequence
		Want  string
		Repr  string
	}
	if err := json.Unmarshal(text, &cases); err != nil {
		t.Fatal(err)
	}
	if len(cases) < 300 {
		t.Fatalf("only %d cases", len(cases))
	}
	for _, c := range cases {
		t.Run(c.Name, func(t *testing.T) {
			if c.Step != 0 {
				start, err := strconv.ParseFloat(c.Data[0], 64)
				if err != nil {
					t.Fatal(err)
				}
				n := tensor.New(tensor.Bool, c.Shape...).Len()
				for i := 1; i < n; i++ {
					c.Data = append(c.Data, strconv.FormatFloat(start+float64(i)*c.Step, 'f', -1, 64))
				}
			}
			x := parse(t, c.DType, c.Shape, c.Data)
			if got := x.Format(); got != c.Want {
				t.Errorf("got:\n%s\nwant:\n%s", got, c.Want)
			}
			if got := x.Repr(); got != c.Repr && len(c.Shape) > 0 {
				t.Errorf("repr, got:\n%s\nwant:\n%s", got, c.Repr)
			}
		})
	}
}

// parse makes a tensor of a dtype's name and its elements as texts.
func parse(t *testing.T, dtype string, shape []int, data []string) *tensor.Tensor {
	t.Helper()
	d, err := tensor.ParseDType(dtype)
	if err != nil {
		t.Fatal(err)
	}
	out := tensor.New(d, shape...)
	for i, s := range data {
		if d == tensor.String {
			out.StringData()[i] = latin1(s)
			continue
		}
		x, errFloat := strconv.ParseFloat(s, 64)
		n, errInt := strconv.ParseInt(s, 10, 64)
		u, errUint := strconv.ParseUint(s, 10, 64)
		if errFloat != nil || !d.IsFloat() && errInt != nil && errUint != nil {
			t.Fatalf("bad element %q", s)
		}
		if errUint != nil {
			u = uint64(n)
		}
		switch d {
		case tensor.Bool:
			tensor.Data[bool](out)[i] = u != 0
		case tensor.Int8:
			tensor.Data[int8](out)[i] = int8(n)
		case tensor.Int16:
			tensor.Data[int16](out)[i] = int16(n)
		case tensor.Int32:
			tensor.Data[int32](out)[i] = int32(n)
		case tensor.Int64:
			tensor.Data[int64](out)[i] = n
		case tensor.Uint8:
			tensor.Data[uint8](out)[i] = uint8(u)
		case tensor.Uint16:
			tensor.Data[uint16](out)[i] = uint16(u)
		case tensor.Uint32:
			tensor.Data[uint32](out)[i] = uint32(u)
		case tensor.Uint64:
			tensor.Data[uint64](out)[i] = u
		case tensor.Float16:
			tensor.Data[tensor.F16](out)[i] = tensor.F16From(float32(x))
		case tensor.BFloat16:
			tensor.Data[tensor.BF16](out)[i] = tensor.BF16From(float32(x))
		case tensor.Float32:
			tensor.Data[float32](out)[i] = float32(x)
		case tensor.Float64:
			tensor.Data[float64](out)[i] = x
		}
	}
	return out
}

// latin1 turns every rune into one byte.
func latin1(s string) string {
	var b []byte
	for _, r := range s {
		b = append(b, byte(r))
	}
	return string(b)
}

func TestString(t *testing.T) {
	device := tensor.HostMemory([]float32{1, 2})
	device.Kind = tensor.Device
	device.Ptr = unsafe.Pointer(nil)
	tests := []struct {
		name string
		got  string
		want string
	}{
		{"scalar", tensor.Scalar(float32(5)).String(), "tf.Tensor(5.0, shape=(), dtype=float32)"},
		{"vector", tensor.From([]float32{1, 4}).String(), "tf.Tensor([1. 4.], shape=(2,), dtype=float32)"},
		{
			"matrix", tensor.From([]int32{1, 2, 3, 40}, 2, 2).String(),
			"tf.Tensor(\n[[ 1  2]\n [ 3 40]], shape=(2, 2), dtype=int32)",
		},
		{"empty", tensor.New(tensor.Float32, 0, 3).String(), "tf.Tensor([], shape=(0, 3), dtype=float32)"},
		{"bool", tensor.Scalar(true).String(), "tf.Tensor(True, shape=(), dtype=bool)"},
		{"string", tensor.Strings([]string{"a"}, []int{}...).String(), "tf.Tensor(b'a', shape=(), dtype=string)"},
		{"device", tensor.Wrap(device, tensor.Float32, 2).String(), "tf.Tensor([? ?], shape=(2,), dtype=float32)"},
		{
			"slices", (&tensor.IndexedSlices{
				Values:  tensor.From([]float32{1}, 1, 1),
				Indices: tensor.From([]int32{3}),
			}).String(),
			"IndexedSlices(indices=tf.Tensor([3], shape=(1,), dtype=int32), values=tf.Tensor([[1.]], shape=(1, 1), " +
				"dtype=float32), dense_shape=None)",
		},
	}
	for _, c := range tests {
		t.Run(c.name, func(t *testing.T) {
			if c.got != c.want {
				t.Errorf("got:\n%s\nwant:\n%s", c.got, c.want)
			}
		})
	}
}
