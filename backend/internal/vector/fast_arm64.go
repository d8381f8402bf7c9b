//go:build !noasm

package vector

// hasVectors reports whether this processor has the instructions of the assembly: all of arm64 have.
const hasVectors = true
