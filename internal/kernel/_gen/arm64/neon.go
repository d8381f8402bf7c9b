package main

import "github.com/lockstep-ml/lockstep/internal/kernel/_gen/kinds"

// The loops for NEON, arm64's vector instructions. Avo has only amd64, and Go's assembler lacks most floating-point
// instructions of vectors: those are written as words, with their names beside them (instructions.go).
//
// The rules of NaNs differ from those of package kernel: a signaling NaN precedes a quiet one, and an invalid operation
// gives a positive NaN. A NaN stays one until the end of an expression, so a loop over floating-point numbers handles
// several vectors in a turn, and looks once whether a NaN is among the results. If so, the turn is repeated by the
// careful loop, which chooses every bit of a NaN as the package specifies. The same loop handles the last vectors.

// neonBytes is a vector register: the loops handle multiples of it.
const neonBytes = 16

// neonOps are the instructions of kinds and arithmetic. An operation that is missing has no loop: Go's loop multiplies
// 64-bit integers as fast, since there is no such instruction for vectors.
var neonOps = map[string]neonOp{
	"sumF32": {fadd, s4}, "diffF32": {fsub, s4}, "prodF32": {fmul, s4}, "quotF32": {fdiv, s4},
	"sumF64": {fadd, d2}, "diffF64": {fsub, d2}, "prodF64": {fmul, d2}, "quotF64": {fdiv, d2},
	"minF32": {fmin, s4}, "maxF32": {fmax, s4}, "minF64": {fmin, d2}, "maxF64": {fmax, d2},
	"sumF16": {fadd, s4}, "prodF16": {fmul, s4}, "minF16": {fmin, s4}, "maxF16": {fmax, s4},
	"sumBF16": {fadd, s4}, "prodBF16": {fmul, s4}, "minBF16": {fmin, s4}, "maxBF16": {fmax, s4},
	"sumI8": {add, b16}, "sumI16": {add, h8}, "sumI32": {add, s4}, "sumI64": {add, d2},
	"prodI8": {mul, b16}, "prodI16": {mul, h8}, "prodI32": {mul, s4},
	"minI8": {smin, b16}, "minI16": {smin, h8}, "minI32": {smin, s4},
	"maxI8": {smax, b16}, "maxI16": {smax, h8}, "maxI32": {smax, s4},
	"minU8": {umin, b16}, "minU16": {umin, h8}, "minU32": {umin, s4},
	"maxU8": {umax, b16}, "maxU16": {umax, h8}, "maxU32": {umax, s4},
	"minI64": {chosenBy(cmgt, false), d2}, "maxI64": {chosenBy(cmgt, true), d2},
	"minU64": {chosenBy(cmhi, false), d2}, "maxU64": {chosenBy(cmhi, true), d2},
}

// neonOp is an operation on the lanes of a register.
type neonOp struct {
	apply func(t arrangement, d, n, m vreg)
	lanes arrangement
}

// chosenBy is a minimum or maximum of 64-bit integers, for which there is only a comparison.
func chosenBy(greater func(t arrangement, d, n, m vreg), largest bool) func(t arrangement, d, n, m vreg) {
	return func(t arrangement, d, n, m vreg) {
		mask := newReg()
		greater(t, mask, n, m)
		if largest {
			bsl(mask, n, m)
		} else {
			bsl(mask, m, n)
		}
		vmov(d, mask)
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
	for _, k := range kinds.Arithmetic {
		op := neonOps[k.Name()]
		if k.Op == "diff" || k.Op == "quot" {
			neonReduce(k, op, 2)
		}
		neonWithNumber(k, op, true)
		neonWithNumber(k, op, false)
	}
	neonSquareRoots("F32", s4)
	neonSquareRoots("F64", d2)
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
		loops(4*neonBytes, neonBytes, func(bytes int, _ bool) {
			v := tree(n, func(i int) []vreg { return load(names[i], bytes) },
				func(left, right []vreg) { each(left, right, func(l, r vreg) { op.apply(op.lanes, l, l, r) }) }, nil)
			store("dst", v)
		})
		end()
		return
	}
	nans := newNaNs(op.lanes)
	apply := func(careful bool) func(left, right []vreg) {
		return func(left, right []vreg) {
			each(left, right, func(l, r vreg) { nans.apply(careful, op.apply, l, l, r) })
		}
	}
	if k.Lane != "F16" && k.Lane != "BF16" {
		loops(4*neonBytes, neonBytes, func(bytes int, careful bool) {
			v := tree(n, func(i int) []vreg { return load(names[i], bytes) }, apply(careful), nil)
			nans.check(careful, v)
			store("dst", v)
		})
		end()
		return
	}
	h := neonHalf{name: k.Lane, ieee: k.Lane == "F16"}
	h.prepare(nans)
	loops(2*neonBytes, neonBytes, func(bytes int, careful bool) {
		v := tree(n, func(i int) []vreg { return h.load(names[i], bytes) }, apply(careful), func(v []vreg) {
			if !h.ieee { // rounding could turn a NaN into a number
				nans.collect(careful, v)
			}
			h.round(careful, v)
		})
		nans.check(careful, v)
		store("dst", h.pack(careful, v))
	})
	end()
}

// tree combines n sources, each in several registers, and returns those of the result. The results of operations that
// are operands of others are rounded.
func tree(n int, load func(i int) []vreg, apply func(left, right []vreg), round func([]vreg)) []vreg {
	if round == nil {
		round = func([]vreg) {}
	}
	v := load(0)
	scratch := used()
	apply(v, load(1))
	release(scratch)
	switch n {
	case 3:
		round(v)
		release(scratch)
		apply(v, load(2))
	case 4:
		round(v)
		release(scratch)
		right := load(2)
		inner := used()
		apply(right, load(3))
		release(inner)
		round(right)
		release(inner)
		apply(v, right)
	}
	release(scratch)
	return v
}

// nans chooses the bits of NaNs as package kernel specifies.
type nans struct {
	lanes          arrangement
	quiet, invalid vreg
	collected      bool
	largest        vreg // a NaN in a lane if there was one in any collected register
}

func newNaNs(lanes arrangement) *nans {
	n := &nans{lanes: lanes, quiet: constant(lanes, 0x00400000, 0x0008000000000000)}
	n.invalid = constant(lanes, 0xffc00000, 0xfff8000000000000)
	n.largest = newConstantReg()
	return n
}

// apply sets d = a ⊕ b, and if careful, chooses the bits of a NaN.
func (n *nans) apply(careful bool, op func(t arrangement, d, n, m vreg), d, a, b vreg) {
	if !careful {
		op(n.lanes, d, a, b)
		return
	}
	mark := used()
	result := newReg()
	op(n.lanes, result, a, b)
	n.choose(d, result, a, b)
	release(mark)
}

// choose sets d = result, but where that is a NaN a or else b, made quiet, if one of them is a NaN, and else the NaN of
// an invalid operation.
func (n *nans) choose(d, result, a, b vreg) {
	operand, chosen := newReg(), newReg()
	fcmeq(n.lanes, operand, a, a)
	bsl(operand, b, a)
	fcmeq(n.lanes, chosen, operand, operand)
	bsl(chosen, n.invalid, operand)
	orr(chosen, chosen, n.quiet)
	fcmeq(n.lanes, operand, result, result)
	bsl(operand, result, chosen)
	vmov(d, operand)
}

// check repeats the turn in the careful loop if there is a NaN in the registers, or was in those collected before.
func (n *nans) check(careful bool, v []vreg) {
	if careful {
		return
	}
	n.collect(careful, v)
	n.collected = false
	n.checkCollected()
}

// collect remembers whether there is a NaN in the registers: the maximum of a NaN and anything is a NaN.
func (n *nans) collect(careful bool, v []vreg) {
	if careful {
		return
	}
	mark := used()
	defer release(mark)
	v = append([]vreg{}, v...)
	if n.collected {
		v = append(v, n.largest)
	}
	n.collected = true
	for len(v) > 1 {
		d := n.largest
		if len(v) > 2 {
			d = newReg()
		}
		fmax(n.lanes, d, v[0], v[1])
		v = append(v[2:], d)
	}
}

func (n *nans) checkCollected() {
	if n.lanes == s4 {
		fmaxv(n.largest, n.largest)
		line("FCMPS F%d, F%d", n.largest, n.largest)
	} else {
		fmaxpd(n.largest, n.largest)
		line("FCMPD F%d, F%d", n.largest, n.largest)
	}
	line("BVS nan")
	repeatFromHere()
}

// neonHalf is a type of half-width elements: IEEE 754's binary16, which base NEON converts, or bfloat16, the upper half
// of a float32, which is rounded by integer instructions: those for bfloat16 came later than ARMv8.0.
type neonHalf struct {
	name        string
	ieee        bool
	bias, upper vreg
	nans        *nans
}

// prepare loads the constants.
func (h *neonHalf) prepare(n *nans) {
	if !h.ieee {
		h.nans = n
		h.bias, h.upper = constant(s4, 0x7fff, 0), constant(s4, 0xffff0000, 0)
	}
}

// load returns registers of float32 for so many bytes of a source.
func (h *neonHalf) load(param string, bytes int) []vreg {
	wide := newRegs(2 * bytes / neonBytes)
	mark := used()
	for i, v := range load(param, bytes) {
		h.widen(wide[2*i], wide[2*i+1], v)
	}
	release(mark)
	return wide
}

func (h *neonHalf) widen(low, high, v vreg) {
	if h.ieee {
		fcvtl(low, v)
		fcvtl2(high, v)
	} else {
		shll(low, v)
		shll2(high, v)
	}
}

// round rounds to the type and widens again.
func (h *neonHalf) round(careful bool, v []vreg) {
	if h.ieee {
		for i := 0; i < len(v); i += 2 {
			x := newReg()
			fcvtn(x, v[i])
			fcvtn2(x, v[i+1])
			h.widen(v[i], v[i+1], x)
		}
		return
	}
	for _, x := range v {
		h.roundUpper(careful, x)
		and(x, x, h.upper)
	}
}

// roundUpper rounds to nearest even in the upper half; what is in the lower half does not count. It makes NaNs quiet if
// careful, else x must not be one.
func (h *neonHalf) roundUpper(careful bool, x vreg) {
	mark := used()
	defer release(mark)
	odd := newReg()
	shl(odd, x, 15)
	if !careful {
		add(s4, x, x, h.bias)
		usra(x, odd, 31)
		return
	}
	rounded, isNumber := newReg(), newReg()
	add(s4, rounded, x, h.bias)
	usra(rounded, odd, 31)
	fcmeq(s4, isNumber, x, x)
	orr(x, x, h.nans.quiet)
	bit(x, rounded, isNumber)
}

// pack rounds to the type and returns registers of half width.
func (h *neonHalf) pack(careful bool, v []vreg) []vreg {
	for i := 0; i < len(v); i += 2 {
		if h.ieee {
			x := newReg()
			fcvtn(x, v[i])
			fcvtn2(x, v[i+1])
			vmov(v[i/2], x)
			continue
		}
		h.roundUpper(careful, v[i])
		h.roundUpper(careful, v[i+1])
		uzp2(h8, v[i/2], v[i], v[i+1])
	}
	return v[:len(v)/2]
}

func neonWiden(h neonHalf) {
	begin(kinds.Named("widen"+h.name), neonBytes)
	loops(2*neonBytes, neonBytes, func(bytes int, _ bool) { store("dst", h.load("src", bytes)) })
	end()
}

func neonNarrow(h neonHalf) {
	begin(kinds.Named("narrow"+h.name), neonBytes)
	if h.ieee {
		loops(2*neonBytes, neonBytes, func(bytes int, _ bool) { store("dst", h.pack(false, load("src", 2*bytes))) })
		end()
		return
	}
	nans := newNaNs(s4)
	h.prepare(nans)
	loops(2*neonBytes, neonBytes, func(bytes int, careful bool) {
		v := load("src", 2*bytes)
		nans.check(careful, v)
		store("dst", h.pack(careful, v))
	})
	end()
}

// neonWithNumber writes the loop over a vector and one number, which is the left or the right operand.
func neonWithNumber(k kinds.Kind, op neonOp, left bool) {
	declared, vector, number := k.WithNumber(left)
	begin(declared, neonBytes)
	nans := newNaNs(op.lanes)
	by := newConstantReg()
	line("VLD1R (%s), [V%d.%s]", param(number), by, op.lanes.goName)
	loops(4*neonBytes, neonBytes, func(bytes int, careful bool) {
		v := load(vector, bytes)
		for _, x := range v {
			if left {
				nans.apply(careful, op.apply, x, by, x)
			} else {
				nans.apply(careful, op.apply, x, x, by)
			}
		}
		nans.check(careful, v)
		store("dst", v)
	})
	end()
}

// neonSquareRoots writes the loop that takes the square root of every element.
func neonSquareRoots(lane string, lanes arrangement) {
	begin(kinds.Named("sqrt"+lane), neonBytes)
	nans := newNaNs(lanes)
	loops(4*neonBytes, neonBytes, func(bytes int, careful bool) {
		v := load("src", bytes)
		for _, x := range v {
			nans.apply(careful, func(t arrangement, d, n, _ vreg) { fsqrt(t, d, n) }, x, x, x)
		}
		nans.check(careful, v)
		store("dst", v)
	})
	end()
}

// neonAddLargest writes the loop that adds and finds the largest magnitude. As integers, the bits of magnitudes are in
// the order of the numbers, with NaNs above infinity.
func neonAddLargest() {
	begin(kinds.Named("addLargest"), neonBytes)
	nans := newNaNs(s4)
	largest := constant(s4, 0, 0)
	loops(4*neonBytes, neonBytes, func(bytes int, careful bool) {
		v := load("a", bytes)
		each(v, load("b", bytes), func(x, y vreg) { nans.apply(careful, fadd, x, x, y) })
		magnitudes := newRegs(len(v))
		each(magnitudes, v, func(m, x vreg) { fabs(s4, m, x) })
		nans.collect(careful, magnitudes)
		if !careful {
			vmov(magnitudes[0], nans.largest)
			nans.collected = false
			nans.checkCollected()
		}
		umax(s4, largest, largest, magnitudes[0])
		store("dst", v)
	})
	umaxv(largest, largest)
	line("FMOVS F%d, ret+%d(FP)", largest, resultOffset)
	end()
}

// neonLargest writes the loop that finds the largest magnitude, as neonAddLargest does.
func neonLargest() {
	begin(kinds.Named("largest"), neonBytes)
	largest := constant(s4, 0, 0)
	loops(4*neonBytes, neonBytes, func(bytes int, _ bool) {
		v := load("src", bytes)
		for _, x := range v {
			fabs(s4, x, x)
		}
		for ; len(v) > 1; v = v[:len(v)/2] {
			each(v[:len(v)/2], v[len(v)/2:], func(x, y vreg) { umax(s4, x, x, y) })
		}
		umax(s4, largest, largest, v[0])
	})
	umaxv(largest, largest)
	line("FMOVS F%d, ret+%d(FP)", largest, resultOffset)
	end()
}

// neonQuantize writes the loop that rounds to 8-bit integers. A turn makes a vector of them, out of four of float32.
func neonQuantize() {
	begin(kinds.Named("quantize"), neonBytes)
	inverse, scale := broadcastParam("inverse"), broadcastParam("scale")
	loop(neonBytes, func() {
		v, n := loadInPlace("e", 4*neonBytes), newRegs(4)
		for i, x := range v {
			rounded := newReg()
			fmul(s4, rounded, x, inverse)
			fcvtns(s4, n[i], rounded)
			scvtf(s4, rounded, n[i])
			fmul(s4, rounded, rounded, scale)
			fsub(s4, x, x, rounded)
		}
		store("e", v)
		uzp1(h8, n[0], n[0], n[1])
		uzp1(h8, n[2], n[2], n[3])
		uzp1(b16, n[0], n[0], n[2])
		store("q", n[:1])
	})
	end()
}

// neonDequantize writes the loop that multiplies 8-bit integers by their scale, and may add the products.
func neonDequantize(name string, sum bool) {
	begin(kinds.Named(name), neonBytes)
	nans, scale := newNaNs(s4), broadcastParam("scale")
	loops(neonBytes, neonBytes, func(bytes int, careful bool) {
		v, words := newRegs(4), newRegs(2)
		q := load("q", bytes)[0]
		sxtl(h8, words[0], q)
		sxtl2(h8, words[1], q)
		for i, w := range words {
			sxtl(s4, v[2*i], w)
			sxtl2(s4, v[2*i+1], w)
		}
		for _, x := range v {
			scvtf(s4, x, x)
			nans.apply(careful, fmul, x, x, scale)
		}
		if sum {
			each(v, loadInPlace("dst", 4*bytes), func(x, y vreg) { nans.apply(careful, fadd, x, y, x) })
		}
		nans.check(careful, v)
		store("dst", v)
	})
	end()
}

// neonAddScaled writes the loop of a vector plus a multiple of another one. Product and sum are rounded separately.
func neonAddScaled() {
	begin(kinds.Named("addScaled"), neonBytes)
	nans, by := newNaNs(s4), broadcastParam("by")
	loops(4*neonBytes, neonBytes, func(bytes int, careful bool) {
		v := load("x", bytes)
		for _, x := range v {
			nans.apply(careful, fmul, x, by, x)
		}
		each(v, load("a", bytes), func(x, a vreg) { nans.apply(careful, fadd, x, a, x) })
		nans.check(careful, v)
		store("dst", v)
	})
	end()
}

// neonDot writes the loop of the dot product. If the result is a NaN, all is computed again in the careful way.
func neonDot() {
	const bytesPerTurn = 4 * kinds.DotLanes
	begin(kinds.Named("dot"), bytesPerTurn)
	nans, sums := newNaNs(s4), newRegs(bytesPerTurn/neonBytes)
	for _, careful := range []bool{false, true} {
		prefix := map[bool]string{false: "", true: "careful"}[careful]
		for _, s := range sums {
			line("VEOR V%d.B16, V%d.B16, V%d.B16", s, s, s)
		}
		line("MOVD %s, R10", param("a"))
		line("MOVD %s, R11", param("b"))
		line("MOVD %s, R12", param("bytes"))
		line("CBZ R12, %send", prefix)
		label(prefix + "turn")
		for half := range 2 {
			mark := used()
			x, y := newRegs(4), newRegs(4)
			line("VLD1.P 64(R10), %s", list(x))
			line("VLD1.P 64(R11), %s", list(y))
			each(x, y, func(x, y vreg) { nans.apply(careful, fmul, x, x, y) })
			each(sums[4*half:][:4], x, func(s, x vreg) { nans.apply(careful, fadd, s, s, x) })
			release(mark)
		}
		line("SUBS $%d, R12, R12", bytesPerTurn)
		line("BNE %sturn", prefix)
		label(prefix + "end")
		for n := len(sums) / 2; n > 0; n /= 2 {
			each(sums[:n], sums[n:2*n], func(x, y vreg) { nans.apply(careful, fadd, x, x, y) })
		}
		for _, bytes := range []int{8, 4} {
			upper := newReg()
			line("VEXT $%d, V%d.B16, V%d.B16, V%d.B16", bytes, sums[0], sums[0], upper)
			nans.apply(careful, fadd, sums[0], sums[0], upper)
		}
		if !careful {
			line("FCMPS F%d, F%d", sums[0], sums[0])
			line("BVC done")
		}
	}
	label("done")
	line("FMOVS F%d, ret+%d(FP)", sums[0], resultOffset)
	end()
}

// neonSquares writes the loop that adds the squares of float32 numbers in 16 sums of float64. A product of two float32
// is exact in float64, so a fused multiplication and addition rounds as two instructions do.
func neonSquares() {
	begin(kinds.Named("squaresF32"), 4*neonBytes)
	sums := newRegs(8)
	line("MOVD %s, R10", param("sums"))
	line("VLD1.P 64(R10), %s", list(sums[:4]))
	line("VLD1 (R10), %s", list(sums[4:]))
	loop(4*neonBytes, func() {
		for i, x := range load("src", 4*neonBytes) {
			low, high := newReg(), newReg()
			fcvtlD(low, x)
			fcvtl2D(high, x)
			line("VFMLA V%d.D2, V%d.D2, V%d.D2", low, low, sums[2*i])
			line("VFMLA V%d.D2, V%d.D2, V%d.D2", high, high, sums[2*i+1])
		}
	})
	store("sums", sums[:4])
	store("sums", sums[4:])
	end()
}

// neonStream writes the loop that copies with non-temporal stores: a hint that the caches need not keep the lines.
func neonStream() {
	begin(kinds.Named("stream"), 4*neonBytes)
	loop(4*neonBytes, func() {
		v := load("src", 4*neonBytes)
		stnp(v[0], v[1], param("dst"), 0)
		stnp(v[2], v[3], param("dst"), 2*neonBytes)
		line("ADD $%d, %s", 4*neonBytes, param("dst"))
	})
	end()
}
