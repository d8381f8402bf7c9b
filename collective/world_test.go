package collective_test

import (
	"context"
	cryptorand "crypto/rand"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/chooser"
	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/internal/transport/transporttest"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mem"
	"github.com/lockstep-ml/lockstep/transport/mixed"
	"github.com/lockstep-ml/lockstep/transport/shm"
	"github.com/lockstep-ml/lockstep/transport/tcp"
)

// placement is a placement of ranks over transports. Each group of endpoints represents a process: it has a separate
// group and shares only messages and memory with the others.
type placement struct {
	name string
	open func(t testing.TB, n int) [][]transport.Endpoint
}

var placements = []placement{
	{"mem", func(_ testing.TB, n int) [][]transport.Endpoint { return [][]transport.Endpoint{mem.New(n)} }},
	{"pipes", func(_ testing.TB, n int) [][]transport.Endpoint { return [][]transport.Endpoint{mem.NewPipes(n)} }},
	{"pipes alone", func(_ testing.TB, n int) [][]transport.Endpoint { return perProcess(mem.NewPipes(n), 1) }},
	{"domains", func(_ testing.TB, n int) [][]transport.Endpoint { return perProcess(domains(n), 2) }},
	{"shm alone", func(t testing.TB, n int) [][]transport.Endpoint { return openShm(t, n, 1) }},
	{"shm of pairs", func(t testing.TB, n int) [][]transport.Endpoint { return openShm(t, n, 2) }},
	{"tcp", func(t testing.TB, n int) [][]transport.Endpoint { return openMixed(t, n, 1, 0) }},
	{"tcp of pairs", func(t testing.TB, n int) [][]transport.Endpoint { return openMixed(t, n, 2, 0) }},
	{"tcp of threes", func(t testing.TB, n int) [][]transport.Endpoint { return openMixed(t, n, 3, 0) }},
	{"shm and tcp", func(t testing.TB, n int) [][]transport.Endpoint { return openMixed(t, n, 1, 2) }},
}

// perProcess divides endpoints into processes.
func perProcess(ends []transport.Endpoint, each int) (out [][]transport.Endpoint) {
	for lo := 0; lo < len(ends); lo += each {
		out = append(out, ends[lo:min(lo+each, len(ends))])
	}
	return out
}

func openShm(t testing.TB, n, each int) [][]transport.Endpoint {
	name := cryptorand.Text()
	return processes(t, n, each, func(ctx context.Context, _ int, ranks []int) ([]transport.Endpoint, error) {
		return shm.Open(ctx, shm.Config{Name: name, Job: t.Name(), Size: n, Ranks: ranks, ArenaBytes: 16 << 20})
	})
}

// openMixed opens processes with the given number of ranks each, and hosts with the given number of processes, which
// share memory; 0: they do not.
func openMixed(t testing.TB, n, each, host int) [][]transport.Endpoint {
	exchanges := transporttest.Exchanges((n + each - 1) / each)
	return processes(t, n, each, func(ctx context.Context, p int, ranks []int) ([]transport.Endpoint, error) {
		cfg := mixed.Config{
			Size: n, Ranks: ranks, Exchange: exchanges[p], TCP: tcp.Config{Job: "test", Logger: slog.New(slog.DiscardHandler)},
		}
		if cfg.NoSharedMemory = host == 0; host > 0 {
			cfg.Apart = fmt.Sprint("host ", p/host)
		}
		return mixed.Open(ctx, cfg)
	})
}

func processes(
	t testing.TB, n, each int, open func(ctx context.Context, p int, ranks []int) ([]transport.Endpoint, error),
) [][]transport.Endpoint {
	t.Helper()
	out := make([][]transport.Endpoint, (n+each-1)/each)
	ctx, cancel := context.WithTimeout(background, 2*time.Minute)
	defer cancel()
	var wg sync.WaitGroup
	for p := range out {
		var ranks []int
		for r := p * each; r < min(n, (p+1)*each); r++ {
			ranks = append(ranks, r)
		}
		wg.Go(func() {
			ends, err := open(ctx, p, ranks)
			if err != nil {
				t.Errorf("process %d: %v", p, err)
			}
			out[p] = ends
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return out
}

// world is a communicator over several simulated processes.
type world struct {
	groups []collective.Group
	comms  []collective.Communicator // by rank
	places []plan.Place
	where  chooser.Where
}

func (p placement) world(t testing.TB, n int, cfg collective.Config) *world {
	t.Helper()
	w := &world{}
	for _, ends := range p.open(t, n) {
		offers := ends[0].Capabilities()
		if w.places == nil {
			for _, at := range offers.Places {
				w.places = append(w.places, plan.Place(at))
			}
		}
		if ends[0].Memory() != nil {
			w.where.Memory = "mem"
		}
		g, err := collective.Open(ends, cfg)
		if err != nil {
			t.Fatal(err)
		}
		w.groups = append(w.groups, g)
		w.comms = append(w.comms, g.Local()...)
	}
	return w
}

// close closes all processes concurrently: none waits for another.
func (w *world) close(t testing.TB) {
	t.Helper()
	var wg sync.WaitGroup
	for _, g := range w.groups {
		wg.Go(func() {
			if err := g.Close(); err != nil {
				t.Errorf("Close: %v", err)
			}
		})
	}
	wg.Wait()
}

// each runs f once per rank, concurrently, and returns the errors by rank.
func (w *world) each(f func(c collective.Communicator) error) []error {
	errs := make([]error, len(w.comms))
	var wg sync.WaitGroup
	for i, c := range w.comms {
		wg.Go(func() { errs[i] = f(c) })
	}
	wg.Wait()
	return errs
}
