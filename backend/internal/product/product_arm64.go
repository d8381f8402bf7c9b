//go:build !noasm

package product

var sets = [...]set{
	Plain: plain,
	NEON: {
		f32: kernels{rows: 6, wide: 16, multiply: multiplyF32NEON, copyRows: copyRows, transpose: transpose},
		f64: kernels{rows: 6, wide: 8, multiply: multiplyF64NEON, copyRows: copyRows},
	},
}

// best is the level of every arm64 processor.
var best = NEON

// levels lists the levels of this processor.
func levels() []Level { return []Level{Plain, NEON} }
