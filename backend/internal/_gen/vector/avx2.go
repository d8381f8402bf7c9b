package main

import (
	"fmt"
	"slices"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// avx2 is the target AVX2, by avo. Its vectors are registers, and constants in memory.
type avx2 struct{}

var constants = map[uint32]Mem{}

func (avx2) generate() error {
	ConstraintExpr("!noasm")
	Generate()
	return nil
}

func (avx2) bits(x uint32) vec {
	if m, ok := constants[x]; ok {
		return m
	}
	m := GLOBL(fmt.Sprintf("c%08x", x), RODATA|NOPTR)
	for i := range 8 {
		DATA(4*i, U32(x))
	}
	constants[x] = m
	return m
}

// register returns a vector in a register.
func register(v vec) reg.VecVirtual {
	if r, ok := v.(reg.VecVirtual); ok {
		return r
	}
	r := YMM()
	VMOVUPS(v.(Op), r)
	return r
}

// pair is two vectors, to which one constant in a register applies.
type pair [2]vec

// each applies f to operands, or to those of each vector of a pair.
func each(f func(in []vec) vec, in ...vec) vec {
	if !slices.ContainsFunc(in, isPair) {
		return f(in)
	}
	var first, second []vec
	for _, v := range in {
		if !isPair(v) {
			v = register(v)
			v = pair{v, v}
		}
		first, second = append(first, v.(pair)[0]), append(second, v.(pair)[1])
	}
	return pair{f(first), f(second)}
}

func isPair(v vec) bool { _, ok := v.(pair); return ok }

// three writes an instruction whose last operand is its result. The one before must be a register.
func three(instruction func(...Op), b, a vec) vec {
	return each(func(in []vec) vec {
		r := YMM()
		instruction(in[0].(Op), register(in[1]), r)
		return r
	}, b, a)
}

// two writes an instruction of one operand and a result.
func two(instruction func(...Op), a vec) vec {
	return each(func(in []vec) vec {
		r := YMM()
		instruction(register(in[0]), r)
		return r
	}, a)
}

func (avx2) add(a, b vec) vec { return three(func(o ...Op) { VADDPS(o[0], o[1], o[2]) }, b, a) }

func (avx2) sub(a, b vec) vec { return three(func(o ...Op) { VSUBPS(o[0], o[1], o[2]) }, b, a) }

func (avx2) mul(a, b vec) vec { return three(func(o ...Op) { VMULPS(o[0], o[1], o[2]) }, b, a) }

func (avx2) div(a, b vec) vec { return three(func(o ...Op) { VDIVPS(o[0], o[1], o[2]) }, b, a) }

func (avx2) and(a, b vec) vec { return three(func(o ...Op) { VANDPS(o[0], o[1], o[2]) }, b, a) }

func (avx2) or(a, b vec) vec { return three(func(o ...Op) { VORPS(o[0], o[1], o[2]) }, b, a) }

func (avx2) xor(a, b vec) vec { return three(func(o ...Op) { VXORPS(o[0], o[1], o[2]) }, b, a) }

func (avx2) addIntegers(a, b vec) vec { return three(func(o ...Op) { VPADDD(o[0], o[1], o[2]) }, b, a) }

func (avx2) subIntegers(a, b vec) vec { return three(func(o ...Op) { VPSUBD(o[0], o[1], o[2]) }, b, a) }

func (avx2) equalIntegers(a, b vec) vec {
	return three(func(o ...Op) { VPCMPEQD(o[0], o[1], o[2]) }, b, a)
}

func (avx2) lessIntegers(a, b vec) vec {
	return three(func(o ...Op) { VPCMPGTD(o[0], o[1], o[2]) }, a, b)
}

// The result is the operand that is written first if one is NaN.

func (avx2) atMost(a, b vec) vec  { return three(func(o ...Op) { VMINPS(o[0], o[1], o[2]) }, a, b) }
func (avx2) atLeast(a, b vec) vec { return three(func(o ...Op) { VMAXPS(o[0], o[1], o[2]) }, a, b) }

func (t avx2) larger(a, b vec) vec  { return keepNaN(a, t.atLeast(b, a)) }
func (t avx2) smaller(a, b vec) vec { return keepNaN(a, t.atMost(b, a)) }

// keepNaN is a where that is NaN, and b elsewhere.
func keepNaN(a, b vec) vec { return avx2{}.blend(comparison(3, a, a), a, b) }

func comparison(immediate uint64, a, b vec) vec {
	return three(func(o ...Op) { VCMPPS(Imm(immediate), o[0], o[1], o[2]) }, b, a)
}

func (avx2) compare(r relation, a, b vec) vec {
	return comparison(map[relation]uint64{
		equal: 0, less: 17, lessOrEqual: 18, greaterOrEqual: 29, different: 12, notEqual: 4, notLess: 5, notGreaterOrEqual: 9,
	}[r], a, b)
}

func (avx2) blend(mask, a, b vec) vec {
	return each(func(in []vec) vec {
		r := YMM()
		VBLENDVPS(register(in[0]), in[1].(Op), register(in[2]), r)
		return r
	}, mask, a, b)
}

func (avx2) sqrt(a vec) vec    { return two(func(o ...Op) { VSQRTPS(o[0], o[1]) }, a) }
func (avx2) round(a vec) vec   { return two(func(o ...Op) { VROUNDPS(Imm(8), o[0], o[1]) }, a) }
func (avx2) integer(a vec) vec { return two(func(o ...Op) { VCVTPS2DQ(o[0], o[1]) }, a) }
func (avx2) float(a vec) vec   { return two(func(o ...Op) { VCVTDQ2PS(o[0], o[1]) }, a) }

func (avx2) shiftLeft(a vec, by int) vec {
	return two(func(o ...Op) { VPSLLD(Imm(uint64(by)), o[0], o[1]) }, a)
}

func (avx2) shiftRight(a vec, by int) vec {
	return two(func(o ...Op) { VPSRLD(Imm(uint64(by)), o[0], o[1]) }, a)
}

func (avx2) shiftRightSigned(a vec, by int) vec {
	return two(func(o ...Op) { VPSRAD(Imm(uint64(by)), o[0], o[1]) }, a)
}

func (avx2) loop(name, doc string, operands []string, f func(in []vec) vec) {
	list := ""
	for _, o := range operands {
		list += ", " + o
	}
	TEXT(name, NOSPLIT, "func(dst"+list+" *byte, n int)")
	Doc(doc)
	Pragma("noescape")
	dst := Load(Param("dst"), GP64()).(reg.GPVirtual)
	var from []reg.GPVirtual
	for _, o := range operands {
		from = append(from, Load(Param(o), GP64()).(reg.GPVirtual))
	}
	n := Load(Param("n"), GP64())
	at := GP64()
	XORQ(at, at)
	// Two vectors at once share the constants. The last one may be alone.
	SUBQ(Imm(16), n)
	JLT(LabelRef("last"))
	Label("loop")
	var in []vec
	for _, p := range from {
		in = append(in, pair{
			register(Mem{Base: p, Index: at, Scale: 4}), register(Mem{Base: p, Index: at, Scale: 4, Disp: 32}),
		})
	}
	for i, v := range f(in).(pair) {
		VMOVUPS(v.(Op), Mem{Base: dst, Index: at, Scale: 4, Disp: 32 * i})
	}
	ADDQ(Imm(16), at)
	CMPQ(at, n)
	JLE(LabelRef("loop"))
	Label("last")
	ADDQ(Imm(16), n)
	CMPQ(at, n)
	JGE(LabelRef("done"))
	in = nil
	for _, p := range from {
		in = append(in, register(Mem{Base: p, Index: at, Scale: 4}))
	}
	VMOVUPS(f(in).(Op), Mem{Base: dst, Index: at, Scale: 4})
	Label("done")
	VZEROUPPER()
	RET()
}

func (avx2) scatterLargest(name string, doc ...string) {
	TEXT(name, NOSPLIT, "func(to, from *byte, places *int, rows int, add *byte, n int)")
	Doc(doc...)
	Pragma("noescape")
	load := func(name string) reg.GPVirtual { return Load(Param(name), GP64()).(reg.GPVirtual) }
	to, from, places, rows, add, n := load("to"), load("from"), load("places"), load("rows"), load("add"), load("n")
	row := func(base, at reg.GPVirtual) Mem { return Mem{Base: base, Index: at, Scale: 1} }
	one := YMM()
	VPCMPEQD(one, one, one)
	VPSRLD(Imm(31), one, one)
	Label("loop")
	best, which, number := YMM(), YMM(), YMM() // the number of the best row
	i, at := GP64(), GP64()
	MOVQ(Mem{Base: places}, at)
	VMOVUPS(row(from, at), best)
	VPXOR(which, which, which)
	VPXOR(number, number, number)
	XORQ(i, i)
	Label("next")
	INCQ(i)
	CMPQ(i, rows)
	JGE(LabelRef("chosen"))
	MOVQ(Mem{Base: places, Index: i, Scale: 8}, at)
	x, larger, nan := YMM(), YMM(), YMM()
	VMOVUPS(row(from, at), x)
	VPADDD(one, number, number)
	VCMPPS(Imm(30), best, x, larger)
	VCMPPS(Imm(3), x, x, nan)
	VORPS(nan, larger, larger)
	VBLENDVPS(larger, x, best, best)
	VBLENDVPS(larger, number, which, which)
	JMP(LabelRef("next"))
	Label("chosen")
	values := YMM()
	VMOVUPS(Mem{Base: add}, values)
	VPXOR(number, number, number)
	XORQ(i, i)
	Label("add")
	MOVQ(Mem{Base: places, Index: i, Scale: 8}, at)
	sum := YMM()
	VPCMPEQD(number, which, sum)
	VANDPS(values, sum, sum)
	VADDPS(row(to, at), sum, sum)
	VMOVUPS(sum, row(to, at))
	VPADDD(one, number, number)
	INCQ(i)
	CMPQ(i, rows)
	JL(LabelRef("add"))
	ADDQ(Imm(32), to)
	ADDQ(Imm(32), from)
	ADDQ(Imm(32), add)
	SUBQ(Imm(8), n)
	JG(LabelRef("loop"))
	VZEROUPPER()
	RET()
}
