//go:build (amd64 || arm64) && !noasm

package vector

import "unsafe"

// addFast replaces loops of float32 by assembly, which handles multiples of 8 elements.
func addFast(m map[key]Loop) {
	if !hasVectors {
		return
	}
	for name, f := range map[string]func(dst, a *byte, n int){
		"Neg": negateVectors, "Abs": absoluteVectors, "Sqrt": sqrtVectors, "Exp": expVectors, "Log": logVectors,
		"Tanh": tanhVectors, "Logistic": logisticVectors, "Erf": erfVectors, "Sign": signVectors,
	} {
		replace(m, key{name, Float32, Float32}, func(dst *byte, in *[3]unsafe.Pointer, n int) {
			f(dst, (*byte)(in[0]), n)
		})
	}
	replace(m, key{"ConvertDType", Bool, Float32}, func(dst *byte, in *[3]unsafe.Pointer, n int) {
		oneWhereVectors(dst, (*byte)(in[0]), n)
	})
	two := func(name string, out Type, f func(dst, a, b *byte, n int)) {
		replace(m, key{name, Float32, out}, func(dst *byte, in *[3]unsafe.Pointer, n int) {
			f(dst, (*byte)(in[0]), (*byte)(in[1]), n)
		})
	}
	two("Add", Float32, addVectors)
	two("Sub", Float32, subVectors)
	two("Mul", Float32, mulVectors)
	two("Div", Float32, divVectors)
	two("Max", Float32, largerVectors)
	two("Min", Float32, smallerVectors)
	two("Equal", Bool, equalVectors)
	two("NotEqual", Bool, notEqualVectors)
	two("LessThan", Bool, lessVectors)
	two("LessOrEqual", Bool, lessOrEqualVectors)
	two("GreaterThan", Bool, func(dst, a, b *byte, n int) { lessVectors(dst, b, a, n) })
	two("GreaterOrEqual", Bool, func(dst, a, b *byte, n int) { lessOrEqualVectors(dst, b, a, n) })
	for _, t := range []Type{Float32, Int32} {
		replace(m, key{"Where", t, t}, func(dst *byte, in *[3]unsafe.Pointer, n int) {
			chooseVectors(dst, (*byte)(in[0]), (*byte)(in[1]), (*byte)(in[2]), n)
		})
	}
	integers := func(name string, f func(dst, a, b *byte, n int)) {
		replace(m, key{name, Int32, Bool}, func(dst *byte, in *[3]unsafe.Pointer, n int) {
			f(dst, (*byte)(in[0]), (*byte)(in[1]), n)
		})
	}
	integers("Equal", equalIntegersVectors)
	integers("LessThan", lessIntegersVectors)
	integers("GreaterThan", func(dst, a, b *byte, n int) { lessIntegersVectors(dst, b, a, n) })
}

// replace replaces a loop for the first elements of 4 bytes.
func replace(m map[key]Loop, k key, fast func(dst *byte, in *[3]unsafe.Pointer, n int)) {
	plain := m[k]
	m[k] = func(dst unsafe.Pointer, in *[3]unsafe.Pointer, n int) {
		done := n &^ 7
		if done > 0 {
			fast((*byte)(dst), in, done)
		}
		if done < n {
			rest := *in
			for i, p := range rest {
				if p != nil {
					rest[i] = unsafe.Add(p, 4*done)
				}
			}
			plain(unsafe.Add(dst, 4*done), &rest, n-done)
		}
	}
}

// scatterLargestFast does so for the largest elements of a multiple of 8 numbers, and returns how many.
func scatterLargestFast[T float32 | float64](to, from unsafe.Pointer, places []int, add unsafe.Pointer, n int) int {
	n &^= 7
	if unsafe.Sizeof(*new(T)) != 4 || n == 0 || !hasVectors {
		return 0
	}
	scatterLargestVectors((*byte)(to), (*byte)(from), &places[0], len(places), (*byte)(add), n)
	return n
}

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
