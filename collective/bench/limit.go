package bench

import (
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
)

// limitRuns is how often a limit is measured before and after the measurement that it bounds; the best of all
// counts.
const limitRuns = 5

// traffic is how much of a vector a rank reads and writes.
type traffic struct{ reads, writes int }

// trafficOf returns the traffic of the busiest rank, balanced where the operation allows it.
func trafficOf(op collective.Op, ranks, bytes int) traffic {
	switch op {
	case collective.AllReduce, collective.AllGather, collective.AllToAll, collective.Broadcast, collective.Send:
		return traffic{bytes, bytes}
	case collective.Reduce, collective.ReduceScatter:
		return traffic{bytes, bytes / ranks}
	}
	return traffic{bytes / ranks, bytes / ranks} // Gather, Scatter: each rank moves its part
}

// MemoryLimit returns the time in which this many goroutines concurrently read and write what the ranks of an
// operation on bytes must, as plain copies to other memory, without synchronising or adding. It is an
// estimate of the least time, not a bound: an operation in place, or one whose data fits into the caches, can take
// less.
func MemoryLimit(op collective.Op, ranks, bytes int) time.Duration {
	defer debug.FreeOSMemory() // or the next measurement would share the machine with the garbage collector
	t := trafficOf(op, ranks, bytes)
	// data that is read and not written is copied here, which stays in the first-level cache
	const cached = 16 << 10
	repeats := max(1, cached/max(1, t.reads)) // copies that are too short for the clock are timed many times over
	if op == collective.Send {
		ranks /= 2
	}
	type memory struct{ src, dst, cache []byte }
	all := make([]memory, ranks)
	for i := range all {
		all[i] = memory{make([]byte, t.reads), make([]byte, t.writes), make([]byte, cached)}
		for _, b := range [][]byte{all[i].src, all[i].dst} {
			for j := range b {
				b[j] = byte(j)*7 | 1 // zeros are written faster on some machines
			}
		}
	}
	best := time.Duration(1<<63 - 1)
	for run := range 2 * limitRuns {
		piece := t.writes // with which copies use streaming stores
		if run%2 == 1 {
			piece = min(t.writes, 256<<10) // with which they do not: better if everything fits there
		}
		best = min(best, together(ranks, func(i int) {
			m := &all[i]
			for range repeats {
				n := 0
				for ; n < t.writes; n += piece {
					copy(m.dst[n:min(n+piece, t.writes)], m.src[n:])
				}
				for n = t.writes; n < t.reads; n += cached {
					copy(m.cache, m.src[n:])
				}
			}
		}))
	}
	return max(1, best/time.Duration(repeats))
}

// together returns the time that f takes on several goroutines at once, from when all have arrived to when
// the last one is done. They begin as spinning ranks do: a goroutine that another one wakes would run after
// it, with the memory to itself.
func together(ranks int, f func(i int)) time.Duration {
	var ready atomic.Int32
	var wg sync.WaitGroup
	began, ended := make([]time.Time, ranks), make([]time.Time, ranks)
	for i := range ranks {
		wg.Go(func() {
			for ready.Add(1); ready.Load() < int32(ranks); {
				runtime.Gosched()
			}
			began[i] = time.Now()
			f(i)
			ended[i] = time.Now()
		})
	}
	wg.Wait()
	return slices.MaxFunc(ended, time.Time.Compare).Sub(slices.MinFunc(began, time.Time.Compare))
}
