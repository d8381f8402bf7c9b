package main

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"

	"golang.org/x/sys/cpu"

	"github.com/lockstep-ml/lockstep/cluster"
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
	gcPercentLeast = 25
	garbage        = 1 << 30 // bytes that may wait for a collection; in a heap of less than 256 MiB gcPercent bounds them
	memoryShare    = 2       // the workers of a host use at most 1/memoryShare of its memory
	memoryFallback = 4 << 30 // bytes, if the memory size is unknown
)

// tuneGC makes the garbage collector run less often, because the outputs of a step are garbage in the next. A
// memory limit bounds the cost on a small machine, and the size of the heap the cost of a large model. GOGC and
// GOMEMLIMIT take precedence. job is nil for a single process.
func tuneGC(job *cluster.Job) {
	if os.Getenv("GOGC") == "" {
		followHeap()
	}
	if os.Getenv("GOMEMLIMIT") == "" {
		workers := 1
		if job != nil {
			workers = max(1, job.LocalWorkers)
		}
		debug.SetMemoryLimit(memoryLimit(memoryBytes(), workers))
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

// memoryBytes returns the memory that this process may use, or 0 if it is unknown.
func memoryBytes() int64 {
	total, _ := memlimit.Total()
	return total
}
