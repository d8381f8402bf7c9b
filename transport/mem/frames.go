package mem

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/lockstep-ml/lockstep/transport"
)

// piper is the end of a rank that exchanges frames only.
type piper struct {
	*endpoint
	transport.NoMemory
}

func (p *piper) Capabilities() transport.Capabilities {
	return transport.Capabilities{Places: p.hub.places, Posts: true}
}

// pipe carries frames from one rank to another, without a buffer: the sender lays its frames in and offers them, the
// receiver copies from the sender's memory. There is a slot for every frame that may be under way; both ends go around
// them.
type pipe struct {
	slots [transport.PostsMax]slot
	sent  uint32 // frames offered and not taken back; the sender's
	_     [60]byte
	got   atomic.Uint32 // frames received; written by the receiver only
}

// slot holds a frame. The state says whose it is:
//
//	idle → offered (sender) → claimed (receiver) → copied (receiver) → idle (sender)
//	       offered → idle    (sender: the frame is taken back)
//	       claimed → offered (receiver: the frame is refused, or not yet its turn)
//
// Leaving offered is a compare-and-swap, since both ends may try; all other states have one owner.
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

// pipe returns the pipe between two ranks, which is made when it is used first.
func (h *hub) pipe(from, to int) *pipe {
	at := &h.pipes[from*h.n+to]
	if p := at.Load(); p != nil {
		return p
	}
	at.CompareAndSwap(nil, &pipe{})
	return at.Load()
}

// coming returns the slot of the next frame from a rank.
func (p *pipe) coming() *slot { return &p.slots[p.got.Load()%transport.PostsMax] }

// exchange is one that has begun.
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
	if e.posted == len(e.under) {
		panic(fmt.Sprintf("mem: more than %d exchanges under way", len(e.under)))
	}
	if e.broken != nil {
		return e.broken
	}
	x, err := e.offer(to, out, from, in)
	if err != nil {
		return err
	}
	e.under[e.posted] = x
	e.posted++
	return nil
}

func (e *endpoint) Complete(ctx context.Context) error {
	if e.posted == 0 {
		panic("mem: Complete without a Post")
	}
	x := e.under[0]
	e.posted--
	copy(e.under[:], e.under[1:])
	if e.broken != nil {
		return e.broken
	}
	err := e.finish(ctx, &x)
	if err != nil {
		e.broken = err
		for i := e.posted - 1; i >= 0; i-- {
			e.retract(&e.under[i])
		}
	}
	return err
}

// offer begins an exchange: it lays in what is to be sent.
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

// finish ends it.
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
	err := e.waitFrame(ctx, &arrival{slot: x.slot, state: copied, peer: x.to, from: -1})
	if err == nil {
		x.slot.state.Store(idle)
		return nil
	}
	if e.retract(x) {
		return err
	}
	return nil
}

// receive waits for the frame that from offers, has it judged, and copies it.
func (e *endpoint) receive(ctx context.Context, from int, in []byte) error {
	p := e.hub.pipe(from, e.rank)
	s := p.coming()
	for {
		a := arrival{slot: s, state: offered, peer: from, from: from}
		if !a.happened() {
			if err := e.waitFrame(ctx, &a); err != nil {
				return err
			}
		}
		if s.state.CompareAndSwap(offered, claimed) {
			break
		}
	}
	var err error
	if e.judge != nil {
		err = e.judge(from, s.frame.Header)
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

// unexpected has the frames judged that peers other than from offer while this rank waits for something else.
func (e *endpoint) unexpected(from int) error {
	if e.judge == nil {
		return nil
	}
	for peer := range e.hub.n {
		p := e.hub.pipes[peer*e.hub.n+e.rank].Load()
		if peer == from || p == nil {
			continue
		}
		s := p.coming()
		if !s.state.CompareAndSwap(offered, claimed) {
			continue
		}
		err := e.judge(peer, s.frame.Header)
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
		e.waitFrame(context.Background(), &arrival{slot: s, state: claimed, left: true, firm: true}) // nothing ends it early
	}
	e.hub.pipe(e.rank, x.to).sent--
	return true
}
