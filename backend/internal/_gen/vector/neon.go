package main

import (
	"log"
	"maps"
	"slices"

	"github.com/lockstep-ml/lockstep/internal/kernel/_gen/neon"
)

// neonTarget is the target NEON, arm64's vector instructions. A loop is recorded as values, each computed once from
// others. Then its instructions are written, each for the two registers of a turn, whose registers are those of values
// that are not needed any more.
type neonTarget struct {
	folder string
	values []*value
}

// value is a vector that the instructions of a turn compute.
type value struct {
	bits     uint32 // of a constant
	constant bool
	in       []*value
	inPlace  bool // the instructions write to the register of the first operand, or to a copy of it
	write    func(d neon.Vreg, in []neon.Vreg)
	uses     int
	at       [turn]neon.Vreg
}

// turn is the number of registers of a turn.
const turn = 2

func (t *neonTarget) generate() error { return neon.Write(t.folder, "vector") }

func (t *neonTarget) bits(x uint32) vec { return &value{constant: true, bits: x} }

// operation records instructions.
func (t *neonTarget) operation(write func(d neon.Vreg, in []neon.Vreg), in ...vec) *value {
	v := &value{write: write}
	for _, x := range in {
		x.(*value).uses++
		v.in = append(v.in, x.(*value))
	}
	t.values = append(t.values, v)
	return v
}

func (t *neonTarget) two(f func(l neon.Arrangement, d, n, m neon.Vreg), a, b vec) vec {
	return t.operation(func(d neon.Vreg, in []neon.Vreg) { f(neon.S4, d, in[0], in[1]) }, a, b)
}

func (t *neonTarget) bitwise(f func(d, n, m neon.Vreg), a, b vec) vec {
	return t.operation(func(d neon.Vreg, in []neon.Vreg) { f(d, in[0], in[1]) }, a, b)
}

func (t *neonTarget) one(f func(l neon.Arrangement, d, n neon.Vreg), a vec) vec {
	return t.operation(func(d neon.Vreg, in []neon.Vreg) { f(neon.S4, d, in[0]) }, a)
}

func (t *neonTarget) shift(f func(d, n neon.Vreg, by int), a vec, by int) vec {
	return t.operation(func(d neon.Vreg, in []neon.Vreg) { f(d, in[0], by) }, a)
}

func (t *neonTarget) not(a vec) vec {
	return t.operation(func(d neon.Vreg, in []neon.Vreg) { neon.NOT(d, in[0]) }, a)
}

func (t *neonTarget) add(a, b vec) vec           { return t.two(neon.FADD, a, b) }
func (t *neonTarget) sub(a, b vec) vec           { return t.two(neon.FSUB, a, b) }
func (t *neonTarget) mul(a, b vec) vec           { return t.two(neon.FMUL, a, b) }
func (t *neonTarget) div(a, b vec) vec           { return t.two(neon.FDIV, a, b) }
func (t *neonTarget) atMost(a, b vec) vec        { return t.two(neon.FMIN, a, b) }
func (t *neonTarget) atLeast(a, b vec) vec       { return t.two(neon.FMAX, a, b) }
func (t *neonTarget) addIntegers(a, b vec) vec   { return t.two(neon.ADD, a, b) }
func (t *neonTarget) subIntegers(a, b vec) vec   { return t.two(neon.SUB, a, b) }
func (t *neonTarget) equalIntegers(a, b vec) vec { return t.two(neon.CMEQ, a, b) }
func (t *neonTarget) lessIntegers(a, b vec) vec  { return t.two(neon.CMGT, b, a) }
func (t *neonTarget) and(a, b vec) vec           { return t.bitwise(neon.AND, a, b) }
func (t *neonTarget) or(a, b vec) vec            { return t.bitwise(neon.ORR, a, b) }
func (t *neonTarget) xor(a, b vec) vec           { return t.bitwise(neon.EOR, a, b) }
func (t *neonTarget) sqrt(a vec) vec             { return t.one(neon.FSQRT, a) }
func (t *neonTarget) round(a vec) vec            { return t.one(neon.FRINTN, a) }
func (t *neonTarget) integer(a vec) vec          { return t.one(neon.FCVTNS, a) }
func (t *neonTarget) float(a vec) vec            { return t.one(neon.SCVTF, a) }

func (t *neonTarget) shiftLeft(a vec, by int) vec        { return t.shift(neon.SHL, a, by) }
func (t *neonTarget) shiftRight(a vec, by int) vec       { return t.shift(neon.USHR, a, by) }
func (t *neonTarget) shiftRightSigned(a vec, by int) vec { return t.shift(neon.SSHR, a, by) }

func (t *neonTarget) larger(a, b vec) vec  { return t.extreme(t.compare(less, b, a), a, b) }
func (t *neonTarget) smaller(a, b vec) vec { return t.extreme(t.compare(less, a, b), a, b) }

// extreme is a where the mask is set or a is NaN, and b elsewhere.
func (t *neonTarget) extreme(mask, a, b vec) vec {
	return t.blend(t.bitwise(neon.ORN, mask, t.compare(equal, a, a)), a, b)
}

func (t *neonTarget) compare(r relation, a, b vec) vec {
	switch r {
	case equal:
		return t.two(neon.FCMEQ, a, b)
	case less:
		return t.two(neon.FCMGT, b, a)
	case lessOrEqual:
		return t.two(neon.FCMGE, b, a)
	case greaterOrEqual:
		return t.two(neon.FCMGE, a, b)
	case different:
		return t.or(t.two(neon.FCMGT, a, b), t.two(neon.FCMGT, b, a))
	case notEqual:
		return t.not(t.compare(equal, a, b))
	case notLess:
		return t.not(t.compare(less, a, b))
	case notGreaterOrEqual:
		return t.not(t.compare(greaterOrEqual, a, b))
	}
	log.Fatalf("no relation %d", r)
	return nil
}

func (t *neonTarget) blend(mask, a, b vec) vec {
	v := t.operation(func(d neon.Vreg, in []neon.Vreg) { neon.BSL(d, in[1], in[2]) }, mask, a, b)
	v.inPlace = true
	return v
}

func (t *neonTarget) loop(name, doc string, operands []string, f func(in []vec) vec) {
	signature := "(dst"
	for _, o := range operands {
		signature += ", " + o
	}
	neon.Begin(name, signature+" *byte, n int)", doc)
	t.values = nil
	var in []vec
	for _, o := range operands {
		in = append(in, t.operation(func(d neon.Vreg, _ []neon.Vreg) {
			neon.Line("VLD1.P %d(%s), [V%d.B16]", neon.Bytes, neon.Param(o), d)
		}))
	}
	result := f(in)
	t.operation(func(_ neon.Vreg, in []neon.Vreg) {
		neon.Line("VST1.P [V%d.B16], %d(%s)", in[0], neon.Bytes, neon.Param("dst"))
	}, result)
	kept := t.keep(neon.Registers - t.allocate(nil, false))
	for _, bits := range slices.Sorted(maps.Keys(kept)) {
		loadConstant(kept[bits], bits)
	}
	neon.Label("loop")
	t.allocate(kept, true)
	neon.Line("SUBS $%d, %s", turn*neon.Bytes/4, neon.Param("n"))
	neon.Line("BGT loop")
	neon.End()
}

func loadConstant(to neon.Vreg, bits uint32) {
	neon.Line("VMOVQ $0x%08x%08x, $0x%08x%08x, V%d", bits, bits, bits, bits, to)
}

// keep chooses constants for some registers, from the last one on: those that are used most.
func (t *neonTarget) keep(registers int) map[uint32]neon.Vreg {
	uses := map[uint32]int{}
	for _, v := range t.values {
		for _, x := range v.in {
			if x.constant {
				uses[x.bits]++
			}
		}
	}
	list := slices.SortedFunc(maps.Keys(uses), func(a, b uint32) int {
		if uses[a] != uses[b] {
			return uses[b] - uses[a]
		}
		return int(int64(a) - int64(b))
	})
	kept := map[uint32]neon.Vreg{}
	for i, bits := range list[:min(len(list), registers)] {
		kept[bits] = neon.Vreg(neon.Registers - 1 - i)
	}
	return kept
}

// allocate gives registers to values, and may write the instructions. Constants that are not kept are loaded where they
// are used. It returns how many registers there must be.
func (t *neonTarget) allocate(kept map[uint32]neon.Vreg, write bool) (most int) {
	used, left := map[neon.Vreg]bool{}, map[*value]int{}
	for _, v := range t.values {
		left[v] = v.uses
	}
	take := func() neon.Vreg {
		r := neon.Vreg(0)
		for used[r] {
			r++
		}
		used[r] = true
		most = max(most, int(r)+1)
		if int(r) >= neon.Registers-len(kept) {
			log.Fatal("out of vector registers")
		}
		return r
	}
	for _, v := range t.values {
		loaded := map[uint32]neon.Vreg{}
		register := func(x *value, i int) neon.Vreg {
			if !x.constant {
				return x.at[i]
			}
			if r, ok := kept[x.bits]; ok {
				return r
			}
			r, ok := loaded[x.bits]
			if !ok {
				r = take()
				loaded[x.bits] = r
				if write {
					loadConstant(r, x.bits)
				}
			}
			return r
		}
		for _, x := range v.in {
			left[x]--
		}
		for i := range turn {
			var in []neon.Vreg
			for _, x := range v.in {
				in = append(in, register(x, i))
			}
			if v.inPlace && !v.in[0].constant && left[v.in[0]] == 0 && !slices.Contains(v.in[1:], v.in[0]) {
				v.at[i] = in[0]
			} else {
				v.at[i] = take()
				if v.inPlace && write {
					neon.VMOV(v.at[i], in[0])
				}
			}
			if write {
				v.write(v.at[i], in)
			}
		}
		for _, r := range loaded {
			delete(used, r)
		}
		for _, x := range append(v.in, v) {
			if !x.constant && left[x] == 0 {
				for _, r := range x.at {
					if x == v || !slices.Contains(v.at[:], r) {
						delete(used, r)
					}
				}
			}
		}
	}
	return most
}

func (t *neonTarget) reductions() {
	for _, r := range []struct {
		name, doc string
		f         func(to, a vec) vec
	}{{"sumVectors", "adds", t.add}, {"largestVectors", "takes the largest of", t.larger}} {
		t.reduce(r.name, r.name+" "+r.doc+
			" the elements i, i + 32, … of a and element i of lanes. n is a multiple of 32 and not 0.", r.f)
	}
}

// reduce writes a loop that combines the elements with the same number modulo 32.
func (t *neonTarget) reduce(name, doc string, f func(to, a vec) vec) {
	neon.Begin(name, "(lanes, a *byte, n int)", doc)
	lanes := neon.NewRegs(8)
	neon.Line("VLD1.P 64(%s), %s", neon.Param("lanes"), neon.List(lanes[:4]))
	neon.Line("VLD1 (%s), %s", neon.Param("lanes"), neon.List(lanes[4:]))
	neon.Line("SUB $64, %s", neon.Param("lanes"))
	a := neon.NewRegs(8)
	neon.Label("loop")
	for i := range 2 {
		neon.Line("VLD1.P 64(%s), %s", neon.Param("a"), neon.List(a[4*i:][:4]))
	}
	for i := range lanes {
		t.values = nil
		to, from := &value{at: [turn]neon.Vreg{lanes[i]}}, &value{at: [turn]neon.Vreg{a[i]}}
		f(to, from)
		mark := neon.Used()
		for j, v := range t.values {
			var in []neon.Vreg
			for _, x := range v.in {
				in = append(in, x.at[0])
			}
			v.at[0] = neon.NewReg()
			if j == len(t.values)-1 && !v.inPlace {
				v.at[0] = lanes[i]
			}
			if v.inPlace {
				neon.VMOV(v.at[0], in[0])
			}
			v.write(v.at[0], in)
		}
		neon.VMOV(lanes[i], t.values[len(t.values)-1].at[0])
		neon.Release(mark)
	}
	neon.Line("SUBS $32, %s", neon.Param("n"))
	neon.Line("BGT loop")
	for i := range 2 {
		neon.Line("VST1.P %s, 64(%s)", neon.List(lanes[4*i:][:4]), neon.Param("lanes"))
	}
	neon.End()
}

func (t *neonTarget) addRows(name string, doc ...string) {
	neon.Begin(name, "(dst, a *byte, rows, step, n int)", doc...)
	const row, left, at = "R10", "R11", "R12"
	for _, registers := range []int{8, turn} {
		name := map[int]string{8: "wide", turn: "narrow"}[registers]
		mark := neon.Used()
		sums, x := neon.NewRegs(registers), neon.NewRegs(registers)
		// each writes an instruction for groups of registers that lie side by side in memory.
		each := func(list []neon.Vreg, first, format string) {
			neon.Line("MOVD %s, %s", first, at)
			for group := range slices.Chunk(list, 4) {
				neon.Line(format, neon.List(group), len(group)*neon.Bytes, at)
			}
		}
		const load, store = "VLD1.P %[2]d(%[3]s), %[1]s", "VST1.P %[1]s, %[2]d(%[3]s)"
		neon.Label(name)
		neon.Line("CMP $%d, %s", registers*neon.Bytes/4, neon.Param("n"))
		neon.Line("BLT %sDone", name)
		each(sums, neon.Param("dst"), load)
		neon.Line("MOVD %s, %s", neon.Param("a"), row)
		neon.Line("MOVD %s, %s", neon.Param("rows"), left)
		neon.Label(name + "Row")
		each(x, row, load)
		for i, v := range sums {
			neon.FADD(neon.S4, v, v, x[i])
		}
		neon.Line("ADD %s, %s", neon.Param("step"), row)
		neon.Line("SUBS $1, %s", left)
		neon.Line("BGT %sRow", name)
		each(sums, neon.Param("dst"), store)
		for _, p := range []string{"dst", "a"} {
			neon.Line("ADD $%d, %s", registers*neon.Bytes, neon.Param(p))
		}
		neon.Line("SUB $%d, %s", registers*neon.Bytes/4, neon.Param("n"))
		neon.Line("B %s", name)
		neon.Label(name + "Done")
		neon.Release(mark)
	}
	neon.End()
}

func (t *neonTarget) spread(name string, doc ...string) {
	neon.Begin(name, "(dst, a *byte, rows, columns int)", doc...)
	const bytes, last, at, left = "R10", "R11", "R12", "R13"
	v := neon.NewRegs(turn)
	neon.Line("LSL $2, %s, %s", neon.Param("columns"), bytes)
	neon.Line("SUB $%d, %s, %s", turn*neon.Bytes, bytes, last)
	neon.Label("row")
	neon.Line("VLD1R.P 4(%s), [V%d.S4]", neon.Param("a"), v[0])
	neon.VMOV(v[1], v[0])
	neon.Line("MOVD %s, %s", neon.Param("dst"), at)
	neon.Line("MOVD %s, %s", last, left)
	neon.Label("loop")
	neon.Line("VST1.P %s, %d(%s)", neon.List(v), turn*neon.Bytes, at)
	neon.Line("SUBS $%d, %s", turn*neon.Bytes, left)
	neon.Line("BGE loop")
	neon.Line("ADD %s, %s, %s", last, neon.Param("dst"), at) // the rest
	neon.Line("VST1 %s, (%s)", neon.List(v), at)
	neon.Line("ADD %s, %s", bytes, neon.Param("dst"))
	neon.Line("SUBS $1, %s", neon.Param("rows"))
	neon.Line("BGT row")
	neon.End()
}

func (t *neonTarget) scatterLargest(name string, doc ...string) {
	neon.Begin(name, "(to, from *byte, places *int, rows int, add *byte, n int)", doc...)
	const i, place, at = "R10", "R11", "R12"
	// row sets at to a row of a matrix, whose number is i.
	row := func(base string) {
		neon.Line("MOVD (%s)(%s<<3), %s", neon.Param("places"), i, place)
		neon.Line("ADD %s, %s, %s", place, neon.Param(base), at)
	}
	best, which, x := neon.NewRegs(turn), neon.NewRegs(turn), neon.NewRegs(turn)
	number, mask, nan, one := neon.NewReg(), neon.NewReg(), neon.NewReg(), neon.NewReg()
	neon.Line("MOVD $1, R13")
	neon.Line("VDUP R13, V%d.S4", one)
	neon.Label("loop")
	start := func() {
		neon.Line("MOVD $0, %s", i)
		neon.EOR(number, number, number)
	}
	start()
	row("from")
	neon.Line("VLD1 (%s), %s", at, neon.List(best))
	for _, v := range which {
		neon.EOR(v, v, v)
	}
	neon.Label("next")
	neon.Line("ADD $1, %s", i)
	neon.Line("CMP %s, %s", neon.Param("rows"), i)
	neon.Line("BGE chosen")
	row("from")
	neon.Line("VLD1 (%s), %s", at, neon.List(x))
	neon.ADD(neon.S4, number, number, one)
	for j := range turn {
		neon.FCMGT(neon.S4, mask, x[j], best[j])
		neon.FCMEQ(neon.S4, nan, x[j], x[j])
		neon.ORN(mask, mask, nan)
		neon.BIT(best[j], x[j], mask)
		neon.BIT(which[j], number, mask)
	}
	neon.Line("B next")
	neon.Label("chosen")
	values := best
	neon.Line("VLD1.P %d(%s), %s", turn*neon.Bytes, neon.Param("add"), neon.List(values))
	start()
	neon.Label("add")
	row("to")
	neon.Line("VLD1 (%s), %s", at, neon.List(x))
	for j := range turn {
		neon.CMEQ(neon.S4, mask, which[j], number)
		neon.AND(mask, mask, values[j])
		neon.FADD(neon.S4, x[j], mask, x[j])
	}
	neon.Line("VST1 %s, (%s)", neon.List(x), at)
	neon.ADD(neon.S4, number, number, one)
	neon.Line("ADD $1, %s", i)
	neon.Line("CMP %s, %s", neon.Param("rows"), i)
	neon.Line("BLT add")
	for _, p := range []string{"to", "from"} {
		neon.Line("ADD $%d, %s", turn*neon.Bytes, neon.Param(p))
	}
	neon.Line("SUBS $%d, %s", turn*neon.Bytes/4, neon.Param("n"))
	neon.Line("BGT loop")
	neon.End()
}
