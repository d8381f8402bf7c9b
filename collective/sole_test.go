package collective_test

import (
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestSoleCalls checks that the numbers of calls stay right when blocking collectives, which are numbered without the
// communicator's lock, alternate with all other calls, while other goroutines take the lock. A call with a wrong number
// would differ from its peer's.
func TestSoleCalls(t *testing.T) {
	const rounds = 300
	g := modes[0].opened(t, 2, collective.Config{})
	var ranks, observers sync.WaitGroup
	var collectives, calls [2]uint64
	over := make(chan struct{})
	for r, c := range g.Local() {
		o := c
		observers.Go(func() {
			var begun, ended uint64
			for i := 0; ; i++ {
				select {
				case <-over:
					return
				default:
				}
				b, e, _ := o.Progress()
				if b < begun || e < ended || e > b {
					t.Errorf("rank %d: progress %d, %d after %d, %d", r, b, e, begun, ended)
				}
				begun, ended = b, e
				switch i % 3 {
				case 0:
					g.Flights()
				case 1:
					if _, err := c.NewBuffer(4); err != nil {
						t.Error(err)
					}
				}
			}
		})
		ranks.Go(func() {
			random := rand.New(rand.NewPCG(1, 2)) // the same on both ranks
			do := func(call *collective.Call) {
				calls[r]++
				if err := c.Do(background, call); err != nil {
					t.Error(err)
				}
			}
			for range rounds {
				x := []float32{1}
				one := sum(x, x)
				switch random.IntN(4) {
				case 0, 1:
					collectives[r]++
					do(one)
				case 2:
					pair := &collective.Call{Op: collective.Send, Type: tensor.Float32, Src: one.Src, Peer: 1}
					if r == 1 {
						pair = &collective.Call{Op: collective.Recv, Type: tensor.Float32, Dst: one.Dst, Peer: 0}
					}
					do(pair)
				case 3:
					calls[r]++
					collectives[r] += 2
					h, err := c.Start(background, one)
					if err != nil {
						t.Error(err)
						return
					}
					do(barrier())
					if err := h.Wait(background); err != nil {
						t.Error(err)
					}
				}
				if one.Op == collective.AllReduce && x[0] != 1 && x[0] != 2 {
					t.Errorf("rank %d: got %v", r, x[0])
				}
			}
		})
	}
	ranks.Wait()
	close(over)
	observers.Wait()
	for r, c := range g.Local() {
		if begun, ended, _ := c.Progress(); begun != calls[r] || ended != calls[r] {
			t.Errorf("rank %d: %d calls have begun and %d ended, want %d", r, begun, ended, calls[r])
		}
	}
	for _, f := range g.Flights() {
		if f.Entered != collectives[f.Rank] || f.Queued != 0 {
			t.Errorf("rank %d: %d collectives, %d queued; want %d and 0", f.Rank, f.Entered, f.Queued, collectives[f.Rank])
		}
	}
}
