package mem

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/lockstep-ml/lockstep/transport"
)

// pipe carries frames from one rank to another, without a buffer: the sender offers its frames, and the receiver copies
// from the sender's memory. Each frame in progress has a slot; both ranks use the slots cyclically.
type pipe struct {
	slots [transport.PostsMax]slot
	sent  uint32 // number of frames offered and not taken back; used by the sender only
	_     [60]byte
	got   atomic.Uint32 // number of frames received; written by the receiver only
}

// slot holds a frame. Its state determines who owns it:
//
//	idle → offered (sender) → claimed (receiver) → copied (receiver) → idle (sender)
//	       offered → idle    (sender: the frame is taken back)
//	       claimed → offered (receiver: the frame is refused, or its turn is later)
//
// Leaving offered is a compare-and-swap, since both ranks may try; all other states have one owner.
type slot struct {
	state atomic.Uint32
	frame transport.Frame
	_     [24]byte
}

const (
	idle uint32 = iota
	offered
	claimed
	copied
)

// pipe returns the pipe between two ranks. The first use allocates it.
func (h *hub) pipe(from, to int) *pipe {
	at := &h.pipes[from*h.n+to]
	if p := at.Load(); p != nil {
		return p
	}
	at.CompareAndSwap(nil, &pipe{})
	return at.Load()
}

// next returns the slot of the next frame to receive.
func (p *pipe) next() *slot { return &p.slots[p.got.Load()%transport.PostsMax] }

// exchange is an exchange in progress.
type exchange struct {
	to   int // -1: nothing is sent
	slot *slot
	from int // -1: nothing is received
	in   []byte
}

func (e *endpoint) Exchange(ctx context.Context, to int, out transport.Frame, from int, in []byte) error {
	x, err := e.offer(to, out, from, in)
	if err != nil {
		return err
	}
	return e.finish(ctx, &x)
}

func (e *endpoint) Post(to int, out transport.Frame, from int, in []byte) error {
	if e.posted == len(e.posts) {
		panic(fmt.Sprintf("mem: more than %d exchanges in progress", len(e.posts)))
	}
	if e.broken != nil {
		return e.broken
	}
	x, err := e.offer(to, out, from, in)
	if err != nil {
		return err
	}
	e.posts[e.posted] = x
	e.posted++
	return nil
}

func (e *endpoint) Complete(ctx context.Context) error {
	if e.posted == 0 {
		panic("mem: Complete without a Post")
	}
	x := e.posts[0]
	e.posted--
	copy(e.posts[:], e.posts[1:])
	if e.broken != nil {
		return e.broken
	}
	err := e.finish(ctx, &x)
	if err != nil {
		e.broken = err
		for i := e.posted - 1; i >= 0; i-- {
			e.retract(&e.posts[i])
		}
	}
	return err
}

// offer begins an exchange: it offers the frame to its receiver.
func (e *endpoint) offer(to int, out transport.Frame, from int, in []byte) (exchange, error) {
	x := exchange{to: to, from: from, in: in}
	if e.closed.Load() {
		return x, transport.ErrClosed
	}
	if to < 0 {
		return x, nil
	}
	if err := e.hub.lost(to); err != nil {
		return x, err
	}
	p := e.hub.pipe(e.rank, to)
	x.slot = &p.slots[p.sent%transport.PostsMax]
	p.sent++
	x.slot.frame = out
	x.slot.state.Store(offered)
	e.hub.ends[to].unparkFrames()
	return x, nil
}

// finish waits for the end of an exchange.
func (e *endpoint) finish(ctx context.Context, x *exchange) error {
	if x.from >= 0 {
		if err := e.receive(ctx, x.from, x.in); err != nil {
			e.retract(x)
			return err
		}
	}
	if x.to < 0 {
		return nil
	}
	err := e.waitFrame(ctx, frameWait{slot: x.slot, state: copied, peer: x.to, from: -1})
	if err == nil {
		x.slot.state.Store(idle)
		return nil
	}
	if e.retract(x) {
		return err
	}
	return nil
}

// receive waits for the frame that from offers, inspects it, and copies it.
func (e *endpoint) receive(ctx context.Context, from int, in []byte) error {
	p := e.hub.pipe(from, e.rank)
	s := p.next()
	for {
		if err := e.waitFrame(ctx, frameWait{slot: s, state: offered, peer: from, from: from}); err != nil {
			return err
		}
		if s.state.CompareAndSwap(offered, claimed) {
			break
		}
	}
	var err error
	if e.inspect != nil {
		err = e.inspect(from, s.frame.Header)
	}
	if err == nil && len(s.frame.Data) != len(in) {
		err = fmt.Errorf("%w: %d bytes from rank %d, %d expected", transport.ErrSize, len(s.frame.Data), from, len(in))
	}
	if err == nil {
		copy(in, s.frame.Data)
		p.got.Add(1)
		s.state.Store(copied)
	} else {
		s.state.Store(offered)
	}
	e.hub.ends[from].unparkFrames()
	return err
}

// unexpected inspects the frames that peers other than from offer while this rank waits for something else.
func (e *endpoint) unexpected(from int) error {
	if e.inspect == nil {
		return nil
	}
	for peer := range e.hub.n {
		p := e.hub.pipes[peer*e.hub.n+e.rank].Load()
		if peer == from || p == nil {
			continue
		}
		s := p.next()
		if !s.state.CompareAndSwap(offered, claimed) {
			continue
		}
		err := e.inspect(peer, s.frame.Header)
		s.state.Store(offered)
		e.hub.ends[peer].unparkFrames()
		if err != nil {
			return err
		}
	}
	return nil
}

// retract takes back the frame offered in an exchange and reports true, or awaits its copy and reports false.
func (e *endpoint) retract(x *exchange) bool {
	if x.to < 0 {
		return true
	}
	for s := x.slot; !s.state.CompareAndSwap(offered, idle); {
		if s.state.CompareAndSwap(copied, idle) {
			return false
		}
		e.waitFrame(context.Background(), frameWait{slot: s, state: claimed, other: true, only: true}) // has no error
	}
	e.hub.pipe(e.rank, x.to).sent--
	return true
}
