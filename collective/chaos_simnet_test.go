package collective_test

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/transport/simnet"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// TestChaosOnSimnet runs random programs on a simulated network, in virtual time: ranks on hosts and in processes, sums
// of all dtypes, started calls, splits, messages, and a fault. Each rank ends with the right result, bit for bit, or
// with an error that names the fault and the ranks at fault. No rank hangs, and afterwards each rank may use its memory
// again. -programs 10000 sets the number of programs.
func TestChaosOnSimnet(t *testing.T) {
	t.Parallel()
	noticed := chaosTally{}
	chaosSeeds(t, 600, 250, 12, noticed.complete, func(p *chaosProgram) error {
		var err error
		synctest.Test(t, func(t *testing.T) {
			var errs []error
			_, errs, err = p.simulate(t)
			noticed.add(p, errs)
		})
		if err != nil {
			chaosFailed(t, p, err)
		}
		return err
	})
	noticed.check(t)
}

// TestChaosRepeats checks that a program ends in the same way each time, although goroutines are scheduled differently.
func TestChaosRepeats(t *testing.T) {
	first := rand.Uint64() >> 1
	for i := range uint64(40) {
		p := newChaos(first+i, 12)
		var outcomes []string
		for range 3 {
			synctest.Test(t, func(t *testing.T) {
				outcome, _, _ := p.simulate(t)
				outcomes = append(outcomes, outcome)
			})
		}
		if slices.ContainsFunc(outcomes, func(o string) bool { return o != outcomes[0] }) {
			chaosFailed(t, p, fmt.Errorf("the same program ended in different ways:\n%q", outcomes))
			return
		}
	}
}

// simulate runs the program in the bubble of the test. It returns the outcome of each rank, and what is wrong with it.
func (p *chaosProgram) simulate(t *testing.T) (outcome string, errs []error, err error) {
	random := rand.New(rand.NewPCG(p.seed, 4))
	cfg := simnet.Config{
		Places: p.places, Buffers: random.IntN(2) == 0, Seed: p.seed,
		Slow: map[int]float64{random.IntN(4): 1 + 3*random.Float64()},
	}
	if random.IntN(2) == 0 {
		cfg.Jitter = time.Duration(1 + random.IntN(30_000))
	}
	if random.IntN(3) == 0 {
		cfg.Switch = 5e9
	}
	if p.fault != nil {
		cfg.Faults = []simnet.Fault{*p.fault}
	}
	net, err := simnet.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	kill := func(rank int) { net.Happen(simnet.Fault{Kind: simnet.Kill, Rank: rank}) }
	hung := false
	watchdog := time.AfterFunc(time.Hour, func() {
		hung = true
		for r := range p.places {
			kill(r)
		}
	})
	errs, done := p.everywhere(t, net.Ends(), func() {
		if p.fault != nil && p.fault.Kind == simnet.Stop {
			kill(p.fault.Rank)
		}
	})
	watchdog.Stop()
	for r, e := range errs {
		if !p.loses(r) {
			outcome += fmt.Sprintf("rank %d: %d steps, %v\n", r, done[r], repeatable(chaosKind(e)))
		}
	}
	if hung {
		return outcome, errs, fmt.Errorf("it hangs: %v steps, %w", done, errors.Join(errs...))
	}
	return outcome, errs, p.judge(errs)
}

// repeatable maps a kind of failure to one that is the same in each run. If the end of a peer is reported at the moment
// of a deadline, the scheduler decides which of the two a rank sees. For the same reason the progress of a killed rank
// is undetermined.
func repeatable(kind error) error {
	if kind == collective.ErrTimeout {
		return collective.ErrPeerLost
	}
	return kind
}

// everywhere runs the program on all processes, and calls over when all surviving ones have ended. It returns the error
// and the number of steps of each rank.
func (p *chaosProgram) everywhere(t *testing.T, ends []transport.Endpoint, over func()) (errs []error, done []int) {
	errs, done = make([]error, len(ends)), make([]int, len(ends))
	var all, survivors sync.WaitGroup
	var leave sync.WaitGroup
	leave.Add(len(p.processes())) // before any of them waits for the others
	for _, ranks := range p.processes() {
		var own []transport.Endpoint
		for _, r := range ranks {
			own = append(own, ends[r])
		}
		g, err := collective.Open(own,
			collective.Config{Timeout: 5 * time.Second, Algorithm: p.row, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		lost := p.loses(ranks[0])
		if !lost {
			survivors.Add(1)
		}
		all.Go(func() {
			var local sync.WaitGroup
			for i, c := range g.Local() {
				local.Go(func() { done[ranks[i]], errs[ranks[i]] = (&chaosRank{chaosProgram: p, Communicator: c}).run() })
			}
			local.Wait()
			leave.Done()
			if !lost {
				survivors.Done()
			}
			if !p.leave {
				leave.Wait()
			}
			if err := g.Close(); err != nil && !lost {
				errs[ranks[0]] = errors.Join(errs[ranks[0]], err)
			}
		})
	}
	survivors.Wait()
	over()
	all.Wait()
	return errs, done
}

// chaosKind returns the kind of an error.
func chaosKind(err error) error {
	for _, kind := range []error{
		errWrong, collective.ErrTimeout, collective.ErrPeerLost, collective.ErrMismatch, collective.ErrDesync,
		collective.ErrInvalid,
		collective.ErrClosed, collective.ErrBusy, collective.ErrAborted,
	} {
		if errors.Is(err, kind) {
			return kind
		}
	}
	return err
}

// TestStoppedInTime checks that a process that stops during an all-reduce is an error on every other rank, soon after
// the deadline, whichever ranks they wait for, and that the error names exactly that rank.
func TestStoppedInTime(t *testing.T) {
	const deadline, grace = 2 * time.Second, 1200 * time.Millisecond
	for _, places := range [][]transport.Place{
		simnet.Uniform(6, 1, false),
		simnet.Uniform(2, 3, true), // domains of three processes each
		simnet.Uniform(1, 6, true),
	} {
		for _, row := range []string{"", "direct_frames", "recursive_doubling"} {
			synctest.Test(t, func(t *testing.T) {
				net, err := simnet.New(simnet.Config{
					Places: places, Faults: []simnet.Fault{{At: 300 * time.Microsecond, Kind: simnet.Stop, Rank: 2}},
				})
				if err != nil {
					t.Fatal(err)
				}
				var all, survivors sync.WaitGroup
				begin := time.Now()
				for rank, end := range net.Ends() {
					g, err := collective.Open([]transport.Endpoint{end},
						collective.Config{Timeout: deadline, Algorithm: row, Logger: slog.New(slog.DiscardHandler)})
					if err != nil {
						t.Fatal(err)
					}
					if rank != 2 {
						survivors.Add(1)
					}
					all.Go(func() {
						defer g.Close()
						call := &collective.Call{
							Op: collective.AllReduce, Type: tensor.Float32,
							Src: tensor.New(tensor.Float32, 1<<16).Memory(), Dst: tensor.New(tensor.Float32, 1<<16).Memory(),
						}
						var err error
						for err == nil {
							err = g.Local()[0].Do(background, call)
							time.Sleep(time.Microsecond) // a program that takes no virtual time would never reach the fault
						}
						if rank == 2 {
							return
						}
						defer survivors.Done()
						if took := time.Since(begin); took > deadline+grace {
							t.Errorf("%v over %q: rank %d had an error after %v: %v", places, row, rank, took, err)
						}
						if e := (*collective.Error)(nil); !errors.Is(err, collective.ErrTimeout) || !errors.As(err, &e) ||
							!slices.Equal(e.Peers, []int{2}) {
							t.Errorf("%v over %q: rank %d got %v, want a deadline that names rank 2", places, row, rank, err)
						}
					})
				}
				survivors.Wait()
				net.Happen(simnet.Fault{Kind: simnet.Kill, Rank: 2})
				all.Wait()
			})
		}
	}
}
