// This program writes the vector loops of package kernel for amd64, for AVX2 or with -avx512 for AVX-512, and their
// declarations; with -table the Go table of all of them instead. Run it with go generate in internal/kernel.
package main

import (
	"flag"
	"log"

	"github.com/lockstep-ml/lockstep/internal/kernel/_gen/kinds"
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

func main() {
	avx512 := flag.Bool("avx512", false, "write the loops for AVX-512")
	table := flag.String("table", "", "write the table to this file, and no loops")
	flag.Parse()
	if *table != "" {
		if err := kinds.WriteTable(*table,
			kinds.Set{Name: "avx2Loops", File: "avx2_amd64.s", Switch: "scaleAVX2"},
			kinds.Set{Name: "avx512Loops", File: "avx512_amd64.s", Switch: "scaleAVX512", Suffix: "AVX512"},
		); err != nil {
			log.Fatal(err)
		}
		return
	}
	if *avx512 {
		vectorBytes, suffix = 64, "AVX512"
	}
	ConstraintExpr("!noasm")
	for _, k := range kinds.Reductions {
		reduce(k, 2)
		reduce(k, 3)
		reduce(k, 4)
	}
	for _, h := range []half{bfloat16, float16} {
		widen(h)
		narrow(h)
	}
	stream()
	if !wide() {
		fence()
	}
	for _, k := range kinds.Scalings {
		by(k)
	}
	addLargest()
	largest()
	quantize()
	dequantize("dequantize", false)
	dequantize("addDequantized", true)
	addScaled()
	dot()
	squares()
	Generate()
}

// vectorBytes is how much of each source a loop handles at least: a register. suffix ends the names of the functions.
var (
	vectorBytes = 32
	suffix      = ""
)

// begin starts a function that handles a multiple of so many bytes.
func begin(l kinds.Loop, bytes int) {
	TEXT(l.Name+suffix, NOSPLIT, l.Signature)
	Doc(l.Doc(suffix, bytes)...)
	Pragma("noescape")
}

// vec returns a new register, part one of half its size.

func vec() reg.VecVirtual {
	if wide() {
		return ZMM()
	}
	return YMM()
}

func part() reg.VecVirtual {
	if wide() {
		return YMM()
	}
	return XMM()
}

// wide reports whether AVX-512's instructions may be used.
func wide() bool { return vectorBytes == 64 }

// operations has the instructions of kinds. In a float instruction the left operand of the tree comes first: if both
// operands are NaNs, it is the one that stays. Avo's operands are in the order of Go's assembler, so that the left one
// stands second.
var operations = map[string]func(b, a, dst Op){
	"sumF32":   addPS,
	"prodF32":  mulPS,
	"minF32":   minPS,
	"maxF32":   maxPS,
	"sumF64":   addPD,
	"prodF64":  mulPD,
	"minF64":   minPD,
	"maxF64":   maxPD,
	"sumF16":   addPS,
	"prodF16":  mulPS,
	"minF16":   minPS,
	"maxF16":   maxPS,
	"sumBF16":  addPS,
	"prodBF16": mulPS,
	"minBF16":  minPS,
	"maxBF16":  maxPS,
	"sumI8":    func(b, a, dst Op) { VPADDB(b, a, dst) },
	"sumI16":   func(b, a, dst Op) { VPADDW(b, a, dst) },
	"sumI32":   func(b, a, dst Op) { VPADDD(b, a, dst) },
	"sumI64":   func(b, a, dst Op) { VPADDQ(b, a, dst) },
	"prodI8":   mulB,
	"prodI16":  func(b, a, dst Op) { VPMULLW(b, a, dst) },
	"prodI32":  func(b, a, dst Op) { VPMULLD(b, a, dst) },
	"prodI64":  mulQ,
	"minI8":    func(b, a, dst Op) { VPMINSB(b, a, dst) },
	"maxI8":    func(b, a, dst Op) { VPMAXSB(b, a, dst) },
	"minU8":    func(b, a, dst Op) { VPMINUB(b, a, dst) },
	"maxU8":    func(b, a, dst Op) { VPMAXUB(b, a, dst) },
	"minI16":   func(b, a, dst Op) { VPMINSW(b, a, dst) },
	"maxI16":   func(b, a, dst Op) { VPMAXSW(b, a, dst) },
	"minU16":   func(b, a, dst Op) { VPMINUW(b, a, dst) },
	"maxU16":   func(b, a, dst Op) { VPMAXUW(b, a, dst) },
	"minI32":   func(b, a, dst Op) { VPMINSD(b, a, dst) },
	"maxI32":   func(b, a, dst Op) { VPMAXSD(b, a, dst) },
	"minU32":   func(b, a, dst Op) { VPMINUD(b, a, dst) },
	"maxU32":   func(b, a, dst Op) { VPMAXUD(b, a, dst) },
	"minI64":   minQ,
	"maxI64":   maxQ,
	"minU64":   minUQ,
	"maxU64":   maxUQ,
	"quotF32":  func(b, a, dst Op) { VDIVPS(b, a, dst) },
	"quotF64":  func(b, a, dst Op) { VDIVPD(b, a, dst) },
}

// halfTypes are the types of half-width elements.
var halfTypes = map[string]half{"F16": float16, "BF16": bfloat16}

// ones sets all bits of a new register.
func ones() reg.VecVirtual {
	v := vec()
	if wide() {
		VPTERNLOGD(U8(0xff), v, v, v)
	} else {
		VPCMPEQD(v, v, v)
	}
	return v
}

func and(b, a, dst Op) {
	if wide() {
		VPANDD(b, a, dst)
	} else {
		VPAND(b, a, dst)
	}
}

func or(b, a, dst Op) {
	if wide() {
		VPORD(b, a, dst)
	} else {
		VPOR(b, a, dst)
	}
}

func xor(b, a, dst Op) {
	if wide() {
		VPXORD(b, a, dst)
	} else {
		VPXOR(b, a, dst)
	}
}

// mulB multiplies bytes: there is an instruction for words only. The even bytes come out right in the lower half of
// each word, the odd ones are shifted there and back.
func mulB(b, a, dst Op) {
	x := inRegister(b)
	low, even, left, right := ones(), vec(), vec(), vec()
	VPSRLW(Imm(8), low, low)
	VPMULLW(x, a, even)
	and(low, even, even)
	VPSRLW(Imm(8), a, left)
	VPSRLW(Imm(8), x, right)
	VPMULLW(right, left, left)
	VPSLLW(Imm(8), left, left)
	or(even, left, dst)
}

// mulQ multiplies 64 bits: AVX2 has only the product of the lower halves, which wants the mixed ones added above.
func mulQ(b, a, dst Op) {
	if wide() {
		VPMULLQ(b, a, dst)
		return
	}
	x := inRegister(b)
	low, left, right := vec(), vec(), vec()
	VPMULUDQ(x, a, low)
	VPSRLQ(Imm(32), a, left)
	VPMULUDQ(x, left, left)
	VPSRLQ(Imm(32), x, right)
	VPMULUDQ(a, right, right)
	VPADDQ(left, right, right)
	VPSLLQ(Imm(32), right, right)
	VPADDQ(low, right, dst)
}

// AVX2 has no minimum of 64 bits: it is chosen by a comparison, which is signed. Unsigned numbers compare like signed
// ones with the highest bit turned over.

func minQ(b, a, dst Op) {
	if wide() {
		VPMINSQ(b, a, dst)
		return
	}
	x, greater := inRegister(b), vec()
	VPCMPGTQ(x, a, greater)
	VBLENDVPD(greater, x, a, dst)
}

func maxQ(b, a, dst Op) {
	if wide() {
		VPMAXSQ(b, a, dst)
		return
	}
	x, greater := inRegister(b), vec()
	VPCMPGTQ(x, a, greater)
	VBLENDVPD(greater, a, x, dst)
}

func minUQ(b, a, dst Op) {
	if wide() {
		VPMINUQ(b, a, dst)
		return
	}
	x := inRegister(b)
	VBLENDVPD(aboveUQ(x, a), x, a, dst)
}

func maxUQ(b, a, dst Op) {
	if wide() {
		VPMAXUQ(b, a, dst)
		return
	}
	x := inRegister(b)
	VBLENDVPD(aboveUQ(x, a), a, x, dst)
}

// aboveUQ says where a > b, unsigned.
func aboveUQ(b, a Op) reg.VecVirtual {
	sign, left, right := ones(), vec(), vec()
	VPSLLQ(Imm(63), sign, sign)
	xor(sign, a, left)
	xor(sign, b, right)
	VPCMPGTQ(right, left, left)
	return left
}

func addPS(b, a, dst Op) { VADDPS(b, a, dst) }
func addPD(b, a, dst Op) { VADDPD(b, a, dst) }
func mulPS(b, a, dst Op) { VMULPS(b, a, dst) }
func mulPD(b, a, dst Op) { VMULPD(b, a, dst) }

// The instructions for a minimum return the second operand if both are zeros or one is a NaN. Taken both ways round and
// put together, the zeros' signs come out right; a NaN is replaced by the sum, which has the bits that are promised.

func minPS(b, a, dst Op) {
	x, y, z := inRegister(b), vec(), vec()
	VMINPS(x, a, y)
	VMINPS(a, x, z)
	VORPS(y, z, y)
	exceptNaN32(x, a, y, dst)
}

func maxPS(b, a, dst Op) {
	x, y, z := inRegister(b), vec(), vec()
	VMAXPS(x, a, y)
	VMAXPS(a, x, z)
	VANDPS(y, z, y)
	exceptNaN32(x, a, y, dst)
}

func minPD(b, a, dst Op) {
	x, y, z := inRegister(b), vec(), vec()
	VMINPD(x, a, y)
	VMINPD(a, x, z)
	VORPD(y, z, y)
	exceptNaN64(x, a, y, dst)
}

func maxPD(b, a, dst Op) {
	x, y, z := inRegister(b), vec(), vec()
	VMAXPD(x, a, y)
	VMAXPD(a, x, z)
	VANDPD(y, z, y)
	exceptNaN64(x, a, y, dst)
}

// unordered is the comparison that finds NaNs.
const unordered = U8(3)

// exceptNaN32 sets dst = result, but a + b where one of the two is a NaN.
func exceptNaN32(b, a, result, dst Op) {
	sum := vec()
	VADDPS(b, a, sum)
	whereNaN32(b, a, sum, result, dst)
}

func exceptNaN64(b, a, result, dst Op) {
	sum := vec()
	VADDPD(b, a, sum)
	if wide() {
		mask := K()
		VCMPPD(unordered, b, a, mask)
		VBLENDMPD(sum, result, mask, dst)
		return
	}
	mask := vec()
	VCMPPD(unordered, b, a, mask)
	VBLENDVPD(mask, sum, result, dst)
}

// whereNaN32 sets dst = then where a or b is a NaN, else otherwise.
func whereNaN32(b, a, then, otherwise, dst Op) {
	if wide() {
		mask := K()
		VCMPPS(unordered, b, a, mask)
		VBLENDMPS(then, otherwise, mask, dst)
		return
	}
	mask := vec()
	VCMPPS(unordered, b, a, mask)
	VBLENDVPS(mask, then, otherwise, dst)
}

func inRegister(x Op) Op {
	if _, memory := x.(Mem); !memory {
		return x
	}
	v := vec()
	VMOVUPS(x, v)
	return v
}

// reduce writes the loop over n sources. Turns of several vectors keep several loads under way; single ones do the
// rest. Numbers of half width are widened, and rounded again after each operation.
func reduce(k kinds.Kind, n int) {
	apply, h := operations[k.Name()], halfTypes[k.Lane]
	declared, names := k.Reduce(n)
	begin(declared, vectorBytes)
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
	if h == nil {
		turns(at, bytes, 4, func(vectors int) {
			v := make([]reg.VecVirtual, vectors)
			for i := range v {
				v[i] = vec()
				VMOVUPS(mem(src[0], i), v[i])
			}
			for i := range v {
				apply(mem(src[1], i), v[i], v[i])
			}
			switch n {
			case 3:
				for i := range v {
					apply(mem(src[2], i), v[i], v[i])
				}
			case 4:
				for i := range v {
					right := vec()
					VMOVUPS(mem(src[2], i), right)
					apply(mem(src[3], i), right, right)
					apply(right, v[i], v[i])
				}
			}
			for i := range v {
				VMOVUPS(v[i], mem(dst, i))
			}
		})
		return
	}
	h.prepare()
	both := func(left, right [2]reg.VecVirtual) {
		for i := range left {
			apply(right[i], left[i], left[i])
		}
	}
	turns(at, bytes, 1, func(int) {
		load := func(i int) [2]reg.VecVirtual { return h.load(mem(src[i], 0)) }
		v := load(0)
		both(v, load(1))
		switch n {
		case 3:
			h.round(v)
			both(v, load(2))
		case 4:
			h.round(v)
			right := load(2)
			both(right, load(3))
			h.round(right)
			both(v, right)
		}
		h.store(v, mem(dst, 0))
	})
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
	v := [2]reg.VecVirtual{vec(), vec()}
	VCVTPH2PS(m, v[0])
	VCVTPH2PS(m.Offset(vectorBytes/2), v[1])
	return v
}

const nearestEven = U8(0)

func (ieeeHalf) round(v [2]reg.VecVirtual) {
	for i := range v {
		x := part()
		VCVTPS2PH(nearestEven, v[i], x)
		VCVTPH2PS(x, v[i])
	}
}

func (ieeeHalf) store(v [2]reg.VecVirtual, m Mem) {
	VCVTPS2PH(nearestEven, v[0], m)
	VCVTPS2PH(nearestEven, v[1], m.Offset(vectorBytes/2))
}

// upperHalf is bfloat16: the upper half of a float32. The two vectors hold the lower and the upper four elements of
// each lane of 128 bits, as the instructions that interleave and pack have it.
type upperHalf struct{ zero, bias, quiet reg.VecVirtual }

var bfloat16 half = &upperHalf{}

func (*upperHalf) name() string { return "BF16" }

func (h *upperHalf) prepare() {
	h.zero, h.bias, h.quiet = vec(), ones(), ones()
	xor(h.zero, h.zero, h.zero)
	VPSRLD(Imm(17), h.bias, h.bias) // 0x7fff
	VPSRLD(Imm(31), h.quiet, h.quiet)
	VPSLLD(Imm(22), h.quiet, h.quiet) // 0x00400000
}

func (h *upperHalf) load(m Mem) [2]reg.VecVirtual {
	both, v := vec(), [2]reg.VecVirtual{vec(), vec()}
	VMOVUPS(m, both)
	VPUNPCKLWD(both, h.zero, v[0])
	VPUNPCKHWD(both, h.zero, v[1])
	return v
}

// toUpper sets v = v rounded to nearest even in the upper half; what is in the lower half does not count.
func (h *upperHalf) toUpper(v reg.VecVirtual) {
	even, rounded := vec(), vec()
	VPSLLD(Imm(15), v, even)
	VPSRLD(Imm(31), even, even)
	VPADDD(h.bias, v, rounded)
	VPADDD(even, rounded, rounded)
	quiet := vec()
	or(h.quiet, v, quiet)
	whereNaN32(v, v, quiet, rounded, v)
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
	VMOVUPS(v[0], m)
}

// widen writes the loop that converts to float32, narrow the one back. They count the bytes of the half-width elements.

func widen(h half) {
	dst, src, bytes, at := conversion("widen" + h.name())
	turns(at, bytes, 1, func(int) {
		from, to := Mem{Base: src, Index: at, Scale: 1}, Mem{Base: dst, Index: at, Scale: 2}
		for i := range 2 {
			v := vec()
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
	dst, src, bytes, at := conversion("narrow" + h.name())
	h.prepare()
	turns(at, bytes, 1, func(int) {
		from, to := Mem{Base: src, Index: at, Scale: 2}, Mem{Base: dst, Index: at, Scale: 1}
		v := [2]reg.VecVirtual{vec(), vec()}
		for i := range v {
			VMOVUPS(from.Offset(i*vectorBytes), v[i])
		}
		if b, ok := h.(*upperHalf); ok {
			if wide() {
				for i := range v {
					b.toUpper(v[i])
					VPSRLD(Imm(16), v[i], v[i])
					VPMOVDW(v[i], to.Offset(i*vectorBytes/2))
				}
				return
			}
			b.pack(v)
			VPERMQ(Imm(0b11011000), v[0], v[0]) // packing took turns between the lanes
			VMOVUPS(v[0], to)
			return
		}
		h.store(v, to)
	})
}

func conversion(name string) (dst, src, bytes, at reg.Register) {
	begin(kinds.Named(name), vectorBytes)
	dst, src, bytes = Load(Param("dst"), GP64()), Load(Param("src"), GP64()), Load(Param("bytes"), GP64())
	at = GP64()
	XORQ(at.(reg.GPVirtual), at.(reg.GPVirtual))
	return dst, src, bytes, at
}

// by writes the loop over a vector and one number, the right operand.
func by(k kinds.Kind) {
	apply := operations[k.Name()]
	begin(k.By(), vectorBytes)
	dst, src := Load(Param("dst"), GP64()), Load(Param("src"), GP64())
	one, number := Load(Param("by"), GP64()), vec()
	if k.Lane == "F32" {
		VBROADCASTSS(Mem{Base: one}, number)
	} else {
		VBROADCASTSD(Mem{Base: one}, number)
	}
	bytes, at := Load(Param("bytes"), GP64()), GP64()
	XORQ(at, at)
	turns(at, bytes, 4, func(vectors int) {
		v := make([]reg.VecVirtual, vectors)
		for i := range v {
			v[i] = vec()
			VMOVUPS(Mem{Base: src, Index: at, Scale: 1, Disp: i * vectorBytes}, v[i])
			apply(number, v[i], v[i])
		}
		for i := range v {
			VMOVUPS(v[i], Mem{Base: dst, Index: at, Scale: 1, Disp: i * vectorBytes})
		}
	})
}

// addLargest writes the loop that adds and finds the largest magnitude. As integers, the bits of magnitudes are in the
// order of the numbers, with NaNs above infinity.
func addLargest() {
	begin(kinds.Named("addLargest"), vectorBytes)
	dst, a, b := Load(Param("dst"), GP64()), Load(Param("a"), GP64()), Load(Param("b"), GP64())
	bytes, at := Load(Param("bytes"), GP64()), GP64()
	XORQ(at, at)
	magnitude, largest := ones(), [2]reg.VecVirtual{vec(), vec()}
	VPSRLD(Imm(1), magnitude, magnitude)
	for _, l := range largest {
		xor(l, l, l)
	}
	loops(at, bytes, 4, func(vectors int) {
		for i := range vectors {
			v := vec()
			VMOVUPS(Mem{Base: a, Index: at, Scale: 1, Disp: i * vectorBytes}, v)
			VADDPS(Mem{Base: b, Index: at, Scale: 1, Disp: i * vectorBytes}, v, v)
			VMOVUPS(v, Mem{Base: dst, Index: at, Scale: 1, Disp: i * vectorBytes})
			and(magnitude, v, v)
			VPMAXSD(v, largest[i%2], largest[i%2])
		}
	})
	VPMAXSD(largest[1], largest[0], largest[0])
	x := halves(largest[0], func(upper, lower Op) { VPMAXSD(upper, lower, lower) })
	result := GP32()
	VMOVD(x, result)
	VZEROUPPER()
	Store(result, ReturnIndex(0))
	RET()
}

// largest writes the loop that finds the largest magnitude, as addLargest does.
func largest() {
	begin(kinds.Named("largest"), vectorBytes)
	src, bytes, at := Load(Param("src"), GP64()), Load(Param("bytes"), GP64()), GP64()
	XORQ(at, at)
	magnitude, found := ones(), make([]reg.VecVirtual, 4)
	VPSRLD(Imm(1), magnitude, magnitude)
	for i := range found {
		found[i] = vec()
		xor(found[i], found[i], found[i])
	}
	loops(at, bytes, 4, func(vectors int) {
		for i := range vectors {
			v := vec()
			VMOVUPS(Mem{Base: src, Index: at, Scale: 1, Disp: i * vectorBytes}, v)
			and(magnitude, v, v)
			VPMAXSD(v, found[i], found[i])
		}
	})
	VPMAXSD(found[1], found[0], found[0])
	VPMAXSD(found[3], found[2], found[2])
	VPMAXSD(found[2], found[0], found[0])
	x := halves(found[0], func(upper, lower Op) { VPMAXSD(upper, lower, lower) })
	result := GP32()
	VMOVD(x, result)
	VZEROUPPER()
	Store(result, ReturnIndex(0))
	RET()
}

// halves combines the lanes of a vector of 32-bit elements: the upper half with the lower one, until one lane is left,
// the lowest of the returned register.
func halves(v reg.VecVirtual, combine func(upper, lower Op)) reg.VecVirtual {
	if wide() {
		upper := YMM()
		VEXTRACTF32X8(Imm(1), v, upper)
		combine(upper, v.AsY())
	}
	upper, x := XMM(), v.AsX()
	VEXTRACTF128(Imm(1), v.AsY(), upper)
	combine(upper, x)
	VPSHUFD(Imm(0b01001110), x, upper)
	combine(upper, x)
	VPSHUFD(Imm(0b00000001), x, upper)
	combine(upper, x)
	return x.(reg.VecVirtual)
}

// broadcast returns a vector filled with a float32 parameter.
func broadcast(param string) reg.VecVirtual {
	one, all := Load(Param(param), XMM()).(reg.VecVirtual), vec()
	VBROADCASTSS(one, all)
	return all
}

// quantize writes the loop that rounds to 8-bit integers. A turn makes a vector of them, out of four of float32.
func quantize() {
	begin(kinds.Named("quantize"), vectorBytes)
	q, e, bytes := Load(Param("q"), GP64()), Load(Param("e"), GP64()), Load(Param("bytes"), GP64())
	inverse, scale := broadcast("inverse"), broadcast("scale")
	var order reg.VecVirtual
	if !wide() {
		order = vec()
		VMOVDQU(packOrder(), order)
	}
	at := GP64()
	XORQ(at, at)
	turns(at, bytes, 1, func(int) {
		from, to := Mem{Base: e, Index: at, Scale: 4}, Mem{Base: q, Index: at, Scale: 1}
		var n [4]reg.VecVirtual
		for i := range n {
			v, rounded := vec(), vec()
			n[i] = vec()
			VMOVUPS(from.Offset(i*vectorBytes), v)
			VMULPS(inverse, v, rounded)
			VCVTPS2DQ(rounded, n[i])
			VCVTDQ2PS(n[i], rounded)
			VMULPS(scale, rounded, rounded)
			VSUBPS(rounded, v, v)
			VMOVUPS(v, from.Offset(i*vectorBytes))
			if wide() {
				VPMOVSDB(n[i], to.Offset(i*vectorBytes/4))
			}
		}
		if wide() {
			return
		}
		VPACKSSDW(n[1], n[0], n[0])
		VPACKSSDW(n[3], n[2], n[2])
		VPACKSSWB(n[2], n[0], n[0])
		VPERMD(n[0], order, n[0]) // packing took turns between the lanes
		VMOVDQU(n[0], to)
	})
}

// packOrder defines the positions of groups of four bytes after packing four vectors to one.
func packOrder() Mem {
	order := GLOBL("packOrder", RODATA|NOPTR)
	for i, at := range []uint32{0, 4, 1, 5, 2, 6, 3, 7} {
		DATA(4*i, U32(at))
	}
	return order
}

// dequantize writes the loop that multiplies 8-bit integers by their scale, and may add the products.
func dequantize(name string, add bool) {
	begin(kinds.Named(name), vectorBytes)
	dst, q, bytes := Load(Param("dst"), GP64()), Load(Param("q"), GP64()), Load(Param("bytes"), GP64())
	scale := broadcast("scale")
	at := GP64()
	XORQ(at, at)
	turns(at, bytes, 1, func(int) {
		to, from := Mem{Base: dst, Index: at, Scale: 4}, Mem{Base: q, Index: at, Scale: 1}
		for i := range 4 {
			v := vec()
			VPMOVSXBD(from.Offset(i*vectorBytes/4), v)
			VCVTDQ2PS(v, v)
			VMULPS(scale, v, v)
			if add {
				sum := vec()
				VMOVUPS(to.Offset(i*vectorBytes), sum)
				VADDPS(v, sum, v)
			}
			VMOVUPS(v, to.Offset(i*vectorBytes))
		}
	})
}

// addScaled writes the loop of a vector plus a multiple of another one. Product and sum are rounded separately.
func addScaled() {
	begin(kinds.Named("addScaled"), vectorBytes)
	dst, a, x := Load(Param("dst"), GP64()), Load(Param("a"), GP64()), Load(Param("x"), GP64())
	bytes, by, at := Load(Param("bytes"), GP64()), broadcast("by"), GP64()
	XORQ(at, at)
	turns(at, bytes, 4, func(vectors int) {
		for i := range vectors {
			v, sum := vec(), vec()
			VMULPS(Mem{Base: x, Index: at, Scale: 1, Disp: i * vectorBytes}, by, v)
			VMOVUPS(Mem{Base: a, Index: at, Scale: 1, Disp: i * vectorBytes}, sum)
			VADDPS(v, sum, sum)
			VMOVUPS(sum, Mem{Base: dst, Index: at, Scale: 1, Disp: i * vectorBytes})
		}
	})
}

// dot writes the loop of the dot product. It has as many partial sums with all kinds of registers, so that the bits are
// equal.
func dot() {
	const bytesPerTurn = 4 * kinds.DotLanes
	begin(kinds.Named("dot"), bytesPerTurn)
	a, b, bytes := Load(Param("a"), GP64()), Load(Param("b"), GP64()), Load(Param("bytes"), GP64())
	at := GP64()
	XORQ(at, at)
	sums := make([]reg.VecVirtual, bytesPerTurn/vectorBytes)
	for i := range sums {
		sums[i] = vec()
		xor(sums[i], sums[i], sums[i])
	}
	Label("turn")
	CMPQ(bytes, U32(bytesPerTurn))
	JLT(LabelRef("end"))
	for i, sum := range sums {
		v := vec()
		VMOVUPS(Mem{Base: a, Index: at, Scale: 1, Disp: i * vectorBytes}, v)
		VMULPS(Mem{Base: b, Index: at, Scale: 1, Disp: i * vectorBytes}, v, v)
		VADDPS(v, sum, sum)
	}
	ADDQ(U32(bytesPerTurn), at)
	SUBQ(U32(bytesPerTurn), bytes)
	JMP(LabelRef("turn"))
	Label("end")
	add := func(upper, lower Op) { VADDPS(upper, lower, lower) }
	for n := len(sums); n > 1; n /= 2 {
		for i := range n / 2 {
			add(sums[i+n/2], sums[i])
		}
	}
	result := halves(sums[0], add)
	VZEROUPPER()
	Store(result, ReturnIndex(0))
	RET()
}

// squares writes the loop that adds the squares of float32 numbers in 16 sums of float64. A product of two float32 is
// exact in float64, so a multiplication and an addition round as a fused one.
func squares() {
	begin(kinds.Named("squaresF32"), 64)
	sums, src, bytes := Load(Param("sums"), GP64()), Load(Param("src"), GP64()), Load(Param("bytes"), GP64())
	at := GP64()
	XORQ(at, at)
	acc := make([]reg.VecVirtual, 16*8/vectorBytes)
	for i := range acc {
		acc[i] = vec()
		VMOVUPD(Mem{Base: sums, Disp: i * vectorBytes}, acc[i])
	}
	Label("next")
	CMPQ(bytes, U32(64))
	JLT(LabelRef("done"))
	for i := range acc {
		v := vec()
		VCVTPS2PD(Mem{Base: src, Index: at, Scale: 1, Disp: i * vectorBytes / 2}, v)
		VMULPD(v, v, v)
		VADDPD(v, acc[i], acc[i])
	}
	ADDQ(U32(64), at)
	SUBQ(U32(64), bytes)
	JMP(LabelRef("next"))
	Label("done")
	for i := range acc {
		VMOVUPD(acc[i], Mem{Base: sums, Disp: i * vectorBytes})
	}
	VZEROUPPER()
	RET()
}

// stream writes the loop that copies with non-temporal stores: the written lines are not read first, and evict nothing
// from the caches.
func stream() {
	begin(kinds.Named("stream"), vectorBytes)
	dst, src, bytes := Load(Param("dst"), GP64()), Load(Param("src"), GP64()), Load(Param("bytes"), GP64())
	at := GP64()
	XORQ(at, at)
	turns(at, bytes, 4, func(vectors int) {
		v := make([]reg.VecVirtual, vectors)
		for i := range v {
			v[i] = vec()
			VMOVUPS(Mem{Base: src, Index: at, Scale: 1, Disp: i * vectorBytes}, v[i])
		}
		for i := range v {
			VMOVNTPS(v[i], Mem{Base: dst, Index: at, Scale: 1, Disp: i * vectorBytes})
		}
	})
}

// fence writes the function that orders what was streamed before what is written later.
func fence() {
	TEXT("fence", NOSPLIT, "func()")
	Doc("fence has what was streamed seen before what is written later.")
	SFENCE()
	RET()
}

// turns writes a function's loops, and its end.
func turns(at, bytes reg.Register, many int, body func(vectors int)) {
	loops(at, bytes, many, body)
	VZEROUPPER()
	RET()
}

// loops writes the loops around a body that handles some vectors from at on: many of them at a time, then one.
func loops(at, bytes reg.Register, many int, body func(vectors int)) {
	left := GP64()
	MOVQ(bytes, left)
	loop := func(name string, vectors int, then string) {
		Label(name)
		CMPQ(left, U32(uint32(vectors*vectorBytes)))
		JLT(LabelRef(then))
		body(vectors)
		ADDQ(U32(uint32(vectors*vectorBytes)), at)
		SUBQ(U32(uint32(vectors*vectorBytes)), left)
		JMP(LabelRef(name))
	}
	if many > 1 {
		loop("wide", many, "narrow")
	}
	loop("narrow", 1, "done")
	Label("done")
}
