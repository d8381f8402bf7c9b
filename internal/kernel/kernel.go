// Package kernel implements the innermost loops of reductions: combining two vectors element by element, combining many
// along the canonical tree, dividing by a count, and converting between widths; and those of compressed gradients.
//
// Memory is given as pointers and counts of elements. Any start address is allowed, aligned or not, and any count, 0
// included. A destination may be the same memory as a source (the same start), but must not overlap one otherwise.
// No function here allocates, blocks or reads a clock.
//
// # Results
//
// Sum and Prod of integers wrap around, as Go's do. float16 and bfloat16 are widened to float32, combined, and rounded
// to nearest even. Min and Max follow IEEE 754-2019's minimum and maximum, as Go's built-ins do: a NaN on either side
// gives a NaN, and -0 is less than +0.
//
// The bits of a NaN are defined too. If the left operand is a NaN, it is the result, else the right one if that is;
// sign and payload stay, and it becomes quiet. An invalid operation (∞ - ∞, 0 · ∞) gives the quiet NaN of negative sign
// without a payload. So an element's bits are the same in every implementation of a loop and on every processor.
//
// # How loops are chosen
//
// One table by operation and element type ([Op], tensor.DType) holds the loops; the rest of the package uses that
// table. The loops in loops.go and half.go, with nan.go, are the reference that any other implementation has to equal
// bit for bit. On amd64 processors with AVX2 or AVX-512 assembly replaces them (fast_amd64.go), and on arm64, where all
// processors have NEON (fast_arm64.go); it is written by the programs in _gen. The build tag noasm leaves it out.
package kernel

//go:generate sh -c "cd _gen && go run ./amd64 -table ../table_amd64.go"
//go:generate sh -c "cd _gen && go run ./amd64 -out ../avx2_amd64.s -stubs ../avx2_amd64.go -pkg kernel"
//go:generate sh -c "cd _gen && go run ./amd64 -avx512 -out ../avx512_amd64.s -stubs ../avx512_amd64.go -pkg kernel"
//go:generate sh -c "cd _gen && go run ./arm64 .."

import (
	"fmt"
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Op is how two elements are combined. A mean is a Sum and a division ([Tree.Divide], [Scale]).
type Op uint8

// The operations.
const (
	Sum Op = iota
	Prod
	Min
	Max
	opCount
)

// String returns the operation's name in lower case: "sum".
func (op Op) String() string {
	names := [...]string{"sum", "prod", "min", "max"}
	if int(op) < len(names) {
		return names[op]
	}
	return fmt.Sprintf("Op(%d)", uint8(op))
}

// Reduce sets dst[i] = a[i] ⊕ b[i] for the n elements of each. It panics if t is not numeric.
func Reduce(op Op, t tensor.DType, dst, a, b unsafe.Pointer, n int) {
	pick(op, t).two(dst, a, b, n)
}

// Convert sets dst[i] = src[i], converted from one type to another: the same type, float16 or bfloat16 to float32
// (exact), or float32 to float16 or bfloat16 (to nearest even). It panics for any other pair.
func Convert(to, from tensor.DType, dst, src unsafe.Pointer, n int) {
	switch {
	case to == from && to.Bytes() > 0:
		move(dst, src, n*to.Bytes())
	case to == tensor.Float32 && isHalf(from):
		widen(from, dst, src, n)
	case isHalf(to) && from == tensor.Float32:
		narrow(to, dst, src, n)
	default:
		panic(fmt.Sprintf("kernel: Convert from %v to %v", from, to))
	}
}

// isHalf reports whether t is float16 or bfloat16.
func isHalf(t tensor.DType) bool { return t == tensor.Float16 || t == tensor.BFloat16 }

// loops are the ways of combining one type of element by one operation. Each sets n elements of dst, which may be any
// of the sources.
type loops struct {
	two   func(dst, a, b unsafe.Pointer, n int)       // a ⊕ b
	three func(dst, a, b, c unsafe.Pointer, n int)    // (a ⊕ b) ⊕ c
	four  func(dst, a, b, c, d unsafe.Pointer, n int) // (a ⊕ b) ⊕ (c ⊕ d)
}

// pick returns the loops of one operation and type.
func pick(op Op, t tensor.DType) *loops {
	if op >= opCount || !t.IsNumeric() {
		panic(fmt.Sprintf("kernel: no %v of %v", op, t))
	}
	return &table[op][t]
}

// move copies bytes; dst and src are the same memory or disjoint.
func move(dst, src unsafe.Pointer, bytes int) {
	if dst != src {
		copy(unsafe.Slice((*byte)(dst), bytes), unsafe.Slice((*byte)(src), bytes))
	}
}

// Stream copies bytes with non-temporal (streaming) stores: the written cache lines are not read first, and they evict
// nothing from the caches. This is faster where the caches do not hold written data until it is read. dst and src are
// the same memory or disjoint.
func Stream(dst, src unsafe.Pointer, bytes int) {
	if dst != src {
		streamLines(dst, src, bytes)
		fenceFast()
	}
}

// streamAlignment is the alignment of streamed vectors: a cache line.
const streamAlignment = 64

// streamLines copies bytes with streaming stores, except for the ends of dst that are not whole cache lines. A fence
// must follow.
func streamLines(dst, src unsafe.Pointer, bytes int) {
	head := min(bytes, -int(uintptr(dst))&(streamAlignment-1))
	move(dst, src, head)
	if bytes -= head; bytes == 0 {
		return
	}
	dst, src = unsafe.Add(dst, head), unsafe.Add(src, head)
	done := streamFast(dst, src, bytes)
	if bytes -= done; bytes > 0 {
		move(unsafe.Add(dst, done), unsafe.Add(src, done), bytes)
	}
}
