//go:build !noasm

package kernel

//go:generate sh -c "cd _gen && go run . -out ../avx2_amd64.s -stubs ../avx2_amd64.go -pkg kernel"

import (
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
	"golang.org/x/sys/cpu"
)

// Whether this processor has the instructions of the assembly loops, and those that convert float16 besides.
var (
	hasAVX2 = cpu.X86.HasAVX2
	hasF16C = cpu.X86.HasAVX2 && cpu.X86.HasF16C
)

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
		{Prod, []tensor.DType{tensor.Float32}, prodF32x2, prodF32x3, prodF32x4},
		{Min, []tensor.DType{tensor.Float32}, minF32x2, minF32x3, minF32x4},
		{Max, []tensor.DType{tensor.Float32}, maxF32x2, maxF32x3, maxF32x4},
		{Sum, []tensor.DType{tensor.Float64}, sumF64x2, sumF64x3, sumF64x4},
		{Prod, []tensor.DType{tensor.Float64}, prodF64x2, prodF64x3, prodF64x4},
		{Min, []tensor.DType{tensor.Float64}, minF64x2, minF64x3, minF64x4},
		{Max, []tensor.DType{tensor.Float64}, maxF64x2, maxF64x3, maxF64x4},
		{Sum, []tensor.DType{tensor.Float16}, sumF16x2, sumF16x3, sumF16x4},
		{Prod, []tensor.DType{tensor.Float16}, prodF16x2, prodF16x3, prodF16x4},
		{Min, []tensor.DType{tensor.Float16}, minF16x2, minF16x3, minF16x4},
		{Max, []tensor.DType{tensor.Float16}, maxF16x2, maxF16x3, maxF16x4},
		{Sum, []tensor.DType{tensor.BFloat16}, sumBF16x2, sumBF16x3, sumBF16x4},
		{Prod, []tensor.DType{tensor.BFloat16}, prodBF16x2, prodBF16x3, prodBF16x4},
		{Min, []tensor.DType{tensor.BFloat16}, minBF16x2, minBF16x3, minBF16x4},
		{Max, []tensor.DType{tensor.BFloat16}, maxBF16x2, maxBF16x3, maxBF16x4},
		{Sum, []tensor.DType{tensor.Int8, tensor.Uint8}, sumI8x2, sumI8x3, sumI8x4},
		{Sum, []tensor.DType{tensor.Int16, tensor.Uint16}, sumI16x2, sumI16x3, sumI16x4},
		{Sum, []tensor.DType{tensor.Int32, tensor.Uint32}, sumI32x2, sumI32x3, sumI32x4},
		{Sum, []tensor.DType{tensor.Int64, tensor.Uint64}, sumI64x2, sumI64x3, sumI64x4},
	} {
		for _, dtype := range x.types {
			if dtype == tensor.Float16 && !hasF16C {
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

// widenFast converts the first elements of a half-width type to float32 and returns how many.
func widenFast(t tensor.DType, dst, src unsafe.Pointer, n int) int {
	m := n * 2 &^ (vectorBytes - 1)
	switch {
	case t == tensor.BFloat16 && hasAVX2:
		widenBF16((*byte)(dst), (*byte)(src), m)
	case t == tensor.Float16 && hasF16C:
		widenF16((*byte)(dst), (*byte)(src), m)
	default:
		return 0
	}
	return m / 2
}

// narrowFast converts the first elements of float32 to a half-width type and returns how many.
func narrowFast(t tensor.DType, dst, src unsafe.Pointer, n int) int {
	m := n * 2 &^ (vectorBytes - 1)
	switch {
	case t == tensor.BFloat16 && hasAVX2:
		narrowBF16((*byte)(dst), (*byte)(src), m)
	case t == tensor.Float16 && hasF16C:
		narrowF16((*byte)(dst), (*byte)(src), m)
	default:
		return 0
	}
	return m / 2
}
