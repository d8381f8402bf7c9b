// This program writes the AVX2 loops of package kernel: avx2_amd64.s, and their declarations in avx2_amd64.go. Run it with
// go generate in internal/kernel.
package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// kind is an operation on a type of elements, by the instruction that does it on a vector of 32 bytes.
type kind struct {
	name  string // of the functions: sumF32 gives sumF32x2, sumF32x3, sumF32x4
	doc   string // the operation in Go
	apply func(b, a, dst Op)
}

// In a float instruction the left operand of the tree comes first, as in the generic loops: avo's operands are in the
// order of Go's assembler, so that the left one stands second.
var kinds = []kind{
	{"sumF32", "+", func(b, a, dst Op) { VADDPS(b, a, dst) }},
	{"sumF64", "+", func(b, a, dst Op) { VADDPD(b, a, dst) }},
	{"prodF32", "*", func(b, a, dst Op) { VMULPS(b, a, dst) }},
	{"prodF64", "*", func(b, a, dst Op) { VMULPD(b, a, dst) }},
	{"sumI8", "+", func(b, a, dst Op) { VPADDB(b, a, dst) }},
	{"sumI16", "+", func(b, a, dst Op) { VPADDW(b, a, dst) }},
	{"sumI32", "+", func(b, a, dst Op) { VPADDD(b, a, dst) }},
	{"sumI64", "+", func(b, a, dst Op) { VPADDQ(b, a, dst) }},
}

const vectorBytes = 32

func main() {
	ConstraintExpr("!noasm")
	for _, k := range kinds {
		reduce(k, 2)
		reduce(k, 3)
		reduce(k, 4)
	}
	scale("mulF32", "*", func(src Op, by, dst reg.VecVirtual) { VMULPS(src, by, dst) }, 4)
	scale("mulF64", "*", func(src Op, by, dst reg.VecVirtual) { VMULPD(src, by, dst) }, 8)
	scale("divF32", "/", func(src Op, by, dst reg.VecVirtual) { VMOVUPS(src, dst); VDIVPS(by, dst, dst) }, 4)
	scale("divF64", "/", func(src Op, by, dst reg.VecVirtual) { VMOVUPD(src, dst); VDIVPD(by, dst, dst) }, 8)
	Generate()
}

// reduce writes the loop over n sources. Turns of four vectors keep several loads under way; single ones do the rest.
func reduce(k kind, n int) {
	expression := map[int]string{2: "a[i] %[1]s b[i]", 3: "(a[i] %[1]s b[i]) %[1]s c[i]", 4: "(a[i] %[1]s b[i]) %[1]s (c[i] %[1]s d[i])"}[n]
	names := []string{"a", "b", "c", "d"}[:n]
	name := fmt.Sprintf("%sx%d", k.name, n)
	signature := "func(dst"
	for _, s := range names {
		signature += ", " + s
	}
	TEXT(name, NOSPLIT, signature+" *byte, bytes int)")
	Doc(fmt.Sprintf("%s sets dst[i] = %s for so many bytes, a multiple of %d.", name, fmt.Sprintf(expression, k.doc), vectorBytes))
	Pragma("noescape")
	dst := Load(Param("dst"), GP64())
	var src []reg.Register
	for _, s := range names {
		src = append(src, Load(Param(s), GP64()))
	}
	bytes := Load(Param("bytes"), GP64())
	at := GP64()
	XORQ(at, at)
	body := func(vectors int) {
		v := make([][]reg.VecVirtual, vectors)
		mem := func(base reg.Register, i int) Mem {
			return Mem{Base: base, Index: at, Scale: 1, Disp: i * vectorBytes}
		}
		for i := range v {
			v[i] = []reg.VecVirtual{YMM()}
			VMOVUPS(mem(src[0], i), v[i][0])
		}
		for i := range v {
			k.apply(mem(src[1], i), v[i][0], v[i][0])
		}
		switch n {
		case 3:
			for i := range v {
				k.apply(mem(src[2], i), v[i][0], v[i][0])
			}
		case 4:
			for i := range v {
				right := YMM()
				VMOVUPS(mem(src[2], i), right)
				k.apply(mem(src[3], i), right, right)
				k.apply(right, v[i][0], v[i][0])
			}
		}
		for i := range v {
			VMOVUPS(v[i][0], mem(dst, i))
		}
	}
	turns(at, bytes, body)
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
	turns(at, bytes, func(vectors int) {
		for i := range vectors {
			v := YMM()
			apply(Mem{Base: src, Index: at, Scale: 1, Disp: i * vectorBytes}, by, v)
			VMOVUPS(v, Mem{Base: dst, Index: at, Scale: 1, Disp: i * vectorBytes})
		}
	})
}

// turns writes the loops around a body that handles some vectors from at on.
func turns(at, bytes reg.Register, body func(vectors int)) {
	const wide = 4
	left := GP64()
	MOVQ(bytes, left)
	Label("wide")
	CMPQ(left, Imm(wide*vectorBytes))
	JLT(LabelRef("narrow"))
	body(wide)
	ADDQ(Imm(wide*vectorBytes), at)
	SUBQ(Imm(wide*vectorBytes), left)
	JMP(LabelRef("wide"))
	Label("narrow")
	CMPQ(left, Imm(vectorBytes))
	JLT(LabelRef("done"))
	body(1)
	ADDQ(Imm(vectorBytes), at)
	SUBQ(Imm(vectorBytes), left)
	JMP(LabelRef("narrow"))
	Label("done")
	VZEROUPPER()
	RET()
}
