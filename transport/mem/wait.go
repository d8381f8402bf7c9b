package mem

import (
	"context"
	"math/bits"
	"runtime"

	"github.com/lockstep-ml/lockstep/transport"
)

// How a rank waits, for frames (arrival, in pipe.go) and for marks (raising, in marks.go).
//
// No wake-up is lost. The waiter writes what it waits for into park, then looks at the condition, then blocks on wake.
// The one who makes a condition true does that first and then looks at park. Both are sequentially consistent, so
// either the waiter sees the condition, or the waker sees what it waits for. Whoever turns park to zero owns the right
// to the one token: a waker then sends it (wake has room, for there is one token per turn), the waiter itself then
// sends none. A waiter that leaves and finds park zero already takes the token that is on its way.
//
// A rank that waits for marks is parked on one rank, whose waiters it joins, and which alone looks after it (see
// rouse). A rank that waits for a frame is woken by all that have frames for it, since those are judged. A rank that is
// gone wakes all, an interrupt those of its domain.

// What a rank is parked on: nothing, frames, or the marks of the rank that it adds to parkedOnRank. Above these bits
// the word has a version, so that a waker never takes a later wait for the one it saw.
const (
	parkedOnFrames = 1
	parkedOnRank   = 2
	parkedBits     = 32
	parkedMask     = 1<<parkedBits - 1
)

// A wait spins in rounds of so many looks before it blocks, some 10 microseconds in all, about what it costs to block
// and to be woken again. Between two rounds it yields.
const (
	spinRounds = 32
	spinLooks  = 128
)

// spins reports whether a wait spins another round. With more ranks than processors it does not: it would keep the
// others from coming. The number of processors is looked at again after each round, and now and then when a wait
// blocks, so that a later change counts.
func (e *endpoint) spins(round int) bool {
	if round > 0 {
		e.look()
		runtime.Gosched()
	}
	if round < spinRounds && e.hub.n <= e.procs {
		return true
	}
	if e.blocks++; e.blocks&15 == 0 {
		e.look()
	}
	return false
}

// look notes how many processors the ranks may use now.
func (e *endpoint) look() { e.procs = min(runtime.GOMAXPROCS(0), runtime.NumCPU()) }

// parkOn writes into park what the rank waits for, and returns it.
func (e *endpoint) parkOn(what int) uint64 {
	e.version++
	word := e.version<<parkedBits | uint64(what)
	e.park.Store(word)
	return word
}

// rise ends being parked, if no waker has done so.
func (e *endpoint) rise() {
	if e.park.Swap(0) == 0 {
		<-e.wake
	}
}

// unparkFrom ends the wait of e's rank if it is the one of word.
func (e *endpoint) unparkFrom(word uint64) bool {
	if !e.park.CompareAndSwap(word, 0) {
		return false
	}
	e.wake <- struct{}{}
	return true
}

// unpark ends the wait of e's rank if it is in one.
func (e *endpoint) unpark() {
	for word := e.park.Load(); word != 0 && !e.unparkFrom(word); {
		word = e.park.Load()
	}
}

// unparkFrames does so if it waits for frames.
func (e *endpoint) unparkFrames() {
	if word := e.park.Load(); word&parkedMask == parkedOnFrames {
		e.unparkFrom(word)
	}
}

// arrival is what a rank waits for of a frame: a state.
type arrival struct {
	slot  *slot
	state uint32 // to wait for
	left  bool   // wait for any other state
	peer  int    // the rank needed
	from  int    // the rank whose frame will be judged when it is received, or -1
	firm  bool   // nothing but the state ends the wait
}

func (a *arrival) happened() bool { return a.slot.state.Load() == a.state != a.left }

// waitFrame blocks until a has happened, or cannot happen, or ctx ends it.
func (e *endpoint) waitFrame(ctx context.Context, a *arrival) error {
	for round := 0; e.spins(round); round++ {
		for range spinLooks {
			if a.happened() {
				return nil
			}
		}
	}
	for !a.happened() {
		e.parkOn(parkedOnFrames)
		var err error
		if !a.firm {
			if err = e.hub.lost(a.peer); err == nil {
				err = e.unexpected(a.from)
			}
		}
		if err == nil && !a.happened() {
			if err = transport.Park(ctx, e.wake); err == nil {
				continue
			}
		}
		e.rise()
		if err != nil && !a.happened() {
			return err
		}
	}
	return nil
}

// raising is what a rank waits for of marks.
type raising struct {
	rank   int    // the rank needed, or -1: all of the domain
	target uint64 // how many marks it shall have raised
	start  bool   // the last of them is a mark 0
	passed int    // rank -1: how many ranks, from the next of the domain on and around, have raised them
}

// behind returns a rank that has not raised the marks that e waits for, or -1. Those passed once are not looked at
// again.
func (v *raising) behind(e *endpoint) int {
	ends := e.hub.ends
	if v.rank >= 0 {
		if ends[v.rank].count() < v.target {
			return v.rank
		}
		return -1
	}
	for ; v.passed < len(e.domain); v.passed++ {
		if r := e.after(v.passed); ends[r].count() < v.target {
			return r
		}
	}
	return -1
}

// after returns the rank that comes in the domain so many after the next one, and around: the last is the rank itself,
// which has raised its own marks.
func (e *endpoint) after(i int) int {
	if i += e.at + 1; i >= len(e.domain) {
		i -= len(e.domain)
	}
	return e.domain[i]
}

// waitMarks blocks until v has happened, or cannot happen, or ctx ends it.
func (e *endpoint) waitMarks(ctx context.Context, v *raising) error {
	for round := 0; e.spins(round); round++ {
		for range spinLooks {
			if v.behind(e) < 0 {
				return nil
			}
		}
	}
	need := v.target << 1
	if v.rank < 0 {
		need |= 1
	}
	for {
		on := v.behind(e)
		if on < 0 {
			return nil
		}
		e.need.Store(need)
		word := e.parkOn(parkedOnRank + on)
		err := e.verdict(v)
		if err == nil {
			e.joinWaiters(word)
			if err = transport.Park(ctx, e.wake); err == nil {
				if e.granted == word>>parkedBits {
					return nil
				}
				continue
			}
		}
		e.rise()
		if v.behind(e) < 0 {
			return nil
		}
		return err
	}
}

// verdict returns why v cannot happen any more, or nil.
func (e *endpoint) verdict(v *raising) error {
	for i := v.passed; i < len(e.domain); i++ {
		r := e.after(i)
		p := &e.hub.ends[r]
		word := p.marks.Load()
		switch {
		case word&^stopBit >= v.target:
		case v.start && word&stopBit != 0:
			return transport.ErrInterrupted
		case (v.rank < 0 || v.rank == r) && p.gone.Load() != nil:
			return e.hub.lost(r)
		}
	}
	return nil
}

// joinWaiters has the rank that e is parked on, as word says, look after it. e may have come to that rank too late: its
// marks are looked at once more.
func (e *endpoint) joinWaiters(word uint64) {
	e.hub.ends[int(word&parkedMask)-parkedOnRank].waiters[e.rank/64].Or(1 << (e.rank % 64))
	e.rouse(word)
}

// rouse looks after e, which is parked on the marks of a rank, as word says: if that rank has raised what e waits for,
// e is parked on the next rank that has not, or if there is none is woken. So a rank that waits for all of its domain
// is woken once, by the last.
//
// It is called by the rank parked on when it has raised a mark and found e among its waiters, and after e has joined
// them: one of the two sees the other. need is written before park: it is that of word, or of a later wait, and then
// park has changed and the exchange fails. It reports whether e stays parked on that same rank, because that has more
// to raise.
func (e *endpoint) rouse(word uint64) (stays bool) {
	first := word
	need := e.need.Load()
	for v := (raising{rank: -1, target: need >> 1}); ; {
		on := &e.hub.ends[int(word&parkedMask)-parkedOnRank]
		if on.count() < v.target {
			return word == first
		}
		next := -1
		if need&1 != 0 {
			v.passed = (on.at - e.at + len(e.domain)) % len(e.domain) // those before on were passed before
			next = v.behind(e)
		}
		if next < 0 {
			if e.park.CompareAndSwap(word, 0) {
				e.granted = word >> parkedBits
				e.wake <- struct{}{}
			}
			return false
		}
		moved := word&^parkedMask | uint64(parkedOnRank+next)
		if !e.park.CompareAndSwap(word, moved) {
			return false
		}
		e.hub.ends[next].waiters[e.rank/64].Or(1 << (e.rank % 64))
		word = moved
	}
}

// rouseWaiters looks after those that are parked on e's marks. What stands among the waiters and is parked on something
// else by now is left alone.
func (e *endpoint) rouseWaiters() {
	for w := range e.waiters {
		if e.waiters[w].Load() == 0 {
			continue
		}
		for set := e.waiters[w].Swap(0); set != 0; set &= set - 1 {
			peer := &e.hub.ends[w*64+bits.TrailingZeros64(set)]
			if word := peer.park.Load(); word&parkedMask == uint64(parkedOnRank+e.rank) && peer.rouse(word) {
				e.waiters[w].Or(1 << (peer.rank % 64))
			}
		}
	}
}
