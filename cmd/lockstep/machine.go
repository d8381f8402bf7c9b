package main

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"

	"golang.org/x/sys/cpu"

	"github.com/lockstep-ml/lockstep/internal/memlimit"
)

// vectors names the processor's vector instructions.
func vectors() string {
	switch {
	case runtime.GOARCH == "arm64":
		return "NEON"
	case runtime.GOARCH != "amd64":
		return "no known vector instructions"
	case cpu.X86.HasAVX512F:
		return "AVX-512"
	case cpu.X86.HasAVX2:
		return "AVX2"
	}
	return "no AVX2"
}

// kernels names the kernels that an engine computes with here. The last bits depend on them.
func kernels(engine string) string {
	kind := "plain Go"
	switch {
	case engine != "go":
		kind = fmt.Sprintf("%s (%s)", engine, vectors())
	case withSIMD && runtime.GOARCH == "amd64":
		kind = fmt.Sprintf("simd (%s)", vectors())
	}
	return kind + ", " + runtime.GOARCH
}

// simdHint returns a hint if this build is several times slower than a build with SIMD, else an empty string.
func simdHint(engine string) string {
	if withSIMD || engine != "go" || runtime.GOARCH != "amd64" || !cpu.X86.HasAVX2 {
		return ""
	}
	return "GOEXPERIMENT=simd before go run or go build makes it several times faster"
}

const (
	gcPercent      = 400
	memoryShare    = 2       // at most 1/memoryShare of the machine's memory
	memoryFallback = 4 << 30 // bytes, if the memory size is unknown
)

// tuneGC makes the garbage collector run less often, because the outputs of a step are garbage in the next. A
// memory limit bounds the cost on a small machine. GOGC and GOMEMLIMIT take precedence.
func tuneGC() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	if os.Getenv("GOMEMLIMIT") == "" {
		limit := int64(memoryFallback)
		if total := memoryBytes(); total > 0 {
			limit = total / memoryShare
		}
		debug.SetMemoryLimit(limit)
	}
}

// memoryBytes returns the memory that this process may use, or 0 if it is unknown.
func memoryBytes() int64 {
	total, _ := memlimit.Total()
	return total
}
