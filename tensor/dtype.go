package tensor

import (
	"fmt"
	"strings"
)

// DType is the type of a [Tensor]'s elements. The zero value is [Invalid].
type DType uint8

// The element types. String tensors are on the host only and cannot be reduced.
const (
	Invalid DType = iota
	Bool
	Int8
	Int16
	Int32
	Int64
	Uint8
	Uint16
	Uint32
	Uint64
	Float16
	BFloat16
	Float32
	Float64
	String
	dtypeCount
)

// DTypes lists every valid DType, in the order of their constants.
var DTypes = [...]DType{
	Bool, Int8, Int16, Int32, Int64, Uint8, Uint16, Uint32, Uint64, Float16, BFloat16, Float32, Float64, String,
}

var dtypeTable = [dtypeCount]struct {
	name  string
	bytes int
}{
	Invalid:  {"invalid", 0},
	Bool:     {"bool", 1},
	Int8:     {"int8", 1},
	Int16:    {"int16", 2},
	Int32:    {"int32", 4},
	Int64:    {"int64", 8},
	Uint8:    {"uint8", 1},
	Uint16:   {"uint16", 2},
	Uint32:   {"uint32", 4},
	Uint64:   {"uint64", 8},
	Float16:  {"float16", 2},
	BFloat16: {"bfloat16", 2},
	Float32:  {"float32", 4},
	Float64:  {"float64", 8},
	String:   {"string", 0},
}

// String returns TensorFlow's and NumPy's name of the type, such as "float32".
func (d DType) String() string {
	if d >= dtypeCount {
		return fmt.Sprintf("DType(%d)", uint8(d))
	}
	return dtypeTable[d].name
}

// Bytes returns the size of one element in bytes: 0 for String and Invalid.
func (d DType) Bytes() int {
	if d >= dtypeCount {
		return 0
	}
	return dtypeTable[d].bytes
}

// Valid reports whether d is one of [DTypes].
func (d DType) Valid() bool { return d > Invalid && d < dtypeCount }

// IsFloat reports whether d is a floating-point type.
func (d DType) IsFloat() bool { return d >= Float16 && d <= Float64 }

// IsInteger reports whether d is a signed or unsigned integer type. Bool is not.
func (d DType) IsInteger() bool { return d >= Int8 && d <= Uint64 }

// IsNumeric reports whether d can be added and multiplied.
func (d DType) IsNumeric() bool { return d >= Int8 && d <= Float64 }

// ParseDType returns the DType with that name ("float32", "bfloat16", …). Case does not matter.
func ParseDType(name string) (DType, error) {
	for _, d := range DTypes {
		if strings.EqualFold(name, d.String()) {
			return d, nil
		}
	}
	return Invalid, fmt.Errorf("tensor: %q is not a dtype: want one of %v", name, DTypes)
}
