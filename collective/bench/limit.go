package bench

import (
	"fmt"
	"io"
	"net"
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

// limitOf returns a lower bound of the operation's time on this machine: over memory, the ranks' reads and
// writes as plain copies, concurrently, without synchronising or adding; over sockets, the least bytes of
// every rank's link, in both directions at once, without headers.
func limitOf(o Options, bytes int) (time.Duration, error) {
	if Transports[o.Transport].join != nil && Transports[o.Transport].frames {
		return socketLimit(o, bytes)
	}
	return MemoryLimit(o.Op, o.Ranks, bytes), nil
}

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
// operation on bytes must, as plain copies, without synchronising or adding. No implementation in memory can
// be faster.
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

// socketLimit times a plain exchange around a ring of connections.
func socketLimit(o Options, bytes int) (time.Duration, error) {
	carried := int(float64(bytes) * busFactor(o.Op, o.Ranks))
	out, in := make([]net.Conn, o.Ranks), make([]net.Conn, o.Ranks)
	defer func() {
		for i := range out {
			for _, c := range []net.Conn{out[i], in[i]} {
				if c != nil {
					c.Close()
				}
			}
		}
	}()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, fmt.Errorf("bench: %w", err)
	}
	defer l.Close()
	for i := range out {
		if out[i], err = net.Dial("tcp", l.Addr().String()); err == nil {
			in[(i+1)%o.Ranks], err = l.Accept()
		}
		if err != nil {
			return 0, fmt.Errorf("bench: %w", err)
		}
	}
	given, got := make([][]byte, o.Ranks), make([][]byte, o.Ranks)
	for i := range given {
		given[i], got[i] = make([]byte, carried), make([]byte, carried)
	}
	best := time.Duration(1<<63 - 1)
	for range limitRuns {
		errs := make(chan error, 2*o.Ranks)
		began := time.Now()
		for i := range out {
			go func() {
				_, err := out[i].Write(given[i])
				errs <- err
			}()
			go func() {
				_, err := io.ReadFull(in[i], got[i])
				errs <- err
			}()
		}
		for range 2 * o.Ranks {
			if e := <-errs; e != nil && err == nil {
				err = e
			}
		}
		if err != nil {
			return 0, fmt.Errorf("bench: a bare exchange: %w", err)
		}
		best = min(best, time.Since(began))
	}
	return best, nil
}
