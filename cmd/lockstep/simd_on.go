//go:build goexperiment.simd

package main

// withSIMD reports whether the Go engine's kernels use vector instructions.
const withSIMD = true
