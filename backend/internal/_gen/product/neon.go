package main

import (
	"fmt"
	"path/filepath"

	"github.com/lockstep-ml/lockstep/internal/kernel/_gen/neon"
)

// writeNEON writes the kernels for NEON, arm64's vector instructions. A vector of a kernel is two registers, so that a
// kernel has as many columns as with AVX2: 24 registers of 32 are sums.
func writeNEON(folder string) error {
	s := neonSets[0]
	for _, t := range []neonElement{{"F32", "float32", "FMOVS", neon.S4, 4}, {"F64", "float64", "FMOVD", neon.D2, 8}} {
		for vectors := 1; vectors <= 2; vectors++ {
			for rows := 1; rows <= s.rows; rows++ {
				t.kernel(s, rows, vectors)
			}
		}
	}
	neonCopyRows()
	neonTranspose()
	if err := neon.Write(folder, "product"); err != nil {
		return err
	}
	return writeTable(filepath.Join(folder, "table_arm64.go"), neonSets)
}

// neonElement is a type of elements, with the instruction that loads one.
type neonElement struct {
	name, goType, load string
	lanes              neon.Arrangement
	bytes              int
}

// kernel multiplies so many rows of the left operand with so many vectors of columns of the right one. Register 0 has
// the arguments, 1 to 6 the first elements of the rows, and 11 how far they are read.
func (e neonElement) kernel(s isa, rows, vectors int) {
	name := fmt.Sprintf("kernel%sx%dx%d%s", e.name, rows, vectors, s.suffix)
	neon.Begin(name, "(x *byte)", fmt.Sprintf("%s multiplies %d rows with %d columns of %s.", name, rows,
		vectors*s.bytes/e.bytes, e.goType))
	const b, column, right, segments, at, n, temporary = "R7", "R8", "R9", "R10", "R11", "R12", "R13"
	field := func(offset int, register string) { neon.Line("MOVD %d(R0), %s", offset, register) }
	row := func(i int) string { return fmt.Sprintf("R%d", 1+i) }
	pointers := func(first, step int) {
		field(first, row(0))
		field(step, temporary)
		for i := 1; i < rows; i++ {
			neon.Line("ADD %s, %s, %s", temporary, row(i-1), row(i))
		}
	}
	pointers(fieldA, fieldRow)
	field(fieldB, b)
	field(fieldColumn, column)
	field(fieldRight, right)
	field(fieldSegments, segments)
	neon.Line("MOVD $0, %s", at)
	columns, numbers := neon.NewRegs(2*vectors), neon.NewRegs(4)
	sums := make([][]neon.Vreg, rows)
	for i := range sums {
		sums[i] = neon.NewRegs(2 * vectors)
		for _, v := range sums[i] {
			neon.EOR(v, v, v)
		}
	}
	step := func() {
		neon.Line("VLD1.P (%s)(%s), %s", b, right, neon.List(columns))
		for i := range rows {
			x := numbers[i%len(numbers)]
			neon.Line("%s (%s)(%s), F%d", e.load, row(i), at, x)
			for j, v := range columns {
				neon.FMLA(e.lanes, sums[i][j], v, x)
			}
		}
		neon.Line("ADD %s, %s", column, at)
	}
	unroll := 4
	if rows > 4 {
		unroll = 2
	}
	neon.Label("segment")
	field(fieldSteps, n)
	neon.Line("SUBS $%d, %s", unroll, n)
	neon.Line("BLT rest")
	neon.Label("several")
	for range unroll {
		step()
	}
	neon.Line("SUBS $%d, %s", unroll, n)
	neon.Line("BGE several")
	neon.Label("rest")
	neon.Line("ADDS $%d, %s", unroll, n)
	neon.Line("BEQ next")
	neon.Label("one")
	step()
	neon.Line("SUBS $1, %s", n)
	neon.Line("BNE one")
	neon.Label("next")
	field(fieldSegmentStep, temporary)
	neon.Line("ADD %s, %s", temporary, at)
	field(fieldRightStep, temporary)
	neon.Line("ADD %s, %s", temporary, b)
	neon.Line("SUBS $1, %s", segments)
	neon.Line("BGT segment")

	pointers(fieldC, fieldResult)
	field(fieldAdd, n)
	neon.Line("CBZ %s, store", n)
	for i := range rows {
		neon.Line("VLD1 (%s), %s", row(i), neon.List(columns))
		for j, v := range columns {
			neon.FADD(e.lanes, sums[i][j], v, sums[i][j])
		}
	}
	neon.Label("store")
	for i := range rows {
		neon.Line("VST1 %s, (%s)", neon.List(sums[i]), row(i))
	}
	neon.End()
}

// neonCopyRows copies rows of 64 bytes.
func neonCopyRows() {
	neon.Begin("copyRows64", "(dst, src *byte, rows, dstStep, srcStep int)", copyRowsDoc)
	v := neon.List(neon.NewRegs(4))
	neon.Label("loop")
	neon.Line("VLD1.P (%s)(%s), %s", neon.Param("src"), neon.Param("srcStep"), v)
	neon.Line("VST1.P %s, (%s)(%s)", v, neon.Param("dst"), neon.Param("dstStep"))
	neon.Line("SUBS $1, %s", neon.Param("rows"))
	neon.Line("BGT loop")
	neon.End()
}

// neonTranspose transposes blocks of 8 × 8 elements of 4 bytes, as four of 4 × 4.
func neonTranspose() {
	neon.Begin("transpose8", "(dst, src *byte, blocks, dstStep, srcStep int)", transposeDoc...)
	neon.Label("loop")
	for half := range 2 {
		mark := neon.Used()
		row := neon.NewRegs(8)
		neon.Line("ADD $%d, %s, R10", 16*half, neon.Param("src"))
		for _, v := range row {
			neon.Line("VLD1.P (R10)(%s), [V%d.B16]", neon.Param("srcStep"), v)
		}
		out := neon.NewRegs(8) // a row of the result in two registers
		for i := range 2 {
			r, t := row[4*i:], neon.NewRegs(4)
			neon.TRN1(neon.S4, t[0], r[0], r[1])
			neon.TRN2(neon.S4, t[1], r[0], r[1])
			neon.TRN1(neon.S4, t[2], r[2], r[3])
			neon.TRN2(neon.S4, t[3], r[2], r[3])
			for j := range 2 {
				neon.TRN1(neon.D2, out[2*j+i], t[j], t[j+2])
				neon.TRN2(neon.D2, out[2*(j+2)+i], t[j], t[j+2])
			}
		}
		for i := range 4 {
			neon.Line("VST1.P %s, (%s)(%s)", neon.List(out[2*i:2*i+2]), neon.Param("dst"), neon.Param("dstStep"))
		}
		neon.Release(mark)
	}
	neon.Line("ADD $32, %s", neon.Param("src"))
	neon.Line("SUBS $1, %s", neon.Param("blocks"))
	neon.Line("BGT loop")
	neon.End()
}
