package tensor

import (
	"encoding/binary"
	"math"
)

// FirstNotFinite returns the index of the first element that is an infinity or NaN, in row-major order, or -1
// if all elements are finite. Elements of types without infinities and NaNs, such as integers, are finite. The
// tensor must be in host memory.
func FirstNotFinite(t *Tensor) int {
	if FiniteBetween(t, 0, t.Len()) {
		return -1
	}
	for i := range t.Len() {
		if x := t.float64At(i); math.IsNaN(x) || math.IsInf(x, 0) {
			return i
		}
	}
	return -1
}

// FiniteBetween reports whether the elements [lo, hi) are finite, in row-major order. Callers use it in place
// of [FirstNotFinite] to check one tensor from several goroutines. It does not allocate.
func FiniteBetween(t *Tensor, lo, hi int) bool {
	switch t.DType() {
	case Float16:
		return finite(t, lo, hi, 0x7c007c007c007c00, 0x0400040004000400)
	case BFloat16:
		return finite(t, lo, hi, 0x7f807f807f807f80, 0x0080008000800080)
	case Float32:
		return finite(t, lo, hi, 0x7f8000007f800000, 0x0080000000800000)
	case Float64:
		return finite(t, lo, hi, 0x7ff0000000000000, 0x0010000000000000)
	}
	return true
}

// finite tests 8 bytes at once. exponents is the mask of the elements' exponents. ones has a 1 in the lowest
// bit of each exponent. Only infinities and NaNs have an exponent of all ones. Adding ones to it carries into
// the sign bit, and never further.
func finite(t *Tensor, lo, hi int, exponents, ones uint64) bool {
	size := t.DType().Bytes()
	b := t.Memory().HostBytes()[lo*size : hi*size]
	var carries uint64
	for ; len(b) >= 32; b = b[32:] {
		carries |= carriesOf(b, exponents, ones)
	}
	var rest [32]byte
	copy(rest[:], b)
	carries |= carriesOf(rest[:], exponents, ones)
	return carries&(exponents+ones) == 0
}

func carriesOf(b []byte, exponents, ones uint64) uint64 {
	_ = b[31]
	return (binary.NativeEndian.Uint64(b)&exponents + ones) | (binary.NativeEndian.Uint64(b[8:])&exponents + ones) |
		(binary.NativeEndian.Uint64(b[16:])&exponents + ones) | (binary.NativeEndian.Uint64(b[24:])&exponents + ones)
}
