// Package tensor has the data types of Lockstep's packages: dense tensors over memory that may have another
// owner, sparse [IndexedSlices], and nests of them.
//
// A [Tensor] is a dtype, a shape and a [Memory], in row-major order. It is immutable by convention: the library
// never changes the memory of a tensor, and a caller that does must coordinate with all users of the tensor.
// The package does not compute: sums are in internal/kernel, models in an engine.
package tensor

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"unsafe"
)

// Element lists the Go types of tensor elements. bool, F16 and BF16 are the elements of Bool, Float16 and
// BFloat16.
type Element interface {
	bool | int8 | int16 | int32 | int64 | uint8 | uint16 | uint32 | uint64 | F16 | BF16 | float32 | float64
}

// Tensor is a dense, row-major array. Make one with [New], [From], [Of], [Scalar], [Strings] or [Wrap]. A
// Tensor is immutable by convention; see the package documentation.
type Tensor struct {
	dtype   DType
	shape   []int
	mem     Memory
	strings []string // the elements if dtype is String
}

// New returns a tensor of zeros (empty strings, false). It panics if dtype is invalid, a dimension is negative,
// or the size overflows int.
func New(dtype DType, shape ...int) *Tensor {
	n := count(shape)
	t := &Tensor{dtype: dtype, shape: slices.Clone(shape)}
	switch {
	case !dtype.Valid():
		panic(fmt.Sprintf("tensor: New of dtype %v", dtype))
	case dtype == String:
		t.strings = make([]string, n)
	case n > 0:
		// uint64 elements align the memory to 8 bytes, which every dtype accepts.
		bytes := size(dtype, n)
		words := make([]uint64, (bytes+7)/8)
		t.mem = Memory{Ptr: unsafe.Pointer(unsafe.SliceData(words)), Bytes: bytes}
	}
	return t
}

// From returns a tensor with a copy of data. Without a shape it has one dimension. It panics if the shape does
// not hold len(data) elements.
func From[T Element](data []T, shape ...int) *Tensor {
	return Of(slices.Clone(data), shape...)
}

// Of returns a tensor that shares the memory of data. The caller must not change data afterwards. Without a
// shape it has one dimension. It panics if the shape does not hold len(data) elements.
func Of[T Element](data []T, shape ...int) *Tensor {
	if len(shape) == 0 {
		shape = []int{len(data)}
	}
	if n := count(shape); n != len(data) {
		panic(fmt.Sprintf("tensor: %d elements given for shape %v, which holds %d", len(data), shape, n))
	}
	return &Tensor{dtype: DTypeOf[T](), shape: slices.Clone(shape), mem: HostMemory(data)}
}

// Scalar returns a tensor of rank 0.
func Scalar[T Element](x T) *Tensor {
	return &Tensor{dtype: DTypeOf[T](), shape: []int{}, mem: HostMemory([]T{x})}
}

// Strings returns a tensor of strings. Without a shape it has one dimension.
func Strings(data []string, shape ...int) *Tensor {
	if shape == nil {
		shape = []int{len(data)}
	}
	if n := count(shape); n != len(data) {
		panic(fmt.Sprintf("tensor: %d elements given for shape %v, which holds %d", len(data), shape, n))
	}
	return &Tensor{dtype: String, shape: slices.Clone(shape), strings: slices.Clone(data)}
}

// Wrap returns a tensor over mem, without copying or retaining it. It panics if mem does not hold exactly the
// elements of the shape.
func Wrap(mem Memory, dtype DType, shape ...int) *Tensor {
	if !dtype.Valid() || dtype == String {
		panic(fmt.Sprintf("tensor: Wrap of memory as %v", dtype))
	}
	if n := size(dtype, count(shape)); n != mem.Bytes {
		panic(fmt.Sprintf("tensor: Wrap of %d bytes as %v%v, which takes %d", mem.Bytes, dtype, shape, n))
	}
	return &Tensor{dtype: dtype, shape: slices.Clone(shape), mem: mem}
}

// DTypeOf returns the dtype whose elements have Go type T.
func DTypeOf[T Element]() DType {
	var zero T
	switch any(zero).(type) {
	case bool:
		return Bool
	case int8:
		return Int8
	case int16:
		return Int16
	case int32:
		return Int32
	case int64:
		return Int64
	case uint8:
		return Uint8
	case uint16:
		return Uint16
	case uint32:
		return Uint32
	case uint64:
		return Uint64
	case F16:
		return Float16
	case BF16:
		return BFloat16
	case float32:
		return Float32
	}
	return Float64
}

// DType returns the type of the elements.
func (t *Tensor) DType() DType { return t.dtype }

// Shape returns the dimensions; the caller must not change them. A scalar has none.
func (t *Tensor) Shape() []int { return t.shape }

// Rank returns the number of dimensions.
func (t *Tensor) Rank() int { return len(t.shape) }

// Len returns the number of elements; it is 1 for a scalar.
func (t *Tensor) Len() int { return count(t.shape) }

// Memory returns the elements' memory, without copying. It is empty for strings.
func (t *Tensor) Memory() Memory { return t.mem }

// StringData returns the elements of a String tensor, without copying, and nil for other dtypes.
func (t *Tensor) StringData() []string { return t.strings }

// Data returns the elements as a slice that shares the tensor's memory. It panics if T is not the element type
// or if the memory is on a device. The elements of a String tensor are [Tensor.StringData]: Data[string] does not
// compile, since strings are not in a Memory.
func Data[T Element](t *Tensor) []T {
	if want := DTypeOf[T](); want != t.dtype {
		hint := ""
		if t.dtype == String {
			hint = ": use Tensor.StringData"
		}
		panic(fmt.Sprintf("tensor: Data[%v] of a %v tensor%s", want, t.dtype, hint))
	}
	if t.mem.Kind == Device {
		panic("tensor: Data of device memory")
	}
	return unsafe.Slice((*T)(t.mem.Ptr), t.Len())
}

// Rows returns the rows [lo, hi) of the first dimension, without copying. It panics if t is a scalar or the
// rows are out of range.
func (t *Tensor) Rows(lo, hi int) *Tensor {
	if len(t.shape) == 0 || lo < 0 || hi < lo || hi > t.shape[0] {
		panic(fmt.Sprintf("tensor: Rows(%d, %d) of shape %v", lo, hi, t.shape))
	}
	shape := slices.Clone(t.shape)
	shape[0] = hi - lo
	row := count(t.shape[1:])
	out := &Tensor{dtype: t.dtype, shape: shape}
	if t.dtype == String {
		out.strings = t.strings[lo*row : hi*row]
		return out
	}
	out.mem = t.mem.Slice(lo*row*t.dtype.Bytes(), hi*row*t.dtype.Bytes())
	return out
}

// Reshape returns a tensor of another shape that shares the memory. It panics if the numbers of elements
// differ.
func (t *Tensor) Reshape(shape ...int) *Tensor {
	if count(shape) != t.Len() {
		panic(fmt.Sprintf("tensor: Reshape of %v to %v", t.shape, shape))
	}
	out := *t
	out.shape = slices.Clone(shape)
	return &out
}

// OnDevice returns a tensor that shares the memory and has device index i of its kind. Logical CPU devices
// share the host's memory, so moving between them does not copy.
func (t *Tensor) OnDevice(i int) *Tensor {
	out := *t
	out.mem.Device = i
	return &out
}

// Clone returns a tensor with a copy of the elements in the Go heap, with the same device index. It panics for
// device memory.
func (t *Tensor) Clone() *Tensor {
	out := New(t.dtype, t.shape...)
	out.mem.Device = t.mem.Device
	if t.dtype == String {
		copy(out.strings, t.strings)
	} else if t.mem.Bytes > 0 {
		copy(out.mem.HostBytes(), t.mem.HostBytes())
	}
	return out
}

// SameShape reports whether t and u have the same dimensions.
func (t *Tensor) SameShape(u *Tensor) bool { return slices.Equal(t.shape, u.shape) }

// Equal reports whether t and u have the same dtype, shape and bits (so a NaN equals itself, and 0 is not -0).
func (t *Tensor) Equal(u *Tensor) bool {
	if t.dtype != u.dtype || !t.SameShape(u) {
		return false
	}
	if t.dtype == String {
		return slices.Equal(t.strings, u.strings)
	}
	return bytes.Equal(t.mem.HostBytes(), u.mem.HostBytes())
}

// Float64s returns the elements converted to float64 (bool as 0 and 1). It panics for strings.
func (t *Tensor) Float64s() []float64 {
	out := make([]float64, t.Len())
	for i := range out {
		out[i] = t.float64At(i)
	}
	return out
}

func (t *Tensor) float64At(i int) float64 {
	switch t.dtype {
	case Bool:
		if Data[bool](t)[i] {
			return 1
		}
		return 0
	case Int8:
		return float64(Data[int8](t)[i])
	case Int16:
		return float64(Data[int16](t)[i])
	case Int32:
		return float64(Data[int32](t)[i])
	case Int64:
		return float64(Data[int64](t)[i])
	case Uint8:
		return float64(Data[uint8](t)[i])
	case Uint16:
		return float64(Data[uint16](t)[i])
	case Uint32:
		return float64(Data[uint32](t)[i])
	case Uint64:
		return float64(Data[uint64](t)[i])
	case Float16:
		return float64(Data[F16](t)[i].Float32())
	case BFloat16:
		return float64(Data[BF16](t)[i].Float32())
	case Float32:
		return float64(Data[float32](t)[i])
	case Float64:
		return Data[float64](t)[i]
	}
	panic(fmt.Sprintf("tensor: cannot convert a %v to a number", t.dtype))
}

// count returns the number of elements of a shape. It panics if a dimension is negative, or if the product of
// the dimensions other than 0 overflows int.
func count(shape []int) int {
	n, empty := 1, false
	for _, d := range shape {
		switch {
		case d < 0:
			panic(fmt.Sprintf("tensor: negative dimension in shape %v", shape))
		case d == 0:
			empty = true
		case n > math.MaxInt/d:
			panic(fmt.Sprintf("tensor: shape %v holds more elements than can be addressed", shape))
		default:
			n *= d
		}
	}
	if empty {
		return 0
	}
	return n
}

// size returns the number of bytes of n elements. It panics if it overflows int.
func size(dtype DType, n int) int {
	if b := dtype.Bytes(); b > 0 && n > (math.MaxInt-7)/b {
		panic(fmt.Sprintf("tensor: %d elements of %v are more bytes than can be addressed", n, dtype))
	}
	return n * dtype.Bytes()
}
