package tcp

import (
	"context"
	"fmt"
	"hash/crc32"
	"runtime"
	"time"

	"github.com/lockstep-ml/lockstep/transport"
)

// post is one exchange that is under way.
type post struct {
	to, from int // -1: not, or not any more
	out      transport.Frame
	in       []byte
	stream   *stream // that has out; nil: it is not queued yet
	ticket   uint64  // what stream.sent reaches when out has gone
	judged   bool    // the head of the frame for in
	err      error   // an earlier one failed
}

func (e *endpoint) Exchange(ctx context.Context, to int, out transport.Frame, from int, in []byte) error {
	err := e.begin(to, out, from, in)
	for e.count > 0 && err == nil { // one, if nothing else is under way
		err = e.Complete(ctx)
	}
	return err
}

// Post writes what the socket takes; the rest is the writer goroutine's, until Complete helps.
func (e *endpoint) Post(to int, out transport.Frame, from int, in []byte) error {
	if err := e.begin(to, out, from, in); err != nil {
		return err
	}
	x := &e.posts[(e.first+e.count-1)%len(e.posts)]
	if x.stream == nil {
		return nil
	}
	for s := x.stream; s.sent.Load() < x.ticket; {
		before := s.progress.Load()
		if s.push() != nil {
			return nil // Complete finds it again
		}
		if s.progress.Load() == before {
			s.finish()
			return nil
		}
	}
	return nil
}

// begin adds an exchange to those under way.
func (e *endpoint) begin(to int, out transport.Frame, from int, in []byte) error {
	switch {
	case e.closed.Load():
		return transport.ErrClosed
	case to >= len(e.peers) || from >= len(e.peers) || to == e.rank || from == e.rank:
		return fmt.Errorf("tcp: rank %d of %d cannot exchange with ranks %d and %d", e.rank, len(e.peers), to, from)
	case e.count == len(e.posts):
		return fmt.Errorf("tcp: %d exchanges are under way already", e.count)
	}
	e.posts[(e.first+e.count)%len(e.posts)] = post{to: max(to, -1), out: out, from: max(from, -1), in: in}
	e.count++
	e.queue()
	return nil
}

// Complete ends the oldest exchange.
func (e *endpoint) Complete(ctx context.Context) error {
	if e.count == 0 {
		return fmt.Errorf("tcp: no exchange is under way")
	}
	x := &e.posts[e.first]
	err := x.err
	if err == nil {
		if err = e.wait(ctx, x); err != nil {
			e.abandon(err)
		}
	}
	*x = post{}
	e.first = (e.first + 1) % len(e.posts)
	e.count--
	return err
}

// abandon takes back what is under way, which fails with err: nobody uses the callers' memory any more.
func (e *endpoint) abandon(err error) {
	for i := range e.posts {
		if s := e.posts[i].stream; s != nil {
			s.takeBack()
		}
		e.posts[i] = post{err: err}
	}
}

// queue gives the frames of posts to their connections, in order, as far as there are some.
func (e *endpoint) queue() {
	for i := range e.count {
		x := &e.posts[(e.first+i)%len(e.posts)]
		if x.to < 0 || x.stream != nil {
			continue
		}
		p := &e.peers[x.to]
		if p.fate.Load().gone != nil {
			return
		}
		if !p.up.Load() {
			e.want(x.to)
			return
		}
		h := head{Header: x.out.Header, bytes: uint64(len(x.out.Data)), number: p.sent}
		x.stream = p.streams[p.sent%uint64(len(p.streams))]
		h.stream = x.stream.number
		if e.group.world.node.cfg.Checksum {
			h.summed, h.sum = true, crc32.Checksum(x.out.Data, castagnoli)
		}
		x.ticket = x.stream.put(&h, x.out.Data)
		p.sent++
	}
}

// step moves an exchange on by one write and one read, and reports whether it is done.
func (e *endpoint) step(x *post) (bool, error) {
	if x.to >= 0 {
		if err := e.stepOut(x); err != nil {
			return false, err
		}
	}
	if x.from >= 0 {
		if err := e.stepIn(x); err != nil {
			return false, err
		}
	}
	return x.to < 0 && x.from < 0, nil
}

func (e *endpoint) stepOut(x *post) error {
	if x.stream == nil {
		if e.queue(); x.stream == nil {
			return nil
		}
	}
	s := x.stream
	if s.sent.Load() < x.ticket {
		if err := s.push(); err != nil {
			e.broke(x.to, s.from, err)
			return e.verdict(x.to, false)
		}
	}
	if s.sent.Load() >= x.ticket {
		x.to = -1
	}
	return nil
}

func (e *endpoint) stepIn(x *post) error {
	p := &e.peers[x.from]
	if !p.up.Load() {
		e.want(x.from)
		return nil
	}
	s := p.streams[p.got%uint64(len(p.streams))]
	if !x.judged {
		if ok, err := s.next(); !ok {
			return e.ended(x.from, s, err)
		}
		if err := e.admit(x, s); err != nil {
			return err
		}
	}
	full, err := s.take(x.in)
	if !full {
		return e.ended(x.from, s, err)
	}
	p.got++
	x.from = -1
	return nil
}

// ended handles that nothing came from a peer: nil, or the error that ends its connection.
func (e *endpoint) ended(rank int, s *stream, err error) error {
	if err == nil {
		return nil
	}
	e.broke(rank, s.from, err)
	return e.verdict(rank, false)
}

// admit holds a head that has come against what is expected.
func (e *endpoint) admit(x *post, s *stream) error {
	p := &e.peers[x.from]
	if s.head.number != p.got {
		s.inErr = fmt.Errorf("%w: number %d came, number %d is next", errFrame, s.head.number, p.got)
		return e.ended(x.from, s, s.inErr)
	}
	if e.judge != nil {
		if err := e.judge(x.from, s.head.Header); err != nil {
			return err
		}
	}
	if s.head.bytes != uint64(len(x.in)) {
		return fmt.Errorf("%w: %d bytes from rank %d, %d expected", transport.ErrSize, s.head.bytes, x.from, len(x.in))
	}
	x.judged = true
	return nil
}

// How long a wait looks before it blocks: longer than it takes to be woken, and than a peer adds a segment.
const (
	spinTime  = 100 * time.Microsecond
	spinLooks = 16 // between two looks at the clock
)

// wait blocks until x is done, or cannot be done, or ctx ends it.
//
// No wake-up is lost: the rank sets parked, then tries again, then has everything watched that it needs, then blocks. A
// watcher, or whoever changes a peer's fate, does that first and then looks at parked. Whoever turns parked from true to
// false owns the right to the one token: see the same in package mem.
func (e *endpoint) wait(ctx context.Context, x *post) error {
	for {
		if done, err := e.spin(x); done || err != nil {
			return err
		}
		e.parked.Store(true)
		done, err := e.exhaust(x)
		if !done && err == nil {
			if err = e.hopeless(x); err != nil && e.written(x) {
				if done, _ = e.exhaust(x); done {
					err = nil
				}
			}
		}
		if !done && err == nil {
			err = e.unexpected(x.from)
		}
		if !done && err == nil {
			e.watch(x)
			if err = transport.Park(ctx, e.wake); err == nil {
				continue
			}
		}
		if !e.parked.Swap(false) {
			<-e.wake
		}
		return err
	}
}

// written waits a moment for the goroutine that writes x's frame to a peer that is gone, if there is one: the peer may have
// taken the frame, and closed its end, before that goroutine has come to say so. It reports whether there is a frame on its
// way.
func (e *endpoint) written(x *post) bool {
	if x.to < 0 || x.stream == nil {
		return false
	}
	for since := time.Now(); x.stream.w.busy() && time.Since(since) < brokenGrace; {
		time.Sleep(20 * time.Microsecond)
	}
	return true
}

// exhaust tries until nothing moves any more: a wire may hold what no watcher of its socket sees.
func (e *endpoint) exhaust(x *post) (done bool, err error) {
	for {
		before := e.moved(x)
		if done, err := e.step(x); done || err != nil || e.moved(x) == before {
			return done, err
		}
	}
}

// spin tries for a while.
func (e *endpoint) spin(x *post) (done bool, err error) {
	if !e.group.world.spin {
		return e.exhaust(x)
	}
	var since time.Time
	var moved uint64
	for look := 1; ; look++ {
		if done, err := e.step(x); done || err != nil {
			return done, err
		}
		if look%spinLooks != 0 {
			continue
		}
		now := time.Now()
		if at := e.moved(x); at != moved || since.IsZero() {
			moved, since = at, now
		} else if now.Sub(since) > spinTime {
			return false, nil
		}
		runtime.Gosched()
	}
}

// moved changes when some of x has moved.
func (e *endpoint) moved(x *post) uint64 {
	var n uint64
	if x.to >= 0 && x.stream != nil {
		n += x.stream.progress.Load()
	}
	if x.from >= 0 && e.peers[x.from].up.Load() {
		p := &e.peers[x.from]
		n += uint64(p.streams[p.got%uint64(len(p.streams))].filled)
	}
	return n
}

// hopeless returns why x cannot be done any more, or nil.
func (e *endpoint) hopeless(x *post) error {
	if e.closed.Load() {
		return transport.ErrClosed
	}
	if x.to >= 0 {
		if err := e.verdict(x.to, false); err != nil {
			return err
		}
	}
	if x.from >= 0 {
		return e.verdict(x.from, true)
	}
	return nil
}

// verdict returns a PeerDown if a peer is of no use any more. What one that has closed its end has sent before can still be
// received, and it may have taken what was sent to it, until its connections end.
func (e *endpoint) verdict(rank int, receiving bool) error {
	p := &e.peers[rank]
	f := p.fate.Load()
	switch {
	case f.gone == nil:
		return nil
	case f.gone == transport.ErrClosed && !f.broken && (p.up.Load() || receiving && e.dialing(rank)):
		return nil
	}
	return &transport.PeerDown{Rank: rank, Err: f.gone}
}

// dialing reports whether a connection with a peer may be about to be there, by this end's dialing or because the peer has
// dialed some.
func (e *endpoint) dialing(rank int) bool {
	p := &e.peers[rank]
	return p.wanted.Load() && e.group.dials(e.rank, rank)
}

// unexpected has the frames judged that peers other than from offer, while this rank waits for something else.
func (e *endpoint) unexpected(from int) error {
	if e.judge == nil {
		return nil
	}
	for r := range e.peers {
		p := &e.peers[r]
		if r == e.rank || r == from || !p.up.Load() {
			continue
		}
		s := p.streams[p.got%uint64(len(p.streams))]
		if s.watching.Load() && !s.held() {
			continue // nothing has come
		}
		if ok, err := s.next(); ok && s.head.number == p.got {
			if err := e.judge(r, s.head.Header); err != nil {
				return err
			}
		} else if err != nil {
			e.broke(r, s.from, err)
		}
	}
	return nil
}

// watch has this rank woken when anything of x can move, or another peer's frame comes.
func (e *endpoint) watch(x *post) {
	if x.to >= 0 && x.stream != nil && !e.peers[x.to].fate.Load().broken {
		x.stream.finish()
	}
	for r := range e.peers {
		p := &e.peers[r]
		if r == e.rank || !p.up.Load() {
			continue
		}
		if s := p.streams[p.got%uint64(len(p.streams))]; s.inErr == nil && (r == x.from || !s.hasHead) {
			s.watch()
		}
	}
}
