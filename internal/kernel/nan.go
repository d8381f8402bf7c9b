package kernel

import "unsafe"

// Processors agree on every bit of a sum but those of a NaN, and compilers may exchange the operands. So the generic
// loops decide for themselves which NaN it is, as amd64's instructions do; they look only where the result is a NaN.

func add[T number](a, b T) T {
	r := a + b
	if r != r {
		return nan(a, b)
	}
	return r
}

func mul[T number](a, b T) T {
	r := T(a * b) // the conversion forbids fusing with an addition
	if r != r {
		return nan(a, b)
	}
	return r
}

func minOf[T number](a, b T) T {
	r := min(a, b)
	if r != r {
		return nan(a, b)
	}
	return r
}

func maxOf[T number](a, b T) T {
	r := max(a, b)
	if r != r {
		return nan(a, b)
	}
	return r
}

// div is for floating-point numbers: integers panic if b is 0.
func div[T number](a, b T) T {
	r := a / b
	if r != r {
		return nan(a, b)
	}
	return r
}

// nan returns the NaN that a ⊕ b is: the left operand if that is one, else the right one, made quiet; if neither is,
// the operation was invalid (∞ - ∞, 0 · ∞), and it is the quiet one of negative sign without a payload.
//
//go:noinline
func nan[T number](a, b T) T {
	r := a
	if a == a {
		r = b
	}
	invalid := r == r
	switch p := unsafe.Pointer(&r); unsafe.Sizeof(r) {
	case 4:
		if invalid {
			*(*uint32)(p) = 0xff800000
		}
		*(*uint32)(p) |= 0x00400000
	case 8:
		if invalid {
			*(*uint64)(p) = 0xfff00000_00000000
		}
		*(*uint64)(p) |= 0x00080000_00000000
	}
	return r
}
