//go:build !noasm

package kernel

import (
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Level names the vector instructions that the loops use: those of ARMv8.0, which every arm64 processor has.
func Level() string { return "NEON" }

// neonBytes is what the assembly loops handle at least; the loops below them in the table do the rest of a vector.
const neonBytes = 16

// fastest returns the table with the assembly loops. They equal the loops that they replace bit for bit.
func fastest(t loopTable) loopTable { return replaced(t, neonLoops, neonBytes, true) }

// scaleFast scales the first elements of float32 or float64, by size, and returns how many.
func scaleFast(op scaling, size int, dst, src, by unsafe.Pointer, n int) int {
	m := n * size &^ (neonBytes - 1)
	scaleNEON(op, size, (*byte)(dst), (*byte)(src), (*byte)(by), m)
	return m / size
}

// widenFast converts the first elements of a half-width type to float32 and returns how many.
func widenFast(t tensor.DType, dst, src unsafe.Pointer, n int) int {
	m := n * 2 &^ (neonBytes - 1)
	if t == tensor.BFloat16 {
		widenBF16((*byte)(dst), (*byte)(src), m)
	} else {
		widenF16((*byte)(dst), (*byte)(src), m)
	}
	return m / 2
}

// narrowFast converts the first elements of float32 to a half-width type and returns how many.
func narrowFast(t tensor.DType, dst, src unsafe.Pointer, n int) int {
	m := n * 2 &^ (neonBytes - 1)
	if t == tensor.BFloat16 {
		narrowBF16((*byte)(dst), (*byte)(src), m)
	} else {
		narrowF16((*byte)(dst), (*byte)(src), m)
	}
	return m / 2
}

// squaresFast adds the squares of the first float32 numbers to the sums and returns how many numbers those are.
func squaresFast(sums *[squareSums]float64, src unsafe.Pointer, n int) int {
	m := n &^ (squareSums - 1)
	squaresF32(&sums[0], (*byte)(src), 4*m)
	return m
}

// largestFast returns the largest bits of a magnitude of the first float32 numbers, and how many numbers those are.
func largestFast(src unsafe.Pointer, n int) (m int, found uint32) {
	m = n &^ (neonBytes/4 - 1)
	return m, largest((*byte)(src), 4*m)
}

// streamFast copies whole cache lines with streaming stores and returns the number of bytes copied.
func streamFast(dst, src unsafe.Pointer, bytes int) int {
	bytes &^= streamAlignment - 1
	stream((*byte)(dst), (*byte)(src), bytes)
	return bytes
}

// fenceFast does nothing: streaming stores are ordered as others are, by the atomic operations that follow.
func fenceFast() {}

// The functions below run the loops of compressed gradients on the first elements, and return on how many.

func addLargestFast(dst, a, b unsafe.Pointer, n int) (m int, largest uint32) {
	m = n &^ (neonBytes/4 - 1)
	return m, addLargest((*byte)(dst), (*byte)(a), (*byte)(b), 4*m)
}

func quantizeFast(q, e unsafe.Pointer, n int, inverse, scale float32) int {
	m := n &^ (neonBytes - 1)
	quantize((*byte)(q), (*byte)(e), m, inverse, scale)
	return m
}

func dequantizeFast(dst, q unsafe.Pointer, n int, scale float32) int {
	m := n &^ (neonBytes - 1)
	dequantize((*byte)(dst), (*byte)(q), m, scale)
	return m
}

func addDequantizedFast(dst, q unsafe.Pointer, n int, scale float32) int {
	m := n &^ (neonBytes - 1)
	addDequantized((*byte)(dst), (*byte)(q), m, scale)
	return m
}

func addScaledFast(dst, a, x unsafe.Pointer, n int, by float32) int {
	m := n &^ (neonBytes/4 - 1)
	addScaled((*byte)(dst), (*byte)(a), (*byte)(x), 4*m, by)
	return m
}

// dotFast returns the sum over n elements, a multiple of dotLanes, and whether there are instructions for it.
func dotFast(a, b unsafe.Pointer, n int) (sum float32, ok bool) {
	return dot((*byte)(a), (*byte)(b), 4*n), true
}
