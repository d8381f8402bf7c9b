//go:build goexperiment.simd

package main

// withSIMD says whether the Go engine's kernels use vector instructions.
const withSIMD = true
