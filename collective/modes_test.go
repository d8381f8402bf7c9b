package collective_test

import (
	"context"
	"flag"
	"math/rand/v2"
	"os"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/transport/transporttest"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

func TestMain(m *testing.M) {
	if program := os.Getenv(chaosChildEnv); program != "" {
		chaosChild(program)
		return
	}
	flag.Parse()
	if err := flag.Set("test.parallel", "4"); err != nil { // the tests of faults mostly wait
		panic(err)
	}
	debug.SetGCPercent(400) // the tests use little memory, and a fifth of their time went into collecting it
	goleak.VerifyTestMain(m)
}

// mode is a way to carry out collectives: every test that makes sense in each runs in each.
type mode struct {
	name      string
	algorithm string
	ends      func(n int) []transport.Endpoint
}

var modes = []mode{
	{"memory", "direct", mem.New},
	{"memory with frames", "recursive_doubling", mem.New},
	{"messages", "recursive_doubling", mem.NewPipes},
	{"domains", "recursive_doubling", domains},
}

// domains makes a domain of every two ranks, in one process: 0 with 1, 2 with 3, and so on.
func domains(n int) []transport.Endpoint { return transporttest.Domains(n, transporttest.Pairs) }

// eachMode runs a test in each mode.
func eachMode(t *testing.T, run func(t *testing.T, m mode)) {
	for _, m := range modes {
		t.Run(m.name, func(t *testing.T) { run(t, m) })
	}
}

// open opens a group, to be closed by the caller.
func (m mode) open(t testing.TB, n int, cfg collective.Config) collective.Group {
	t.Helper()
	if cfg.Algorithm == "" {
		cfg.Algorithm = m.algorithm
	}
	g, err := collective.Open(m.ends(n), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// opened opens a group that is closed at the end of the test.
func (m mode) opened(t testing.TB, n int, cfg collective.Config) collective.Group {
	t.Helper()
	g := m.open(t, n, cfg)
	t.Cleanup(func() { shut(t, g) })
	return g
}

func shut(t testing.TB, g collective.Group) {
	t.Helper()
	if err := g.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
}

// each runs f once per local rank, at the same time, and returns the errors by rank.
func each(g collective.Group, f func(c collective.Communicator) error) []error {
	errs := make([]error, len(g.Local()))
	var wg sync.WaitGroup
	for i, c := range g.Local() {
		wg.Go(func() { errs[i] = f(c) })
	}
	wg.Wait()
	return errs
}

// mustEach fails the test if a rank has an error.
func mustEach(t *testing.T, g collective.Group, f func(c collective.Communicator) error) {
	t.Helper()
	for rank, err := range each(g, f) {
		if err != nil {
			t.Fatalf("rank %d: %v", rank, err)
		}
	}
}

var background = context.Background()

// sum is an all-reduce of float32.
func sum(src, dst []float32) *collective.Call {
	return &collective.Call{
		Op: collective.AllReduce, Type: tensor.Float32, Src: tensor.HostMemory(src), Dst: tensor.HostMemory(dst),
	}
}

func named(c *collective.Call, name string, shape ...int) *collective.Call {
	c.Manifest = &collective.Manifest{Name: name, Shape: shape}
	return c
}

func barrier() *collective.Call { return &collective.Call{Op: collective.Barrier} }

// seeded returns random numbers and prints their seed if the test fails.
func seeded(t *testing.T) *rand.Rand {
	seed := rand.Uint64()
	if *seedFlag != 0 {
		seed = *seedFlag
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("repeat with: go test ./collective -run '^%s$' -seed %d", t.Name(), seed)
		}
	})
	return rand.New(rand.NewPCG(seed, 1))
}

// paddedCounter is a counter on a separate cache line.
type paddedCounter struct {
	atomic.Int64
	_ [56]byte
}
