package transporttest

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

var frameTests = []test{
	{"identity", []int{1, 2, 5}, 0, identity},
	{"places", []int{1, 2, 5}, 0, places},
	{"capabilities", []int{1, 2, 4}, 0, capabilities},
	{"exchange", []int{2, 3, 8}, 0, exchange},
	{"large frames", []int{2}, 0, largeFrames},
	{"random frames", []int{2, 4, 7}, 0, randomFrames},
	{"one-sided exchange", []int{2, 4}, 0, oneSided},
	{"header as sent", []int{2}, 0, headerAsSent},
	{"held until received", []int{2}, unbuffered, heldUntilReceived},
	{"inspect before data", []int{2}, 0, inspect},
	{"inspect what no rank awaits", []int{2, 3}, unbuffered, unexpected},
	{"inspect what others offer", []int{3, 5}, 0, unexpectedThird},
	{"frame of wrong size", []int{2}, 0, wrongSize},
	{"parker", []int{2}, 0, parker},
	{"parked sender", []int{2}, unbuffered, parkedSender},
	{"no allocation", []int{2}, frugal, noAllocation},
}

func identity(g *group) {
	for i, e := range g.ends {
		if e.Rank() != i || e.Size() != len(g.ends) {
			g.Errorf("endpoint %d says rank %d of %d, want rank %d of %d", i, e.Rank(), e.Size(), i, len(g.ends))
		}
		if e.Transport() == "" {
			g.Error("Transport is empty")
		}
		if m := e.Memory(); m != nil {
			m.Retire(tensor.Memory{})
		}
	}
}

// places: all ranks declare the same places, and these are consistent with the domains.
func places(g *group) {
	n := len(g.ends)
	first := g.ends[0].Capabilities()
	if len(first.Places) != n {
		g.Fatalf("%d ranks are at %v", n, first.Places)
	}
	for i, e := range g.ends {
		c := e.Capabilities()
		if !slices.Equal(c.Places, first.Places) {
			g.Errorf("rank %d declares that the ranks are at %v, rank 0 at %v", i, c.Places, first.Places)
			return
		}
		own := c.Places[i]
		var domain []int
		for r, at := range c.Places {
			if r == i || g.Domain != nil && g.Domain(n, i) == g.Domain(n, r) {
				domain = append(domain, r)
			} else if e.Memory() != nil && e.Memory().Peer(r) != nil {
				g.Errorf("rank %d sees a slot of rank %d, which is in another domain", i, r)
			}
			if at.Worker == own.Worker && at.Domain != own.Domain || at.Domain == own.Domain && at.Host != own.Host {
				g.Errorf("rank %d is at %v and rank %d at %v: a worker is in one domain, a domain on one host", i, own, r, at)
			}
		}
		if got := domainOf(e); !slices.Equal(got, domain) {
			g.Errorf("rank %d declares the domain %v, want %v", i, got, domain)
		}
	}
}

// capabilities: what an endpoint declares is what it does. Other tests try the methods that it supports.
func capabilities(g *group) {
	first := g.ends[0].Capabilities()
	for r, e := range g.ends {
		c := e.Capabilities()
		if (e.Memory() == nil) != (g.ends[0].Memory() == nil) || (e.Posts() == nil) != (g.ends[0].Posts() == nil) ||
			c.StagingBytes != first.StagingBytes || c.InlineBytes != first.InlineBytes ||
			c.SharedReceives != first.SharedReceives {
			g.Errorf("rank %d declares %+v, rank 0 %+v", r, c, first)
		}
		if c.Encrypted != nil && (len(c.Encrypted) != len(g.ends) || c.Encrypted[r]) {
			g.Errorf("rank %d of %d declares that these connections are encrypted: %v", r, len(g.ends), c.Encrypted)
		}
		if e.Memory() == nil {
			if c.StagingBytes != 0 || c.InlineBytes != 0 || len(domainOf(e)) > 1 {
				g.Errorf("rank %d shares no memory, and declares it: %+v", r, c)
			}
			continue
		}
		for _, p := range domainOf(e) {
			if n := len(e.Memory().StagingBuffer(p)); n != c.StagingBytes || n == 0 || n%2 != 0 {
				g.Errorf("rank %d: the staging buffer of rank %d has %d bytes, declared are %d", r, p, n, c.StagingBytes)
			}
		}
	}
}

// exchange lets every rank exchange with every distance around the ring, at many sizes.
func exchange(g *group) {
	n := len(g.ends)
	sizes := []int{0, 1, 3, 64, 1000, 4096, 65_536, 100_001}
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
				clear(out) // no rank may read it any more: the race detector checks that
			}
		}
	})
}

// later returns the header of the later call: Inspect also receives frames of later calls that wait for the rank.
func later(a, b transport.Header) transport.Header {
	if b.Seq >= a.Seq {
		return b
	}
	return a
}

// largeFrames: both directions at the same time, with more bytes than any buffer holds.
func largeFrames(g *group) {
	g.acceptAll()
	size := g.Large
	g.each(func(e transport.Endpoint) {
		peer := 1 - e.Rank()
		out, in, want := pattern(make([]byte, size), e.Rank(), peer, 0), make([]byte, size), pattern(make([]byte, size),
			peer, e.Rank(), 0)
		for round := range 2 {
			if err := e.Exchange(ctx, peer, frame(uint64(round), out), peer, in); err != nil || !bytes.Equal(in, want) {
				g.Errorf("rank %d, round %d, %d bytes: other bytes than sent, or %v", e.Rank(), round, size, err)
				return
			}
			clear(in)
		}
	})
}

// randomFrames: in each round the ranks exchange along a permutation, with frames of random sizes; some ranks rest.
func randomFrames(g *group) {
	g.acceptAll()
	_, seed := seeded(g.T)
	n := len(g.ends)
	g.each(func(e transport.Endpoint) {
		random := rand.New(rand.NewPCG(seed, 1)) // the same on all ranks
		buf := make([]byte, 2*100_000)
		for round := range 150 {
			next := random.Perm(n)
			sizes := make([]int, n)
			for r := range sizes {
				sizes[r] = random.IntN(1 << random.IntN(17))
			}
			me := e.Rank()
			to, from := next[me], slices.Index(next, me)
			if to == me {
				continue
			}
			out, in := buf[:sizes[me]], buf[100_000:][:sizes[from]]
			err := e.Exchange(ctx, to, frame(uint64(round), pattern(out, me, to, round)), from, in)
			if err != nil || !bytes.Equal(in, pattern(make([]byte, len(in)), from, me, round)) {
				g.Errorf("rank %d, round %d, %d bytes from %d: other bytes than sent, or %v (seed %d)", me, round, len(in), from,
					err, seed)
				return
			}
		}
	})
}

func oneSided(g *group) {
	n := len(g.ends)
	g.acceptAll()
	g.each(func(e transport.Endpoint) {
		for round := range 200 {
			sender := round % n
			data := make([]byte, 100)
			var err error
			if e.Rank() == sender {
				for to := range n {
					if to != sender && err == nil {
						err = send(ctx, e, to, frame(uint64(round), pattern(data, sender, to, round)))
					}
				}
			} else {
				err = receive(ctx, e, sender, data)
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

// headerAsSent: every field arrives, also the largest values.
func headerAsSent(g *group) {
	headers := []transport.Header{
		{},
		{Epoch: 1, Frame: 2, Comm: 3, Seq: 4, Count: 5, Names: 6, Root: 7, Plan: 8, Op: 9, Reduce: 10, Type: 11, Order: 12},
		{
			Epoch: 1<<32 - 1, Frame: 1<<32 - 2, Comm: 1<<64 - 3, Seq: 1<<64 - 4, Count: 1<<64 - 5, Names: 1<<64 - 6,
			Root: -1, Plan: 1<<32 - 7, Op: 255, Reduce: 254, Type: 253, Order: 252,
		},
	}
	var got transport.Header
	g.ends[1].Inspect(func(_ int, h transport.Header) error { got = h; return nil })
	for _, want := range headers {
		sent := async(func() error { return send(ctx, g.ends[0], 1, transport.Frame{Header: want, Data: []byte("abc")}) })
		if err := receive(ctx, g.ends[1], 0, make([]byte, 3)); err != nil {
			g.Fatal(err)
		}
		if err := result(g, "sending", sent); err != nil {
			g.Fatal(err)
		}
		if got != want {
			g.Errorf("got header %+v, want %+v", got, want)
		}
	}
}

// heldUntilReceived: a send does not return before its receiver receives.
func heldUntilReceived(g *group) {
	g.acceptAll()
	done := async(func() error { return send(ctx, g.ends[0], 1, frame(0, []byte("abc"))) })
	select {
	case err := <-done:
		g.Fatalf("the send returned %v before anybody received", err)
	case <-time.After(20 * time.Millisecond): // if it would return later, that would pass: never a false alarm
	}
	in := make([]byte, 3)
	if err := receive(ctx, g.ends[1], 0, in); err != nil || string(in) != "abc" {
		g.Errorf("received %q, %v", in, err)
	}
	if err := result(g, "the send", done); err != nil {
		g.Errorf("the send returned %v", err)
	}
}

// inspect: a refused frame does not change the receiver's memory, and the sender gets it back.
func inspect(g *group) {
	refusal := errors.New("not this one")
	g.ends[1].Inspect(func(peer int, h transport.Header) error {
		if peer != 0 || h.Seq != 7 {
			g.Errorf("judged a frame of rank %d with header %+v", peer, h)
		}
		return refusal
	})
	sending, cancel := context.WithCancelCause(ctx)
	data := []byte("abc")
	done := async(func() error { return send(sending, g.ends[0], 1, frame(7, data)) })
	in := []byte("xyz")
	if err := receive(ctx, g.ends[1], 0, in); !errors.Is(err, refusal) {
		g.Errorf("the receiver got %v, want %v", err, refusal)
	}
	if string(in) != "xyz" {
		g.Errorf("the receiver's memory was changed to %q", in)
	}
	cause := errors.New("enough")
	cancel(cause)
	if err := result(g, "the send", done); !errors.Is(err, cause) && !(g.Buffers && err == nil) {
		g.Errorf("the sender got %v, want %v", err, cause)
	}
	clear(data)
}

// unexpected: ranks that send to each other while none receives learn of each other's frames.
func unexpected(g *group) {
	refusal := errors.New("not now")
	n := len(g.ends)
	all, cancel := context.WithTimeout(ctx, soon)
	defer cancel()
	var refused atomic.Int32
	g.each(func(e transport.Endpoint) {
		e.Inspect(func(peer int, h transport.Header) error {
			if peer != (e.Rank()+n-1)%n || h.Seq != uint64(peer) {
				g.Errorf("rank %d judged a frame of rank %d with header %+v", e.Rank(), peer, h)
			}
			return refusal
		})
		err := send(all, e, (e.Rank()+1)%n, frame(uint64(e.Rank()), []byte("abc")))
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

// unexpectedThird: a rank that waits for one peer inspects the frame of another.
func unexpectedThird(g *group) {
	refusal := errors.New("not now")
	n := len(g.ends)
	g.acceptAll()
	g.ends[0].Inspect(func(peer int, h transport.Header) error {
		if peer != n-1 || h.Seq != 7 {
			g.Errorf("rank 0 judged a frame of rank %d with header %+v", peer, h)
		}
		return refusal
	})
	waiting := async(func() error { return receive(ctx, g.ends[0], 1, make([]byte, 3)) })
	time.Sleep(5 * time.Millisecond) // most often it blocks by then
	sending, cancel := context.WithCancel(ctx)
	sent := async(func() error { return send(sending, g.ends[n-1], 0, frame(7, []byte("abc"))) })
	if err := result(g, "waiting for rank 1", waiting); !errors.Is(err, refusal) {
		g.Errorf("waiting for rank 1: %v, want %v", err, refusal)
	}
	cancel()
	result(g, "the send", sent)
}

func wrongSize(g *group) {
	for _, size := range []int{0, 2, 4, 100_000} {
		g := g.again()
		g.acceptAll()
		sending, cancel := context.WithCancel(ctx)
		done := async(func() error { return send(sending, g.ends[0], 1, frame(0, []byte("abc"))) })
		in := bytes.Repeat([]byte{9}, size)
		if err := receive(ctx, g.ends[1], 0, in); !errors.Is(err, transport.ErrSize) {
			g.Errorf("3 bytes received into %d: %v, want %v", size, err, transport.ErrSize)
		}
		if !bytes.Equal(in, bytes.Repeat([]byte{9}, size)) {
			g.Errorf("a refused frame of 3 bytes was written into %d", size)
		}
		cancel()
		result(g, "the send", done)
		g.close()
	}
}

// parker: a transport blocks through its context if that is a Parker.
func parker(g *group) {
	g.acceptAll()
	end := errors.New("that is all")
	h := g.again()
	h.acceptAll()
	p := &parked{Context: ctx, end: end}
	if err := receive(p, h.ends[0], 1, make([]byte, 1)); !errors.Is(err, end) || p.parks == 0 {
		g.Errorf("after %d parks: %v, want %v", p.parks, err, end)
	}
	h.close()
	p = &parked{Context: ctx}
	in := make([]byte, 3)
	done := async(func() error { return receive(p, g.ends[0], 1, in) })
	time.Sleep(2 * time.Millisecond)
	if err := send(ctx, g.ends[1], 0, frame(0, []byte("abc"))); err != nil {
		g.Errorf("sending to a parked receiver: %v", err)
	}
	if err := result(g, "the parked receiver", done); err != nil || string(in) != "abc" {
		g.Errorf("the parked receiver got %q, %v", in, err)
	}
}

func parkedSender(g *group) {
	g.acceptAll()
	p := &parked{Context: ctx}
	done := async(func() error { return send(p, g.ends[0], 1, frame(0, []byte("abc"))) })
	time.Sleep(2 * time.Millisecond)
	if err := receive(ctx, g.ends[1], 0, make([]byte, 3)); err != nil {
		g.Errorf("receiving from a parked sender: %v", err)
	}
	if err := result(g, "the parked sender", done); err != nil {
		g.Errorf("the parked sender got %v", err)
	}
}

// noAllocation: neither rank allocates in an exchange. AllocsPerRun counts the whole process, so both count, and so
// does what else the process does: on a busy machine a wait may be long enough for a timer. One of three counts is 0.
func noAllocation(g *group) {
	g.acceptAll()
	a, b := make([]byte, 64), make([]byte, 64)
	const runs = 200
	var counts []float64
	for range 3 {
		peer := async(func() error {
			in := make([]byte, 64)
			var err error
			for range runs + 1 {
				err = errors.Join(err, g.ends[1].Exchange(ctx, 0, frame(0, b), 0, in))
			}
			return err
		})
		in := make([]byte, 64)
		n := testing.AllocsPerRun(runs, func() { g.ends[0].Exchange(ctx, 1, frame(0, a), 1, in) })
		if err := result(g, "rank 1", peer); err != nil {
			g.Error(err)
		}
		if n < 1 {
			return
		}
		counts = append(counts, n)
	}
	g.Errorf("%v allocations per exchange, want 0 once", counts)
}
