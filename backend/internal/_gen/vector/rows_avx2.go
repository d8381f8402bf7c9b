package main

import (
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

func (t avx2) reductions() {
	t.rows("sumRowsVectors", "the sum", 0, t.add)
	t.rows("largestRowsVectors", "the largest", math.Inf(-1), t.larger)
}

// rows writes a loop that combines the elements of each row, as package vector's lanes do. identity changes no element
// that it is combined with.
func (t avx2) rows(name, doc string, identity float64, combine func(a, b vec) vec) {
	TEXT(name, NOSPLIT, "func(dst, a *byte, rows, columns int)")
	Doc(name+": dst is "+doc+" of each row of float32. Element i belongs to lane i modulo 32, and at the end the second",
		"half of the lanes is combined with the first half, until one is left. Neither number is 0.")
	Pragma("noescape")
	dst, a := Load(Param("dst"), GP64()).(reg.GPVirtual), Load(Param("a"), GP64()).(reg.GPVirtual)
	rows, columns := Load(Param("rows"), GP64()).(reg.GPVirtual), Load(Param("columns"), GP64()).(reg.GPVirtual)
	rest := GP64()
	MOVQ(columns, rest)
	ANDQ(Imm(31), rest)
	masks := GP64() // those of the rest of a row
	LEAQ(firstElements(), masks)
	ADDQ(Imm(128), masks)
	bytes := GP64()
	MOVQ(rest, bytes)
	SHLQ(Imm(2), bytes)
	SUBQ(bytes, masks)
	Label("row")
	none := t.bits(math.Float32bits(float32(identity)))
	var lanes []reg.VecVirtual
	for range 4 {
		lanes = append(lanes, register(none))
	}
	left := GP64()
	MOVQ(columns, left)
	SUBQ(Imm(32), left)
	JLT(LabelRef("rest"))
	Label("several")
	for i, v := range lanes {
		VMOVAPS(combine(v, register(Mem{Base: a, Disp: 32 * i})).(Op), v)
	}
	ADDQ(Imm(128), a)
	SUBQ(Imm(32), left)
	JGE(LabelRef("several"))
	Label("rest")
	TESTQ(rest, rest)
	JE(LabelRef("halves"))
	other := register(none)
	for i, v := range lanes {
		mask, x := register(Mem{Base: masks, Disp: 32 * i}), YMM()
		VMASKMOVPS(Mem{Base: a, Disp: 32 * i}, mask, x)
		VMOVAPS(combine(v, t.blend(mask, x, other)).(Op), v)
	}
	ADDQ(bytes, a)
	Label("halves")
	v, high := combine(combine(lanes[0], lanes[2]), combine(lanes[1], lanes[3])), YMM()
	VEXTRACTF128(Imm(1), v.(Op), high.AsX())
	v = combine(v, high)
	for _, from := range []uint64{0x0e, 0x01} {
		x := YMM()
		VPERMILPS(Imm(from), v.(Op), x)
		v = combine(v, x)
	}
	VMOVSS(v.(reg.VecVirtual).AsX(), Mem{Base: dst})
	ADDQ(Imm(4), dst)
	DECQ(rows)
	JG(LabelRef("row"))
	VZEROUPPER()
	RET()
}

var table Mem

// firstElements returns masks of 32 elements, and then of none.
func firstElements() Mem {
	if table.Symbol.Name == "" {
		table = GLOBL("firstElements", RODATA|NOPTR)
		for i := range 64 {
			DATA(4*i, U32(uint32(0xffffffff)*uint32(1-i/32)))
		}
	}
	return table
}

// addRows writes the loop that adds rows to a row.
func (avx2) addRows(name string, doc ...string) {
	TEXT(name, NOSPLIT, "func(dst, a *byte, rows, step, n int)")
	Doc(doc...)
	Pragma("noescape")
	dst, a := Load(Param("dst"), GP64()).(reg.GPVirtual), Load(Param("a"), GP64()).(reg.GPVirtual)
	rows, step := Load(Param("rows"), GP64()), Load(Param("step"), GP64())
	n := Load(Param("n"), GP64())
	for _, vectors := range []int{8, 1} {
		name := []string{"wide", "narrow"}[1/vectors]
		Label(name)
		CMPQ(n, Imm(uint64(8*vectors)))
		JLT(LabelRef(name + "Done"))
		var sums []reg.VecVirtual
		for i := range vectors {
			v := YMM()
			VMOVUPS(Mem{Base: dst, Disp: 32 * i}, v)
			sums = append(sums, v)
		}
		from, left := GP64(), GP64()
		MOVQ(a, from)
		MOVQ(rows, left)
		Label(name + "Row")
		for i, v := range sums {
			VADDPS(Mem{Base: from, Disp: 32 * i}, v, v)
		}
		ADDQ(step, from)
		DECQ(left)
		JG(LabelRef(name + "Row"))
		for i, v := range sums {
			VMOVUPS(v, Mem{Base: dst, Disp: 32 * i})
		}
		ADDQ(U32(uint32(32*vectors)), dst)
		ADDQ(U32(uint32(32*vectors)), a)
		SUBQ(Imm(uint64(8*vectors)), n)
		JMP(LabelRef(name))
		Label(name + "Done")
	}
	VZEROUPPER()
	RET()
}

// spread writes the loop that repeats the number of each row.
func (avx2) spread(name string, doc ...string) {
	TEXT(name, NOSPLIT, "func(dst, a *byte, rows, columns int)")
	Doc(doc...)
	Pragma("noescape")
	dst, a := Load(Param("dst"), GP64()).(reg.GPVirtual), Load(Param("a"), GP64()).(reg.GPVirtual)
	rows, columns := Load(Param("rows"), GP64()), Load(Param("columns"), GP64()).(reg.GPVirtual)
	last := GP64()
	MOVQ(columns, last)
	SUBQ(Imm(8), last)
	Label("row")
	v, at := YMM(), GP64()
	VBROADCASTSS(Mem{Base: a}, v)
	XORQ(at, at)
	Label("loop")
	VMOVUPS(v, Mem{Base: dst, Index: at, Scale: 4})
	ADDQ(Imm(8), at)
	CMPQ(at, last)
	JLE(LabelRef("loop"))
	VMOVUPS(v, Mem{Base: dst, Index: last, Scale: 4}) // the rest
	LEAQ(Mem{Base: dst, Index: columns, Scale: 4}, dst)
	ADDQ(Imm(4), a)
	DECQ(rows)
	JG(LabelRef("row"))
	VZEROUPPER()
	RET()
}
