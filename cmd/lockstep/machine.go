package main

import (
	"bufio"
	"math"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"

	"golang.org/x/sys/cpu"
)

// vectors names the processor's vector instructions.
func vectors() string {
	switch {
	case runtime.GOARCH == "arm64":
		return "NEON"
	case runtime.GOARCH != "amd64":
		return "no vector instructions that are known here"
	case cpu.X86.HasAVX512F:
		return "AVX-512"
	case cpu.X86.HasAVX2:
		return "AVX2"
	}
	return "no AVX2"
}

// simdHint is what to say to somebody whose build is several times slower than it need be, or empty.
func simdHint(engine string) string {
	if withSIMD || engine != "go" || runtime.GOARCH != "amd64" || !cpu.X86.HasAVX2 {
		return ""
	}
	return "GOEXPERIMENT=simd before go run or go build makes it several times faster"
}

const (
	gcPercent      = 400
	memoryShare    = 2       // at most 1/memoryShare of the machine's memory
	memoryFallback = 4 << 30 // bytes, where the machine does not say
)

// tuneGC makes the garbage collector run less often, because the outputs of every step are garbage by the next. The memory
// limit keeps that from being dear on a small machine. GOGC and GOMEMLIMIT win.
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

// memoryBytes returns the memory that this process may use, or 0 if nobody says.
func memoryBytes() int64 {
	least := int64(math.MaxInt64)
	if text, err := os.ReadFile("/sys/fs/cgroup/memory.max"); err == nil {
		if n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil {
			least = n
		}
	}
	if f, err := os.Open("/proc/meminfo"); err == nil {
		defer f.Close()
		for s := bufio.NewScanner(f); s.Scan(); {
			fields := strings.Fields(s.Text()) // MemTotal: 16384 kB
			if len(fields) >= 2 && fields[0] == "MemTotal:" {
				if kb, err := strconv.ParseInt(fields[1], 10, 64); err == nil {
					least = min(least, kb<<10)
				}
			}
		}
	}
	if least == math.MaxInt64 {
		return 0
	}
	return least
}
