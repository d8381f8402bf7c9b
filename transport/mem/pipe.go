package mem

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/lockstep-ml/lockstep/transport"
)

// piper is the end of a group whose ranks exchange frames only.
type piper struct{ *endpoint }

var _ transport.Splitter = (*piper)(nil)

func (p *piper) Reach(int) transport.Reach { return transport.Messages }

func (p *piper) Publish(transport.Slot) {}

func (p *piper) Peer(int) *transport.Slot { return nil }

func (p *piper) Split(id uint64, ranks []int) (transport.Endpoint, error) {
	e, err := p.split(id, ranks)
	if err != nil {
		return nil, err
	}
	return &piper{endpoint: e}, nil
}

// pipe carries frames from one rank to another, without a buffer: the sender lays its frame in and offers it, the receiver
// copies from the sender's memory. The state says whose the frame is:
//
//	idle → offered (sender) → claimed (receiver) → copied (receiver) → idle (sender)
//	       offered → idle    (sender: the frame is taken back)
//	       claimed → offered (receiver: the frame is refused, or not yet its turn)
//
// Leaving offered is a compare-and-swap, since both ends may try; all other states have one owner.
type pipe struct {
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

func (h *hub) pipe(from, to int) *pipe { return &h.pipes[from*h.n+to] }

func (e *endpoint) Exchange(ctx context.Context, to int, out transport.Frame, from int, in []byte) error {
	if e.closed.Load() {
		return transport.ErrClosed
	}
	if to >= 0 {
		p := e.hub.pipe(e.rank, to)
		p.frame = out
		p.state.Store(offered)
		e.hub.ends[to].unpark()
	}
	if from >= 0 {
		if err := e.receive(ctx, from, in); err != nil {
			if to >= 0 {
				e.retract(to)
			}
			return err
		}
	}
	if to >= 0 {
		return e.sent(ctx, to)
	}
	return nil
}

// receive waits for the frame that from offers, has it judged, and copies it.
func (e *endpoint) receive(ctx context.Context, from int, in []byte) error {
	p := e.hub.pipe(from, e.rank)
	for {
		if err := e.wait(ctx, event{pipe: p, state: offered, peer: from, from: from}); err != nil {
			return err
		}
		if p.state.CompareAndSwap(offered, claimed) {
			break
		}
	}
	var err error
	if e.judge != nil {
		err = e.judge(from, p.frame.Header)
	}
	if err == nil && len(p.frame.Data) != len(in) {
		err = fmt.Errorf("%w: %d bytes from rank %d, %d expected", transport.ErrSize, len(p.frame.Data), from, len(in))
	}
	if err == nil {
		copy(in, p.frame.Data)
		p.state.Store(copied)
	} else {
		p.state.Store(offered)
	}
	e.hub.ends[from].unpark()
	return err
}

// unexpected has the frames judged that peers other than from offer while this rank waits for something else.
func (e *endpoint) unexpected(from int) error {
	if e.judge == nil {
		return nil
	}
	for peer := range e.hub.n {
		p := e.hub.pipe(peer, e.rank)
		if peer == from || !p.state.CompareAndSwap(offered, claimed) {
			continue
		}
		err := e.judge(peer, p.frame.Header)
		p.state.Store(offered)
		e.hub.ends[peer].unpark()
		if err != nil {
			return err
		}
	}
	return nil
}

// sent waits until the receiver has copied the frame offered to it; if the wait is ended, it takes the frame back, or
// awaits its copy.
func (e *endpoint) sent(ctx context.Context, to int) error {
	p := e.hub.pipe(e.rank, to)
	err := e.wait(ctx, event{pipe: p, state: copied, peer: to, from: -1})
	if err == nil {
		p.state.Store(idle)
		return nil
	}
	if e.retract(to) {
		return err
	}
	return nil
}

// retract takes back the frame offered to a rank and reports true, or awaits its copy and reports false.
func (e *endpoint) retract(to int) bool {
	p := e.hub.pipe(e.rank, to)
	for !p.state.CompareAndSwap(offered, idle) {
		if p.state.CompareAndSwap(copied, idle) {
			return false
		}
		e.wait(context.Background(), event{pipe: p, state: claimed, left: true, firm: true}) // nothing ends it early
	}
	return true
}
