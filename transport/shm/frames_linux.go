package shm

import (
	"context"
	"errors"
	"fmt"

	"github.com/lockstep-ml/lockstep/transport"
)

// Frames between ranks of the domain go through a ring per pair and direction. The sender writes the header, offers the
// frame and puts in as much as fits; the receiver claims the frame, has the header judged, and takes out what is there,
// while the sender goes on putting in. Both copy at the same time if the frame is long. The pipe's state is the number
// of the frame, and whose it is:
//
//	offered → claimed (receiver) → taken (receiver)
//	offered → idle    (sender: the frame is taken back)
//	claimed → offered (receiver: the frame is refused)
//
// Neither touches the other's own memory, so either can leave at any time, whatever the other does.
const (
	pipeIdle = iota
	pipeOffered
	pipeClaimed
	pipeTaken
)

const pipeStates = 4

// chunkBytes is how much is copied between two looks at what the other end has done.
const chunkBytes = 64 << 10

// pipeEnd is a rank's end of a pipe.
type pipeEnd struct {
	*pipe
	ring     []byte
	frame    uint64 // sender: number of the last frame that it offered, from 1
	provided int    // how much of the pipe has memory
}

// exchange is what the rank's Exchange has done so far.
type exchange struct {
	to, from int // -1: this half is done
	out, in  []byte
	put, got int    // bytes
	claimed  uint64 // receiver: the pipe's state of the frame that it has claimed, or 0
	err      error  // ends the exchange
}

func (e *endpoint) Exchange(ctx context.Context, to int, out transport.Frame, from int, in []byte) error {
	if e.closed.Load() {
		return errClosed
	}
	if to >= 0 {
		if err := e.providePipe(&e.outgoing[to], e.rank, to, pipeWhole); err != nil {
			return err
		}
	}
	if from >= 0 {
		if err := e.providePipe(&e.incoming[from], from, e.rank, pipeWhole); err != nil {
			return err
		}
	}
	x := &e.x
	*x = exchange{to: max(to, -1), from: max(from, -1), out: out.Data, in: in}
	if to >= 0 {
		e.offer(&out)
	}
	var err error
	if !e.move() {
		e.want = want{frames: true, mark: -1}
		err = e.wait(ctx)
	}
	if x.err != nil {
		err = x.err
	}
	if err != nil && x.to >= 0 {
		p := &e.outgoing[to]
		p.state.CompareAndSwap(p.frame*pipeStates+pipeOffered, p.frame*pipeStates+pipeIdle)
	}
	x.out, x.in = nil, nil
	return err
}

// offer shows the frame to its receiver.
func (e *endpoint) offer(out *transport.Frame) {
	p := &e.outgoing[e.x.to]
	p.set(&out.Header)
	p.length = uint64(len(out.Data))
	p.sent.Store(0)
	p.got.Store(0)
	e.x.put = e.fill(p, out.Data, 0)
	p.frame++
	p.state.Store(p.frame*pipeStates + pipeOffered)
	e.poke(e.x.to)
}

// poke wakes the rank if it is parked.
func (e *endpoint) poke(rank int) {
	if e.g.head.parkers.Load() != 0 {
		e.g.wakeUp(rank, e.blocks[rank])
	}
}

// fill puts the next chunk of data, of which some was put in before, into the ring as far as there is room, and returns
// how much of data is in the ring or was.
func (e *endpoint) fill(p *pipeEnd, data []byte, put int) int {
	taken := p.got.Load()
	room := uint64(len(p.ring)) - (uint64(put) - taken)
	if room > uint64(len(p.ring)) {
		e.x.err = e.gone(e.x.to, errRing)
		return put
	}
	at := put % len(p.ring)
	n := min(len(data)-put, int(room), len(p.ring)-at, chunkBytes)
	if n > 0 {
		put += copy(p.ring[at:at+n], data[put:])
		p.sent.Store(uint64(put))
	}
	return put
}

var errRing = errors.New("its count of a frame's bytes cannot be")

func (e *endpoint) gone(rank int, err error) error { return &transport.PeerDown{Rank: rank, Err: err} }

// move takes and puts what it can, and reports whether the exchange has ended.
func (e *endpoint) move() bool {
	x := &e.x
	for moved := true; moved && x.err == nil; {
		moved = false
		if x.to >= 0 && e.send() {
			moved = true
		}
		if x.from >= 0 && x.err == nil && e.receive() {
			moved = true
		}
	}
	return x.err != nil || x.to < 0 && x.from < 0
}

// send puts the next chunk into the ring, and reports whether it did anything.
func (e *endpoint) send() bool {
	x := &e.x
	p := &e.outgoing[x.to]
	if x.put == len(x.out) {
		if p.state.Load() != p.frame*pipeStates+pipeTaken {
			return false
		}
		x.to = -1
		return true
	}
	was := x.put
	if x.put = e.fill(p, x.out, x.put); x.put == was {
		return false
	}
	e.poke(x.to)
	return true
}

// receive takes the next chunk out of the ring, and reports whether it did anything.
func (e *endpoint) receive() bool {
	x := &e.x
	p := &e.incoming[x.from]
	if x.claimed == 0 {
		return e.claim(p)
	}
	if x.got < len(x.in) {
		sent := p.sent.Load()
		have := sent - uint64(x.got)
		if have == 0 {
			return false
		}
		if sent > uint64(len(x.in)) || have > uint64(len(p.ring)) {
			x.err = e.gone(x.from, errRing)
			return false
		}
		at := x.got % len(p.ring)
		n := min(int(have), len(p.ring)-at, chunkBytes)
		copy(x.in[x.got:x.got+n], p.ring[at:])
		x.got += n
		p.got.Store(uint64(x.got))
	}
	if x.got == len(x.in) {
		p.state.CompareAndSwap(x.claimed, x.claimed-pipeClaimed+pipeTaken)
		e.poke(x.from)
		x.from = -1
		return true
	}
	e.poke(x.from)
	return true
}

// claim takes the frame that is offered, if there is one, and has it judged.
func (e *endpoint) claim(p *pipeEnd) bool {
	x := &e.x
	state := p.state.Load()
	claimed := state - pipeOffered + pipeClaimed
	if state%pipeStates != pipeOffered || !p.state.CompareAndSwap(state, claimed) {
		return false
	}
	var err error
	if e.judge != nil {
		var h transport.Header
		p.get(&h)
		err = e.judge(x.from, h)
	}
	if length := p.length; err == nil && length != uint64(len(x.in)) {
		err = fmt.Errorf("%w: %d bytes from rank %d, %d expected", transport.ErrSize, length, x.from, len(x.in))
	}
	if err != nil {
		p.state.CompareAndSwap(claimed, state)
		x.err = err
		return false
	}
	x.claimed = claimed
	return true
}

// exchangeVerdict has the frames judged that peers other than the awaited one offer, and returns why the exchange
// cannot come to its end, or nil.
func (e *endpoint) exchangeVerdict() error {
	x := &e.x
	for _, peer := range [2]int{x.from, x.to} {
		if peer < 0 {
			continue
		}
		if err := e.g.lost(peer); err != nil && !e.move() && (x.from == peer || x.to == peer) {
			return e.gone(peer, err)
		}
	}
	if e.judge == nil {
		return nil
	}
	for peer := range e.incoming {
		if peer == x.from {
			continue
		}
		p := &e.incoming[peer]
		if err := e.providePipe(p, peer, e.rank, pipeFront); err != nil {
			return err
		}
		state := p.state.Load()
		if state%pipeStates != pipeOffered {
			continue
		}
		var h transport.Header
		p.get(&h)
		if p.state.Load() != state {
			continue // that was not one header
		}
		if err := e.judge(peer, h); err != nil {
			return err
		}
	}
	return nil
}
