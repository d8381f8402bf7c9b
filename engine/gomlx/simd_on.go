//go:build goexperiment.simd

package gomlx

// simd describes how the Go backend's kernels were built.
func simd() string { return "simd" }
