package tcp_test

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/tcp"
)

// TestOneProcessor: ranks that share one processor of Go's scheduler with each other, and with a goroutine that
// computes, exchange frames. A rank that waits in a system call does not keep the processor from the others.
func TestOneProcessor(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	const n, rounds = 4, 15
	for _, processes := range []int{1, 2} {
		ends := opened(t, n, processes, func(int) tcp.Config { return tcp.Config{} })
		for _, computes := range []bool{false, true} {
			var stop atomic.Bool
			var others, ranks sync.WaitGroup
			if computes {
				others.Go(func() {
					for !stop.Load() {
						runtime.Gosched()
					}
				})
			}
			for _, e := range ends {
				ranks.Go(func() {
					in := make([]byte, 4)
					to, from := (e.Rank()+1)%n, (e.Rank()+n-1)%n
					for range rounds {
						if err := e.Exchange(context.Background(), to, transport.Frame{Data: []byte("abcd")}, from, in); err != nil {
							t.Errorf("rank %d: %v", e.Rank(), err)
							return
						}
					}
				})
			}
			ranks.Wait()
			stop.Store(true)
			others.Wait()
		}
		for _, e := range ends {
			e.Close()
		}
	}
}
