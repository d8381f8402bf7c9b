// This program writes the AVX2 loops of package kernel: avx2_amd64.s, and their declarations in avx2_amd64.go. Run it with
// go generate in internal/kernel.
package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

func main() {
	ConstraintExpr("!noasm")
	for _, k := range kinds {
		reduce(k, 2)
		reduce(k, 3)
		reduce(k, 4)
	}
	for _, h := range []half{bfloat16, float16} {
		widen(h)
		narrow(h)
	}
	scale("mulF32", "*", func(src Op, by, dst reg.VecVirtual) { VMULPS(src, by, dst) }, 4)
	scale("mulF64", "*", func(src Op, by, dst reg.VecVirtual) { VMULPD(src, by, dst) }, 8)
	scale("divF32", "/", func(src Op, by, dst reg.VecVirtual) { VMOVUPS(src, dst); VDIVPS(by, dst, dst) }, 4)
	scale("divF64", "/", func(src Op, by, dst reg.VecVirtual) { VMOVUPD(src, dst); VDIVPD(by, dst, dst) }, 8)
	Generate()
}

// vectorBytes is how much of each source a loop handles at least.
const vectorBytes = 32

// kind is an operation on a type of elements.
type kind struct {
	name  string // of the functions: sumF32 gives sumF32x2, sumF32x3, sumF32x4
	doc   string // of the operation in Go
	apply func(b, a, dst Op)
	half  half // nil: the elements fill the lanes of apply's instructions
}

// In a float instruction the left operand of the tree comes first: if both operands are NaNs, it is the one that stays.
// Avo's operands are in the order of Go's assembler, so that the left one stands second.
var kinds = []kind{
	{"sumF32", "%s + %s", addPS, nil},
	{"prodF32", "%s * %s", mulPS, nil},
	{"minF32", "min(%s, %s)", minPS, nil},
	{"maxF32", "max(%s, %s)", maxPS, nil},
	{"sumF64", "%s + %s", addPD, nil},
	{"prodF64", "%s * %s", mulPD, nil},
	{"minF64", "min(%s, %s)", minPD, nil},
	{"maxF64", "max(%s, %s)", maxPD, nil},
	{"sumF16", "%s + %s", addPS, float16},
	{"prodF16", "%s * %s", mulPS, float16},
	{"minF16", "min(%s, %s)", minPS, float16},
	{"maxF16", "max(%s, %s)", maxPS, float16},
	{"sumBF16", "%s + %s", addPS, bfloat16},
	{"prodBF16", "%s * %s", mulPS, bfloat16},
	{"minBF16", "min(%s, %s)", minPS, bfloat16},
	{"maxBF16", "max(%s, %s)", maxPS, bfloat16},
	{"sumI8", "%s + %s", func(b, a, dst Op) { VPADDB(b, a, dst) }, nil},
	{"sumI16", "%s + %s", func(b, a, dst Op) { VPADDW(b, a, dst) }, nil},
	{"sumI32", "%s + %s", func(b, a, dst Op) { VPADDD(b, a, dst) }, nil},
	{"sumI64", "%s + %s", func(b, a, dst Op) { VPADDQ(b, a, dst) }, nil},
}

func addPS(b, a, dst Op) { VADDPS(b, a, dst) }
func addPD(b, a, dst Op) { VADDPD(b, a, dst) }
func mulPS(b, a, dst Op) { VMULPS(b, a, dst) }
func mulPD(b, a, dst Op) { VMULPD(b, a, dst) }

// The instructions for a minimum return the second operand if both are zeros or one is a NaN. Taken both ways round and
// put together, the zeros' signs come out right; a NaN is replaced by the sum, which has the bits that are promised.

func minPS(b, a, dst Op) {
	x, y, z := inRegister(b), YMM(), YMM()
	VMINPS(x, a, y)
	VMINPS(a, x, z)
	VORPS(y, z, y)
	exceptNaN32(x, a, y, dst)
}

func maxPS(b, a, dst Op) {
	x, y, z := inRegister(b), YMM(), YMM()
	VMAXPS(x, a, y)
	VMAXPS(a, x, z)
	VANDPS(y, z, y)
	exceptNaN32(x, a, y, dst)
}

func minPD(b, a, dst Op) {
	x, y, z := inRegister(b), YMM(), YMM()
	VMINPD(x, a, y)
	VMINPD(a, x, z)
	VORPD(y, z, y)
	exceptNaN64(x, a, y, dst)
}

func maxPD(b, a, dst Op) {
	x, y, z := inRegister(b), YMM(), YMM()
	VMAXPD(x, a, y)
	VMAXPD(a, x, z)
	VANDPD(y, z, y)
	exceptNaN64(x, a, y, dst)
}

// unordered is the comparison that finds NaNs.
const unordered = U8(3)

// exceptNaN32 sets dst = result, but a + b where one of the two is a NaN.
func exceptNaN32(b, a, result, dst Op) {
	sum, mask := YMM(), YMM()
	VADDPS(b, a, sum)
	VCMPPS(unordered, b, a, mask)
	VBLENDVPS(mask, sum, result, dst)
}

func exceptNaN64(b, a, result, dst Op) {
	sum, mask := YMM(), YMM()
	VADDPD(b, a, sum)
	VCMPPD(unordered, b, a, mask)
	VBLENDVPD(mask, sum, result, dst)
}

func inRegister(x Op) Op {
	if _, memory := x.(Mem); !memory {
		return x
	}
	v := YMM()
	VMOVUPS(x, v)
	return v
}

// reduce writes the loop over n sources. Turns of several vectors keep several loads under way; single ones do the rest.
// Numbers of half width are widened, and rounded again after each operation.
func reduce(k kind, n int) {
	name := fmt.Sprintf("%sx%d", k.name, n)
	names := []string{"a", "b", "c", "d"}[:n]
	signature := "func(dst"
	for _, s := range names {
		signature += ", " + s
	}
	TEXT(name, NOSPLIT, signature+" *byte, bytes int)")
	Doc(fmt.Sprintf("%s sets dst[i] = %s for so many bytes, a multiple of %d.", name, expression(k.doc, n), vectorBytes))
	Pragma("noescape")
	dst := Load(Param("dst"), GP64())
	var src []reg.Register
	for _, s := range names {
		src = append(src, Load(Param(s), GP64()))
	}
	bytes := Load(Param("bytes"), GP64())
	at := GP64()
	XORQ(at, at)
	mem := func(base reg.Register, i int) Mem {
		return Mem{Base: base, Index: at, Scale: 1, Disp: i * vectorBytes}
	}
	if k.half == nil {
		turns(at, bytes, 4, func(vectors int) {
			v := make([]reg.VecVirtual, vectors)
			for i := range v {
				v[i] = YMM()
				VMOVUPS(mem(src[0], i), v[i])
			}
			for i := range v {
				k.apply(mem(src[1], i), v[i], v[i])
			}
			switch n {
			case 3:
				for i := range v {
					k.apply(mem(src[2], i), v[i], v[i])
				}
			case 4:
				for i := range v {
					right := YMM()
					VMOVUPS(mem(src[2], i), right)
					k.apply(mem(src[3], i), right, right)
					k.apply(right, v[i], v[i])
				}
			}
			for i := range v {
				VMOVUPS(v[i], mem(dst, i))
			}
		})
		return
	}
	k.half.prepare()
	apply := func(left, right [2]reg.VecVirtual) {
		for i := range left {
			k.apply(right[i], left[i], left[i])
		}
	}
	turns(at, bytes, 1, func(int) {
		load := func(i int) [2]reg.VecVirtual { return k.half.load(mem(src[i], 0)) }
		v := load(0)
		apply(v, load(1))
		switch n {
		case 3:
			k.half.round(v)
			apply(v, load(2))
		case 4:
			k.half.round(v)
			right := load(2)
			apply(right, load(3))
			k.half.round(right)
			apply(v, right)
		}
		k.half.store(v, mem(dst, 0))
	})
}

// expression writes the tree over n sources with an operation.
func expression(operation string, n int) string {
	nest := func(a, b string) string {
		s := fmt.Sprintf(operation, a, b)
		if operation[0] == '%' { // an operator
			s = "(" + s + ")"
		}
		return s
	}
	switch n {
	case 3:
		return fmt.Sprintf(operation, nest("a[i]", "b[i]"), "c[i]")
	case 4:
		return fmt.Sprintf(operation, nest("a[i]", "b[i]"), nest("c[i]", "d[i]"))
	}
	return fmt.Sprintf(operation, "a[i]", "b[i]")
}

// half is a type of half-width elements. 16 of them, a vector, are worked on as two vectors of float32.
type half interface {
	name() string
	prepare() // once in a function, before the loop
	load(m Mem) [2]reg.VecVirtual
	round(v [2]reg.VecVirtual) // to the type
	store(v [2]reg.VecVirtual, m Mem)
}

// ieeeHalf is IEEE 754's binary16: the processor converts it (F16C).
type ieeeHalf struct{}

var float16 half = ieeeHalf{}

func (ieeeHalf) name() string { return "F16" }

func (ieeeHalf) prepare() {}

func (ieeeHalf) load(m Mem) [2]reg.VecVirtual {
	v := [2]reg.VecVirtual{YMM(), YMM()}
	VCVTPH2PS(m, v[0])
	VCVTPH2PS(m.Offset(vectorBytes/2), v[1])
	return v
}

const nearestEven = U8(0)

func (ieeeHalf) round(v [2]reg.VecVirtual) {
	for i := range v {
		x := XMM()
		VCVTPS2PH(nearestEven, v[i], x)
		VCVTPH2PS(x, v[i])
	}
}

func (ieeeHalf) store(v [2]reg.VecVirtual, m Mem) {
	VCVTPS2PH(nearestEven, v[0], m)
	VCVTPS2PH(nearestEven, v[1], m.Offset(vectorBytes/2))
}

// upperHalf is bfloat16: the upper half of a float32. The two vectors hold the lower and the upper four elements of each
// lane of 128 bits, as the instructions that interleave and pack have it.
type upperHalf struct{ zero, bias, quiet reg.VecVirtual }

var bfloat16 half = &upperHalf{}

func (*upperHalf) name() string { return "BF16" }

func (h *upperHalf) prepare() {
	h.zero, h.bias, h.quiet = YMM(), YMM(), YMM()
	VPXOR(h.zero, h.zero, h.zero)
	VPCMPEQD(h.bias, h.bias, h.bias)
	VPSRLD(Imm(17), h.bias, h.bias) // 0x7fff
	VPCMPEQD(h.quiet, h.quiet, h.quiet)
	VPSRLD(Imm(31), h.quiet, h.quiet)
	VPSLLD(Imm(22), h.quiet, h.quiet) // 0x00400000
}

func (h *upperHalf) load(m Mem) [2]reg.VecVirtual {
	both, v := YMM(), [2]reg.VecVirtual{YMM(), YMM()}
	VMOVDQU(m, both)
	VPUNPCKLWD(both, h.zero, v[0])
	VPUNPCKHWD(both, h.zero, v[1])
	return v
}

// toUpper sets v = v rounded to nearest even in the upper half; what is in the lower half does not count.
func (h *upperHalf) toUpper(v reg.VecVirtual) {
	even, rounded, mask := YMM(), YMM(), YMM()
	VPSLLD(Imm(15), v, even)
	VPSRLD(Imm(31), even, even)
	VPADDD(h.bias, v, rounded)
	VPADDD(even, rounded, rounded)
	VCMPPS(unordered, v, v, mask)
	VPOR(h.quiet, v, v)
	VBLENDVPS(mask, v, rounded, v)
}

func (h *upperHalf) round(v [2]reg.VecVirtual) {
	for i := range v {
		h.toUpper(v[i])
		VPSRLD(Imm(16), v[i], v[i])
		VPSLLD(Imm(16), v[i], v[i])
	}
}

func (h *upperHalf) pack(v [2]reg.VecVirtual) {
	for i := range v {
		h.toUpper(v[i])
		VPSRLD(Imm(16), v[i], v[i])
	}
	VPACKUSDW(v[1], v[0], v[0])
}

func (h *upperHalf) store(v [2]reg.VecVirtual, m Mem) {
	h.pack(v)
	VMOVDQU(v[0], m)
}

// widen writes the loop that converts to float32, narrow the one back. They count the bytes of the half-width elements.

func widen(h half) {
	dst, src, bytes, at := conversion("widen"+h.name(), fmt.Sprintf("dst[i] = float32 of src[i], which is %s,", h.name()))
	turns(at, bytes, 1, func(int) {
		from, to := Mem{Base: src, Index: at, Scale: 1}, Mem{Base: dst, Index: at, Scale: 2}
		for i := range 2 {
			v := YMM()
			if h == float16 {
				VCVTPH2PS(from.Offset(i*vectorBytes/2), v)
			} else {
				VPMOVZXWD(from.Offset(i*vectorBytes/2), v)
				VPSLLD(Imm(16), v, v)
			}
			VMOVUPS(v, to.Offset(i*vectorBytes))
		}
	})
}

func narrow(h half) {
	dst, src, bytes, at := conversion("narrow"+h.name(), fmt.Sprintf("dst[i] = %s of src[i], which is float32, rounded to nearest even,", h.name()))
	h.prepare()
	turns(at, bytes, 1, func(int) {
		from, to := Mem{Base: src, Index: at, Scale: 2}, Mem{Base: dst, Index: at, Scale: 1}
		v := [2]reg.VecVirtual{YMM(), YMM()}
		for i := range v {
			VMOVUPS(from.Offset(i*vectorBytes), v[i])
		}
		if b, ok := h.(*upperHalf); ok {
			b.pack(v)
			VPERMQ(Imm(0b11011000), v[0], v[0]) // packing took turns between the lanes
			VMOVDQU(v[0], to)
			return
		}
		h.store(v, to)
	})
}

func conversion(name, doc string) (dst, src, bytes, at reg.Register) {
	TEXT(name, NOSPLIT, "func(dst, src *byte, bytes int)")
	Doc(fmt.Sprintf("%s sets %s for so many bytes of half-width elements, a multiple of %d.", name, doc, vectorBytes))
	Pragma("noescape")
	dst, src, bytes = Load(Param("dst"), GP64()), Load(Param("src"), GP64()), Load(Param("bytes"), GP64())
	at = GP64()
	XORQ(at.(reg.GPVirtual), at.(reg.GPVirtual))
	return dst, src, bytes, at
}

// scale writes the loop that multiplies or divides every element by one number.
func scale(name, operator string, apply func(src Op, by, dst reg.VecVirtual), size int) {
	TEXT(name, NOSPLIT, fmt.Sprintf("func(dst, src *byte, bytes int, by float%d)", 8*size))
	Doc(fmt.Sprintf("%s sets dst[i] = src[i] %s by for so many bytes, a multiple of %d.", name, operator, vectorBytes))
	Pragma("noescape")
	dst := Load(Param("dst"), GP64())
	src := Load(Param("src"), GP64())
	bytes := Load(Param("bytes"), GP64())
	one, by := Load(Param("by"), XMM()).(reg.VecVirtual), YMM()
	if size == 4 {
		VBROADCASTSS(one, by)
	} else {
		VBROADCASTSD(one, by)
	}
	at := GP64()
	XORQ(at, at)
	turns(at, bytes, 4, func(vectors int) {
		for i := range vectors {
			v := YMM()
			apply(Mem{Base: src, Index: at, Scale: 1, Disp: i * vectorBytes}, by, v)
			VMOVUPS(v, Mem{Base: dst, Index: at, Scale: 1, Disp: i * vectorBytes})
		}
	})
}

// turns writes the loops around a body that handles some vectors from at on: many of them at a time, then one.
func turns(at, bytes reg.Register, many int, body func(vectors int)) {
	left := GP64()
	MOVQ(bytes, left)
	loop := func(name string, vectors int, then string) {
		Label(name)
		CMPQ(left, Imm(uint64(vectors*vectorBytes)))
		JLT(LabelRef(then))
		body(vectors)
		ADDQ(Imm(uint64(vectors*vectorBytes)), at)
		SUBQ(Imm(uint64(vectors*vectorBytes)), left)
		JMP(LabelRef(name))
	}
	if many > 1 {
		loop("wide", many, "narrow")
	}
	loop("narrow", 1, "done")
	Label("done")
	VZEROUPPER()
	RET()
}
