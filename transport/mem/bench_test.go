package mem_test

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// BenchmarkFlags times a call of two flags, which all ranks await from all: the synchronization of a small all-reduce.
func BenchmarkFlags(b *testing.B) {
	for _, n := range []int{2, 4, 8} {
		b.Run(fmt.Sprintf("ranks=%d", n), func(b *testing.B) {
			var wg sync.WaitGroup
			for _, e := range mem.New(n) {
				wg.Go(func() {
					ctx := context.Background()
					for i := range b.N {
						e.Memory().Publish(&transport.Slot{Header: transport.Header{Seq: uint64(i)}})
						e.Memory().Signal(0)
						e.Memory().Await(ctx, -1, 0)
						for r := range n {
							if e.Memory().Peer(r).Seq != uint64(i) {
								b.Error("another call")
							}
						}
						e.Memory().Signal(1)
						e.Memory().Await(ctx, -1, 1)
					}
				})
			}
			wg.Wait()
		})
	}
}
