// Package transporttest is the conformance suite of transports: it tests any implementation of the properties that
// package collective needs.
package transporttest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// Transport describes how to create groups of a transport, and its properties.
type Transport struct {
	// Open creates a group of n ranks and returns their endpoints, by rank. All are in the test's process, even for
	// transports between processes. The suite closes the endpoints; Open registers other clean-up with t.Cleanup.
	Open func(t *testing.T, n int) []transport.Endpoint
	// Domain returns the number of the domain of a rank. nil: the ranks only exchange frames.
	Domain func(n, rank int) int
	// Processes reports that the endpoints act as separate processes: they cannot access each other's ordinary memory.
	Processes bool
	// Buffers reports that a send may complete before its receiver receives.
	Buffers bool
	// Allocates reports that a call may allocate. A transport for production must not.
	Allocates bool
	// Lazy reports that a rank that has closed its endpoint is reported only to ranks that need it.
	Lazy bool
	// Virtual selects virtual time: each test runs in a bubble of testing/synctest, and Open is called inside.
	Virtual bool
	// Large is the size of the largest frame, in bytes; default 5 MiB.
	Large int
}

// OneDomain is the Domain of a transport whose ranks all access each other's memory.
func OneDomain(n, rank int) int { return 0 }

// Pairs is the Domain of a transport where ranks 0 and 1, 2 and 3, … access each other's memory.
func Pairs(n, rank int) int { return rank / 2 }

// Run tests everything that the contracts of package transport promise, with [transport.SharedMemory] and
// [transport.Poster] if the endpoints have them. After each test no goroutine is left.
func Run(t *testing.T, tr Transport) {
	if tr.Large == 0 {
		tr.Large = 5<<20 + 3
	}
	for _, test := range slices.Concat(frameTests, endTests, postTests, flagTests, memoryTests, splitTests, askTests) {
		t.Run(test.name, func(t *testing.T) {
			for _, n := range test.sizes {
				t.Run(fmt.Sprintf("ranks=%d", n), func(t *testing.T) {
					if tr.Virtual {
						synctest.Test(t, func(t *testing.T) { tr.try(t, n, test) })
						return
					}
					before := goleak.IgnoreCurrent()
					t.Cleanup(func() { // after those of Open
						if err := goleak.Find(before); err != nil && !t.Failed() {
							t.Error(err)
						}
					})
					tr.try(t, n, test)
				})
			}
		})
	}
}

// test is the test of one promise, with groups of several sizes.
type test struct {
	name  string
	sizes []int
	needs need
	run   func(*group)
}

// need is a property that a test requires of the transport.
type need uint

const (
	memory     need = 1 << iota // two ranks in some domain
	posts                       // non-blocking exchanges
	unbuffered                  // a send does not complete before its receiver receives
	frugal                      // no call allocates
)

func (tr Transport) try(t *testing.T, n int, test test) {
	g := &group{T: t, Transport: tr, ends: tr.open(t, n)}
	defer func() {
		for _, e := range g.ends {
			if err := e.Close(); err != nil {
				t.Errorf("Close of rank %d: %v", e.Rank(), err)
			}
		}
	}()
	if lacks := g.lacks(test.needs); lacks != "" {
		t.Skipf("not for this transport: %s", lacks)
	}
	test.run(g)
}

func (tr Transport) open(t *testing.T, n int) []transport.Endpoint {
	ends := tr.Open(t, n)
	if len(ends) != n {
		t.Fatalf("%d endpoints, want %d", len(ends), n)
	}
	return ends
}

// group is the ranks under test.
type group struct {
	*testing.T
	Transport
	ends []transport.Endpoint
}

// lacks names a property that a test needs and the transport lacks, or returns "".
func (g *group) lacks(needs need) string {
	for _, row := range []struct {
		need need
		ok   bool
		text string
	}{
		{memory, g.shared() != nil, "no two ranks access each other's memory"},
		{posts, g.ends[0].Posts() != nil, "it has no non-blocking exchanges"},
		{unbuffered, !g.Buffers, "a send may complete before its receiver receives"},
		{frugal, !g.Allocates, "it may allocate"},
	} {
		if needs&row.need != 0 && !row.ok {
			return row.text
		}
	}
	return ""
}

// domainOf returns the ranks of the domain of an endpoint's rank.
func domainOf(e transport.Endpoint) []int {
	c := e.Capabilities()
	return c.Domain(e.Rank())
}

// shares reports whether a rank is in the domain of an endpoint's rank.
func shares(e transport.Endpoint, rank int) bool { return slices.Contains(domainOf(e), rank) }

// domains returns the endpoints of each domain.
func (g *group) domains() [][]transport.Endpoint {
	if g.Domain == nil {
		return nil
	}
	var out [][]transport.Endpoint
	at := map[int]int{}
	for r, e := range g.ends {
		d := g.Domain(len(g.ends), r)
		i, known := at[d]
		if !known {
			i = len(out)
			at[d], out = i, append(out, nil)
		}
		out[i] = append(out[i], e)
	}
	return out
}

// shared returns the endpoints of the largest domain, if it has two ranks.
func (g *group) shared() []transport.Endpoint {
	var best []transport.Endpoint
	for _, d := range g.domains() {
		if len(d) > max(1, len(best)) {
			best = d
		}
	}
	return best
}

// again opens another group of the same size, which is closed at the end.
func (g *group) again() *group {
	return &group{T: g.T, Transport: g.Transport, ends: g.open(g.T, len(g.ends))}
}

func (g *group) close() {
	for _, e := range g.ends {
		e.Close()
	}
}

// each runs f once per rank, at the same time, and waits.
func (g *group) each(f func(e transport.Endpoint)) { together(g.ends, f) }

// together runs f once for each end, at the same time, and waits.
func together(ends []transport.Endpoint, f func(e transport.Endpoint)) {
	var wg sync.WaitGroup
	for _, e := range ends {
		wg.Go(func() { f(e) })
	}
	wg.Wait()
}

// soon bounds events that need no further action. Waiting for it does not make a test pass.
const soon = time.Minute

// result returns the first value of a channel, and fails the test if none arrives.
func result[V any](g *group, what string, from <-chan V) V {
	g.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(soon):
		g.Fatalf("%s: nothing within %v", what, soon)
	}
	panic("unreachable")
}

// async runs f and returns a channel with its error.
func async(f func() error) <-chan error {
	out := make(chan error, 1)
	go func() { out <- f() }()
	return out
}

// pass lets time pass if it is virtual: nothing else takes any there.
func (g *group) pass() {
	if g.Virtual {
		time.Sleep(5 * time.Microsecond)
	}
}

var ctx = context.Background()

func frame(seq uint64, data []byte) transport.Frame {
	return transport.Frame{Header: transport.Header{Seq: seq, Count: uint64(len(data))}, Data: data}
}

// accept accepts every header.
func accept(int, transport.Header) error { return nil }

func (g *group) acceptAll() {
	for _, e := range g.ends {
		e.Inspect(accept)
	}
}

// send and receive are the halves of an exchange.
func send(c context.Context, e transport.Endpoint, to int, f transport.Frame) error {
	return e.Exchange(c, to, f, -1, nil)
}

func receive(c context.Context, e transport.Endpoint, from int, in []byte) error {
	return e.Exchange(c, -1, transport.Frame{}, from, in)
}

// pattern fills bytes so that sender, receiver, round and most positions differ.
func pattern(b []byte, from, to, round int) []byte {
	const period = 251 // no buffer's size
	for i := range min(len(b), period) {
		b[i] = byte(i*7 + from*31 + to*131 + round*17)
	}
	for n := period; n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
	return b
}

// attempts returns how often a test opens a group to hit a race at a random time: n times, with -short a quarter of it.
func attempts(n int) int {
	if testing.Short() {
		return (n + 3) / 4
	}
	return n
}

// seeded returns random numbers and their seed, which it prints if the test fails.
func seeded(t *testing.T) (*rand.Rand, uint64) {
	seed := rand.Uint64()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("seed %d", seed)
		}
	})
	return rand.New(rand.NewPCG(seed, 0)), seed
}

// parked is a context that blocks for the transport, without a limit if necessary.
type parked struct {
	context.Context
	parks int
	end   error // ends every wait, unless nil
}

func (p *parked) Park(ready <-chan struct{}) error {
	p.parks++
	if p.end != nil {
		return p.end
	}
	<-ready
	return nil
}

// buffer returns zeroed memory of this rank that its domain reaches.
func (g *group) buffer(m transport.Endpoint, bytes int) tensor.Memory {
	if words := tensor.HostMemory(make([]uint64, (bytes+7)/8)).Slice(0, bytes); m.Memory().Reachable(words) {
		return words
	}
	mem, err := m.Memory().NewBuffer(bytes)
	if err != nil {
		g.Fatalf("rank %d: NewBuffer(%d): %v", m.Rank(), bytes, err)
	}
	return mem
}
