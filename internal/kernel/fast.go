//go:build (amd64 || arm64) && !noasm

package kernel

import (
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
)

// vectorLoops are the loops of one operation on types whose elements it treats alike. They handle whole vectors.
type vectorLoops struct {
	op    Op
	types []tensor.DType
	two   func(dst, a, b *byte, bytes int)
	three func(dst, a, b, c *byte, bytes int)
	four  func(dst, a, b, c, d *byte, bytes int)
}

// replaced returns the table with loops over vectors of so many bytes, which leave the rest to those that they replace.
// Those of float16 may need instructions that the processor lacks.
func replaced(t loopTable, by []vectorLoops, vectorBytes int, hasFloat16 bool) loopTable {
	for _, x := range by {
		for _, dtype := range x.types {
			if dtype == tensor.Float16 && !hasFloat16 {
				continue
			}
			rest, size := t[x.op][dtype], dtype.Bytes()
			t[x.op][dtype] = loops{
				two: func(dst, a, b unsafe.Pointer, n int) {
					m := n * size &^ (vectorBytes - 1)
					x.two((*byte)(dst), (*byte)(a), (*byte)(b), m)
					if n -= m / size; n > 0 {
						rest.two(unsafe.Add(dst, m), unsafe.Add(a, m), unsafe.Add(b, m), n)
					}
				},
				three: func(dst, a, b, c unsafe.Pointer, n int) {
					m := n * size &^ (vectorBytes - 1)
					x.three((*byte)(dst), (*byte)(a), (*byte)(b), (*byte)(c), m)
					if n -= m / size; n > 0 {
						rest.three(unsafe.Add(dst, m), unsafe.Add(a, m), unsafe.Add(b, m), unsafe.Add(c, m), n)
					}
				},
				four: func(dst, a, b, c, d unsafe.Pointer, n int) {
					m := n * size &^ (vectorBytes - 1)
					x.four((*byte)(dst), (*byte)(a), (*byte)(b), (*byte)(c), (*byte)(d), m)
					if n -= m / size; n > 0 {
						rest.four(unsafe.Add(dst, m), unsafe.Add(a, m), unsafe.Add(b, m), unsafe.Add(c, m), unsafe.Add(d, m), n)
					}
				},
			}
		}
	}
	return t
}
