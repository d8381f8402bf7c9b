package tensor_test

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/lockstep-ml/lockstep/tensor"
)

func TestDTypes(t *testing.T) {
	bytes := map[string]int{
		"bool": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
		"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "string": 0,
	}
	if len(bytes) != len(tensor.DTypes) {
		t.Fatalf("%d dtypes, want %d", len(tensor.DTypes), len(bytes))
	}
	for _, d := range tensor.DTypes {
		t.Run(d.String(), func(t *testing.T) {
			if want, ok := bytes[d.String()]; !ok || d.Bytes() != want {
				t.Errorf("Bytes: got %d, want %d", d.Bytes(), want)
			}
			for _, name := range []string{d.String(), strings.ToUpper(d.String())} {
				if got, err := tensor.ParseDType(name); got != d || err != nil {
					t.Errorf("ParseDType(%q): %v, %v", name, got, err)
				}
			}
			name := d.String()
			isFloat := strings.Contains(name, "float")
			isInteger := strings.Contains(name, "int")
			if !d.Valid() || d.IsFloat() != isFloat || d.IsInteger() != isInteger || d.IsNumeric() != (isFloat || isInteger) {
				t.Errorf("Valid %t, IsFloat %t, IsInteger %t, IsNumeric %t", d.Valid(), d.IsFloat(), d.IsInteger(), d.IsNumeric())
			}
		})
	}
	for _, d := range []tensor.DType{tensor.Invalid, 200} {
		if d.Valid() || d.Bytes() != 0 || d.IsNumeric() {
			t.Errorf("%v is taken for a dtype", d)
		}
	}
	if got := tensor.DType(200).String(); got != "DType(200)" {
		t.Errorf("got %q", got)
	}
	for _, name := range []string{"", "invalid", "float", "double"} {
		if d, err := tensor.ParseDType(name); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("%q", name)) ||
			!strings.Contains(err.Error(), "float32") {
			t.Errorf("ParseDType(%q): %v, %v", name, d, err)
		}
	}
}

func testElement[T tensor.Element](want tensor.DType, x T) func(*testing.T) {
	return func(t *testing.T) {
		if got := tensor.DTypeOf[T](); got != want {
			t.Errorf("DTypeOf: got %v, want %v", got, want)
		}
		data := []T{x, x, x}
		for name, got := range map[string]*tensor.Tensor{
			"From":   tensor.From(data),
			"Of":     tensor.Of(data),
			"Scalar": tensor.Scalar(x).Reshape(1),
			"Wrap":   tensor.Wrap(tensor.HostMemory(data), want, 3),
		} {
			if got.DType() != want || got.Memory().Bytes != got.Len()*want.Bytes() {
				t.Errorf("%s: %v of %d bytes", name, got, got.Memory().Bytes)
			}
			for _, y := range tensor.Data[T](got) {
				if y != x {
					t.Errorf("%s: got %v, want %v", name, y, x)
				}
			}
		}
		if got := tensor.New(want, 2, 2); got.Equal(tensor.From([]T{x, x, x, x}, 2, 2)) || len(tensor.Data[T](got)) != 4 {
			t.Errorf("New: %v", got)
		}
	}
}

func TestElements(t *testing.T) {
	t.Run("bool", testElement(tensor.Bool, true))
	t.Run("int8", testElement(tensor.Int8, int8(-3)))
	t.Run("int16", testElement(tensor.Int16, int16(-3)))
	t.Run("int32", testElement(tensor.Int32, int32(-3)))
	t.Run("int64", testElement(tensor.Int64, int64(-3)))
	t.Run("uint8", testElement(tensor.Uint8, uint8(3)))
	t.Run("uint16", testElement(tensor.Uint16, uint16(3)))
	t.Run("uint32", testElement(tensor.Uint32, uint32(3)))
	t.Run("uint64", testElement(tensor.Uint64, uint64(3)))
	t.Run("float16", testElement(tensor.Float16, tensor.F16From(1.5)))
	t.Run("bfloat16", testElement(tensor.BFloat16, tensor.BF16From(1.5)))
	t.Run("float32", testElement(tensor.Float32, float32(1.5)))
	t.Run("float64", testElement(tensor.Float64, 1.5))
}

func TestOwnership(t *testing.T) {
	data := []float32{1, 2, 3, 4}
	shape := []int{2, 2}
	from, of := tensor.From(data, shape...), tensor.Of(data, shape...)
	clone, rows, flat := of.Clone(), of.Rows(1, 2), of.Reshape(4)
	moved := of.OnDevice(3)
	data[2], shape[0] = 30, 7
	for _, c := range []struct {
		name string
		t    *tensor.Tensor
		want string
	}{
		{"From copies", from, "[[1. 2.]\n [3. 4.]]"},
		{"Of shares", of, "[[ 1.  2.]\n [30.  4.]]"},
		{"Clone copies", clone, "[[1. 2.]\n [3. 4.]]"},
		{"Rows shares", rows, "[[30.  4.]]"},
		{"Reshape shares", flat, "[ 1.  2. 30.  4.]"},
		{"OnDevice shares", moved, "[[ 1.  2.]\n [30.  4.]]"},
	} {
		if got := c.t.Format(); got != c.want {
			t.Errorf("%s: got %s, want %s", c.name, got, c.want)
		}
	}
	if moved.Memory().Device != 3 || of.Memory().Device != 0 || moved.Clone().Memory().Device != 3 || !moved.Equal(of) {
		t.Error("OnDevice changes the device index of a new tensor only, which Clone keeps and Equal ignores")
	}
	words := []string{"a", "b"}
	s := tensor.Strings(words)
	clone = s.Clone()
	words[0] = "x"
	s.StringData()[1] = "y"
	if got := s.Format() + clone.Format() + s.Rows(1, 2).Format(); got != "[b'a' b'y'][b'a' b'b'][b'y']" {
		t.Errorf("strings: got %s", got)
	}
	if of.StringData() != nil || s.Memory().Bytes != 0 {
		t.Error("a tensor has either memory or strings")
	}
}

// TestRows compares Rows, Reshape and Clone with indexing by hand.
func TestRows(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		shape := rapid.SliceOfN(rapid.IntRange(0, 5), 1, 4).Draw(t, "shape")
		n, row := 1, 1
		for i, d := range shape {
			n *= d
			if i > 0 {
				row *= d
			}
		}
		data := make([]int16, n)
		words := make([]string, n)
		for i := range data {
			data[i] = int16(i)
			words[i] = fmt.Sprint(i)
		}
		lo := rapid.IntRange(0, shape[0]).Draw(t, "lo")
		hi := rapid.IntRange(lo, shape[0]).Draw(t, "hi")
		x := tensor.New(tensor.Int16, shape...)
		copy(tensor.Data[int16](x), data)
		got := x.Rows(lo, hi)
		want := append([]int{hi - lo}, shape[1:]...)
		if !slices.Equal(got.Shape(), want) || !slices.Equal(tensor.Data[int16](got), data[lo*row:hi*row]) {
			t.Fatalf("got %v", got)
		}
		if s := tensor.Strings(words, shape...).Rows(lo, hi); !slices.Equal(s.Shape(), want) ||
			!slices.Equal(s.StringData(), words[lo*row:hi*row]) {
			t.Fatalf("got %v", s)
		}
		if c := got.Clone(); !c.Equal(got) || !c.Reshape(got.Len()).Reshape(want...).Equal(got) {
			t.Fatalf("got %v, want %v", c, got)
		}
	})
}

func TestEqual(t *testing.T) {
	nan, zero := float32(math.NaN()), float32(0)
	tests := []struct {
		name string
		a, b *tensor.Tensor
		want bool
	}{
		{"same", tensor.From([]float32{1, 2}), tensor.From([]float32{1, 2}), true},
		{"value", tensor.From([]float32{1, 2}), tensor.From([]float32{1, 3}), false},
		{"shape", tensor.From([]float32{1, 2}), tensor.From([]float32{1, 2}, 1, 2), false},
		{"dtype", tensor.From([]int32{1, 2}), tensor.From([]uint32{1, 2}), false},
		{"NaN", tensor.Scalar(nan), tensor.Scalar(nan), true},
		{"zeros", tensor.Scalar(zero), tensor.Scalar(-1 / float32(math.Inf(1))), false},
		{"strings", tensor.Strings([]string{"a"}), tensor.Strings([]string{"a"}), true},
		{"other strings", tensor.Strings([]string{"a"}), tensor.Strings([]string{"b"}), false},
		{"empty", tensor.New(tensor.Int8, 0, 2), tensor.From([]int8{}, 0, 2), true},
	}
	for _, c := range tests {
		t.Run(c.name, func(t *testing.T) {
			if got := c.a.Equal(c.b); got != c.want {
				t.Errorf("%v and %v: got %t, want %t", c.a, c.b, got, c.want)
			}
			if c.b.Equal(c.a) != c.want {
				t.Error("Equal is not symmetric")
			}
		})
	}
}

func TestScalarShapes(t *testing.T) {
	for name, x := range map[string]*tensor.Tensor{
		"Scalar":  tensor.Scalar(int32(0)),
		"New":     tensor.New(tensor.Int32),
		"Reshape": tensor.New(tensor.Int32, 1, 1).Reshape(),
		"Wrap":    tensor.Wrap(tensor.HostMemory([]int32{0}), tensor.Int32),
	} {
		if x.Rank() != 0 || x.Len() != 1 || tensor.FormatShape(x.Shape()) != "()" || x.Format() != "0" {
			t.Errorf("%s: %v", name, x)
		}
	}
}

func TestFloat64s(t *testing.T) {
	for _, x := range []*tensor.Tensor{
		tensor.From([]bool{false, true}), tensor.From([]int8{0, 1}), tensor.From([]int16{0, 1}), tensor.From([]int32{0, 1}),
		tensor.From([]int64{0, 1}), tensor.From([]uint8{0, 1}), tensor.From([]uint16{0, 1}), tensor.From([]uint32{0, 1}),
		tensor.From([]uint64{0, 1}), tensor.From([]tensor.F16{0, 0x3c00}), tensor.From([]tensor.BF16{0, 0x3f80}),
		tensor.From([]float32{0, 1}), tensor.From([]float64{0, 1}),
	} {
		if got := x.Float64s(); !slices.Equal(got, []float64{0, 1}) {
			t.Errorf("%v: got %v", x, got)
		}
	}
}

func TestMemory(t *testing.T) {
	m := tensor.HostMemory([]uint16{0x0201, 0x0403})
	if got := m.Slice(1, 3).HostBytes(); m.Bytes != 4 || len(got) != 2 || &got[0] != &m.HostBytes()[1] {
		t.Errorf("got %v", got)
	}
	if empty := tensor.HostMemory([]int64{}); empty.Ptr != nil || len(empty.Slice(0, 0).HostBytes()) != 0 {
		t.Errorf("got %+v", empty)
	}
	for kind, want := range map[tensor.MemoryKind]string{
		tensor.Host: "host", tensor.Shared: "shared",
		tensor.Device: "device", 9: "MemoryKind(9)",
	} {
		if kind.String() != want {
			t.Errorf("got %q, want %q", kind, want)
		}
	}
}

func TestPanics(t *testing.T) {
	x := tensor.From([]float32{1, 2, 3, 4}, 2, 2)
	device := tensor.Memory{Bytes: 8, Kind: tensor.Device}
	tests := []struct {
		name string
		f    func()
		want string
	}{
		{"New invalid", func() { tensor.New(tensor.Invalid, 1) }, "tensor: New of dtype invalid"},
		{"New negative", func() { tensor.New(tensor.Int8, 2, -1) }, "tensor: negative dimension in shape [2 -1]"},
		{
			"New too large", func() { tensor.New(tensor.Int8, math.MaxInt/2, 3) },
			fmt.Sprintf("tensor: shape [%d 3] holds more elements than can be addressed", math.MaxInt/2),
		},
		{
			"New too many bytes", func() { tensor.New(tensor.Int64, math.MaxInt/4) },
			fmt.Sprintf("tensor: %d elements of int64 are more bytes than can be addressed", math.MaxInt/4),
		},
		{"From count", func() { tensor.From([]int8{1}, 2) }, "tensor: 1 elements given for shape [2], which holds 2"},
		{
			"Strings count", func() { tensor.Strings([]string{"a"}, 2, 2) },
			"tensor: 1 elements given for shape [2 2], which holds 4",
		},
		{
			"Wrap bytes", func() { tensor.Wrap(x.Memory(), tensor.Float32, 3) },
			"tensor: Wrap of 16 bytes as float32[3], which takes 12",
		},
		{"Wrap string", func() { tensor.Wrap(tensor.Memory{}, tensor.String, 3) }, "tensor: Wrap of memory as string"},
		{"Data type", func() { tensor.Data[int32](x) }, "tensor: Data[int32] of a float32 tensor"},
		{
			"Data device", func() { tensor.Data[float32](tensor.Wrap(device, tensor.Float32, 2)) },
			"tensor: Data of device memory",
		},
		{"Rows outside", func() { x.Rows(1, 3) }, "tensor: Rows(1, 3) of shape [2 2]"},
		{"Rows backwards", func() { x.Rows(2, 1) }, "tensor: Rows(2, 1) of shape [2 2]"},
		{"Rows scalar", func() { tensor.Scalar(true).Rows(0, 1) }, "tensor: Rows(0, 1) of shape []"},
		{"Reshape", func() { x.Reshape(3) }, "tensor: Reshape of [2 2] to [3]"},
		{"Slice", func() { x.Memory().Slice(0, 17) }, "tensor: Slice(0, 17) of a memory of 16 bytes"},
		{"HostBytes", func() { device.HostBytes() }, "tensor: HostBytes of device memory"},
		{"Clone device", func() { tensor.Wrap(device, tensor.Float32, 2).Clone() }, "tensor: HostBytes of device memory"},
		{"Float64s", func() { tensor.Strings([]string{"a"}).Float64s() }, "tensor: cannot convert a string to a number"},
	}
	for _, c := range tests {
		t.Run(c.name, func(t *testing.T) {
			defer func() {
				if got := recover(); got != c.want {
					t.Errorf("got %v, want %q", got, c.want)
				}
			}()
			c.f()
		})
	}
}

// TestDataOfStrings checks that the panic for a tensor of strings names what to call.
func TestDataOfStrings(t *testing.T) {
	defer func() {
		if got := fmt.Sprint(recover()); !strings.Contains(got, "use Tensor.StringData") {
			t.Errorf("panic: %s", got)
		}
	}()
	tensor.Data[float32](tensor.Strings([]string{"a"}, 1))
}
