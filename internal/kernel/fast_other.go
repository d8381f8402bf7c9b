//go:build (!amd64 && !arm64) || noasm

package kernel

import (
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Level names the vector instructions that the loops use: none in this build.
func Level() string { return "none" }

// fastest returns the table as it is: there are no assembly loops for this machine.
func fastest(t loopTable) loopTable { return t }

// scaleFast scales nothing, and reports this.
func scaleFast(scaling, int, unsafe.Pointer, unsafe.Pointer, unsafe.Pointer, int) int { return 0 }

// widenFast and narrowFast convert no elements, and report this.

func widenFast(tensor.DType, unsafe.Pointer, unsafe.Pointer, int) int { return 0 }

func narrowFast(tensor.DType, unsafe.Pointer, unsafe.Pointer, int) int { return 0 }

// squaresFast adds nothing, and reports this.
func squaresFast(*[squareSums]float64, unsafe.Pointer, int) int { return 0 }

// largestFast looks at no number, and reports this.
func largestFast(unsafe.Pointer, int) (m int, found uint32) { return 0, 0 }

// streamFast copies nothing, and reports this.
func streamFast(unsafe.Pointer, unsafe.Pointer, int) int { return 0 }

func fenceFast() {}

// The functions below run no loops of compressed gradients, and report this: none of the elements are done.

func addLargestFast(_, _, _ unsafe.Pointer, _ int) (m int, largest uint32) { return 0, 0 }

func quantizeFast(_, _ unsafe.Pointer, _ int, _, _ float32) int { return 0 }

func dequantizeFast(_, _ unsafe.Pointer, _ int, _ float32) int { return 0 }

func addDequantizedFast(_, _ unsafe.Pointer, _ int, _ float32) int { return 0 }

func addScaledFast(_, _, _ unsafe.Pointer, _ int, _ float32) int { return 0 }

func dotFast(_, _ unsafe.Pointer, _ int) (sum float32, ok bool) { return 0, false }
