package main

import (
	"fmt"
	"log"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/lockstep-ml/lockstep/internal/kernel/_gen/kinds"
)

// What is written: the assembly, and its declarations in Go.
var text, declarations strings.Builder

// The state of the function being written. Vector registers are allocated from 0 on for what a turn of a loop uses, and
// from 31 down for constants. General registers 0 to 6 hold the parameters, 7 and 8 count bytes, 10 to 12 are free.
var (
	params       map[string]string // the registers of pointers and of "bytes", the addresses of others
	resultOffset int
	next, last   vreg
	advanced     map[string]int // how far the turn has moved pointers by loads
	repeated     map[string]int // the same, where a turn is left to be repeated
	repeats      bool
)

// line writes an instruction.
func line(format string, args ...any) { fmt.Fprintf(&text, "\t"+format+"\n", args...) }

func label(name string) { fmt.Fprintf(&text, "\n%s:\n", name) }

// begin starts a function of some pointers, a number of bytes, float32 numbers and a result of 4 bytes at most. It
// handles a multiple of so many bytes.
func begin(l kinds.Loop, bytes int) {
	params, next, last, repeats = map[string]string{}, 0, 31, false
	name, signature := l.Name, strings.TrimPrefix(l.Signature, "func")
	m := regexp.MustCompile(`^\((.*)\)(.*)$`).FindStringSubmatch(signature)
	groups := regexp.MustCompile(`([a-z, ]+?) (\*byte|\*float64|int|float32)(?:, |$)`).FindAllStringSubmatch(m[1], -1)
	var loads []string
	offset := 0
	for _, group := range groups {
		for _, param := range strings.Split(group[1], ", ") {
			if group[2] == "float32" {
				params[param] = fmt.Sprintf("%s+%d(FP)", param, offset)
				offset += 4
				continue
			}
			params[param] = fmt.Sprintf("R%d", len(loads))
			loads = append(loads, fmt.Sprintf("MOVD %s+%d(FP), R%d", param, offset, len(loads)))
			offset += 8
		}
	}
	if m[2] != "" {
		resultOffset = (offset + 7) &^ 7
		offset = resultOffset + 4
	}
	doc := strings.Join(l.Doc("", bytes), "\n// ")
	fmt.Fprintf(&declarations, "\n// %s\n//\n//go:noescape\nfunc %s%s\n", doc, name, signature)
	fmt.Fprintf(&text, "\n// func %s%s\nTEXT ·%s(SB), NOSPLIT, $0-%d\n", name, signature, name, offset)
	for _, l := range loads {
		line("%s", l)
	}
}

// end ends a function.
func end() { line("RET") }

// param returns the register of a pointer or of the number of bytes, or where another parameter lies.
func param(name string) string {
	p, ok := params[name]
	if !ok {
		log.Fatalf("no parameter %s", name)
	}
	return p
}

// newReg returns a vector register until the turn ends or it is released.
func newReg() vreg { return newRegs(1)[0] }

func newRegs(n int) []vreg {
	v := make([]vreg, n)
	for i := range v {
		if next > last {
			log.Fatalf("out of vector registers:\n%s", text.String()[max(0, text.Len()-2000):])
		}
		v[i] = next
		next++
	}
	return v
}

// used returns a mark to release the registers that are allocated after it.
func used() vreg { return next }

func release(mark vreg) { next = mark }

// newConstantReg returns a vector register for the whole function.
func newConstantReg() vreg {
	last--
	return last + 1
}

// constant returns a register with all lanes set to bits, to those of its size.
func constant(lanes arrangement, word uint32, long uint64) vreg {
	v := newConstantReg()
	if lanes == d2 {
		line("MOVD $0x%016x, R10", long)
	} else {
		line("MOVD $0x%08x, R10", word)
	}
	line("VDUP R10, V%d.%s", v, lanes.goName)
	return v
}

// broadcastParam returns a register with all lanes set to a float32 parameter.
func broadcastParam(name string) vreg {
	v := newConstantReg()
	line("MOVWU %s, R10", param(name))
	line("VDUP R10, V%d.S4", v)
	return v
}

// load reads bytes from a pointer and moves it on.
func load(pointer string, bytes int) []vreg {
	v := newRegs(bytes / neonBytes)
	line("VLD1.P %d(%s), %s", bytes, param(pointer), list(v))
	advanced[pointer] += bytes
	return v
}

// loadInPlace reads bytes from a pointer, to which they are stored again.
func loadInPlace(pointer string, bytes int) []vreg {
	v := newRegs(bytes / neonBytes)
	line("VLD1 (%s), %s", param(pointer), list(v))
	return v
}

// store writes registers to a pointer and moves it on.
func store(pointer string, v []vreg) {
	line("VST1.P %s, %d(%s)", list(v), len(v)*neonBytes, param(pointer))
}

// list writes consecutive registers for loads and stores.
func list(v []vreg) string {
	s := make([]string, len(v))
	for i, r := range v {
		if r != v[0]+vreg(i) {
			log.Fatalf("registers %v are not consecutive", v)
		}
		s[i] = fmt.Sprintf("V%d.B16", r)
	}
	return "[" + strings.Join(s, ", ") + "]"
}

// each calls f with the registers of two vectors.
func each(a, b []vreg, f func(a, b vreg)) {
	for i := range a {
		f(a[i], b[i])
	}
}

// repeatFromHere marks the end of what a turn has done when it is left to be repeated by the careful loop.
func repeatFromHere() {
	repeats = true
	repeated = maps.Clone(advanced)
}

// loop writes the loop around a body that handles some bytes.
func loop(bytes int, body func()) {
	advanced = map[string]int{}
	left := param("bytes")
	line("CBZ %s, done", left)
	label("turn")
	mark := used()
	body()
	release(mark)
	line("SUBS $%d, %s, %s", bytes, left, left)
	line("BNE turn")
	label("done")
}

// loops writes the loops around a body that handles some bytes: many in a turn, then few, carefully. A turn that finds
// a NaN (nans.check) is repeated by the second loop.
func loops(many, few int, body func(bytes int, careful bool)) {
	turn := func(bytes int, careful bool) {
		advanced = map[string]int{}
		mark := used()
		body(bytes, careful)
		release(mark)
	}
	left, now := param("bytes"), "R8"
	repeats = false
	line("SUBS $%d, %s, %s", many, left, left)
	line("BLT tail")
	label("turn")
	turn(many, false)
	line("SUBS $%d, %s, %s", many, left, left)
	line("BGE turn")
	label("tail")
	line("ADDS $%d, %s, %s", many, left, now)
	line("BEQ done")
	line("MOVD $0, %s", left)
	label("few")
	turn(few, true)
	line("SUBS $%d, %s, %s", few, now, now)
	line("BNE few")
	if repeats {
		line("SUBS $%d, %s, %s", many, left, left)
		line("BGE turn")
		line("B tail")
		label("nan")
		for _, pointer := range slices.Sorted(maps.Keys(repeated)) {
			line("SUB $%d, %s", repeated[pointer], param(pointer))
		}
		line("MOVD $%d, %s", many, now)
		line("B few")
	}
	label("done")
}
