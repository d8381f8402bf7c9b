//go:build !noasm

package kernel

//go:generate sh -c "cd _gen && go run . -table ../table_amd64.go"
//go:generate sh -c "cd _gen && go run . -out ../avx2_amd64.s -stubs ../avx2_amd64.go -pkg kernel"
//go:generate sh -c "cd _gen && go run . -avx512 -out ../avx512_amd64.s -stubs ../avx512_amd64.go -pkg kernel"

import (
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
	"golang.org/x/sys/cpu"
)

// The instructions that the loops need. An operating system that does not keep the registers counts as a processor
// without them.
var (
	hasAVX2   = cpu.X86.HasAVX2
	hasF16C   = cpu.X86.HasAVX2 && cpu.X86.HasF16C
	hasAVX512 = hasF16C && cpu.X86.HasAVX512F && cpu.X86.HasAVX512BW && cpu.X86.HasAVX512DQ && cpu.X86.HasAVX512VL
)

// Level names the vector instructions that the loops use on this processor.
func Level() string {
	switch {
	case hasAVX512:
		return "AVX-512"
	case hasF16C:
		return "AVX2"
	case hasAVX2:
		return "AVX2 without F16C"
	}
	return "none"
}

// What the assembly loops handle at least; the loops below them in the table do the rest of a vector.
const (
	avx2Bytes   = 32
	avx512Bytes = 64
)

// vectorLoops are the loops of one operation on types whose elements it treats alike. They handle whole vectors.
type vectorLoops struct {
	op    Op
	types []tensor.DType
	two   func(dst, a, b *byte, bytes int)
	three func(dst, a, b, c *byte, bytes int)
	four  func(dst, a, b, c, d *byte, bytes int)
}

// fastest returns the table with the assembly loops where there are any that this processor can run. They equal the
// loops that they replace bit for bit.
func fastest(t loopTable) loopTable {
	if hasAVX2 {
		t = replaced(t, avx2Loops, avx2Bytes)
	}
	if hasAVX512 {
		t = replaced(t, avx512Loops, avx512Bytes)
	}
	return t
}

// replaced returns the table with loops over vectors of so many bytes, which leave the rest to those that they replace.
func replaced(t loopTable, by []vectorLoops, vectorBytes int) loopTable {
	for _, x := range by {
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

// combineFast combines the first elements of float32 or float64, by size, and returns how many.
func combineFast(op Arithmetic, size int, dst, a, b unsafe.Pointer, n int, single Single) int {
	m := n * size &^ (avx2Bytes - 1)
	switch {
	case hasAVX512:
		m &^= avx512Bytes - 1
		combineAVX512(op, size, single, (*byte)(dst), (*byte)(a), (*byte)(b), m)
	case hasAVX2:
		combineAVX2(op, size, single, (*byte)(dst), (*byte)(a), (*byte)(b), m)
	default:
		return 0
	}
	return m / size
}

// rootsFast takes the square roots of the first elements of float32 or float64, by size, and returns how many.
func rootsFast(size int, dst, src unsafe.Pointer, n int) int {
	d, s, m := (*byte)(dst), (*byte)(src), n*size&^(avx2Bytes-1)
	switch {
	case hasAVX512 && size == 4:
		m &^= avx512Bytes - 1
		sqrtF32AVX512(d, s, m)
	case hasAVX512:
		m &^= avx512Bytes - 1
		sqrtF64AVX512(d, s, m)
	case hasAVX2 && size == 4:
		sqrtF32(d, s, m)
	case hasAVX2:
		sqrtF64(d, s, m)
	default:
		return 0
	}
	return m / size
}

// widenFast converts the first elements of a half-width type to float32 and returns how many.
func widenFast(t tensor.DType, dst, src unsafe.Pointer, n int) int {
	d, s, m := (*byte)(dst), (*byte)(src), n*2&^(avx2Bytes-1)
	switch {
	case hasAVX512 && t == tensor.BFloat16:
		m &^= avx512Bytes - 1
		widenBF16AVX512(d, s, m)
	case hasAVX512 && t == tensor.Float16:
		m &^= avx512Bytes - 1
		widenF16AVX512(d, s, m)
	case hasAVX2 && t == tensor.BFloat16:
		widenBF16(d, s, m)
	case hasF16C && t == tensor.Float16:
		widenF16(d, s, m)
	default:
		return 0
	}
	return m / 2
}

// narrowFast converts the first elements of float32 to a half-width type and returns how many.
func narrowFast(t tensor.DType, dst, src unsafe.Pointer, n int) int {
	d, s, m := (*byte)(dst), (*byte)(src), n*2&^(avx2Bytes-1)
	switch {
	case hasAVX512 && t == tensor.BFloat16:
		m &^= avx512Bytes - 1
		narrowBF16AVX512(d, s, m)
	case hasAVX512 && t == tensor.Float16:
		m &^= avx512Bytes - 1
		narrowF16AVX512(d, s, m)
	case hasAVX2 && t == tensor.BFloat16:
		narrowBF16(d, s, m)
	case hasF16C && t == tensor.Float16:
		narrowF16(d, s, m)
	default:
		return 0
	}
	return m / 2
}

// squaresFast adds the squares of the first float32 numbers to the sums and returns how many numbers those are.
func squaresFast(sums *[squareSums]float64, src unsafe.Pointer, n int) int {
	m := n &^ (squareSums - 1)
	switch {
	case hasAVX512:
		squaresF32AVX512(&sums[0], (*byte)(src), 4*m)
	case hasAVX2:
		squaresF32(&sums[0], (*byte)(src), 4*m)
	default:
		return 0
	}
	return m
}

// streamFast copies whole vectors with streaming stores to dst, which is aligned to a vector, and returns the number of
// bytes copied.
func streamFast(dst, src unsafe.Pointer, bytes int) int {
	switch d, s := (*byte)(dst), (*byte)(src); {
	case hasAVX512:
		bytes &^= avx512Bytes - 1
		streamAVX512(d, s, bytes)
	case hasAVX2:
		bytes &^= avx2Bytes - 1
		stream(d, s, bytes)
	default:
		return 0
	}
	return bytes
}

// fenceFast orders what was streamed before what is written later.
func fenceFast() {
	if hasAVX2 {
		fence()
	}
}
