// Package machine describes the processor and the memory of this process, and sets limits by them.
package machine

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"strings"

	"golang.org/x/sys/cpu"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/internal/memlimit"
)

// Vectors names the processor's vector instructions.
func Vectors() string {
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

// Kernels names the kernels that an engine computes with here.
func Kernels(engine string) string {
	return fmt.Sprintf("%s (%s), %s", engine, Vectors(), runtime.GOARCH)
}

const (
	gcPercent      = 400
	gcPercentLeast = 25
	garbage        = 1 << 30 // bytes that may wait for a collection; in a heap of less than 256 MiB gcPercent bounds them
	memoryShare    = 2       // the workers of a host use at most 1/memoryShare of its memory
	memoryFallback = 4 << 30 // bytes, if the memory size is unknown
)

// TuneGC makes the garbage collector run less often, because the outputs of a step are garbage in the next. A
// memory limit bounds the cost on a small machine, and the size of the heap the cost of a large model. GOGC and
// GOMEMLIMIT take precedence. job is nil for a single process.
func TuneGC(job *cluster.Job) {
	if os.Getenv("GOGC") == "" {
		followHeap()
	}
	if os.Getenv("GOMEMLIMIT") == "" {
		workers := 1
		if job != nil {
			workers = max(1, job.LocalWorkers)
		}
		debug.SetMemoryLimit(memoryLimit(Memory(), workers))
	}
}

// memoryLimit returns the memory limit of each of the workers of a host with total bytes of memory, 0 if unknown.
func memoryLimit(total int64, workers int) int64 {
	if total <= 0 {
		total = memoryShare * memoryFallback
	}
	return total / memoryShare / int64(workers)
}

// followHeap sets the percentage of garbage for the size of the heap, now and after every collection.
func followHeap() {
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(live)
	debug.SetGCPercent(percentOf(live[0].Value.Uint64()))
	runtime.AddCleanup(new([64]byte), func(struct{}) { followHeap() }, struct{}{})
}

// percentOf returns the percentage of garbage for a heap with so many live bytes.
func percentOf(live uint64) int {
	return int(min(max(100*garbage/max(live, 1), gcPercentLeast), gcPercent))
}

// Memory returns the memory that this process may use, or 0 if it is unknown.
func Memory() int64 {
	total, _ := memlimit.Total()
	return total
}

// PeakMemory returns the largest number of bytes that this process has had resident, or 0 without Linux' /proc.
func PeakMemory() int {
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(text)) {
		var kilobytes int
		if n, _ := fmt.Sscanf(line, "VmHWM: %d kB", &kilobytes); n == 1 {
			return kilobytes << 10
		}
	}
	return 0
}
