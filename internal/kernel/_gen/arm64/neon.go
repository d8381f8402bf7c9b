package main

import (
	"github.com/lockstep-ml/lockstep/internal/kernel/_gen/kinds"
	. "github.com/lockstep-ml/lockstep/internal/kernel/_gen/neon"
)

// The loops for NEON, arm64's vector instructions. Avo has only amd64, and Go's assembler lacks most floating-point
// instructions of vectors: those are written as words, with their names beside them (instructions.go).
//
// The rules of NaNs differ from those of package kernel: a signaling NaN precedes a quiet one, and an invalid operation
// gives a positive NaN. A NaN stays one until the end of an expression, so a loop over floating-point numbers handles
// several vectors in a turn, and looks once whether a NaN is among the results. If so, the turn is repeated by the
// careful loop, which chooses every bit of a NaN as the package specifies. The same loop handles the last vectors.

// neonBytes is a vector register: the loops handle multiples of it.
const neonBytes = Bytes

// begin starts a loop that handles a multiple of so many bytes.
func begin(l kinds.Loop, bytes int) { Begin(l.Name, l.Signature, l.Doc("", bytes)...) }

// neonOps are the instructions of kinds. An operation that is missing has no loop: Go's loop multiplies
// 64-bit integers as fast, since there is no such instruction for vectors.
var neonOps = map[string]neonOp{
	"sumF32": {FADD, S4}, "prodF32": {FMUL, S4}, "quotF32": {FDIV, S4},
	"sumF64": {FADD, D2}, "prodF64": {FMUL, D2}, "quotF64": {FDIV, D2},
	"minF32": {FMIN, S4}, "maxF32": {FMAX, S4}, "minF64": {FMIN, D2}, "maxF64": {FMAX, D2},
	"sumF16": {FADD, S4}, "prodF16": {FMUL, S4}, "minF16": {FMIN, S4}, "maxF16": {FMAX, S4},
	"sumBF16": {FADD, S4}, "prodBF16": {FMUL, S4}, "minBF16": {FMIN, S4}, "maxBF16": {FMAX, S4},
	"sumI8": {ADD, B16}, "sumI16": {ADD, H8}, "sumI32": {ADD, S4}, "sumI64": {ADD, D2},
	"prodI8": {MUL, B16}, "prodI16": {MUL, H8}, "prodI32": {MUL, S4},
	"minI8": {SMIN, B16}, "minI16": {SMIN, H8}, "minI32": {SMIN, S4},
	"maxI8": {SMAX, B16}, "maxI16": {SMAX, H8}, "maxI32": {SMAX, S4},
	"minU8": {UMIN, B16}, "minU16": {UMIN, H8}, "minU32": {UMIN, S4},
	"maxU8": {UMAX, B16}, "maxU16": {UMAX, H8}, "maxU32": {UMAX, S4},
	"minI64": {chosenBy(CMGT, false), D2}, "maxI64": {chosenBy(CMGT, true), D2},
	"minU64": {chosenBy(CMHI, false), D2}, "maxU64": {chosenBy(CMHI, true), D2},
}

// neonOp is an operation on the lanes of a register.
type neonOp struct {
	apply func(t Arrangement, d, n, m Vreg)
	lanes Arrangement
}

// chosenBy is a minimum or maximum of 64-bit integers, for which there is only a comparison.
func chosenBy(greater func(t Arrangement, d, n, m Vreg), largest bool) func(t Arrangement, d, n, m Vreg) {
	return func(t Arrangement, d, n, m Vreg) {
		mask := NewReg()
		greater(t, mask, n, m)
		if largest {
			BSL(mask, n, m)
		} else {
			BSL(mask, m, n)
		}
		VMOV(d, mask)
	}
}

// writeLoops writes the loops and their declarations.
func writeLoops() {
	for _, k := range kinds.Reductions {
		if op, ok := neonOps[k.Name()]; ok {
			for n := 2; n <= 4; n++ {
				neonReduce(k, op, n)
			}
		}
	}
	for _, h := range []neonHalf{{name: "BF16"}, {name: "F16", ieee: true}} {
		neonWiden(h)
		neonNarrow(h)
	}
	neonStream()
	for _, k := range kinds.Scalings {
		neonBy(k, neonOps[k.Name()])
	}
	neonAddLargest()
	neonLargest()
	neonQuantize()
	neonDequantize("dequantize", false)
	neonDequantize("addDequantized", true)
	neonAddScaled()
	neonDot()
	neonSquares()
}

// neonReduce writes the loop over n sources.
func neonReduce(k kinds.Kind, op neonOp, n int) {
	declared, names := k.Reduce(n)
	begin(declared, neonBytes)
	if !k.Float() {
		Loops(4*neonBytes, neonBytes, func(bytes int, _ bool) {
			v := tree(n, func(i int) []Vreg { return Load(names[i], bytes) },
				func(left, right []Vreg) { Each(left, right, func(l, r Vreg) { op.apply(op.lanes, l, l, r) }) }, nil)
			Store("dst", v)
		})
		End()
		return
	}
	nans := newNaNs(op.lanes)
	apply := func(careful bool) func(left, right []Vreg) {
		return func(left, right []Vreg) {
			Each(left, right, func(l, r Vreg) { nans.apply(careful, op.apply, l, l, r) })
		}
	}
	if k.Lane != "F16" && k.Lane != "BF16" {
		Loops(4*neonBytes, neonBytes, func(bytes int, careful bool) {
			v := tree(n, func(i int) []Vreg { return Load(names[i], bytes) }, apply(careful), nil)
			nans.check(careful, v)
			Store("dst", v)
		})
		End()
		return
	}
	h := neonHalf{name: k.Lane, ieee: k.Lane == "F16"}
	h.prepare(nans)
	Loops(2*neonBytes, neonBytes, func(bytes int, careful bool) {
		v := tree(n, func(i int) []Vreg { return h.load(names[i], bytes) }, apply(careful), func(v []Vreg) {
			if !h.ieee { // rounding could turn a NaN into a number
				nans.collect(careful, v)
			}
			h.round(careful, v)
		})
		nans.check(careful, v)
		Store("dst", h.pack(careful, v))
	})
	End()
}

// tree combines n sources, each in several registers, and returns those of the result. The results of operations that
// are operands of others are rounded.
func tree(n int, load func(i int) []Vreg, apply func(left, right []Vreg), round func([]Vreg)) []Vreg {
	if round == nil {
		round = func([]Vreg) {}
	}
	v := load(0)
	scratch := Used()
	apply(v, load(1))
	Release(scratch)
	switch n {
	case 3:
		round(v)
		Release(scratch)
		apply(v, load(2))
	case 4:
		round(v)
		Release(scratch)
		right := load(2)
		inner := Used()
		apply(right, load(3))
		Release(inner)
		round(right)
		Release(inner)
		apply(v, right)
	}
	Release(scratch)
	return v
}

// nans chooses the bits of NaNs as package kernel specifies.
type nans struct {
	lanes          Arrangement
	quiet, invalid Vreg
	collected      bool
	largest        Vreg // a NaN in a lane if there was one in any collected register
}

func newNaNs(lanes Arrangement) *nans {
	n := &nans{lanes: lanes, quiet: Constant(lanes, 0x00400000, 0x0008000000000000)}
	n.invalid = Constant(lanes, 0xffc00000, 0xfff8000000000000)
	n.largest = NewConstantReg()
	return n
}

// apply sets d = a ⊕ b, and if careful, chooses the bits of a NaN.
func (n *nans) apply(careful bool, op func(t Arrangement, d, n, m Vreg), d, a, b Vreg) {
	if !careful {
		op(n.lanes, d, a, b)
		return
	}
	mark := Used()
	result := NewReg()
	op(n.lanes, result, a, b)
	n.choose(d, result, a, b)
	Release(mark)
}

// choose sets d = result, but where that is a NaN a or else b, made quiet, if one of them is a NaN, and else the NaN of
// an invalid operation.
func (n *nans) choose(d, result, a, b Vreg) {
	operand, chosen := NewReg(), NewReg()
	FCMEQ(n.lanes, operand, a, a)
	BSL(operand, b, a)
	FCMEQ(n.lanes, chosen, operand, operand)
	BSL(chosen, n.invalid, operand)
	ORR(chosen, chosen, n.quiet)
	FCMEQ(n.lanes, operand, result, result)
	BSL(operand, result, chosen)
	VMOV(d, operand)
}

// check repeats the turn in the careful loop if there is a NaN in the registers, or was in those collected before.
func (n *nans) check(careful bool, v []Vreg) {
	if careful {
		return
	}
	n.collect(careful, v)
	n.collected = false
	n.checkCollected()
}

// collect remembers whether there is a NaN in the registers: the maximum of a NaN and anything is a NaN.
func (n *nans) collect(careful bool, v []Vreg) {
	if careful {
		return
	}
	mark := Used()
	defer Release(mark)
	v = append([]Vreg{}, v...)
	if n.collected {
		v = append(v, n.largest)
	}
	n.collected = true
	for len(v) > 1 {
		d := n.largest
		if len(v) > 2 {
			d = NewReg()
		}
		FMAX(n.lanes, d, v[0], v[1])
		v = append(v[2:], d)
	}
}

func (n *nans) checkCollected() {
	if n.lanes == S4 {
		FMAXV(n.largest, n.largest)
		Line("FCMPS F%d, F%d", n.largest, n.largest)
	} else {
		FMAXPD(n.largest, n.largest)
		Line("FCMPD F%d, F%d", n.largest, n.largest)
	}
	Line("BVS nan")
	RepeatFromHere()
}

// neonHalf is a type of half-width elements: IEEE 754's binary16, which base NEON converts, or bfloat16, the upper half
// of a float32, which is rounded by integer instructions: those for bfloat16 came later than ARMv8.0.
type neonHalf struct {
	name        string
	ieee        bool
	bias, upper Vreg
	nans        *nans
}

// prepare loads the constants.
func (h *neonHalf) prepare(n *nans) {
	if !h.ieee {
		h.nans = n
		h.bias, h.upper = Constant(S4, 0x7fff, 0), Constant(S4, 0xffff0000, 0)
	}
}

// load returns registers of float32 for so many bytes of a source.
func (h *neonHalf) load(source string, bytes int) []Vreg {
	wide := NewRegs(2 * bytes / neonBytes)
	mark := Used()
	for i, v := range Load(source, bytes) {
		h.widen(wide[2*i], wide[2*i+1], v)
	}
	Release(mark)
	return wide
}

func (h *neonHalf) widen(low, high, v Vreg) {
	if h.ieee {
		FCVTL(low, v)
		FCVTL2(high, v)
	} else {
		SHLL(low, v)
		SHLL2(high, v)
	}
}

// round rounds to the type and widens again.
func (h *neonHalf) round(careful bool, v []Vreg) {
	if h.ieee {
		for i := 0; i < len(v); i += 2 {
			x := NewReg()
			FCVTN(x, v[i])
			FCVTN2(x, v[i+1])
			h.widen(v[i], v[i+1], x)
		}
		return
	}
	for _, x := range v {
		h.roundUpper(careful, x)
		AND(x, x, h.upper)
	}
}

// roundUpper rounds to nearest even in the upper half; what is in the lower half does not count. It makes NaNs quiet if
// careful, else x must not be one.
func (h *neonHalf) roundUpper(careful bool, x Vreg) {
	mark := Used()
	defer Release(mark)
	odd := NewReg()
	SHL(odd, x, 15)
	if !careful {
		ADD(S4, x, x, h.bias)
		USRA(x, odd, 31)
		return
	}
	rounded, isNumber := NewReg(), NewReg()
	ADD(S4, rounded, x, h.bias)
	USRA(rounded, odd, 31)
	FCMEQ(S4, isNumber, x, x)
	ORR(x, x, h.nans.quiet)
	BIT(x, rounded, isNumber)
}

// pack rounds to the type and returns registers of half width.
func (h *neonHalf) pack(careful bool, v []Vreg) []Vreg {
	for i := 0; i < len(v); i += 2 {
		if h.ieee {
			x := NewReg()
			FCVTN(x, v[i])
			FCVTN2(x, v[i+1])
			VMOV(v[i/2], x)
			continue
		}
		h.roundUpper(careful, v[i])
		h.roundUpper(careful, v[i+1])
		UZP2(H8, v[i/2], v[i], v[i+1])
	}
	return v[:len(v)/2]
}

func neonWiden(h neonHalf) {
	begin(kinds.Named("widen"+h.name), neonBytes)
	Loops(2*neonBytes, neonBytes, func(bytes int, _ bool) { Store("dst", h.load("src", bytes)) })
	End()
}

func neonNarrow(h neonHalf) {
	begin(kinds.Named("narrow"+h.name), neonBytes)
	if h.ieee {
		Loops(2*neonBytes, neonBytes, func(bytes int, _ bool) { Store("dst", h.pack(false, Load("src", 2*bytes))) })
		End()
		return
	}
	nans := newNaNs(S4)
	h.prepare(nans)
	Loops(2*neonBytes, neonBytes, func(bytes int, careful bool) {
		v := Load("src", 2*bytes)
		nans.check(careful, v)
		Store("dst", h.pack(careful, v))
	})
	End()
}

// neonBy writes the loop over a vector and one number, the right operand.
func neonBy(k kinds.Kind, op neonOp) {
	begin(k.By(), neonBytes)
	nans := newNaNs(op.lanes)
	by := NewConstantReg()
	Line("VLD1R (%s), [V%d.%s]", Param("by"), by, op.lanes.GoName)
	Loops(4*neonBytes, neonBytes, func(bytes int, careful bool) {
		v := Load("src", bytes)
		for _, x := range v {
			nans.apply(careful, op.apply, x, x, by)
		}
		nans.check(careful, v)
		Store("dst", v)
	})
	End()
}

// neonAddLargest writes the loop that adds and finds the largest magnitude. As integers, the bits of magnitudes are in
// the order of the numbers, with NaNs above infinity.
func neonAddLargest() {
	begin(kinds.Named("addLargest"), neonBytes)
	nans := newNaNs(S4)
	largest := Constant(S4, 0, 0)
	Loops(4*neonBytes, neonBytes, func(bytes int, careful bool) {
		v := Load("a", bytes)
		Each(v, Load("b", bytes), func(x, y Vreg) { nans.apply(careful, FADD, x, x, y) })
		magnitudes := NewRegs(len(v))
		Each(magnitudes, v, func(m, x Vreg) { FABS(S4, m, x) })
		nans.collect(careful, magnitudes)
		if !careful {
			VMOV(magnitudes[0], nans.largest)
			nans.collected = false
			nans.checkCollected()
		}
		UMAX(S4, largest, largest, magnitudes[0])
		Store("dst", v)
	})
	UMAXV(largest, largest)
	Line("FMOVS F%d, ret+%d(FP)", largest, ResultOffset)
	End()
}

// neonLargest writes the loop that finds the largest magnitude, as neonAddLargest does.
func neonLargest() {
	begin(kinds.Named("largest"), neonBytes)
	largest := Constant(S4, 0, 0)
	Loops(4*neonBytes, neonBytes, func(bytes int, _ bool) {
		v := Load("src", bytes)
		for _, x := range v {
			FABS(S4, x, x)
		}
		for ; len(v) > 1; v = v[:len(v)/2] {
			Each(v[:len(v)/2], v[len(v)/2:], func(x, y Vreg) { UMAX(S4, x, x, y) })
		}
		UMAX(S4, largest, largest, v[0])
	})
	UMAXV(largest, largest)
	Line("FMOVS F%d, ret+%d(FP)", largest, ResultOffset)
	End()
}

// neonQuantize writes the loop that rounds to 8-bit integers. A turn makes a vector of them, out of four of float32.
func neonQuantize() {
	begin(kinds.Named("quantize"), neonBytes)
	inverse, scale := BroadcastParam("inverse"), BroadcastParam("scale")
	Loop(neonBytes, func() {
		v, n := LoadInPlace("e", 4*neonBytes), NewRegs(4)
		for i, x := range v {
			rounded := NewReg()
			FMUL(S4, rounded, x, inverse)
			FCVTNS(S4, n[i], rounded)
			SCVTF(S4, rounded, n[i])
			FMUL(S4, rounded, rounded, scale)
			FSUB(S4, x, x, rounded)
		}
		Store("e", v)
		UZP1(H8, n[0], n[0], n[1])
		UZP1(H8, n[2], n[2], n[3])
		UZP1(B16, n[0], n[0], n[2])
		Store("q", n[:1])
	})
	End()
}

// neonDequantize writes the loop that multiplies 8-bit integers by their scale, and may add the products.
func neonDequantize(name string, sum bool) {
	begin(kinds.Named(name), neonBytes)
	nans, scale := newNaNs(S4), BroadcastParam("scale")
	Loops(neonBytes, neonBytes, func(bytes int, careful bool) {
		v, words := NewRegs(4), NewRegs(2)
		q := Load("q", bytes)[0]
		SXTL(H8, words[0], q)
		SXTL2(H8, words[1], q)
		for i, w := range words {
			SXTL(S4, v[2*i], w)
			SXTL2(S4, v[2*i+1], w)
		}
		for _, x := range v {
			SCVTF(S4, x, x)
			nans.apply(careful, FMUL, x, x, scale)
		}
		if sum {
			Each(v, LoadInPlace("dst", 4*bytes), func(x, y Vreg) { nans.apply(careful, FADD, x, y, x) })
		}
		nans.check(careful, v)
		Store("dst", v)
	})
	End()
}

// neonAddScaled writes the loop of a vector plus a multiple of another one. Product and sum are rounded separately.
func neonAddScaled() {
	begin(kinds.Named("addScaled"), neonBytes)
	nans, by := newNaNs(S4), BroadcastParam("by")
	Loops(4*neonBytes, neonBytes, func(bytes int, careful bool) {
		v := Load("x", bytes)
		for _, x := range v {
			nans.apply(careful, FMUL, x, by, x)
		}
		Each(v, Load("a", bytes), func(x, a Vreg) { nans.apply(careful, FADD, x, a, x) })
		nans.check(careful, v)
		Store("dst", v)
	})
	End()
}

// neonDot writes the loop of the dot product. If the result is a NaN, all is computed again in the careful way.
func neonDot() {
	const bytesPerTurn = 4 * kinds.DotLanes
	begin(kinds.Named("dot"), bytesPerTurn)
	nans, sums := newNaNs(S4), NewRegs(bytesPerTurn/neonBytes)
	for _, careful := range []bool{false, true} {
		prefix := map[bool]string{false: "", true: "careful"}[careful]
		for _, s := range sums {
			Line("VEOR V%d.B16, V%d.B16, V%d.B16", s, s, s)
		}
		Line("MOVD %s, R10", Param("a"))
		Line("MOVD %s, R11", Param("b"))
		Line("MOVD %s, R12", Param("bytes"))
		Line("CBZ R12, %send", prefix)
		Label(prefix + "turn")
		for half := range 2 {
			mark := Used()
			x, y := NewRegs(4), NewRegs(4)
			Line("VLD1.P 64(R10), %s", List(x))
			Line("VLD1.P 64(R11), %s", List(y))
			Each(x, y, func(x, y Vreg) { nans.apply(careful, FMUL, x, x, y) })
			Each(sums[4*half:][:4], x, func(s, x Vreg) { nans.apply(careful, FADD, s, s, x) })
			Release(mark)
		}
		Line("SUBS $%d, R12, R12", bytesPerTurn)
		Line("BNE %sturn", prefix)
		Label(prefix + "end")
		for n := len(sums) / 2; n > 0; n /= 2 {
			Each(sums[:n], sums[n:2*n], func(x, y Vreg) { nans.apply(careful, FADD, x, x, y) })
		}
		for _, bytes := range []int{8, 4} {
			upper := NewReg()
			Line("VEXT $%d, V%d.B16, V%d.B16, V%d.B16", bytes, sums[0], sums[0], upper)
			nans.apply(careful, FADD, sums[0], sums[0], upper)
		}
		if !careful {
			Line("FCMPS F%d, F%d", sums[0], sums[0])
			Line("BVC done")
		}
	}
	Label("done")
	Line("FMOVS F%d, ret+%d(FP)", sums[0], ResultOffset)
	End()
}

// neonSquares writes the loop that adds the squares of float32 numbers in 16 sums of float64. A product of two float32
// is exact in float64, so a fused multiplication and addition rounds as two instructions do.
func neonSquares() {
	begin(kinds.Named("squaresF32"), 4*neonBytes)
	sums := NewRegs(8)
	Line("MOVD %s, R10", Param("sums"))
	Line("VLD1.P 64(R10), %s", List(sums[:4]))
	Line("VLD1 (R10), %s", List(sums[4:]))
	Loop(4*neonBytes, func() {
		for i, x := range Load("src", 4*neonBytes) {
			low, high := NewReg(), NewReg()
			FCVTLD(low, x)
			FCVTL2D(high, x)
			Line("VFMLA V%d.D2, V%d.D2, V%d.D2", low, low, sums[2*i])
			Line("VFMLA V%d.D2, V%d.D2, V%d.D2", high, high, sums[2*i+1])
		}
	})
	Store("sums", sums[:4])
	Store("sums", sums[4:])
	End()
}

// neonStream writes the loop that copies with non-temporal stores: a hint that the caches need not keep the lines.
func neonStream() {
	begin(kinds.Named("stream"), 4*neonBytes)
	Loop(4*neonBytes, func() {
		v := Load("src", 4*neonBytes)
		STNP(v[0], v[1], Param("dst"), 0)
		STNP(v[2], v[3], Param("dst"), 2*neonBytes)
		Line("ADD $%d, %s", 4*neonBytes, Param("dst"))
	})
	End()
}
