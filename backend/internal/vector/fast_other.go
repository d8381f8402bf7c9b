//go:build (!amd64 && !arm64) || noasm

package vector

import "unsafe"

func addFast(map[key]Loop) {}

func reduceRowsFast[T number](Reduction, []T, []T, int) bool { return false }

func reduceFast[T number](Reduction, *[lanes]T, []T) bool { return false }

func addRowsFast(_, _ unsafe.Pointer, _, _, _ int) int { return 0 }

func spreadFast(_, _ unsafe.Pointer, _, _ int) bool { return false }

func scatterLargestFast[T float32 | float64](_, _ unsafe.Pointer, _ []int, _ unsafe.Pointer, _ int) int {
	return 0
}
