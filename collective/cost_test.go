package collective

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// bare executes a collective as Run does, without the detection of mistakes and stuck peers: no header is made, no
// description of the call is recorded, no deadline is set. It exists to measure what these cost.
func (b *planBackend) bare(call *Call, t ticket) error {
	if err := b.front.Err(); err != nil {
		return err
	}
	b.diagnosis.begun.Next(call.Op, call.Peer)
	r := Running{Call: call, ticket: t}
	b.team.cfg.options(&r.Options, call)
	var err error
	if r.Count, err = call.check(b.rank, b.team.size, &r.Options); err != nil {
		return err
	}
	p, err := b.planner.plan(&r)
	if err != nil {
		return err
	}
	b.use(&r, p)
	call.sides(b.rank, &b.call)
	b.signer.last, b.call.Slot = &signature{}, transport.Slot{Header: transport.Header{Seq: t.seq}}
	return b.exec.Execute(context.Background(), &b.call)
}

// doBare is Do, but executes the call by bare.
func (c *communicator) doBare(call *Call) error {
	t, ready, err := c.enter(call, blocking)
	if err != nil {
		return err
	}
	if !ready {
		return fmt.Errorf("call %d is not the first", t.seq)
	}
	err = c.backend.(*planBackend).bare(call, t)
	c.finish(true)
	c.leaveMonitor(t.seq, call, err)
	return err
}

// BenchmarkChecks measures calls with and without fingerprints and deadlines, in turns of one run: the medians of the
// turns, their difference (cost-ns), and its part of a call (cost-%).
func BenchmarkChecks(b *testing.B) {
	for _, size := range []int{4, 1 << 10, 64 << 10, 256 << 10, 1 << 20} {
		b.Run(fmt.Sprintf("bytes=%d", size), func(b *testing.B) {
			g, err := Open(mem.New(2), Config{Algorithm: "direct"})
			if err != nil {
				b.Fatal(err)
			}
			defer g.Close()
			calls := max(20, min(500, 4<<20/size))
			var took [2][]float64 // with, without: ns of a call of rank 0
			var ranks sync.WaitGroup
			for _, c := range g.Local() {
				m := c.(*communicator)
				x := func() tensor.Memory { return tensor.New(tensor.Float32, size/4).Memory() }
				call := &Call{
					Op: AllReduce, Type: tensor.Float32, Src: x(), Dst: x(),
					Manifest: &Manifest{Name: "layers/0/kernel", Shape: []int{size / 4}},
				}
				ranks.Go(func() {
					for turn := range 2 * (b.N + 1) {
						start := time.Now()
						for range calls {
							var err error
							if turn%2 == 0 {
								err = m.Do(context.Background(), call)
							} else {
								err = m.doBare(call)
							}
							if err != nil {
								b.Error(err)
								return
							}
						}
						if m.rank == 0 && turn > 1 {
							took[turn%2] = append(took[turn%2], float64(time.Since(start))/float64(calls))
						}
					}
				})
			}
			ranks.Wait()
			with, without := middle(took[0]), middle(took[1])
			b.ReportMetric(with, "with-ns")
			b.ReportMetric(without, "without-ns")
			b.ReportMetric(with-without, "cost-ns")
			b.ReportMetric(100*(with-without)/without, "cost-%")
		})
	}
}

func middle(x []float64) float64 {
	if len(x) == 0 {
		return 0
	}
	slices.Sort(x)
	return x[len(x)/2]
}
