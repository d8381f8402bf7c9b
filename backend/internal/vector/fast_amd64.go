//go:build !noasm

package vector

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

// hasVectors reports whether this processor has the instructions of the assembly.
var hasVectors = cpu.X86.HasAVX2

// reduceRowsFast combines the elements of rows, if there is assembly for them.
func reduceRowsFast[T number](r Reduction, dst, src []T, columns int) bool {
	if _, ok := any(src).([]float32); !ok || !hasVectors || r == Smallest || len(src) == 0 {
		return false
	}
	to, from := (*byte)(unsafe.Pointer(&dst[0])), (*byte)(unsafe.Pointer(&src[0]))
	if r == Sum {
		sumRowsVectors(to, from, len(dst), columns)
	} else {
		largestRowsVectors(to, from, len(dst), columns)
	}
	return true
}

// reduceFast does nothing: reduceRowsFast combines whole rows.
func reduceFast[T number](Reduction, *[lanes]T, []T) bool { return false }
