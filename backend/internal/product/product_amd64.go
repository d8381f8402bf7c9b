//go:build !noasm

package product

import "golang.org/x/sys/cpu"

var sets = [...]set{
	Plain: plain,
	AVX2: {
		f32: kernels{
			rows: 6, wide: 16, multiply: multiplyF32AVX2, long: kernelF32x1x8AVX2, pack: packF32AVX2,
			copyRows: copyRows, transpose: transpose,
		},
		f64: kernels{rows: 6, wide: 8, multiply: multiplyF64AVX2, copyRows: copyRows},
	},
	AVX512: {
		f32: kernels{
			rows: 14, wide: 32, multiply: multiplyF32AVX512, long: kernelF32x1x8AVX2, pack: packF32AVX512,
			copyRows: copyRows, transpose: transpose,
		},
		f64: kernels{rows: 14, wide: 16, multiply: multiplyF64AVX512, copyRows: copyRows},
	},
}

// best is the level of this processor.
var best = levels()[len(levels())-1]

// levels lists the levels of this processor.
func levels() []Level {
	list := []Level{Plain}
	if cpu.X86.HasAVX2 && cpu.X86.HasFMA {
		list = append(list, AVX2)
		if cpu.X86.HasAVX512F {
			list = append(list, AVX512)
		}
	}
	return list
}
