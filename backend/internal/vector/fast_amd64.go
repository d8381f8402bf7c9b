//go:build !noasm

package vector

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

// hasVectors reports whether this processor has the instructions of the assembly.
var hasVectors = cpu.X86.HasAVX2

// addIntegers replaces comparisons of int32 by assembly.
func addIntegers(m map[key]Loop) {
	two := func(name string, f func(dst, a, b *byte, n int)) {
		replace(m, key{name, Int32, Bool}, func(dst *byte, in *[3]unsafe.Pointer, n int) {
			f(dst, (*byte)(in[0]), (*byte)(in[1]), n)
		})
	}
	two("Equal", equalIntegersVectors)
	two("LessThan", lessIntegersVectors)
	two("GreaterThan", func(dst, a, b *byte, n int) { lessIntegersVectors(dst, b, a, n) })
}

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

// addRowsFast adds the first columns of rows of float32, and returns how many.
func addRowsFast(dst, src unsafe.Pointer, rows, step, columns int) int {
	columns &^= 7
	if columns == 0 || rows == 0 || !hasVectors {
		return 0
	}
	addRowsVectors((*byte)(dst), (*byte)(src), rows, step, columns)
	return columns
}

// spreadFast repeats elements of 4 bytes, if there is assembly for rows of so many columns.
func spreadFast(dst, src unsafe.Pointer, rows, columns int) bool {
	if columns < 8 || rows == 0 || !hasVectors {
		return false
	}
	spreadVectors((*byte)(dst), (*byte)(src), rows, columns)
	return true
}
