package collective_test

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync"
	"testing"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/race"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestNoAllocation checks that a call like an earlier one allocates nothing on any rank, and starts no goroutine.
// AllocsPerRun counts the whole process.
func TestNoAllocation(t *testing.T) {
	if race.Enabled {
		t.Skip("the race detector allocates, and is slow")
	}
	calls := map[string]func() *collective.Call{
		"small all_reduce": func() *collective.Call {
			return named(sum(make([]float32, 1), make([]float32, 1)), "layers/0/kernel", 1)
		},
		"all_reduce of several segments": func() *collective.Call {
			return sum(make([]float32, 70_000), make([]float32, 70_000))
		},
		"mean in place with wide sums": func() *collective.Call {
			x := tensor.New(tensor.BFloat16, 1001).Memory()
			return &collective.Call{
				Op: collective.AllReduce, Reduce: collective.Mean, Type: tensor.BFloat16, Src: x, Dst: x,
				Options: &collective.Options{Accumulate: collective.AccumulateFloat32},
			}
		},
		"broadcast": func() *collective.Call {
			x := tensor.New(tensor.Float32, 1001).Memory()
			return &collective.Call{Op: collective.Broadcast, Type: tensor.Float32, Src: x, Dst: x, Root: 1}
		},
		"barrier": barrier,
	}
	for name, call := range calls {
		t.Run(name, func(t *testing.T) {
			eachMode(t, func(t *testing.T, m mode) {
				for _, n := range []int{2, 5} { // more ranks than cores block
					g := m.opened(t, n, collective.Config{})
					// few at a time: on a busy machine a waiting rank probes the others
					const warm, runs, tries = 10, 10, 25
					var wg sync.WaitGroup
					for _, c := range g.Local()[1:] {
						own := call()
						wg.Go(func() {
							for range warm + tries*(runs+1) {
								if err := c.Do(background, own); err != nil {
									t.Error(err)
								}
							}
						})
					}
					own, first := call(), g.Local()[0]
					for range warm {
						if err := first.Do(background, own); err != nil {
							t.Error(err)
						}
					}
					before := runtime.NumGoroutine()
					allocs := math.Inf(1) // the least: now and then the runtime itself allocates meanwhile
					for range tries {
						allocs = min(allocs, testing.AllocsPerRun(runs, func() {
							if err := first.Do(background, own); err != nil {
								t.Error(err)
							}
						}))
					}
					if after := runtime.NumGoroutine(); after > before {
						t.Errorf("%d ranks: %d goroutines became %d", n, before, after)
					}
					if allocs >= 1 {
						t.Errorf("%d ranks: %v allocations per call, want none", n, allocs)
					}
					wg.Wait()
				}
			})
		})
	}
}

func BenchmarkAllReduce(b *testing.B) {
	for _, m := range modes {
		for _, n := range []int{2, 4} {
			for _, size := range []int{4, 1 << 10, 64 << 10, 1 << 20, 16 << 20} {
				b.Run(fmt.Sprintf("%s/ranks=%d/bytes=%d", m.name, n, size), func(b *testing.B) {
					g := m.open(b, n, collective.Config{})
					defer shut(b, g)
					b.SetBytes(int64(size))
					b.ReportAllocs()
					var wg sync.WaitGroup
					for _, c := range g.Local() {
						call := sum(make([]float32, size/4), make([]float32, size/4))
						wg.Go(func() {
							for range b.N {
								if err := c.Do(background, call); err != nil {
									b.Error(err)
									return
								}
							}
						})
					}
					wg.Wait()
				})
			}
		}
	}
}

// TestNoAllocationEverywhere checks the same over every transport, for every operation.
func TestNoAllocationEverywhere(t *testing.T) {
	if testing.Short() {
		t.Skip("counts what all goroutines allocate, many times: part of the run without -short")
	}
	for _, p := range placements {
		t.Run(p.name, func(t *testing.T) {
			const n, runs, attempts = 4, 8, 50
			w := p.world(t, n, collective.Config{})
			defer w.close(t)
			for _, op := range collectives {
				for _, count := range []int{4, 200_000} {
					call := func() *collective.Call {
						c := sum(make([]float32, count), make([]float32, count))
						if c.Op = op; op == collective.AllGather || op == collective.Gather {
							c.Src = c.Src.Slice(0, count)
						}
						if op == collective.ReduceScatter || op == collective.Scatter {
							c.Dst = c.Dst.Slice(0, count)
						}
						return c
					}
					const warm = 5
					var wg sync.WaitGroup
					var more []chan bool
					for _, c := range w.comms[1:] {
						own, again := call(), make(chan bool, 1)
						more = append(more, again)
						wg.Go(func() {
							for i := 0; ; i++ {
								err := c.Do(background, own)
								if i == warm-1 { // every rank has made its plan by now
									err = errors.Join(err, c.Do(background, barrier()))
								}
								if err != nil {
									t.Error(err)
									return
								}
								if i >= warm-1 && (i-warm+1)%(runs+1) == 0 && !<-again {
									return
								}
							}
						})
					}
					attempt := func(another bool) {
						for _, again := range more {
							again <- another
						}
					}
					own, first := call(), w.comms[0]
					do := func() {
						if err := first.Do(background, own); err != nil {
							t.Error(err)
						}
					}
					for range warm {
						do()
					}
					if err := first.Do(background, barrier()); err != nil {
						t.Error(err)
					}
					// A transport's buffers may still grow when frames accumulate, and on a busy machine a rank that has waited long
					// probes the others. Neither happens in every try.
					allocs := math.Inf(1)
					for range attempts {
						if allocs < 1 {
							break
						}
						attempt(true)
						allocs = min(allocs, testing.AllocsPerRun(runs, do))
					}
					attempt(false)
					if allocs >= 1 {
						t.Errorf("%v of %d elements: %v allocations per call, want none", op, count, allocs)
					}
					wg.Wait()
				}
			}
		})
	}
}
