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

// combineFast combines nothing, and reports this.
func combineFast(Arithmetic, int, unsafe.Pointer, unsafe.Pointer, unsafe.Pointer, int, Single) int {
	return 0
}

// rootsFast takes no square root, and reports this.
func rootsFast(int, unsafe.Pointer, unsafe.Pointer, int) int { return 0 }

// widenFast and narrowFast convert no elements, and report this.

func widenFast(tensor.DType, unsafe.Pointer, unsafe.Pointer, int) int { return 0 }

func narrowFast(tensor.DType, unsafe.Pointer, unsafe.Pointer, int) int { return 0 }

// squaresFast adds nothing, and reports this.
func squaresFast(*[squareSums]float64, unsafe.Pointer, int) int { return 0 }

// streamFast copies nothing, and reports this.
func streamFast(unsafe.Pointer, unsafe.Pointer, int) int { return 0 }

func fenceFast() {}
