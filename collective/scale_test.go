package collective_test

import (
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/bits"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/formula"
	"github.com/lockstep-ml/lockstep/internal/transport/overlay"
	"github.com/lockstep-ml/lockstep/internal/transport/simnet"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

var manyRanks = flag.Int("ranks", 256, "number of ranks of TestManyRanks, a power of two of at least 64")

// TestManyRanks joins -ranks ranks on hosts of 8 in a simulated network, each a separate process. They all-reduce 4
// bytes and 64 KiB, then 5 hosts of 8 ranks are killed, and every survivor must report that. The messages, their bytes
// and the memory are compared with formulas.
func TestManyRanks(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: hundreds of simulated processes")
	}
	const each, killed = 8, 40
	n := *manyRanks
	if n < 64 || n&(n-1) != 0 {
		t.Fatalf("-ranks %d: want a power of two of at least 64", n)
	}
	log := bits.Len(uint(n)) - 1
	synctest.Test(t, func(t *testing.T) {
		begin := heapBytes()
		net, err := simnet.New(simnet.Config{Places: simnet.Uniform(n/each, each, false)})
		if err != nil {
			t.Fatal(err)
		}
		var groups []collective.Group
		for _, end := range net.Ends() {
			g, err := collective.Open([]transport.Endpoint{end}, collective.Config{
				Timeout: 5 * time.Second, Logger: slog.New(slog.DiscardHandler),
			})
			if err != nil {
				t.Fatal(err)
			}
			groups = append(groups, g)
		}
		formula.Head(t)
		row := func(name string, got, want int, text string) {
			formula.Row(t, fmt.Sprintf("%d ranks: %s", n, name), got, want, text)
			if got != want {
				t.Errorf("%s: %d, want %d = %s", name, got, want, text)
			}
		}
		// For each rank: its structures, and after the first call its buffers, the numbers of frames by peer, and its
		// records. For each pair of ranks: after a loss two bits of the simulated network.
		memory := func(name string, rank int, text string) {
			limit := rank * n
			used := heapBytes() - begin
			formula.Row(t, fmt.Sprintf("%d ranks: %s", n, name), used, limit, "at most "+text)
			if used > limit {
				t.Errorf("%s: %d, more than %d", name, used, limit)
			}
		}
		memory("bytes of memory after the start", 16<<10, "16 KiB n")
		var before simnet.Counts
		since := func() simnet.Counts {
			now := net.Counts()
			d := simnet.Counts{
				Frames: now.Frames - before.Frames, Bytes: now.Bytes - before.Bytes,
				Notices: now.Notices - before.Notices, Queries: now.Queries - before.Queries,
			}
			before = now
			return d
		}
		allReduce := func(algorithm string, elements int) (errs []error) {
			errs = make([]error, n)
			var all sync.WaitGroup
			for r, g := range groups {
				all.Go(func() {
					src, dst := tensor.New(tensor.Float32, elements), tensor.New(tensor.Float32, elements)
					values := tensor.Data[float32](src)
					for i := range values {
						values[i] = float32(r)
					}
					errs[r] = g.Local()[0].Do(background, &collective.Call{
						Op: collective.AllReduce, Type: tensor.Float32, Src: src.Memory(), Dst: dst.Memory(),
						Options: &collective.Options{Algorithm: algorithm},
					})
					if sum := float32(n) * float32(n-1) / 2; errs[r] == nil && tensor.Data[float32](dst)[elements-1] != sum {
						errs[r] = errWrong
					}
				})
			}
			all.Wait()
			return errs
		}
		began := time.Now()
		for _, e := range allReduce("recursive_doubling", 1) {
			if e != nil {
				t.Fatal(e)
			}
		}
		c := since()
		row("all-reduce of 4 B: frames", c.Frames, n*log, "n log2 n")
		row("all-reduce of 4 B: bytes", c.Bytes, 4*n*log, "S n log2 n")
		for _, e := range allReduce("rabenseifner", 16<<10) {
			if e != nil {
				t.Fatal(e)
			}
		}
		c = since()
		row("all-reduce of 64 KiB: frames", c.Frames, 2*n*log, "2 n log2 n")
		row("all-reduce of 64 KiB: bytes", c.Bytes, 2*(n-1)<<16, "2 (n-1) S")
		t.Logf("virtual time of both %v", time.Since(began))
		memory("bytes of memory after both", 512<<10, "512 KiB n")

		for r := range killed {
			net.Happen(simnet.Fault{Kind: simnet.Kill, Rank: n - 1 - r*n/64})
		}
		lost := map[int]bool{}
		for r := range killed {
			lost[n-1-r*n/64] = true
		}
		began = time.Now()
		named := map[int]int{}
		for r, e := range allReduce("recursive_doubling", 1) {
			ce := (*collective.Error)(nil)
			switch {
			case lost[r]:
			case !errors.Is(e, collective.ErrPeerLost) || !errors.As(e, &ce) || len(ce.Peers) == 0:
				t.Errorf("rank %d reports %v, want a lost peer", r, e)
			default:
				for _, p := range ce.Peers {
					if named[p]++; !lost[p] {
						t.Errorf("rank %d names rank %d, which lives: %v", r, p, e)
					}
				}
			}
		}
		t.Logf("%d of %d lost, reported by all others after %v; ranks named: %d", killed, n, time.Since(began), len(named))
		time.Sleep(time.Second) // all notices arrive
		c = since()
		t.Logf("%d frames until then", c.Frames)
		// A loss passes once along each of the first connections in each direction, except to those that see it. So does the
		// failure of the group; besides, a rank sends its failure to those that exchange frames with it.
		next := len(overlay.New(n, overlay.MeshMax).Neighbours(0))
		losses, failures := killed*next*(n-1-next), n*(next+log)
		formula.Row(t, fmt.Sprintf("%d ranks: the loss: notices", n), c.Notices, losses+failures,
			fmt.Sprintf("at most %d d (n-1-d) + n (d + log2 n), d = %d first connections", killed, next))
		if c.Notices > losses+failures || c.Notices < losses/2 {
			t.Errorf("the loss: %d notices, want %d to %d", c.Notices, losses/2, losses+failures)
		}
		row("the loss: queries", c.Queries, 0, "0: the ends of connections suffice")
		memory("bytes of memory after the loss", 512<<10, "512 KiB n")
		var all sync.WaitGroup
		for _, g := range groups {
			all.Go(func() { _ = g.Close() })
		}
		all.Wait()
	})
}

// heapBytes returns the bytes of live objects.
func heapBytes() int {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}
