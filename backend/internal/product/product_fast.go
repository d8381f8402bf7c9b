//go:build (amd64 || arm64) && !noasm

package product

import "unsafe"

func copyRows(dst, src unsafe.Pointer, rows, dstStep, srcStep int) {
	copyRows64((*byte)(dst), (*byte)(src), rows, dstStep, srcStep)
}

func transpose(dst, src unsafe.Pointer, blocks, dstStep, srcStep int) {
	transpose8((*byte)(dst), (*byte)(src), blocks, dstStep, srcStep)
}
