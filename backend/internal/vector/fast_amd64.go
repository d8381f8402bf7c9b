//go:build !noasm

package vector

import "golang.org/x/sys/cpu"

// hasVectors reports whether this processor has the instructions of the assembly.
var hasVectors = cpu.X86.HasAVX2
