package main

import "fmt"

// vreg is the number of a vector register.
type vreg int

// arrangement is how a register of 128 bits is divided into lanes.
type arrangement struct {
	name   string // of the GNU assembler
	goName string
	size   uint32 // 0 to 3: of 1, 2, 4 and 8 bytes
}

var (
	b16 = arrangement{"16b", "B16", 0}
	h8  = arrangement{"8h", "H8", 1}
	s4  = arrangement{"4s", "S4", 2}
	d2  = arrangement{"2d", "D2", 3}
)

// The instructions, each as in the Arm Architecture Reference Manual, C7.2. All of them are in ARMv8.0. The comment
// beside each word is what the GNU disassembler prints for it; TestEncodings compares both.
var (
	fadd  = floats("fadd", 0x4e20d400)
	fsub  = floats("fsub", 0x4ea0d400)
	fmul  = floats("fmul", 0x6e20dc00)
	fdiv  = floats("fdiv", 0x6e20fc00)
	fmin  = floats("fmin", 0x4ea0f400)
	fmax  = floats("fmax", 0x4e20f400)
	fcmeq = floats("fcmeq", 0x4e20e400)

	add  = integers("add", 0x4e208400)
	mul  = integers("mul", 0x4e209c00)
	smin = integers("smin", 0x4e206c00)
	smax = integers("smax", 0x4e206400)
	umin = integers("umin", 0x6e206c00)
	umax = integers("umax", 0x6e206400)
	cmgt = integers("cmgt", 0x4e203400)
	cmhi = integers("cmhi", 0x6e203400)
	uzp1 = integers("uzp1", 0x4e001800)
	uzp2 = integers("uzp2", 0x4e005800)

	and = bits("and", 0x4e201c00)
	orr = bits("orr", 0x4ea01c00)
	bsl = bits("bsl", 0x6e601c00) // d = d ? n : m
	bit = bits("bit", 0x6ea01c00) // d = m ? n : d

	fsqrt  = float("fsqrt", 0x6ea1f800)
	fabs   = float("fabs", 0x4ea0f800)
	scvtf  = float("scvtf", 0x4e21d800)
	fcvtns = float("fcvtns", 0x4e21a800)

	fcvtl   = convert("fcvtl", 0x0e217800, "4s", "4h")
	fcvtl2  = convert("fcvtl2", 0x4e217800, "4s", "8h")
	fcvtlD  = convert("fcvtl", 0x0e617800, "2d", "2s")
	fcvtl2D = convert("fcvtl2", 0x4e617800, "2d", "4s")
	fcvtn   = convert("fcvtn", 0x0e216800, "4h", "4s")
	fcvtn2  = convert("fcvtn2", 0x4e216800, "8h", "4s")
)

// word writes an instruction.
func word(w uint32, format string, args ...any) {
	line("WORD $0x%08x // %s", w, fmt.Sprintf(format, args...))
}

// floats are instructions on the floating-point lanes of two registers: d = n ∘ m.
func floats(name string, base uint32) func(t arrangement, d, n, m vreg) {
	return func(t arrangement, d, n, m vreg) { three(name, base|t.size&1<<22, t, d, n, m) }
}

// integers are instructions on the integer lanes of two registers, or which move lanes.
func integers(name string, base uint32) func(t arrangement, d, n, m vreg) {
	return func(t arrangement, d, n, m vreg) { three(name, base|t.size<<22, t, d, n, m) }
}

// bits are instructions on all bits of registers.
func bits(name string, base uint32) func(d, n, m vreg) {
	return func(d, n, m vreg) { three(name, base, b16, d, n, m) }
}

func three(name string, base uint32, t arrangement, d, n, m vreg) {
	word(base|uint32(m)<<16|uint32(n)<<5|uint32(d), "%s v%d.%s, v%d.%s, v%d.%s", name, d, t.name, n, t.name, m, t.name)
}

// float is an instruction on the floating-point lanes of one register.
func float(name string, base uint32) func(t arrangement, d, n vreg) {
	return func(t arrangement, d, n vreg) { two(name, base|t.size&1<<22, t.name, t.name, d, n) }
}

// convert is an instruction between lanes of two sizes.
func convert(name string, base uint32, to, from string) func(d, n vreg) {
	return func(d, n vreg) { two(name, base, to, from, d, n) }
}

func two(name string, base uint32, to, from string, d, n vreg) {
	word(base|uint32(n)<<5|uint32(d), "%s v%d.%s, v%d.%s", name, d, to, n, from)
}

// shll and shll2 shift the lower and the upper four lanes of 16 bits to the upper halves of lanes of 32 bits.

func shll(d, n vreg)  { shiftLong("shll", 0x2e613800, "4h", d, n) }
func shll2(d, n vreg) { shiftLong("shll2", 0x6e613800, "8h", d, n) }

func shiftLong(name string, base uint32, from string, d, n vreg) {
	word(base|uint32(n)<<5|uint32(d), "%s v%d.4s, v%d.%s, #16", name, d, n, from)
}

// sxtl and sxtl2 extend the lower and the upper lanes of half the size, signed, to lanes of t.

func sxtl(t arrangement, d, n vreg) {
	two("sxtl", 0x0f00a400|8<<(t.size-1)<<16, t.name, map[arrangement]string{h8: "8b", s4: "4h"}[t], d, n)
}

func sxtl2(t arrangement, d, n vreg) {
	two("sxtl2", 0x4f00a400|8<<(t.size-1)<<16, t.name, map[arrangement]string{h8: "16b", s4: "8h"}[t], d, n)
}

// shl sets d = n << by, usra d += n >> by, unsigned, in lanes of 32 bits.

func shl(d, n vreg, by int) {
	word(0x4f005400|uint32(32+by)<<16|uint32(n)<<5|uint32(d), "shl v%d.4s, v%d.4s, #%d", d, n, by)
}

func usra(d, n vreg, by int) {
	word(0x6f001400|uint32(64-by)<<16|uint32(n)<<5|uint32(d), "usra v%d.4s, v%d.4s, #%d", d, n, by)
}

// fmaxv, umaxv and fmaxpd set the lowest lane of d to the maximum over all lanes of n.

func fmaxv(d, n vreg) { word(0x6e30f800|uint32(n)<<5|uint32(d), "fmaxv s%d, v%d.4s", d, n) }
func umaxv(d, n vreg) { word(0x6eb0a800|uint32(n)<<5|uint32(d), "umaxv s%d, v%d.4s", d, n) }

func fmaxpd(d, n vreg) { word(0x7e70f800|uint32(n)<<5|uint32(d), "fmaxp d%d, v%d.2d", d, n) }

// stnp stores two registers from an address on, with the hint that they will not be read soon.
func stnp(a, b vreg, pointer string, offset int) {
	var base uint32
	fmt.Sscanf(pointer, "R%d", &base)
	at := fmt.Sprintf("[x%d]", base)
	if offset != 0 {
		at = fmt.Sprintf("[x%d, #%d]", base, offset)
	}
	word(0xac000000|uint32(offset/16)&0x7f<<15|uint32(b)<<10|base<<5|uint32(a), "stnp q%d, q%d, %s", a, b, at)
}

// vmov copies a register.
func vmov(d, n vreg) {
	if d != n {
		line("VMOV V%d.B16, V%d.B16", n, d)
	}
}
