package mem

import (
	"context"
	"runtime"

	"github.com/lockstep-ml/lockstep/transport"
)

// spinLooks is how often a wait looks before it blocks: some 10 to 20 microseconds, about what it costs to block and to
// be woken again.
const spinLooks = 4000

// event is what a rank waits for: a state of a frame in a pipe, or marks.
type event struct {
	slot  *slot
	state uint32 // of the slot: the state to wait for
	left  bool   // of the slot: wait for any other state
	peer  int    // the rank needed; of marks, -1: all of the domain
	from  int    // of the exchange that waits: the rank whose frame will be judged when it is received, or -1
	firm  bool   // nothing but the event ends the wait

	target uint64 // if there is no slot: how many marks shall have been raised
	start  bool   // the last of them is a mark 0
	next   int    // peer -1: how many ranks of the domain, from the first, have reached it
}

func (v *event) happened(e *endpoint) bool {
	if v.slot != nil {
		return v.slot.state.Load() == v.state != v.left
	}
	return v.behind(e) < 0
}

// behind returns the first rank that has not raised the marks waited for, or -1. Those passed once are not looked at again.
func (v *event) behind(e *endpoint) int {
	if v.peer >= 0 {
		if e.hub.ends[v.peer].count() < v.target {
			return v.peer
		}
		return -1
	}
	for ; v.next < len(e.domain); v.next++ {
		if r := e.domain[v.next]; e.hub.ends[r].count() < v.target {
			return r
		}
	}
	return -1
}

// What a rank is parked on: nothing, frames, or the marks of the rank that it adds to parkedOnRank. Above these bits the
// word has a version, so that a waker never takes a later wait for the one it saw.
const (
	parkedOnFrames = 1
	parkedOnRank   = 2
	parkedBits     = 32
	parkedMask     = 1<<parkedBits - 1
)

// wait blocks until v has happened, or cannot happen, or ctx ends it.
//
// No wake-up is lost. The waiter writes what it waits for into park, then looks at the condition, then blocks on wake. The one
// who makes a condition true does that first and then looks at park. Both are sequentially consistent, so either the waiter
// sees the condition, or the waker sees what it waits for. Whoever turns park to zero owns the right to the one token: a waker
// then sends it (wake has room, for there is one token per turn), the waiter itself then sends none. A waiter that leaves and
// finds park zero already takes the token that is on its way.
//
// A rank that waits for marks is parked on one rank, which alone looks after it (see rouse). A rank that waits for a frame is
// woken by all that have frames for it, since those are judged.
func (e *endpoint) wait(ctx context.Context, v *event) error {
	if e.hub.spinning() && e.spin(v) {
		return nil
	}
	if e.hub.blocks.Add(1)&15 == 0 {
		e.hub.look()
	}
	for !v.happened(e) {
		word := e.parkOn(v)
		err := e.verdict(v)
		if err == nil && v.slot != nil && !v.firm {
			err = e.unexpected(v.from)
		}
		if err == nil && !v.happened(e) {
			if v.slot == nil {
				e.rouse(e, word) // the rank parked on may have come in the meantime
			}
			if err = transport.Park(ctx, e.wake); err == nil {
				continue
			}
		}
		if e.park.Swap(0) == 0 {
			<-e.wake
		}
		if err != nil && !v.happened(e) {
			return err
		}
	}
	return nil
}

// spin looks for a while and reports whether the event has happened.
func (e *endpoint) spin(v *event) bool {
	for i := range spinLooks {
		if v.happened(e) {
			return true
		}
		if i&255 == 255 {
			if e.hub.look(); !e.hub.spinning() || v.start && e.hub.ends[v.behindOr(e)].marks.Load()&stopBit != 0 {
				break
			}
			runtime.Gosched()
		}
	}
	return false
}

// behindOr returns the rank that is waited for, or this one if there is none any more.
func (v *event) behindOr(e *endpoint) int {
	if r := v.behind(e); r >= 0 {
		return r
	}
	return e.rank
}

// parkOn writes into park what v waits for, and returns it.
func (e *endpoint) parkOn(v *event) uint64 {
	e.version++
	word := e.version<<parkedBits | parkedOnFrames
	if v.slot == nil {
		need := v.target << 1
		if v.peer < 0 {
			need |= 1
		}
		e.need.Store(need)
		word = e.version<<parkedBits | uint64(parkedOnRank+v.behindOr(e))
	}
	e.park.Store(word)
	return word
}

// rouse looks after peer, which is parked on the marks of a rank, as word says: if that rank has raised what peer waits for,
// peer is parked on the next rank that has not, or if there is none is woken. So a rank that waits for all of its domain is
// woken once, by the last.
//
// The rank parked on calls it when it has raised a mark. Whoever parks peer on another rank looks at that rank's marks
// afterwards, as peer does when it parks itself, for that rank may have looked before. need is written before park: it is that
// of word, or of a later wait, and then park has changed and the exchange fails.
func (e *endpoint) rouse(peer *endpoint, word uint64) {
	need := peer.need.Load()
	v := event{peer: -1, target: need >> 1}
	for {
		on := int(word&parkedMask) - parkedOnRank
		if e.hub.ends[on].count() < v.target {
			return
		}
		next := -1
		if need&1 != 0 {
			next = v.behind(peer)
		}
		if next < 0 {
			peer.unparkFrom(word)
			return
		}
		moved := word&^parkedMask | uint64(parkedOnRank+next)
		if !peer.park.CompareAndSwap(word, moved) {
			return
		}
		word = moved
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

// verdict returns why v cannot happen any more, or nil.
func (e *endpoint) verdict(v *event) error {
	if v.firm {
		return nil
	}
	if v.slot != nil {
		return e.hub.lost(v.peer)
	}
	for _, r := range e.domain {
		p := &e.hub.ends[r]
		word := p.marks.Load()
		if word&^stopBit >= v.target {
			continue
		}
		if v.start && word&stopBit != 0 {
			return transport.ErrInterrupted
		}
	}
	for _, r := range e.domain {
		if v.peer >= 0 && r != v.peer || e.hub.ends[r].count() >= v.target {
			continue
		}
		if err := e.hub.lost(r); err != nil {
			return err
		}
	}
	return nil
}
