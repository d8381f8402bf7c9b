//go:build !goexperiment.simd || !amd64

package fused

// The vector loops process no element.

func addVector[T Float](_, _ []T) int                                       { return 0 }
func dotVector[T Float](_ *[lanes]T, _, _ []T) int                          { return 0 }
func softmaxGradientVector[T Float](_, _, _ []T, _, _ T) int                { return 0 }
func maxVector[T Float](_ *T, _ []T) int                                    { return 0 }
func expVector[T Float](_ *[lanes]T, _, _ []T, _, _ T) int                  { return 0 }
func scaleVector[T Float](_ []T, _ T) int                                   { return 0 }
func sumVector[T Float](_ *[lanes]T, _ []T) int                             { return 0 }
func squaresVector[T Float](_ *[lanes]T, _ []T, _ T) int                    { return 0 }
func normalizeVector[T Float](_, _, _, _ []T, _, _ T) int                   { return 0 }
func normSumsVector[T Float](_, _ *[lanes]T, _, _, _, _, _ []T, _, _ T) int { return 0 }
func normGradientVector[T Float](_, _, _, _ []T, _, _, _, _ T) int          { return 0 }
func geluVector(_ *Gelu, _, _ []float32) int                                { return 0 }
func geluGradientVector(_ *Gelu, _, _, _ []float32) int                     { return 0 }
