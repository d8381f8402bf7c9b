package simnet

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/lockstep-ml/lockstep/transport"
)

// end is one rank's endpoint of a group.
type end struct {
	group   *group
	net     *Net
	rank    int
	proc    int   // the rank in the network
	domain  []int // the ranks whose memory this one accesses, this one included
	inspect func(peer int, h transport.Header) error
	wake    chan struct{} // something has changed
	down    chan transport.PeerDown
	over    chan struct{} // closed when the endpoint is

	// Used by the rank's goroutine only.
	posts  []posted
	broken error  // why the posts in progress have failed
	calls  uint64 // number of calls published
	base   uint64 // number of flags set before the current call

	// Guarded by net.mu.
	sent     uint64
	inbox    inbox
	lost     bitSet                      // the peers that are down as far as this rank knows
	reported bitSet                      // those of them that were sent to down
	telling  bool                        // forward runs: down had no room
	reasons  map[int]*transport.PeerDown // why a peer is down, unless it is the end of the peer
	gone     *transport.PeerDown         // why this rank is down for its peers; nil: it is not
	notified map[int]bool                // peers that have sent, or send, why they are down
	closed   bool
	answer   func(seq uint64) []byte
	set      uint64 // number of flags set
	halted   bool   // it can no longer set a flag 0
	slots    [2]transport.Slot
	staging  []byte
}

func (e *end) Rank() int { return e.rank }

func (e *end) Size() int { return len(e.group.ends) }

func (e *end) Transport() string { return "simnet" }

func (e *end) Capabilities() transport.Capabilities {
	if !e.group.memory {
		return transport.Capabilities{Places: e.group.places}
	}
	return transport.Capabilities{Places: e.group.places, StagingBytes: stagingBytes}
}

func (e *end) Posts() transport.Poster { return e }

func (e *end) Memory() transport.SharedMemory {
	if !e.group.memory {
		return nil
	}
	return e
}

// shares reports whether a rank is in the domain of this rank.
func (e *end) shares(rank int) bool { return slices.Contains(e.domain, rank) }

func (e *end) Inspect(inspect func(peer int, h transport.Header) error) { e.inspect = inspect }

func (e *end) Down() <-chan transport.PeerDown { return e.down }

// notify makes the rank check again what it waits for.
func (e *end) notify() {
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

// alive locks the network as soon as the process runs, and returns nil, or why the endpoint is unusable. All calls
// begin with it.
func (e *end) alive() error {
	e.net.mu.Lock()
	p := &e.net.procs[e.proc]
	for p.stopped != nil {
		again := p.stopped
		e.net.mu.Unlock()
		<-again
		e.net.mu.Lock()
	}
	switch {
	case p.killed:
		return ErrKilled
	case e.closed:
		return transport.ErrClosed
	}
	return nil
}

// until blocks until ready, which is called with the network locked, returns true or an error.
func (e *end) until(ctx context.Context, ready func() (bool, error)) error {
	var parked error
	for {
		err := e.alive()
		ok := false
		if err == nil {
			ok, err = ready()
		}
		e.net.mu.Unlock()
		switch {
		case ok || err != nil:
			return err
		case parked != nil:
			return parked
		}
		parked = transport.Park(ctx, e.wake)
	}
}

// posted is an exchange in progress.
type posted struct {
	flight *flight // nil: nothing is sent
	to     int
	from   int // -1: nothing is received
	in     []byte
}

func (e *end) Exchange(ctx context.Context, to int, out transport.Frame, from int, in []byte) error {
	x, err := e.begin(to, out, from, in)
	if err != nil {
		return err
	}
	return e.finish(ctx, &x)
}

func (e *end) Post(to int, out transport.Frame, from int, in []byte) error {
	if len(e.posts) == transport.PostsMax {
		panic(fmt.Sprintf("simnet: more than %d exchanges in progress", transport.PostsMax))
	}
	if e.broken != nil {
		return e.broken
	}
	x, err := e.begin(to, out, from, in)
	if err == nil {
		e.posts = append(e.posts, x)
	}
	return err
}

func (e *end) Complete(ctx context.Context) error {
	if len(e.posts) == 0 {
		panic("simnet: Complete without a Post")
	}
	x := e.posts[0]
	e.posts = slices.Delete(e.posts, 0, 1)
	if e.broken == nil {
		e.broken = e.finish(ctx, &x)
	}
	return e.broken
}

func (e *end) begin(to int, out transport.Frame, from int, in []byte) (posted, error) {
	x := posted{to: to, from: from, in: in}
	err := e.alive()
	defer e.net.mu.Unlock()
	switch {
	case err != nil || to < 0:
		return x, err
	case e.knows(to):
		return x, e.lostError(to)
	}
	e.needs(to)
	e.sent++
	x.flight = &flight{from: e, to: e.group.ends[to], number: e.sent, header: out.Header, data: slices.Clone(out.Data)}
	e.net.offer(x.flight)
	return x, nil
}

// knows reports whether this rank knows that a peer is down.
func (e *end) knows(peer int) bool { return e.lost.has(peer) }

// lostError returns a copy of what is known of a peer.
func (e *end) lostError(peer int) error {
	d := e.reason(peer)
	return &d
}

// reason returns why a peer is down.
func (e *end) reason(peer int) transport.PeerDown {
	if d := e.reasons[peer]; d != nil {
		return *d
	}
	return *e.group.ends[peer].gone
}

func (e *end) finish(ctx context.Context, x *posted) error {
	if x.from >= 0 {
		if err := e.receive(ctx, x.from, x.in); err != nil {
			return err
		}
	}
	if x.flight == nil {
		return nil
	}
	return e.until(ctx, func() (bool, error) {
		if x.flight.done {
			return true, nil
		}
		if e.knows(x.to) {
			return false, e.lostError(x.to)
		}
		return false, e.unexpected(-1)
	})
}

// receive waits for the frame that from has for this rank, inspects it, and copies it.
func (e *end) receive(ctx context.Context, from int, in []byte) error {
	return e.until(ctx, func() (bool, error) {
		f := e.inbox.first(from)
		if f == nil {
			if e.knows(from) {
				return false, e.lostError(from)
			}
			e.needs(from)
			return false, e.unexpected(from)
		}
		if err := e.inspected(from, f); err != nil {
			return false, err
		}
		if len(f.data) != len(in) {
			return false, fmt.Errorf("%w: %d bytes from rank %d, %d expected", transport.ErrSize, len(f.data), from, len(in))
		}
		copy(in, f.data)
		e.net.receive(e, from)
		return true, nil
	})
}

// unexpected inspects the frames that peers other than from have for this rank.
func (e *end) unexpected(from int) error {
	for peer := e.inbox.next(-1); peer >= 0; peer = e.inbox.next(peer) {
		if peer == from {
			continue
		}
		if err := e.inspected(peer, e.inbox.first(peer)); err != nil {
			return err
		}
	}
	return nil
}

// inspected inspects a frame, with the network unlocked meanwhile: only this rank takes frames from its inbox.
func (e *end) inspected(peer int, f *flight) error {
	if e.inspect == nil {
		return nil
	}
	e.net.mu.Unlock()
	defer e.net.mu.Lock()
	return e.inspect(peer, f.header)
}

func (e *end) Fail(reason []byte) {
	err := e.alive()
	defer e.net.mu.Unlock()
	if err == nil {
		e.leave(&transport.Failure{Reason: slices.Clone(reason[:min(len(reason), transport.ReasonMax)])})
	}
}

func (e *end) Close() error {
	_ = e.alive() // a killed rank is closed too, and closing again does nothing
	defer e.net.mu.Unlock()
	if e.closed {
		return nil
	}
	e.leave(transport.ErrClosed)
	e.closed = true
	close(e.over)
	e.net.closed(e.group)
	return nil
}

func (e *end) Answer(text func(seq uint64) []byte) {
	_ = e.alive()
	defer e.net.mu.Unlock()
	e.answer = text
}

// askMax bounds the wait for an answer.
const askMax = 500 * time.Millisecond

func (e *end) Ask(peer int, seq uint64) []byte {
	err := e.alive()
	p := e.group.ends[peer]
	e.net.counts.Queries++
	wait := e.net.latency(e.proc, p.proc) + e.net.latency(p.proc, e.proc)
	gone := err != nil || e.knows(peer)
	e.net.mu.Unlock()
	if gone {
		return nil
	}
	time.Sleep(min(wait, askMax))
	e.net.mu.Lock()
	text := p.answer
	silent := p.closed || e.net.procs[p.proc].killed || e.net.procs[p.proc].stopped != nil ||
		e.net.dead[pair(e.proc, p.proc)]
	e.net.mu.Unlock()
	switch {
	case silent || wait > askMax:
		time.Sleep(askMax - min(wait, askMax))
		return nil
	case text == nil:
		return nil
	}
	answer := text(seq)
	return slices.Clone(answer[:min(len(answer), transport.ReasonMax)])
}

func (e *end) Split(id uint64, ranks []int) (transport.Endpoint, error) {
	at, err := transport.RankIn(ranks, e.rank, e.Size())
	if err != nil {
		return nil, fmt.Errorf("simnet: %w", err)
	}
	of := make([]int, len(ranks))
	for i, r := range ranks {
		of[i] = e.group.ranks[r]
	}
	err = e.alive()
	n := e.net
	defer n.mu.Unlock()
	if err != nil {
		return nil, err
	}
	g := n.splits[id]
	if g == nil {
		g = n.group(of)
		n.splits[id] = g
		for _, part := range g.ends {
			part.inherit()
		}
	}
	if !slices.Equal(g.ranks, of) {
		return nil, fmt.Errorf("simnet: group %#x exists already with ranks %v of the network, not %v", id, g.ranks, of)
	}
	if g.taken++; g.taken == len(ranks) {
		delete(n.splits, id)
	}
	return g.ends[at], nil
}

// inherit passes what is known of connections to an endpoint of a new group.
func (e *end) inherit() {
	if e.net.procs[e.proc].killed {
		e.gone = &transport.PeerDown{Rank: e.rank, Err: ErrReset}
		for _, peer := range e.group.ends {
			e.leaves([]*end{peer}, time.Now().Add(e.net.latency(e.proc, peer.proc)))
		}
	}
	for _, peer := range e.group.ends {
		if e.net.dead[pair(e.proc, peer.proc)] {
			e.lose(&transport.PeerDown{Rank: peer.rank, Err: ErrCut})
		}
	}
}
