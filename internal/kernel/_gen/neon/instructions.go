package neon

import "fmt"

// Vreg is the number of a vector register.
type Vreg int

// Arrangement is how a register of 128 bits is divided into lanes.
type Arrangement struct {
	name   string // of the GNU assembler
	GoName string
	size   uint32 // 0 to 3: of 1, 2, 4 and 8 bytes
}

// The arrangements.
var (
	B16 = Arrangement{"16b", "B16", 0}
	H8  = Arrangement{"8h", "H8", 1}
	S4  = Arrangement{"4s", "S4", 2}
	D2  = Arrangement{"2d", "D2", 3}
)

// The instructions, each as in the Arm Architecture Reference Manual, C7.2. All of them are in ARMv8.0. The comment
// beside each word is what the GNU disassembler prints for it; TestEncodings compares both.
var (
	FADD  = floats("fadd", 0x4e20d400)
	FSUB  = floats("fsub", 0x4ea0d400)
	FMUL  = floats("fmul", 0x6e20dc00)
	FDIV  = floats("fdiv", 0x6e20fc00)
	FMIN  = floats("fmin", 0x4ea0f400)
	FMAX  = floats("fmax", 0x4e20f400)
	FCMEQ = floats("fcmeq", 0x4e20e400)
	FCMGE = floats("fcmge", 0x6e20e400)
	FCMGT = floats("fcmgt", 0x6ea0e400)

	ADD  = integers("add", 0x4e208400)
	SUB  = integers("sub", 0x6e208400)
	MUL  = integers("mul", 0x4e209c00)
	SMIN = integers("smin", 0x4e206c00)
	SMAX = integers("smax", 0x4e206400)
	UMIN = integers("umin", 0x6e206c00)
	UMAX = integers("umax", 0x6e206400)
	CMGT = integers("cmgt", 0x4e203400)
	CMHI = integers("cmhi", 0x6e203400)
	CMEQ = integers("cmeq", 0x6e208c00)
	TRN1 = integers("trn1", 0x4e002800)
	TRN2 = integers("trn2", 0x4e006800)
	UZP1 = integers("uzp1", 0x4e001800)
	UZP2 = integers("uzp2", 0x4e005800)

	AND = bits("and", 0x4e201c00)
	ORR = bits("orr", 0x4ea01c00)
	ORN = bits("orn", 0x4ee01c00) // d = n | ^m
	EOR = bits("eor", 0x6e201c00)
	BSL = bits("bsl", 0x6e601c00) // d = d ? n : m
	BIT = bits("bit", 0x6ea01c00) // d = m ? n : d

	FSQRT  = float("fsqrt", 0x6ea1f800)
	FABS   = float("fabs", 0x4ea0f800)
	FNEG   = float("fneg", 0x6ea0f800)
	FRINTN = float("frintn", 0x4e218800)
	SCVTF  = float("scvtf", 0x4e21d800)
	FCVTNS = float("fcvtns", 0x4e21a800)

	FCVTL   = convert("fcvtl", 0x0e217800, "4s", "4h")
	FCVTL2  = convert("fcvtl2", 0x4e217800, "4s", "8h")
	FCVTLD  = convert("fcvtl", 0x0e617800, "2d", "2s")
	FCVTL2D = convert("fcvtl2", 0x4e617800, "2d", "4s")
	FCVTN   = convert("fcvtn", 0x0e216800, "4h", "4s")
	FCVTN2  = convert("fcvtn2", 0x4e216800, "8h", "4s")
)

// word writes an instruction.
func word(w uint32, format string, args ...any) {
	Line("WORD $0x%08x // %s", w, fmt.Sprintf(format, args...))
}

// floats are instructions on the floating-point lanes of two registers: d = n ∘ m.
func floats(name string, base uint32) func(t Arrangement, d, n, m Vreg) {
	return func(t Arrangement, d, n, m Vreg) { three(name, base|t.size&1<<22, t, d, n, m) }
}

// integers are instructions on the integer lanes of two registers, or which move lanes.
func integers(name string, base uint32) func(t Arrangement, d, n, m Vreg) {
	return func(t Arrangement, d, n, m Vreg) { three(name, base|t.size<<22, t, d, n, m) }
}

// bits are instructions on all bits of registers.
func bits(name string, base uint32) func(d, n, m Vreg) {
	return func(d, n, m Vreg) { three(name, base, B16, d, n, m) }
}

func three(name string, base uint32, t Arrangement, d, n, m Vreg) {
	word(base|uint32(m)<<16|uint32(n)<<5|uint32(d), "%s v%d.%s, v%d.%s, v%d.%s", name, d, t.name, n, t.name, m, t.name)
}

// float is an instruction on the floating-point lanes of one register.
func float(name string, base uint32) func(t Arrangement, d, n Vreg) {
	return func(t Arrangement, d, n Vreg) { two(name, base|t.size&1<<22, t.name, t.name, d, n) }
}

// convert is an instruction between lanes of two sizes.
func convert(name string, base uint32, to, from string) func(d, n Vreg) {
	return func(d, n Vreg) { two(name, base, to, from, d, n) }
}

func two(name string, base uint32, to, from string, d, n Vreg) {
	word(base|uint32(n)<<5|uint32(d), "%s v%d.%s, v%d.%s", name, d, to, n, from)
}

// SHLL and SHLL2 shift the lower and the upper four lanes of 16 bits to the upper halves of lanes of 32 bits.

func SHLL(d, n Vreg)  { shiftLong("shll", 0x2e613800, "4h", d, n) }
func SHLL2(d, n Vreg) { shiftLong("shll2", 0x6e613800, "8h", d, n) }

func shiftLong(name string, base uint32, from string, d, n Vreg) {
	word(base|uint32(n)<<5|uint32(d), "%s v%d.4s, v%d.%s, #16", name, d, n, from)
}

// SXTL and SXTL2 extend the lower and the upper lanes of half the size, signed, to lanes of t.

func SXTL(t Arrangement, d, n Vreg) {
	two("sxtl", 0x0f00a400|8<<(t.size-1)<<16, t.name, map[Arrangement]string{H8: "8b", S4: "4h"}[t], d, n)
}

func SXTL2(t Arrangement, d, n Vreg) {
	two("sxtl2", 0x4f00a400|8<<(t.size-1)<<16, t.name, map[Arrangement]string{H8: "16b", S4: "8h"}[t], d, n)
}

// Shifts of lanes of 32 bits: SHL sets d = n << by, USHR and SSHR d = n >> by, unsigned and signed, and USRA
// d += n >> by, unsigned.

func SHL(d, n Vreg, by int)  { shift("shl", 0x4f005400, 32+by, d, n, by) }
func USHR(d, n Vreg, by int) { shift("ushr", 0x6f000400, 64-by, d, n, by) }
func SSHR(d, n Vreg, by int) { shift("sshr", 0x4f000400, 64-by, d, n, by) }
func USRA(d, n Vreg, by int) { shift("usra", 0x6f001400, 64-by, d, n, by) }

func shift(name string, base uint32, immediate int, d, n Vreg, by int) {
	word(base|uint32(immediate)<<16|uint32(n)<<5|uint32(d), "%s v%d.4s, v%d.4s, #%d", name, d, n, by)
}

// FMLA sets d += n · the lowest lane of m, fused, in lanes of 4 or 8 bytes.
func FMLA(t Arrangement, d, n, m Vreg) {
	word(0x4f801000|t.size&1<<22|uint32(m)<<16|uint32(n)<<5|uint32(d), "fmla v%d.%s, v%d.%s, v%d.%s[0]", d, t.name, n,
		t.name, m, t.name[1:])
}

// NOT sets d = ^n.
func NOT(d, n Vreg) { two("not", 0x6e205800, "16b", "16b", d, n) }

// FMAXV, UMAXV and FMAXPD set the lowest lane of d to the maximum over all lanes of n.

func FMAXV(d, n Vreg) { word(0x6e30f800|uint32(n)<<5|uint32(d), "fmaxv s%d, v%d.4s", d, n) }
func UMAXV(d, n Vreg) { word(0x6eb0a800|uint32(n)<<5|uint32(d), "umaxv s%d, v%d.4s", d, n) }

func FMAXPD(d, n Vreg) { word(0x7e70f800|uint32(n)<<5|uint32(d), "fmaxp d%d, v%d.2d", d, n) }

// STNP stores two registers from an address on, with the hint that they will not be read soon.
func STNP(a, b Vreg, pointer string, offset int) {
	var base uint32
	fmt.Sscanf(pointer, "R%d", &base)
	at := fmt.Sprintf("[x%d]", base)
	if offset != 0 {
		at = fmt.Sprintf("[x%d, #%d]", base, offset)
	}
	word(0xac000000|uint32(offset/16)&0x7f<<15|uint32(b)<<10|base<<5|uint32(a), "stnp q%d, q%d, %s", a, b, at)
}

// VMOV copies a register.
func VMOV(d, n Vreg) {
	if d != n {
		Line("VMOV V%d.B16, V%d.B16", n, d)
	}
}
