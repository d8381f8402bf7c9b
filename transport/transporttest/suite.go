// Package transporttest is the conformance suite of transports: what package collective relies on, tried on any
// implementation.
package transporttest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// Open makes a new group of n ranks and returns their ends, by rank.
type Open func(t *testing.T, n int) []transport.Endpoint

// Run tries everything that the contracts in package transport promise: for all transports, and for those whose
// endpoints are a [transport.Marker] or a [transport.Splitter] what these promise.
func Run(t *testing.T, open Open) {
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			for _, n := range test.sizes {
				t.Run(fmt.Sprintf("ranks=%d", n), func(t *testing.T) {
					g := &group{T: t, ends: open(t, n)}
					if len(g.ends) != n {
						t.Fatalf("%d endpoints, want %d", len(g.ends), n)
					}
					test.run(g)
					for _, e := range g.ends {
						if err := e.Close(); err != nil {
							t.Errorf("Close of rank %d: %v", e.Rank(), err)
						}
					}
				})
			}
		})
	}
}

var tests = []struct {
	name  string
	sizes []int
	run   func(*group)
}{
	{"identity", []int{1, 2, 5}, identity},
	{"exchange", []int{2, 3, 8}, exchange},
	{"one-sided exchange", []int{2, 4}, oneSided},
	{"unbuffered", []int{2}, unbuffered},
	{"inspect before data", []int{2}, inspect},
	{"inspect what nobody awaits", []int{2, 3}, unexpected},
	{"frame of wrong size", []int{2}, wrongSize},
	{"cancelled receiver", []int{2}, cancelledReceiver},
	{"cancelled sender", []int{2}, cancelledSender},
	{"cancelled at any moment", []int{2, 4}, cancelledAnyTime},
	{"parker", []int{2}, parker},
	{"peer closes", []int{2, 3}, peerCloses},
	{"own close", []int{2}, ownClose},
	{"no allocation", []int{2}, noAllocation},
	{"slots and marks", []int{1, 2, 5}, slotsAndMarks},
	{"marks end by closing", []int{2, 3}, marksClose},
	{"withdraw before the start", []int{2, 3}, withdrawBefore},
	{"withdraw after the start", []int{2}, withdrawAfter},
	{"withdraw against the last arrival", []int{2, 4}, withdrawRace},
	{"interrupt", []int{2, 3}, interrupt},
	{"no allocation in memory", []int{2}, marksNoAllocation},
	{"split", []int{1, 4, 5}, split},
}

// group is the ranks under test.
type group struct {
	*testing.T
	ends []transport.Endpoint
}

// each runs f once per rank, at the same time, and waits.
func (g *group) each(f func(e transport.Endpoint)) {
	var wg sync.WaitGroup
	for _, e := range g.ends {
		wg.Go(func() { f(e) })
	}
	wg.Wait()
}

// markers returns the ends as Markers, and skips the test if they are none.
func (g *group) markers() []transport.Marker {
	out := make([]transport.Marker, len(g.ends))
	for i, e := range g.ends {
		m, ok := e.(transport.Marker)
		if !ok {
			g.Skip("the transport has no marks: its ranks exchange messages only")
		}
		out[i] = m
	}
	return out
}

var ctx = context.Background()

func frame(seq uint64, data []byte) transport.Frame {
	return transport.Frame{Header: transport.Header{Seq: seq, Count: uint64(len(data))}, Data: data}
}

// pattern fills bytes that tell sender, receiver and round apart.
func pattern(b []byte, from, to, round int) []byte {
	for i := range b {
		b[i] = byte(i*7 + from*31 + to*131 + round*17)
	}
	return b
}

func identity(g *group) {
	for i, e := range g.ends {
		if e.Rank() != i || e.Size() != len(g.ends) {
			g.Errorf("endpoint %d says rank %d of %d, want rank %d of %d", i, e.Rank(), e.Size(), i, len(g.ends))
		}
		if e.Transport() == "" {
			g.Error("Transport is empty")
		}
		_, marker := e.(transport.Marker)
		for j, peer := range g.ends {
			if i == j {
				continue
			}
			reach := e.Reach(j)
			if reach != transport.Memory && reach != transport.Messages || reach != peer.Reach(i) {
				g.Errorf("rank %d reaches %d by %v, the other way by %v", i, j, reach, peer.Reach(i))
			}
			if marker && reach != transport.Memory {
				g.Errorf("rank %d is a Marker and reaches rank %d by %v", i, j, reach)
			}
			if reach == transport.Messages && e.Peer(j) != nil {
				g.Errorf("rank %d sees a slot of rank %d, which it reaches by messages", i, j)
			}
		}
		e.Retire(tensor.Memory{})
	}
}

// exchange lets every rank exchange with every distance around the ring, at many sizes.
func exchange(g *group) {
	n := len(g.ends)
	sizes := []int{0, 1, 3, 64, 1000, 4096, 100_001}
	g.each(func(e transport.Endpoint) {
		seen := map[int]transport.Header{}
		e.Inspect(func(peer int, h transport.Header) error { seen[peer] = later(seen[peer], h); return nil })
		for round, size := range sizes {
			for distance := 1; distance < n; distance++ {
				to, from := (e.Rank()+distance)%n, (e.Rank()-distance+n)%n
				in := make([]byte, size)
				out := pattern(make([]byte, size), e.Rank(), to, round)
				if err := e.Exchange(ctx, to, frame(uint64(round), out), from, in); err != nil {
					g.Errorf("rank %d, %d bytes to %d from %d: %v", e.Rank(), size, to, from, err)
					return
				}
				if want := pattern(make([]byte, size), from, e.Rank(), round); !bytes.Equal(in, want) {
					g.Errorf("rank %d got other bytes than rank %d sent (%d bytes)", e.Rank(), from, size)
				}
				if h := seen[from]; h.Seq < uint64(round) || h.Seq == uint64(round) && h.Count != uint64(size) {
					g.Errorf("rank %d saw header %+v, want call %d of %d bytes", e.Rank(), h, round, size)
				}
				clear(out) // nobody may read it any more: the race detector looks
			}
		}
	})
}

// later returns the header of the later call: a rank may be shown frames of later calls that wait for it.
func later(a, b transport.Header) transport.Header {
	if b.Seq >= a.Seq {
		return b
	}
	return a
}

func oneSided(g *group) {
	n := len(g.ends)
	g.each(func(e transport.Endpoint) {
		e.Inspect(func(int, transport.Header) error { return nil })
		for round := range 200 {
			sender := round % n
			data := make([]byte, 100)
			var err error
			if e.Rank() == sender {
				for to := range n {
					if to != sender && err == nil {
						err = e.Exchange(ctx, to, frame(uint64(round), pattern(data, sender, to, round)), -1, nil)
					}
				}
			} else {
				err = e.Exchange(ctx, -1, transport.Frame{}, sender, data)
				if !bytes.Equal(data, pattern(make([]byte, 100), sender, e.Rank(), round)) {
					g.Errorf("rank %d got other bytes in round %d", e.Rank(), round)
				}
			}
			if err != nil {
				g.Errorf("rank %d, round %d: %v", e.Rank(), round, err)
				return
			}
		}
	})
}

// unbuffered: a send does not return before its receiver has come.
func unbuffered(g *group) {
	g.ends[1].Inspect(func(int, transport.Header) error { return nil })
	done := make(chan error, 1)
	go func() { done <- g.ends[0].Exchange(ctx, 1, frame(0, []byte("abc")), -1, nil) }()
	select {
	case err := <-done:
		g.Fatalf("the send returned %v before anybody received", err)
	case <-time.After(20 * time.Millisecond): // if it would return later, that would pass: never a false alarm
	}
	in := make([]byte, 3)
	if err := g.ends[1].Exchange(ctx, -1, transport.Frame{}, 0, in); err != nil || string(in) != "abc" {
		g.Errorf("received %q, %v", in, err)
	}
	if err := <-done; err != nil {
		g.Errorf("the send returned %v", err)
	}
}

// inspect: a refused frame leaves the receiver's memory alone, and the sender gets it back.
func inspect(g *group) {
	refusal := errors.New("not this one")
	g.ends[1].Inspect(func(peer int, h transport.Header) error {
		if peer != 0 || h.Seq != 7 {
			g.Errorf("judged a frame of rank %d with header %+v", peer, h)
		}
		return refusal
	})
	sending, cancel := context.WithCancelCause(ctx)
	done := make(chan error, 1)
	go func() { done <- g.ends[0].Exchange(sending, 1, frame(7, []byte("abc")), -1, nil) }()
	in := []byte("xyz")
	if err := g.ends[1].Exchange(ctx, -1, transport.Frame{}, 0, in); !errors.Is(err, refusal) {
		g.Errorf("the receiver got %v, want %v", err, refusal)
	}
	if string(in) != "xyz" {
		g.Errorf("the receiver's memory was changed to %q", in)
	}
	cause := errors.New("enough")
	cancel(cause)
	if err := <-done; !errors.Is(err, cause) {
		g.Errorf("the sender got %v, want %v", err, cause)
	}
}

// unexpected: ranks that send to each other while none receives learn of each other's frames.
func unexpected(g *group) {
	refusal := errors.New("not now")
	n := len(g.ends)
	all, cancel := context.WithCancel(ctx)
	defer cancel()
	var refused atomic.Int32
	g.each(func(e transport.Endpoint) {
		e.Inspect(func(peer int, h transport.Header) error {
			if peer != (e.Rank()+n-1)%n || h.Seq != uint64(peer) {
				g.Errorf("rank %d judged a frame of rank %d with header %+v", e.Rank(), peer, h)
			}
			return refusal
		})
		err := e.Exchange(all, (e.Rank()+1)%n, frame(uint64(e.Rank()), []byte("abc")), -1, nil)
		switch {
		case errors.Is(err, refusal):
			refused.Add(1)
		case !errors.Is(err, context.Canceled):
			g.Errorf("rank %d: %v, want %v", e.Rank(), err, refusal)
		}
		cancel()
	})
	if refused.Load() == 0 {
		g.Error("no rank was shown the frame that it did not await")
	}
}

func wrongSize(g *group) {
	g.ends[1].Inspect(func(int, transport.Header) error { return nil })
	sending, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- g.ends[0].Exchange(sending, 1, frame(0, []byte("abc")), -1, nil) }()
	if err := g.ends[1].Exchange(ctx, -1, transport.Frame{}, 0, make([]byte, 4)); !errors.Is(err, transport.ErrSize) {
		g.Errorf("3 bytes received into 4: %v, want %v", err, transport.ErrSize)
	}
	cancel()
	<-done
}

func cancelledReceiver(g *group) {
	cause := errors.New("enough")
	receiving, cancel := context.WithCancelCause(ctx)
	time.AfterFunc(time.Millisecond, func() { cancel(cause) })
	if err := g.ends[0].Exchange(receiving, -1, transport.Frame{}, 1, make([]byte, 4)); !errors.Is(err, cause) {
		g.Errorf("got %v, want %v", err, cause)
	}
}

func cancelledSender(g *group) {
	cause := errors.New("enough")
	sending, cancel := context.WithCancelCause(ctx)
	time.AfterFunc(time.Millisecond, func() { cancel(cause) })
	data := []byte("abcd")
	if err := g.ends[0].Exchange(sending, 1, frame(0, data), 1, make([]byte, 4)); !errors.Is(err, cause) {
		g.Errorf("got %v, want %v", err, cause)
	}
	clear(data)
}

// cancelledAnyTime cancels exchanges at random moments: whatever the outcome, nobody touches the memory afterwards, which
// the race detector watches.
func cancelledAnyTime(g *group) {
	random, seed := seeded(g.T)
	for range 20 {
		all, cancel := context.WithCancel(ctx)
		time.AfterFunc(time.Duration(random.IntN(300))*time.Microsecond, cancel)
		n := len(g.ends)
		color := uint64(random.Uint32()) | 1<<40
		ends := g.sub(color)
		var wg sync.WaitGroup
		for _, e := range ends {
			e.Inspect(func(int, transport.Header) error { return nil })
			wg.Go(func() {
				for round := 0; ; round++ {
					out, in := make([]byte, 20_000), make([]byte, 20_000)
					err := e.Exchange(all, (e.Rank()+1)%n, frame(uint64(round), out), (e.Rank()+n-1)%n, in)
					clear(out)
					clear(in)
					if err != nil {
						if !errors.Is(err, context.Canceled) {
							g.Errorf("rank %d: %v (seed %d)", e.Rank(), err, seed)
						}
						return
					}
				}
			})
		}
		wg.Wait()
		for _, e := range ends {
			e.Close()
		}
	}
}

// sub returns a fresh group of the same ranks, which the transport must be able to split off for these tests.
func (g *group) sub(id uint64) []transport.Endpoint {
	ranks := make([]int, len(g.ends))
	for i := range ranks {
		ranks[i] = i
	}
	out := make([]transport.Endpoint, len(g.ends))
	for i, e := range g.ends {
		s, ok := e.(transport.Splitter)
		if !ok {
			g.Skip("the transport cannot split, so no second group can be made here")
		}
		sub, err := s.Split(id, ranks)
		if err != nil {
			g.Fatalf("Split: %v", err)
		}
		out[i] = sub
	}
	return out
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

// parked is a context that blocks for the transport.
type parked struct {
	context.Context
	parks int
	end   error
}

func (p *parked) Park(ready <-chan struct{}) error {
	p.parks++
	if p.end != nil {
		return p.end
	}
	<-ready
	return nil
}

// parker: a transport that blocks does so through its context if that can.
func parker(g *group) {
	g.ends[1].Inspect(func(int, transport.Header) error { return nil })
	end := errors.New("that is all")
	p := &parked{Context: ctx, end: end}
	if err := g.ends[0].Exchange(p, 1, frame(0, nil), -1, nil); !errors.Is(err, end) || p.parks == 0 {
		g.Errorf("after %d parks: %v, want %v", p.parks, err, end)
	}
	p = &parked{Context: ctx}
	done := make(chan error, 1)
	go func() { done <- g.ends[0].Exchange(p, 1, frame(0, []byte("abc")), -1, nil) }()
	time.Sleep(2 * time.Millisecond)
	in := make([]byte, 3)
	if err := g.ends[1].Exchange(ctx, -1, transport.Frame{}, 0, in); err != nil {
		g.Errorf("receiving from a parked sender: %v", err)
	}
	if err := <-done; err != nil {
		g.Errorf("the parked sender got %v", err)
	}
}

// peerCloses: whoever needs a rank that has closed is told so, waiting or coming later, and Down says it once.
func peerCloses(g *group) {
	last := len(g.ends) - 1
	waiting := make(chan error, 1)
	go func() { waiting <- g.ends[0].Exchange(ctx, -1, transport.Frame{}, last, make([]byte, 1)) }()
	runtime.Gosched()
	g.ends[last].Close()
	check := func(when string, err error) {
		g.Helper()
		var down *transport.PeerDown
		if !errors.As(err, &down) || down.Rank != last || !errors.Is(err, transport.ErrClosed) {
			g.Errorf("%s: %v, want a PeerDown of rank %d", when, err, last)
		}
	}
	check("waiting to receive", <-waiting)
	check("sending later", g.ends[0].Exchange(ctx, last, frame(0, []byte("a")), -1, nil))
	for _, e := range g.ends[:last] {
		select {
		case d := <-e.Down():
			if d.Rank != last {
				g.Errorf("rank %d was told that rank %d is down, want %d", e.Rank(), d.Rank, last)
			}
		case <-time.After(10 * time.Second):
			g.Errorf("rank %d was not told in 10 s that rank %d is down", e.Rank(), last)
		}
		select {
		case d := <-e.Down():
			g.Errorf("rank %d was told of rank %d as well", e.Rank(), d.Rank)
		default:
		}
	}
}

func ownClose(g *group) {
	e := g.ends[0]
	for range 2 {
		if err := e.Close(); err != nil {
			g.Errorf("Close: %v", err)
		}
	}
	if err := e.Exchange(ctx, 1, frame(0, nil), -1, nil); !errors.Is(err, transport.ErrClosed) {
		g.Errorf("Exchange after Close: %v, want %v", err, transport.ErrClosed)
	}
}

// noAllocation: neither rank allocates in an exchange. AllocsPerRun counts the whole process, so both count.
func noAllocation(g *group) {
	for _, e := range g.ends {
		e.Inspect(func(int, transport.Header) error { return nil })
	}
	a, b := make([]byte, 64), make([]byte, 64)
	const runs = 200
	var wg sync.WaitGroup
	wg.Go(func() {
		in := make([]byte, 64)
		for range runs + 1 {
			if err := g.ends[1].Exchange(ctx, 0, frame(0, b), 0, in); err != nil {
				g.Error(err)
			}
		}
	})
	in := make([]byte, 64)
	if n := testing.AllocsPerRun(runs, func() { g.ends[0].Exchange(ctx, 1, frame(0, a), 1, in) }); n >= 1 {
		g.Errorf("%v allocations per exchange, want 0", n)
	}
	wg.Wait()
}

// split makes groups by parity, reversed, and uses both at once with the parent.
func split(g *group) {
	var even, odd []int
	for r := range g.ends {
		if r%2 == 0 {
			even = append([]int{r}, even...)
		} else {
			odd = append([]int{r}, odd...)
		}
	}
	for _, e := range g.ends {
		if _, ok := e.(transport.Splitter); !ok {
			g.Skip("the transport cannot split")
		}
	}
	g.each(func(e transport.Endpoint) {
		ranks, id := even, uint64(1)
		if e.Rank()%2 == 1 {
			ranks, id = odd, 2
		}
		s := e.(transport.Splitter)
		sub, err := s.Split(id, ranks)
		if err != nil {
			g.Errorf("rank %d: Split: %v", e.Rank(), err)
			return
		}
		defer sub.Close()
		n := len(ranks)
		if sub.Size() != n || ranks[sub.Rank()] != e.Rank() {
			g.Errorf("rank %d became rank %d of %d in %v", e.Rank(), sub.Rank(), sub.Size(), ranks)
			return
		}
		if n > 1 {
			sub.Inspect(func(int, transport.Header) error { return nil })
			in := make([]byte, 8)
			to, from := (sub.Rank()+1)%n, (sub.Rank()+n-1)%n
			err := sub.Exchange(ctx, to, frame(0, pattern(make([]byte, 8), sub.Rank(), to, int(id))), from, in)
			if err != nil || !bytes.Equal(in, pattern(make([]byte, 8), from, sub.Rank(), int(id))) {
				g.Errorf("rank %d of group %d: other bytes, or %v", sub.Rank(), id, err)
			}
		}
		if _, err := s.Split(99, nil); err == nil {
			g.Error("Split into a group that the rank is not in: no error")
		}
	})
}
