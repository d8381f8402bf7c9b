//go:build !amd64 || noasm

package kernel

import (
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Level names the vector instructions that the loops use: none in this build.
func Level() string { return "none" }

// fastest returns the table as it is: there are no assembly loops for this machine.
func fastest(t loopTable) loopTable { return t }

// divideFast divides the first elements of float32 or float64, by size, and returns how many.
func divideFast(size int, dst, src unsafe.Pointer, n, divisor int) int {
	if !powerOfTwo(divisor) {
		return 0
	}
	if size == 4 {
		return multiply(dst, src, n, 1/float32(divisor))
	}
	return multiply(dst, src, n, 1/float64(divisor))
}

// widenFast and narrowFast convert no elements, and report this.

func widenFast(tensor.DType, unsafe.Pointer, unsafe.Pointer, int) int { return 0 }

func narrowFast(tensor.DType, unsafe.Pointer, unsafe.Pointer, int) int { return 0 }

// squaresFast adds nothing, and reports this.
func squaresFast(*[squareSums]float64, unsafe.Pointer, int) int { return 0 }

// streamFast copies nothing, and reports this.
func streamFast(unsafe.Pointer, unsafe.Pointer, int) int { return 0 }

func fenceFast() {}

// multiply sets dst[i] = src[i] * factor for whole turns and returns how many elements those are.
func multiply[T float32 | float64](dst, src unsafe.Pointer, n int, factor T) int {
	i := 0
	for ; i+lanes <= n; i += lanes {
		r, x := at[T](dst, i), at[T](src, i)
		for j := range r {
			r[j] = mul(x[j], factor)
		}
	}
	return i
}
