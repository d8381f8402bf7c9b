//go:build !noasm

package vector

import "unsafe"

// hasVectors reports whether this processor has the instructions of the assembly: all of arm64 have.
const hasVectors = true

// reduceRowsFast does nothing: reduceFast combines parts of rows.
func reduceRowsFast[T number](Reduction, []T, []T, int) bool { return false }

// reduceFast combines a multiple of lanes elements, if there is assembly for them.
func reduceFast[T number](r Reduction, part *[lanes]T, row []T) bool {
	if _, ok := any(row).([]float32); !ok || r == Smallest {
		return false
	}
	to, from := (*byte)(unsafe.Pointer(part)), (*byte)(unsafe.Pointer(&row[0]))
	if r == Sum {
		sumVectors(to, from, len(row))
	} else {
		largestVectors(to, from, len(row))
	}
	return true
}
