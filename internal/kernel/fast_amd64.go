//go:build !noasm

package kernel

//go:generate sh -c "cd _gen && go run . -out ../avx2_amd64.s -stubs ../avx2_amd64.go -pkg kernel"

import (
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
	"golang.org/x/sys/cpu"
)

// hasAVX2 is whether this processor has the instructions of the assembly loops.
var hasAVX2 = cpu.X86.HasAVX2

// vectorBytes is what the assembly loops handle at least; the generic loops do the rest of a vector.
const vectorBytes = 32

// fastest returns the table with the assembly loops where there are any that this processor can run. They equal the
// loops that they replace bit for bit.
func fastest(t loopTable) loopTable {
	if !hasAVX2 {
		return t
	}
	for _, x := range []struct {
		op    Op
		types []tensor.DType
		two   func(dst, a, b *byte, bytes int)
		three func(dst, a, b, c *byte, bytes int)
		four  func(dst, a, b, c, d *byte, bytes int)
	}{
		{Sum, []tensor.DType{tensor.Float32}, sumF32x2, sumF32x3, sumF32x4},
		{Sum, []tensor.DType{tensor.Float64}, sumF64x2, sumF64x3, sumF64x4},
		{Prod, []tensor.DType{tensor.Float32}, prodF32x2, prodF32x3, prodF32x4},
		{Prod, []tensor.DType{tensor.Float64}, prodF64x2, prodF64x3, prodF64x4},
		{Sum, []tensor.DType{tensor.Int8, tensor.Uint8}, sumI8x2, sumI8x3, sumI8x4},
		{Sum, []tensor.DType{tensor.Int16, tensor.Uint16}, sumI16x2, sumI16x3, sumI16x4},
		{Sum, []tensor.DType{tensor.Int32, tensor.Uint32}, sumI32x2, sumI32x3, sumI32x4},
		{Sum, []tensor.DType{tensor.Int64, tensor.Uint64}, sumI64x2, sumI64x3, sumI64x4},
	} {
		for _, dtype := range x.types {
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

// divideFast divides the first elements of float32 or float64, by size, and returns how many.
func divideFast(size int, dst, src unsafe.Pointer, n, divisor int) int {
	if !hasAVX2 {
		return 0
	}
	m, exact := n*size&^(vectorBytes-1), powerOfTwo(divisor)
	d, s := (*byte)(dst), (*byte)(src)
	switch {
	case size == 4 && exact:
		mulF32(d, s, m, 1/float32(divisor))
	case size == 4:
		divF32(d, s, m, float32(divisor))
	case exact:
		mulF64(d, s, m, 1/float64(divisor))
	default:
		divF64(d, s, m, float64(divisor))
	}
	return m / size
}
