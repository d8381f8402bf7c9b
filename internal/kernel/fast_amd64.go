//go:build !noasm

package kernel

import (
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
	"golang.org/x/sys/cpu"
)

// The instructions that the loops need. An operating system that does not keep the registers counts as a processor
// without them.
var (
	hasAVX2   = cpu.X86.HasAVX2
	hasF16C   = cpu.X86.HasAVX2 && cpu.X86.HasF16C
	hasAVX512 = hasF16C && cpu.X86.HasAVX512F && cpu.X86.HasAVX512BW && cpu.X86.HasAVX512DQ && cpu.X86.HasAVX512VL
)

// Level names the vector instructions that the loops use on this processor.
func Level() string {
	switch {
	case hasAVX512:
		return "AVX-512"
	case hasF16C:
		return "AVX2"
	case hasAVX2:
		return "AVX2 without F16C"
	}
	return "none"
}

// What the assembly loops handle at least; the loops below them in the table do the rest of a vector.
const (
	avx2Bytes   = 32
	avx512Bytes = 64
)

// fastest returns the table with the assembly loops where there are any that this processor can run. They equal the
// loops that they replace bit for bit.
func fastest(t loopTable) loopTable {
	if hasAVX2 {
		t = replaced(t, avx2Loops, avx2Bytes, hasF16C)
	}
	if hasAVX512 {
		t = replaced(t, avx512Loops, avx512Bytes, true)
	}
	return t
}

// scaleFast scales the first elements of float32 or float64, by size, and returns how many.
func scaleFast(op scaling, size int, dst, src, by unsafe.Pointer, n int) int {
	m := n * size &^ (avx2Bytes - 1)
	switch {
	case hasAVX512:
		m &^= avx512Bytes - 1
		scaleAVX512(op, size, (*byte)(dst), (*byte)(src), (*byte)(by), m)
	case hasAVX2:
		scaleAVX2(op, size, (*byte)(dst), (*byte)(src), (*byte)(by), m)
	default:
		return 0
	}
	return m / size
}

// widenFast converts the first elements of a half-width type to float32 and returns how many.
func widenFast(t tensor.DType, dst, src unsafe.Pointer, n int) int {
	d, s, m := (*byte)(dst), (*byte)(src), n*2&^(avx2Bytes-1)
	switch {
	case hasAVX512 && t == tensor.BFloat16:
		m &^= avx512Bytes - 1
		widenBF16AVX512(d, s, m)
	case hasAVX512 && t == tensor.Float16:
		m &^= avx512Bytes - 1
		widenF16AVX512(d, s, m)
	case hasAVX2 && t == tensor.BFloat16:
		widenBF16(d, s, m)
	case hasF16C && t == tensor.Float16:
		widenF16(d, s, m)
	default:
		return 0
	}
	return m / 2
}

// narrowFast converts the first elements of float32 to a half-width type and returns how many.
func narrowFast(t tensor.DType, dst, src unsafe.Pointer, n int) int {
	d, s, m := (*byte)(dst), (*byte)(src), n*2&^(avx2Bytes-1)
	switch {
	case hasAVX512 && t == tensor.BFloat16:
		m &^= avx512Bytes - 1
		narrowBF16AVX512(d, s, m)
	case hasAVX512 && t == tensor.Float16:
		m &^= avx512Bytes - 1
		narrowF16AVX512(d, s, m)
	case hasAVX2 && t == tensor.BFloat16:
		narrowBF16(d, s, m)
	case hasF16C && t == tensor.Float16:
		narrowF16(d, s, m)
	default:
		return 0
	}
	return m / 2
}

// squaresFast adds the squares of the first float32 numbers to the sums and returns how many numbers those are.
func squaresFast(sums *[squareSums]float64, src unsafe.Pointer, n int) int {
	m := n &^ (squareSums - 1)
	switch {
	case hasAVX512:
		squaresF32AVX512(&sums[0], (*byte)(src), 4*m)
	case hasAVX2:
		squaresF32(&sums[0], (*byte)(src), 4*m)
	default:
		return 0
	}
	return m
}

// largestFast returns the largest bits of a magnitude of the first float32 numbers, and how many numbers those are.
func largestFast(src unsafe.Pointer, n int) (m int, found uint32) {
	switch {
	case hasAVX512:
		m = n &^ (avx512Bytes/4 - 1)
		found = largestAVX512((*byte)(src), 4*m)
	case hasAVX2:
		m = n &^ (avx2Bytes/4 - 1)
		found = largest((*byte)(src), 4*m)
	}
	return m, found
}

// streamFast copies whole vectors with streaming stores to dst, which is aligned to a vector, and returns the number of
// bytes copied.
func streamFast(dst, src unsafe.Pointer, bytes int) int {
	switch d, s := (*byte)(dst), (*byte)(src); {
	case hasAVX512:
		bytes &^= avx512Bytes - 1
		streamAVX512(d, s, bytes)
	case hasAVX2:
		bytes &^= avx2Bytes - 1
		stream(d, s, bytes)
	default:
		return 0
	}
	return bytes
}

// fenceFast orders what was streamed before what is written later.
func fenceFast() {
	if hasAVX2 {
		fence()
	}
}

// The functions below run the loops of compressed gradients on the first elements, and return on how many: none if the
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
