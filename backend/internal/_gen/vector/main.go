// This program writes the loops of package vector for amd64 with AVX2, and their declarations. Run it with go generate
// in backend/internal/vector.
package main

import (
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

type vec = reg.VecVirtual

func main() {
	ConstraintExpr("!noasm")
	two("add", "is a + b", func(a, b vec) vec { return add(a, b) })
	two("sub", "is a - b", func(a, b vec) vec { return sub(a, b) })
	two("mul", "is a · b", func(a, b vec) vec { return mul(a, b) })
	two("div", "is a / b", func(a, b vec) vec { return div(a, b) })
	two("larger", "is the larger one of a and b, or NaN", func(a, b vec) vec { return extreme(VMAXPS, a, b) })
	two("smaller", "is the smaller one of a and b, or NaN", func(a, b vec) vec { return extreme(VMINPS, a, b) })
	for _, c := range []struct {
		name string
		imm  uint64
	}{{"equal", 0}, {"less", 17}, {"lessOrEqual", 18}, {"notEqual", 4}} {
		two(c.name, "has all bits set where a and b compare so", func(a, b vec) vec { return compare(c.imm, a, b) })
	}
	one("negate", "is -a", func(a vec) vec { return xor(a, bits(0x80000000)) })
	one("absolute", "is |a|", func(a vec) vec { return and(a, bits(0x7fffffff)) })
	one("oneWhere", "is 1 where the mask a is set, and 0 elsewhere", func(a vec) vec { return and(a, number(1)) })
	one("sign", "is 1 or -1 with the sign of a, or a if it is 0 or NaN", func(a vec) vec {
		return blend(compare(12, a, bits(0)), or(and(a, bits(0x80000000)), number(1)), a)
	})
	one("sqrt", "is the square root of a", func(a vec) vec { r := YMM(); VSQRTPS(a, r); return r })
	one("exp", "is e to the power of a", exp)
	one("log", "is the natural logarithm of a", log)
	one("tanh", "is the hyperbolic tangent of a", tanh)
	one("logistic", "is 1/(1 + exp(-a))", logistic)
	one("erf", "is the error function of a", erf)
	choose()
	scatterLargest()
	reduce("sumLanes", "adds", func(a Op, to vec) { VADDPS(a, to, to) })
	reduce("largestLanes", "takes the largest of", func(a Op, to vec) {
		x := YMM()
		VMOVUPS(a, x)
		r := extreme(VMAXPS, to, x)
		VMOVAPS(r, to)
	})
	Generate()
}

// one writes a loop over one operand.
func one(name, doc string, f func(a vec) vec) {
	loop(name, doc, []string{"a"}, func(in []vec) vec { return f(in[0]) })
}

// two writes a loop over two operands.
func two(name, doc string, f func(a, b vec) vec) {
	loop(name, doc, []string{"a", "b"}, func(in []vec) vec { return f(in[0], in[1]) })
}

func loop(name, doc string, operands []string, f func(in []vec) vec) {
	list := ""
	for _, o := range operands {
		list += ", " + o
	}
	TEXT(name+"AVX2", NOSPLIT, "func(dst"+list+" *byte, n int)")
	Doc(name + "AVX2: dst " + doc + ", for n float32. n is a multiple of 8 and not 0.")
	Pragma("noescape")
	dst := Load(Param("dst"), GP64()).(reg.GPVirtual)
	var from []reg.GPVirtual
	for _, o := range operands {
		from = append(from, Load(Param(o), GP64()).(reg.GPVirtual))
	}
	n := Load(Param("n"), GP64())
	at := GP64()
	XORQ(at, at)
	Label("loop")
	var in []vec
	for _, p := range from {
		v := YMM()
		VMOVUPS(Mem{Base: p, Index: at, Scale: 4}, v)
		in = append(in, v)
	}
	VMOVUPS(f(in), Mem{Base: dst, Index: at, Scale: 4})
	ADDQ(Imm(8), at)
	CMPQ(at, n)
	JL(LabelRef("loop"))
	VZEROUPPER()
	RET()
}

// choose writes the loop of Where.
func choose() {
	loop("choose", "is a where the mask c is set, and b elsewhere", []string{"c", "a", "b"}, func(in []vec) vec {
		return blend(in[0], in[1], in[2])
	})
}

// scatterLargest writes the loop that adds numbers where rows have their largest element.
func scatterLargest() {
	TEXT("scatterLargestAVX2", NOSPLIT, "func(to, from *byte, places *int, rows int, add *byte, n int)")
	Doc("scatterLargestAVX2 adds each of n float32 to the row of to where the rows of from have the first largest",
		"element, or the last NaN. places are the first elements of the rows, in bytes. n is a multiple of 8. Neither",
		"number is 0.")
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

// reduce writes a loop that combines the elements with the same number modulo 32.
func reduce(name, doc string, f func(a Op, to vec)) {
	TEXT(name+"AVX2", NOSPLIT, "func(lanes, a *byte, n int)")
	Doc(name + "AVX2 " + doc + " the elements i, i + 32, … of a and element i of lanes. n is a multiple of 32 and not 0.")
	Pragma("noescape")
	lanes, a := Load(Param("lanes"), GP64()).(reg.GPVirtual), Load(Param("a"), GP64()).(reg.GPVirtual)
	n := Load(Param("n"), GP64())
	var sums []vec
	for i := range 4 {
		v := YMM()
		VMOVUPS(Mem{Base: lanes, Disp: 32 * i}, v)
		sums = append(sums, v)
	}
	Label("loop")
	for i, v := range sums {
		f(Mem{Base: a, Disp: 32 * i}, v)
	}
	ADDQ(Imm(128), a)
	SUBQ(Imm(32), n)
	JG(LabelRef("loop"))
	for i, v := range sums {
		VMOVUPS(v, Mem{Base: lanes, Disp: 32 * i})
	}
	VZEROUPPER()
	RET()
}

var constants = map[uint32]Mem{}

// bits returns a vector of 8 equal numbers in memory.
func bits(x uint32) Mem {
	if m, ok := constants[x]; ok {
		return m
	}
	m := GLOBL("c"+hex(x), RODATA|NOPTR)
	for i := range 8 {
		DATA(4*i, U32(x))
	}
	constants[x] = m
	return m
}

func hex(x uint32) string {
	s := ""
	for range 8 {
		s = string("0123456789abcdef"[x&15]) + s
		x >>= 4
	}
	return s
}

func number(x float64) Mem { return bits(math.Float32bits(float32(x))) }

func add(a vec, b Op) vec { r := YMM(); VADDPS(b, a, r); return r }
func sub(a vec, b Op) vec { r := YMM(); VSUBPS(b, a, r); return r } // a - b
func mul(a vec, b Op) vec { r := YMM(); VMULPS(b, a, r); return r }
func div(a vec, b Op) vec { r := YMM(); VDIVPS(b, a, r); return r } // a / b
func and(a vec, b Op) vec { r := YMM(); VANDPS(b, a, r); return r }
func or(a vec, b Op) vec  { r := YMM(); VORPS(b, a, r); return r }
func xor(a vec, b Op) vec { r := YMM(); VXORPS(b, a, r); return r }

// constant loads a number.
func constant(x float64) vec { r := YMM(); VMOVUPS(number(x), r); return r }

func compare(imm uint64, a vec, b Op) vec { r := YMM(); VCMPPS(Imm(imm), b, a, r); return r }

// blend is a where the mask is set, and b elsewhere.
func blend(mask, a, b vec) vec { r := YMM(); VBLENDVPS(mask, a, b, r); return r }

// extreme is a if it is NaN, and otherwise what the instruction makes of a and b: b if that is NaN.
func extreme(instruction func(...Op), a, b vec) vec {
	r := YMM()
	instruction(b, a, r)
	return blend(compare(3, a, a), a, r)
}

// polynomial evaluates a polynomial by Horner's rule, coefficients from the highest power on.
func polynomial(x vec, coefficients ...float64) vec {
	p := constant(coefficients[0])
	for _, c := range coefficients[1:] {
		p = add(mul(p, x), number(c))
	}
	return p
}

func power(n vec) vec { // 2 to the power of an integer
	r := YMM()
	VPADDD(bits(127), n, r)
	VPSLLD(Imm(23), r, r)
	return r
}

func exp(x vec) vec {
	// Where the result is 0, it is made of another number, since products that underflow are slow. NaN stays.
	kept := compare(5, x, number(-104))
	c := YMM()
	VMINPS(and(x, kept), constant(89), c)
	n := YMM()
	VROUNDPS(Imm(8), mul(c, number(1.44269504)), n)
	r := add(sub(c, mul(n, number(0.693359375))), mul(n, number(2.12194440e-4)))
	p := polynomial(r, 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
		5.0000001201e-1)
	y := add(add(mul(mul(p, r), r), r), number(1))
	i, half, rest := YMM(), YMM(), YMM()
	VCVTPS2DQ(n, i)
	VPSRAD(Imm(1), i, half)
	VPSUBD(half, i, rest)
	return and(mul(mul(y, power(half)), power(rest)), kept)
}

func log(x vec) vec {
	tiny := compare(17, x, number(0x1p-126))
	s := blend(tiny, mul(x, number(0x1p25)), x)
	e, m := YMM(), YMM()
	VPSRLD(Imm(23), s, e)
	VPSUBD(bits(126), e, e)
	VCVTDQ2PS(e, e)
	e = sub(e, and(tiny, number(25)))
	VPAND(bits(0x7fffff), s, m)
	VPOR(bits(0x3f000000), m, m)
	low := compare(17, m, number(0.70710678118654752440))
	e = sub(e, and(low, number(1)))
	m = sub(add(m, and(low, m)), number(1))
	z := mul(m, m)
	y := mul(mul(polynomial(m, 7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
		-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1), m), z)
	y = add(y, mul(e, number(-2.12194440e-4)))
	y = sub(y, mul(z, number(0.5)))
	r := add(add(m, y), mul(e, number(0.693359375)))
	inf := YMM()
	VMOVUPS(number(math.Inf(1)), inf)
	r = blend(compare(0, x, number(math.Inf(1))), inf, r)
	minus := YMM()
	VMOVUPS(number(math.Inf(-1)), minus)
	r = blend(compare(0, x, number(0)), minus, r)
	return or(r, compare(9, x, number(0))) // not ≥ 0: NaN
}

func tanh(x vec) vec {
	a := and(x, bits(0x7fffffff))
	large := sub(constant(1), div(constant(2), add(exp(add(a, a)), number(1))))
	large = or(large, and(x, bits(0x80000000)))
	z := mul(x, x)
	p := polynomial(z, -5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
	small := add(mul(mul(p, z), x), x)
	return blend(compare(29, a, number(0.625)), large, small)
}

func logistic(x vec) vec {
	return div(constant(1), add(exp(xor(x, bits(0x80000000))), number(1)))
}

func erf(x vec) vec {
	t, c := YMM(), YMM()
	VMAXPS(x, constant(-3.832506856900711), t)
	VMINPS(t, constant(3.832506856900711), c)
	z := mul(c, c)
	p := polynomial(z, 0.00022905065861350646, 0.0034082910107109506, 0.050955695062380861, 0.18520832239976145,
		1.128379143519084)
	q := polynomial(z, -1.1791602954361697e-7, 0.000023547966471313185, 0.0010179625278914885, 0.014070470171167667,
		0.11098505178285362, 0.49746925110067538, 1)
	low, y := YMM(), YMM()
	VMAXPS(div(mul(c, p), q), constant(-1), low)
	VMINPS(low, constant(1), y)
	return y
}
