package tensor

import "math"

// F16 is an IEEE 754 binary16 number, the element of a [Float16] tensor.
type F16 uint16

// BF16 is a bfloat16 number, the upper half of a float32, the element of a [BFloat16] tensor.
type BF16 uint16

// The conversions are implemented here because every sum of half-precision numbers uses them, and sums have
// equal bits on all platforms. They round to nearest, ties to even, over the whole range including subnormal
// numbers, keep the sign of zero, and convert a NaN to a quiet NaN with the upper bits of its payload, as the
// processors' instructions do (VCVTPS2PH, VCVTNEPS2BF16). The processor's bfloat16 instruction also flushes
// subnormals to zero; these conversions do not.

// F16From returns x rounded to binary16.
func F16From(x float32) F16 {
	b := math.Float32bits(x)
	sign := uint16(b>>16) & 0x8000
	b &= 0x7fffffff
	switch {
	case b > 0x7f800000: // NaN
		return F16(sign | 0x7e00 | uint16(b>>13)&0x03ff)
	case b >= 0x477ff000: // rounds to 2^16 or more
		return F16(sign | 0x7c00)
	case b >= 0x38800000: // normal in binary16
		b += 0x0fff + b>>13&1
		return F16(sign | uint16((b-0x38000000)>>13))
	}
	// Subnormal: adding 0.5 aligns the number's unit with 2^-24, the smallest step of binary16. The addition
	// rounds to nearest even.
	return F16(sign | uint16(math.Float32bits(math.Float32frombits(b)+0.5)-0x3f000000))
}

// Float32 returns h as a float32, exactly.
func (h F16) Float32() float32 {
	sign := uint32(h&0x8000) << 16
	exp := uint32(h>>10) & 0x1f
	frac := uint32(h & 0x03ff)
	switch exp {
	case 0: // zero or subnormal: frac * 2^-24
		f := float32(frac) * (1.0 / (1 << 24))
		return math.Float32frombits(sign | math.Float32bits(f))
	case 0x1f:
		if frac != 0 {
			frac |= 0x0200 // quiet
		}
		return math.Float32frombits(sign | 0x7f800000 | frac<<13)
	}
	return math.Float32frombits(sign | (exp+112)<<23 | frac<<13)
}

// BF16From returns x rounded to bfloat16.
func BF16From(x float32) BF16 {
	b := math.Float32bits(x)
	if b&0x7fffffff > 0x7f800000 { // NaN
		return BF16(b>>16 | 0x0040)
	}
	return BF16((b + 0x7fff + b>>16&1) >> 16)
}

// Float32 returns h as a float32, exactly.
func (h BF16) Float32() float32 { return math.Float32frombits(uint32(h) << 16) }
