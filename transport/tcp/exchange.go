package tcp

import (
	"context"
	"fmt"
	"time"

	"github.com/lockstep-ml/lockstep/internal/transport/waiting"
	"github.com/lockstep-ml/lockstep/transport"
)

// post is an exchange in progress.
type post struct {
	to, from int // -1: no such half, or it is complete
	out      transport.Frame
	in       []byte
	stream   *stream   // the connection where out is queued; nil before
	ticket   uint64    // the value of stream.sent when out was sent
	admitted bool      // the head of the frame for in was accepted
	since    time.Time // when the wait for it began; only with a Meter
	err      error     // set when an earlier exchange failed
}

func (e *endpoint) Exchange(ctx context.Context, to int, out transport.Frame, from int, in []byte) error {
	err := e.begin(to, out, from, in)
	for e.count > 0 && err == nil { // a single one, unless others were posted
		err = e.Complete(ctx)
	}
	return err
}

// Post writes as much as the socket takes. Complete sends the rest.
func (e *endpoint) Post(to int, out transport.Frame, from int, in []byte) error {
	if err := e.begin(to, out, from, in); err != nil {
		return err
	}
	x := &e.posts[(e.first+e.count-1)%len(e.posts)]
	if x.stream == nil {
		return nil
	}
	for s := x.stream; s.sent < x.ticket; {
		before := s.progress.Load()
		if s.push() != nil || s.progress.Load() == before {
			return nil // Complete returns the error
		}
	}
	return nil
}

// begin adds an exchange to those in progress.
func (e *endpoint) begin(to int, out transport.Frame, from int, in []byte) error {
	switch {
	case e.closed.Load():
		return transport.ErrClosed
	case to >= len(e.peers) || from >= len(e.peers) || to == e.rank || from == e.rank:
		return fmt.Errorf("tcp: rank %d of %d cannot exchange with ranks %d and %d", e.rank, len(e.peers), to, from)
	case e.count == len(e.posts):
		return fmt.Errorf("tcp: %d exchanges are in progress already", e.count)
	}
	e.posts[(e.first+e.count)%len(e.posts)] = post{to: max(to, -1), out: out, from: max(from, -1), in: in}
	e.count++
	e.queue()
	return nil
}

// Complete ends the oldest exchange.
func (e *endpoint) Complete(ctx context.Context) error {
	if e.count == 0 {
		return fmt.Errorf("tcp: no exchange is in progress")
	}
	x := &e.posts[e.first]
	err := x.err
	if err == nil {
		if x.from >= 0 && e.meter() != nil {
			x.since = time.Now()
		}
		if err = e.waiter.Wait(ctx, e); err == nil {
			err = e.stepErr
		}
		if err != nil {
			e.abandon(err)
		}
	}
	*x = post{}
	e.first = (e.first + 1) % len(e.posts)
	e.count--
	return err
}

// abandon cancels all exchanges in progress, which fail with err. The callers' memory is not used afterwards.
func (e *endpoint) abandon(err error) {
	for i := range e.posts {
		if s := e.posts[i].stream; s != nil {
			s.cancel()
		}
		e.posts[i] = post{err: err}
	}
}

// queue queues the frames of posts on their connections, in order, up to the first whose peer is not connected.
func (e *endpoint) queue() {
	for i := range e.count {
		x := &e.posts[(e.first+i)%len(e.posts)]
		if x.to < 0 || x.stream != nil {
			continue
		}
		p := &e.peers[x.to]
		if p.state.Load().gone != nil {
			return
		}
		if !p.up.Load() {
			e.want(x.to)
			return
		}
		h := head{Header: x.out.Header, bytes: uint64(len(x.out.Data)), number: p.sent}
		x.stream = p.stream
		x.ticket = x.stream.put(&h, x.out.Data)
		p.sent++
	}
}

// step advances an exchange by at most one write and one read, and the later ones by at most one write to each
// connection. It reports whether the exchange is complete.
func (e *endpoint) step(x *post) (bool, error) {
	if x.to >= 0 {
		if err := e.stepOut(x); err != nil {
			return false, err
		}
	}
	last := x.stream
	if x.to < 0 {
		last = nil
	}
	for i := 1; i < e.count; i++ {
		if s := e.posts[(e.first+i)%len(e.posts)].stream; s != nil && s != last && s.sending() {
			s.push() // its Complete returns the error
			last = s
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
	if s.sent < x.ticket {
		if err := s.push(); err != nil {
			e.broke(x.to, s.from, err)
			return e.peerDown(x.to, false)
		}
	}
	if s.sent >= x.ticket {
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
	s := p.stream
	if !x.admitted {
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
	if !x.since.IsZero() {
		s.received.Add(int64(time.Since(x.since)))
	}
	return nil
}

// ended handles the error of receiving from a peer, which is nil if no data is available.
func (e *endpoint) ended(rank int, s *stream, err error) error {
	if err == nil {
		return nil
	}
	e.broke(rank, s.from, err)
	return e.peerDown(rank, false)
}

// admit verifies the received head of a frame.
func (e *endpoint) admit(x *post, s *stream) error {
	p := &e.peers[x.from]
	if s.head.number != p.got {
		s.inErr = fmt.Errorf("%w: got frame number %d, want %d", errFrame, s.head.number, p.got)
		return e.ended(x.from, s, s.inErr)
	}
	if e.inspect != nil {
		if err := e.inspect(x.from, s.head.Header); err != nil {
			return err
		}
	}
	if s.head.bytes != uint64(len(x.in)) {
		return fmt.Errorf("%w: %d bytes from rank %d, %d expected", transport.ErrSize, s.head.bytes, x.from, len(x.in))
	}
	x.admitted = true
	return nil
}

// Poll advances the oldest exchange.
func (e *endpoint) Poll() bool {
	done, err := e.step(&e.posts[e.first])
	e.stepErr = err
	return done || err != nil
}

// Nap blocks in a system call until a socket of the oldest exchange is ready. There is none where the awaited rank may
// need this processor of Go's scheduler.
func (e *endpoint) Nap(most time.Duration) bool {
	if !e.group.world.block {
		return false
	}
	x := &e.posts[e.first]
	defer e.polled.done()
	if x.from >= 0 && e.peers[x.from].up.Load() {
		if s := e.peers[x.from].stream; s.inErr != nil || s.w.held() ||
			!e.polled.add(s.w, true, s.sending()) {
			return false
		}
	}
	for i := range e.count {
		s := e.posts[(e.first+i)%len(e.posts)].stream
		if s == nil || !s.sending() || x.from >= 0 && e.peers[x.from].up.Load() && s == e.peers[x.from].stream {
			continue
		}
		if !e.polled.add(s.w, false, true) {
			return false
		}
	}
	return e.polled.wait(most)
}

// Park blocks until the oldest exchange can be complete, cannot complete, or ctx ends.
//
// No wake-up is lost: the rank sets parked, then tries again, then has its streams watched, then blocks. A wire,
// and an update of a peer's state, make their change first and then read parked. The goroutine that changes parked
// from true to false sends the single token. Package mem uses the same scheme.
func (e *endpoint) Park(ctx context.Context) error {
	x := &e.posts[e.first]
	e.parked.Store(true)
	done, err := waiting.Exhaust(e), e.stepErr
	if !done {
		if err = e.failure(x); err != nil && e.written(x) && waiting.Exhaust(e) && e.stepErr == nil {
			done, err = true, nil
		}
	}
	if !done && err == nil {
		err = e.unexpected(x.from)
	}
	if !done && err == nil {
		e.watch(x)
		if err = transport.Park(ctx, e.wake); err == nil {
			return nil
		}
	}
	if !e.parked.Swap(false) {
		<-e.wake
	}
	return err
}

// written waits shortly for the goroutine that writes x's frame to a peer that is down, if there is one: the peer may
// have received the frame and closed its endpoint before that goroutine records the write. It reports whether a frame
// was queued.
func (e *endpoint) written(x *post) bool {
	if x.to < 0 || x.stream == nil {
		return false
	}
	for since := time.Now(); x.stream.w.busy() && time.Since(since) < brokenGrace; {
		time.Sleep(20 * time.Microsecond)
	}
	return true
}

// Progress counts the bytes of the exchanges in progress.
func (e *endpoint) Progress() uint64 {
	x := &e.posts[e.first]
	var n uint64
	for i := range e.count {
		if s := e.posts[(e.first+i)%len(e.posts)].stream; s != nil {
			n += s.progress.Load()
		}
	}
	if x.from >= 0 && e.peers[x.from].up.Load() {
		n += uint64(e.peers[x.from].stream.filled)
	}
	return n
}

// failure returns why x cannot complete, or nil.
func (e *endpoint) failure(x *post) error {
	if e.closed.Load() {
		return transport.ErrClosed
	}
	if x.to >= 0 {
		if err := e.peerDown(x.to, false); err != nil {
			return err
		}
	}
	if x.from >= 0 {
		return e.peerDown(x.from, true)
	}
	return nil
}

// peerDown returns a PeerDown if the exchange with a peer cannot complete, or nil. Until its connections end, frames
// that a peer sent before it closed its endpoint can be received, and it may still receive frames.
func (e *endpoint) peerDown(rank int, receiving bool) error {
	p := &e.peers[rank]
	f := p.state.Load()
	switch {
	case f.gone == nil:
		return nil
	case f.gone == transport.ErrClosed && !f.broken && (p.up.Load() || receiving && e.dialing(rank)):
		return nil
	}
	return &transport.PeerDown{Rank: rank, Err: f.gone}
}

// dialing reports whether this endpoint dials a peer, so that a connection may follow.
func (e *endpoint) dialing(rank int) bool {
	p := &e.peers[rank]
	return p.wanted.Load() && e.group.dials(e.rank, rank)
}

// unexpected inspects the frames that peers other than from have sent, while this rank waits for another one.
func (e *endpoint) unexpected(from int) error {
	if e.inspect == nil {
		return nil
	}
	for r := range e.peers {
		p := &e.peers[r]
		if r == e.rank || r == from || !p.up.Load() {
			continue
		}
		s := p.stream
		if ok, err := s.next(); ok && s.head.number == p.got {
			if err := e.inspect(r, s.head.Header); err != nil {
				return err
			}
		} else if err != nil {
			e.broke(r, s.from, err)
		}
	}
	return nil
}

// watch makes the streams wake this rank when x can make progress, or a frame of another peer arrives.
func (e *endpoint) watch(x *post) {
	for r := range e.peers {
		p := &e.peers[r]
		if r == e.rank || !p.up.Load() {
			continue
		}
		s := p.stream
		s.w.watch(s.inErr == nil && (r == x.from || !s.hasHead), s.sending() && !p.state.Load().broken)
	}
}
