package shm

import (
	"context"
	"errors"
	"fmt"

	"github.com/lockstep-ml/lockstep/transport"
)

// Frames between ranks of the domain go through one ring per pair and direction. The sender writes the header, offers
// the frame and writes as much as fits; the receiver claims the frame, inspects the header, and reads what is
// available, while the sender continues to write. Both copy at the same time if the frame is long. The pipe's state is
// the number of the frame, and its owner:
//
//	offered → claimed (receiver) → taken (receiver)
//	offered → idle    (sender: the frame is taken back)
//	claimed → offered (receiver: the frame is refused)
//
// Neither accesses the other's private memory, so either can leave at any time, whatever the other does.
const (
	pipeIdle = iota
	pipeOffered
	pipeClaimed
	pipeTaken
)

const pipeStates = 4

// chunkBytes is how much is copied between two checks of the other rank's progress.
const chunkBytes = 64 << 10

// pipeEnd is a rank's end of a pipe.
type pipeEnd struct {
	*pipe
	ring     []byte
	frame    uint64 // sender: number of the last frame that it offered, from 1
	provided int    // how much of the pipe has memory
}

// exchange is the progress of the rank's Exchange.
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
		e.want = want{frames: true, flag: -1}
		err = e.waiter.Wait(ctx, e)
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

// offer offers the frame to its receiver.
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

// fill writes the next chunk of data to the ring as far as it has room. put is how much of data was written before; the
// result is how much was written in total.
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

var (
	errRing     = errors.New("its count of a frame's bytes is invalid")
	errReplaced = errors.New("it replaced a frame while that was received")
)

func (e *endpoint) gone(rank int, err error) error { return &transport.PeerDown{Rank: rank, Err: err} }

// move sends and receives as much as possible, and reports whether the exchange has ended.
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

// send writes the next chunk to the ring, and reports whether it made progress.
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

// receive reads the next chunk from the ring, and reports whether it made progress.
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
		if !p.state.CompareAndSwap(x.claimed, x.claimed-pipeClaimed+pipeTaken) {
			x.err = e.gone(x.from, errReplaced)
			return false
		}
		e.poke(x.from)
		x.from = -1
		return true
	}
	e.poke(x.from)
	return true
}

// claim takes an offered frame, if any, and inspects it.
func (e *endpoint) claim(p *pipeEnd) bool {
	x := &e.x
	state := p.state.Load()
	claimed := state - pipeOffered + pipeClaimed
	if state%pipeStates != pipeOffered || !p.state.CompareAndSwap(state, claimed) {
		return false
	}
	var err error
	if e.inspect != nil {
		var h transport.Header
		p.get(&h)
		err = e.inspect(x.from, h)
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

// exchangeImpossible inspects the frames that peers other than the awaited one offer, and returns why the exchange
// cannot end, or nil.
func (e *endpoint) exchangeImpossible() error {
	x := &e.x
	for _, peer := range [2]int{x.from, x.to} {
		if peer < 0 {
			continue
		}
		if err := e.g.lost(peer); err != nil && !e.move() && (x.from == peer || x.to == peer) {
			return e.gone(peer, err)
		}
	}
	if e.inspect == nil {
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
			continue // the header has changed meanwhile
		}
		if err := e.inspect(peer, h); err != nil {
			return err
		}
	}
	return nil
}
