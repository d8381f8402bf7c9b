// This program writes the kernels of package product and their declarations: for amd64 with AVX2, or with -avx512 for
// AVX-512, and with -neon for arm64. Run it with go generate in backend.
package main

import (
	"flag"
	"fmt"
	"log"
	"os"
	"strings"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// The fields of package product's arguments, in bytes from its start.
const (
	fieldA           = 8 * iota // the first element of the left operand
	fieldB                      // of the right one
	fieldC                      // of the result
	fieldRow                    // bytes from a row of the left operand to the next
	fieldColumn                 // from a column of the left operand to the next
	fieldRight                  // from a row of the right operand to the next
	fieldResult                 // from a row of the result to the next
	fieldSteps                  // columns of the left operand in a segment
	fieldSegments               // how many segments
	fieldSegmentStep            // bytes of the left operand from the end of a segment to the next
	fieldRightStep              // of the right one
	fieldAdd                    // 1: add to the result
	fieldPacked                 // where to copy the rows of the right operand
)

// isa is an instruction set.
type isa struct {
	suffix string
	bytes  int // of a vector; of two registers for NEON
	rows   int // of the largest kernel
	packs  bool
}

// leastPacking returns the least rows of a kernel that packs: it is the first one of at least three of equal rows.
func (s isa) leastPacking() int { return (2*s.rows + 1 + 2) / 3 }

// element is a type of elements, with its instructions.
type element struct {
	name, goType   string
	bytes          int
	broadcast, fma func(...Op)
	add            func(...Op)
}

var float32s = element{"F32", "float32", 4, VBROADCASTSS2, VFMADD231PS2, VADDPS2}

// longVectors is the width of the kernel for one row and many columns. It prefetches the rows of the right operand,
// which the processor does not for rows that are far apart.
const longVectors = 8

var sets, neonSets = []isa{{"AVX2", 32, 6, true}, {"AVX512", 64, 14, true}}, []isa{{"NEON", 32, 6, false}}

func main() {
	avx512 := flag.Bool("avx512", false, "write the kernels for AVX-512")
	table := flag.String("table", "", "write the functions that choose a kernel to this file, and no kernels")
	neon := flag.String("neon", "", "write the kernels for arm64, and the functions that choose one, in this folder")
	flag.Parse()
	switch {
	case *table != "":
		if err := writeTable(*table, sets); err != nil {
			log.Fatal(err)
		}
		return
	case *neon != "":
		if err := writeNEON(*neon); err != nil {
			log.Fatal(err)
		}
		return
	}
	to := sets[0]
	if *avx512 {
		to = sets[1]
	}
	ConstraintExpr("!noasm")
	for _, e := range []element{
		float32s,
		{"F64", "float64", 8, VBROADCASTSD2, VFMADD231PD2, VADDPD2},
	} {
		for vectors := 1; vectors <= 2; vectors++ {
			for rows := 1; rows <= to.rows; rows++ {
				kernel(to, e, rows, vectors, false)
			}
		}
	}
	for rows := to.leastPacking(); rows <= to.rows; rows++ {
		kernel(to, float32s, rows, 2, true)
	}
	if !*avx512 {
		kernel(to, float32s, 1, longVectors, false)
		copyRows()
		transpose()
	}
	Generate()
}

// Avo's instructions with one signature.

func VBROADCASTSS2(x ...Op) { VBROADCASTSS(x[0], x[1]) }
func VBROADCASTSD2(x ...Op) { VBROADCASTSD(x[0], x[1]) }
func VFMADD231PS2(x ...Op)  { VFMADD231PS(x[0], x[1], x[2]) }
func VFMADD231PD2(x ...Op)  { VFMADD231PD(x[0], x[1], x[2]) }
func VADDPS2(x ...Op)       { VADDPS(x[0], x[1], x[2]) }
func VADDPD2(x ...Op)       { VADDPD(x[0], x[1], x[2]) }

func (s isa) vector() reg.VecVirtual {
	if s.bytes == 64 {
		return ZMM()
	}
	return YMM()
}

// clear sets a vector to 0.
func (s isa) clear(v reg.VecVirtual) {
	if s.bytes == 64 {
		VPXORD(v, v, v)
	} else {
		VXORPS(v, v, v)
	}
}

// rowPointers returns the addresses of rows, from the first one and the bytes between two. A register serves three.
func rowPointers(first reg.GPVirtual, step reg.GPVirtual, rows int) (list []reg.GPVirtual, at func(row, disp int) Mem) {
	list = []reg.GPVirtual{first}
	if rows > 3 {
		three := GP64()
		LEAQ(Mem{Base: step, Index: step, Scale: 2}, three)
		for len(list)*3 < rows {
			next := GP64()
			LEAQ(Mem{Base: list[len(list)-1], Index: three, Scale: 1}, next)
			list = append(list, next)
		}
	}
	return list, func(row, disp int) Mem {
		m := Mem{Base: list[row/3], Disp: disp}
		if row%3 > 0 {
			m.Index, m.Scale = step, uint8(row%3)
		}
		return m
	}
}

// kernel multiplies so many rows of the left operand with so many vectors of columns of the right one. It may copy the
// rows of the right operand, so that they lie side by side.
func kernel(s isa, e element, rows, vectors int, packs bool) {
	name, doc := fmt.Sprintf("kernel%sx%dx%d%s", e.name, rows, vectors, s.suffix), "multiplies"
	if packs {
		name, doc = fmt.Sprintf("packing%sx%d%s", e.name, rows, s.suffix), "copies the right operand, and multiplies"
	}
	TEXT(name, NOSPLIT, "func(x *byte)")
	Doc(fmt.Sprintf("%s %s %d rows with %d columns of %s.", name, doc, rows, vectors*s.bytes/e.bytes, e.goType))
	Pragma("noescape")
	x := Load(Param("x"), GP64()).(reg.GPVirtual)
	field := func(offset int) Mem { return Mem{Base: x, Disp: offset} }
	load := func(offset int) reg.GPVirtual {
		r := GP64()
		MOVQ(field(offset), r)
		return r
	}
	_, at := rowPointers(load(fieldC), load(fieldResult), rows)
	for i := range rows { // they are needed at the end
		for disp := 0; disp < vectors*s.bytes; disp += 64 {
			PREFETCHT0(at(i, disp))
		}
	}
	a, row, column := load(fieldA), load(fieldRow), load(fieldColumn)
	b, right := load(fieldB), load(fieldRight)
	segments := load(fieldSegments)
	var packed, ahead reg.GPVirtual
	if packs {
		packed, ahead = load(fieldPacked), GP64()
		MOVQ(right, ahead)
		SHLQ(Imm(4), ahead)
	}
	pointers, at := rowPointers(a, row, rows)
	sums := make([][]reg.VecVirtual, rows)
	for i := range sums {
		for range vectors {
			v := s.vector()
			s.clear(v)
			sums[i] = append(sums[i], v)
		}
	}
	n := GP64()
	step := func() {
		if vectors == longVectors {
			v := s.vector()
			e.broadcast(at(0, 0), v)
			for j := range vectors {
				if j*s.bytes%64 == 0 {
					PREFETCHT0(Mem{Base: b, Index: right, Scale: 8, Disp: j * s.bytes})
				}
				e.fma(Mem{Base: b, Disp: j * s.bytes}, v, sums[0][j])
			}
			ADDQ(column, a)
			ADDQ(right, b)
			return
		}
		var columns []reg.VecVirtual
		for disp := 0; packs && disp < vectors*s.bytes; disp += 64 { // of row 16 from here: they lie far apart
			PREFETCHT0(Mem{Base: b, Index: ahead, Scale: 1, Disp: disp})
		}
		for j := range vectors {
			v := s.vector()
			VMOVUPS(Mem{Base: b, Disp: j * s.bytes}, v)
			columns = append(columns, v)
			if packs {
				VMOVUPS(v, Mem{Base: packed, Disp: j * s.bytes})
			}
		}
		if packs {
			ADDQ(U32(uint32(vectors*s.bytes)), packed)
		}
		for i := range rows {
			v := s.vector()
			e.broadcast(at(i, 0), v)
			for j := range vectors {
				e.fma(columns[j], v, sums[i][j])
			}
		}
		for _, p := range pointers {
			ADDQ(column, p)
		}
		ADDQ(right, b)
	}
	Label("segment")
	MOVQ(field(fieldSteps), n)
	unroll := 4
	if rows > 4 {
		unroll = 2
	}
	SUBQ(Imm(uint64(unroll)), n)
	JLT(LabelRef("rest"))
	Label("several")
	for range unroll {
		step()
	}
	SUBQ(Imm(uint64(unroll)), n)
	JGE(LabelRef("several"))
	Label("rest")
	ADDQ(Imm(uint64(unroll)), n)
	JLE(LabelRef("next"))
	Label("one")
	step()
	DECQ(n)
	JG(LabelRef("one"))
	Label("next")
	gap := GP64()
	MOVQ(field(fieldSegmentStep), gap)
	for _, p := range pointers {
		ADDQ(gap, p)
	}
	ADDQ(field(fieldRightStep), b)
	DECQ(segments)
	JG(LabelRef("segment"))

	c, result := load(fieldC), load(fieldResult)
	_, at = rowPointers(c, result, rows)
	CMPQ(field(fieldAdd), Imm(0))
	JE(LabelRef("store"))
	for i := range rows {
		for j := range vectors {
			e.add(at(i, j*s.bytes), sums[i][j], sums[i][j])
		}
	}
	Label("store")
	for i := range rows {
		for j := range vectors {
			VMOVUPS(sums[i][j], at(i, j*s.bytes))
		}
	}
	VZEROUPPER()
	RET()
}

// The documentation of functions that both processors have.
const copyRowsDoc = "copyRows64 copies rows of 64 bytes, dstStep and srcStep bytes apart. There must be one."

var transposeDoc = []string{
	"transpose8 writes the transposes of 8 rows of 8·blocks elements of 4 bytes: 8·blocks rows of 8 elements.",
	"dstStep and srcStep are the bytes from a row to the next. There must be a block.",
}

// copyRows copies rows of 64 bytes.
func copyRows() {
	TEXT("copyRows64", NOSPLIT, "func(dst, src *byte, rows, dstStep, srcStep int)")
	Doc(copyRowsDoc)
	Pragma("noescape")
	dst, src := Load(Param("dst"), GP64()).(reg.GPVirtual), Load(Param("src"), GP64()).(reg.GPVirtual)
	rows := Load(Param("rows"), GP64())
	to, from := Load(Param("dstStep"), GP64()), Load(Param("srcStep"), GP64())
	v, w := YMM(), YMM()
	Label("loop")
	VMOVUPS(Mem{Base: src}, v)
	VMOVUPS(Mem{Base: src, Disp: 32}, w)
	VMOVUPS(v, Mem{Base: dst})
	VMOVUPS(w, Mem{Base: dst, Disp: 32})
	ADDQ(from, src)
	ADDQ(to, dst)
	DECQ(rows)
	JG(LabelRef("loop"))
	VZEROUPPER()
	RET()
}

// transpose transposes blocks of 8 × 8 elements of 4 bytes.
func transpose() {
	TEXT("transpose8", NOSPLIT, "func(dst, src *byte, blocks, dstStep, srcStep int)")
	Doc(transposeDoc...)
	Pragma("noescape")
	dst, src := Load(Param("dst"), GP64()).(reg.GPVirtual), Load(Param("src"), GP64()).(reg.GPVirtual)
	blocks := Load(Param("blocks"), GP64())
	to, from := Load(Param("dstStep"), GP64()).(reg.GPVirtual), Load(Param("srcStep"), GP64()).(reg.GPVirtual)
	_, source := rowPointers(src, from, 3)
	low := GP64() // row 4
	LEAQ(Mem{Base: src, Index: from, Scale: 4}, low)
	three := GP64()
	LEAQ(Mem{Base: from, Index: from, Scale: 2}, three)
	at := func(r, disp int) Mem {
		base := src
		if r >= 4 {
			base = low
		}
		if r%4 == 3 {
			return Mem{Base: base, Index: three, Scale: 1, Disp: disp}
		}
		m := source(r%4, disp)
		m.Base = base
		return m
	}
	toThree := GP64()
	LEAQ(Mem{Base: to, Index: to, Scale: 2}, toThree)
	Label("loop")
	for half := range 2 {
		var r [4]reg.VecVirtual
		for i := range r {
			r[i] = YMM()
			VMOVUPS(at(i, 16*half), r[i].AsX())
			VINSERTF128(Imm(1), at(i+4, 16*half), r[i], r[i])
		}
		a, b, c, d := YMM(), YMM(), YMM(), YMM()
		VUNPCKLPS(r[1], r[0], a)
		VUNPCKHPS(r[1], r[0], b)
		VUNPCKLPS(r[3], r[2], c)
		VUNPCKHPS(r[3], r[2], d)
		var out [4]reg.VecVirtual
		for i := range out {
			out[i] = YMM()
		}
		VUNPCKLPD(c, a, out[0])
		VUNPCKHPD(c, a, out[1])
		VUNPCKLPD(d, b, out[2])
		VUNPCKHPD(d, b, out[3])
		VMOVUPS(out[0], Mem{Base: dst})
		VMOVUPS(out[1], Mem{Base: dst, Index: to, Scale: 1})
		VMOVUPS(out[2], Mem{Base: dst, Index: to, Scale: 2})
		VMOVUPS(out[3], Mem{Base: dst, Index: toThree, Scale: 1})
		LEAQ(Mem{Base: dst, Index: to, Scale: 4}, dst)
	}
	ADDQ(Imm(32), src)
	ADDQ(Imm(32), low)
	DECQ(blocks)
	JG(LabelRef("loop"))
	VZEROUPPER()
	RET()
}

// writeTable writes the functions that call the kernel for so many rows and vectors.
func writeTable(file string, sets []isa) error {
	var s strings.Builder
	s.WriteString("// Code generated by _gen; DO NOT EDIT.\n\n//go:build !noasm\n\npackage product\n\nimport \"unsafe\"\n")
	for _, to := range sets {
		for _, element := range []string{"F32", "F64"} {
			fmt.Fprintf(&s, "\nfunc multiply%s%s(rows, vectors int, a *arguments) {\n\tx := (*byte)(unsafe.Pointer(a))\n"+
				"\tswitch rows*2 + vectors - 1 {\n", element, to.suffix)
			for rows := 1; rows <= to.rows; rows++ {
				for vectors := 1; vectors <= 2; vectors++ {
					fmt.Fprintf(&s, "\tcase %d:\n\t\tkernel%sx%dx%d%s(x)\n", rows*2+vectors-1, element, rows, vectors, to.suffix)
				}
			}
			s.WriteString("\t}\n}\n")
		}
		if to.packs {
			fmt.Fprintf(&s, "\nfunc packF32%s(rows int, a *arguments) {\n\tx := (*byte)(unsafe.Pointer(a))\n\tswitch rows {\n",
				to.suffix)
			for rows := to.leastPacking(); rows <= to.rows; rows++ {
				fmt.Fprintf(&s, "\tcase %d:\n\t\tpackingF32x%d%s(x)\n", rows, rows, to.suffix)
			}
			s.WriteString("\t}\n}\n")
		}
	}
	return os.WriteFile(file, []byte(s.String()), 0o644)
}
