//go:build !noasm

package kernel

import "unsafe"

// The functions below run the assembly loops of vector.go on the first elements, and return on how many: none if the
// processor has no such instructions.

func addLargestFast(dst, a, b unsafe.Pointer, n int) (m int, largest uint32) {
	switch {
	case hasAVX512:
		m = n &^ (avx512Bytes/4 - 1)
		largest = addLargestAVX512((*byte)(dst), (*byte)(a), (*byte)(b), 4*m)
	case hasAVX2:
		m = n &^ (avx2Bytes/4 - 1)
		largest = addLargest((*byte)(dst), (*byte)(a), (*byte)(b), 4*m)
	}
	return m, largest
}

func quantizeFast(q, e unsafe.Pointer, n int, inverse, scale float32) (m int) {
	switch {
	case hasAVX512:
		m = n &^ (avx512Bytes - 1)
		quantizeAVX512((*byte)(q), (*byte)(e), m, inverse, scale)
	case hasAVX2:
		m = n &^ (avx2Bytes - 1)
		quantize((*byte)(q), (*byte)(e), m, inverse, scale)
	}
	return m
}

func dequantizeFast(dst, q unsafe.Pointer, n int, scale float32) (m int) {
	switch {
	case hasAVX512:
		m = n &^ (avx512Bytes - 1)
		dequantizeAVX512((*byte)(dst), (*byte)(q), m, scale)
	case hasAVX2:
		m = n &^ (avx2Bytes - 1)
		dequantize((*byte)(dst), (*byte)(q), m, scale)
	}
	return m
}

func addDequantizedFast(dst, q unsafe.Pointer, n int, scale float32) (m int) {
	switch {
	case hasAVX512:
		m = n &^ (avx512Bytes - 1)
		addDequantizedAVX512((*byte)(dst), (*byte)(q), m, scale)
	case hasAVX2:
		m = n &^ (avx2Bytes - 1)
		addDequantized((*byte)(dst), (*byte)(q), m, scale)
	}
	return m
}

func addScaledFast(dst, a, x unsafe.Pointer, n int, by float32) (m int) {
	switch {
	case hasAVX512:
		m = n &^ (avx512Bytes/4 - 1)
		addScaledAVX512((*byte)(dst), (*byte)(a), (*byte)(x), 4*m, by)
	case hasAVX2:
		m = n &^ (avx2Bytes/4 - 1)
		addScaled((*byte)(dst), (*byte)(a), (*byte)(x), 4*m, by)
	}
	return m
}

// dotFast returns the sum over n elements, a multiple of dotLanes, and whether there are instructions for it.
func dotFast(a, b unsafe.Pointer, n int) (sum float32, ok bool) {
	switch {
	case hasAVX512:
		return dotAVX512((*byte)(a), (*byte)(b), 4*n), true
	case hasAVX2:
		return dot((*byte)(a), (*byte)(b), 4*n), true
	}
	return 0, false
}
