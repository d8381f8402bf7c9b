package collective_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/transport/faulty"
	"github.com/lockstep-ml/lockstep/internal/transport/simnet"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mixed"
	"github.com/lockstep-ml/lockstep/transport/tcp"
)

// chaosChildEnv names the program and the part that this process runs, "SEED PROCESS". The test with real processes
// sets it for the children that it starts.
const chaosChildEnv = "LOCKSTEP_CHAOS_CHILD"

// chaosRanksMax bounds the ranks of programs with real processes.
const chaosRanksMax = 6

// chaosFaulty are the faults of the simulated network that a wrapped endpoint has too.
var chaosFaulty = map[simnet.FaultKind]faulty.Fault{
	simnet.Cut: faulty.Cut, simnet.Delay: faulty.Delay, simnet.Corrupt: faulty.Corrupt, simnet.Forge: faulty.Header,
}

// chaosChild is one process of a program. On its standard streams it exchanges addresses, reports that it is ready,
// receives the start request, reports how each rank ended, in a line each, and receives the stop request.
func chaosChild(which string) {
	var seed uint64
	var process int
	if _, err := fmt.Sscan(which, &seed, &process); err != nil {
		panic(err)
	}
	p := newChaos(seed, chaosRanksMax)
	p.hurried = true
	in := bufio.NewReader(os.Stdin)
	g, err := p.join(process, in)
	if err != nil {
		fmt.Printf("error: %v\n", chaosLine(err))
		os.Exit(1)
	}
	fmt.Println("ready")
	chaosRead(in)
	ranks := p.processes()[process]
	said := make([]string, len(ranks))
	var wg sync.WaitGroup
	for i, c := range g.Local() {
		wg.Go(func() {
			_, err := (&chaosRank{chaosProgram: p, Communicator: c}).run()
			said[i] = fmt.Sprintf("ended: %v", chaosKind(err))
			if wrong := p.judgeRank(ranks[i], err); wrong != nil {
				said[i] = fmt.Sprintf("error: %v", chaosLine(wrong))
			}
		})
	}
	wg.Wait()
	if p.leave {
		err = g.Close()
	}
	fmt.Println(strings.Join(said, "\n"))
	chaosRead(in)
	if err = errors.Join(err, g.Close()); err != nil {
		fmt.Printf("error: Close: %v\n", chaosLine(err))
	}
	os.Exit(0)
}

// chaosLine writes an error in one line.
func chaosLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

// chaosRead waits for a line of the parent.
func chaosRead(in *bufio.Reader) {
	if _, err := in.ReadString('\n'); err != nil {
		os.Exit(0) // the parent is gone
	}
}

// join opens the communicators of a process's ranks. Ranks that share memory in the program share it here; all others
// communicate over TCP, as between hosts.
func (p *chaosProgram) join(process int, in io.Reader) (collective.Group, error) {
	ranks := p.processes()[process]
	parent := struct {
		io.Reader
		io.Writer
	}{in, os.Stdout}
	quiet := slog.New(slog.DiscardHandler)
	ctx, cancel := context.WithTimeout(background, 2*time.Minute)
	defer cancel()
	ends, err := mixed.Open(ctx, mixed.Config{
		Ranks: ranks, Size: len(p.places), Exchange: mixed.Through(parent),
		Apart: fmt.Sprint("domain ", p.places[ranks[0]].Domain),
		TCP:   tcp.Config{Job: fmt.Sprint(p.seed), Logger: quiet},
	})
	if err != nil {
		return nil, err
	}
	timeout := time.Minute // a busy machine is not a fault
	if p.fault != nil {
		if kind, ok := chaosFaulty[p.fault.Kind]; ok {
			ends = p.spoil(ranks, ends, kind)
		}
		switch {
		case p.fault.Kind == simnet.Stop:
			timeout = 2 * time.Second
		case p.splits() && chaosKinds[p.fault.Kind] != nil: // see judgeRank
			timeout = 5 * time.Second
		}
	}
	return collective.Open(ends, collective.Config{Timeout: timeout, Algorithm: p.row, Logger: quiet})
}

// spoil wraps the end of the rank to which the fault happens.
func (p *chaosProgram) spoil(ranks []int, ends []transport.Endpoint, kind faulty.Fault) []transport.Endpoint {
	if i := slices.Index(ranks, p.fault.Rank); i >= 0 {
		ends[i] = faulty.Wrap(ends[i],
			faulty.Config{Seed: p.seed, Rate: map[faulty.Fault]float64{kind: 0.1}, DelayMax: p.fault.By + 1, Once: true})
	}
	return ends
}
