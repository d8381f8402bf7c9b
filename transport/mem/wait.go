package mem

import (
	"context"
	"math/bits"
	"time"

	"github.com/lockstep-ml/lockstep/transport"
)

// How a rank waits for frames (frameWait) and for flags (flagWait).
//
// No wake-up is lost. The waiter writes what it waits for into park, then checks the condition, then blocks on wake. A
// rank that makes a condition true does that first and then reads park. Both are sequentially consistent, so either the
// waiter sees the condition, or the other rank sees what it waits for. Whoever sets park to zero owns the right to the
// one token: a waker then sends it (wake has room, since each turn has one token), and the waiter itself sends none. A
// waiter that leaves and finds park zero takes the token that was sent.
//
// A rank that waits for flags is parked on one rank, whose waiters it joins, and only that rank wakes it or moves it to
// the next (see wakeOrMove). A rank that waits for a frame is woken by all that offer it frames, since it inspects
// them. A rank that leaves wakes all, and so does an interrupt.

// What a rank is parked on: nothing, frames, or the flags of the rank whose number is added to parkedOnRank. The bits
// above are a version, so that a waker never mistakes a later wait for the one that it saw.
const (
	parkedOnFrames = 1
	parkedOnRank   = 2
	parkedBits     = 32
	parkedMask     = 1<<parkedBits - 1
)

// parkOn writes into park what the rank waits for, and returns it.
func (e *endpoint) parkOn(what int) uint64 {
	e.version++
	word := e.version<<parkedBits | uint64(what)
	e.park.Store(word)
	return word
}

// unparkSelf ends being parked, if no waker has done so.
func (e *endpoint) unparkSelf() {
	if e.park.Swap(0) == 0 {
		<-e.wake
	}
}

// unparkFrom ends the wait of e's rank if it is that of word.
func (e *endpoint) unparkFrom(word uint64) bool {
	if !e.park.CompareAndSwap(word, 0) {
		return false
	}
	e.wake <- struct{}{}
	return true
}

// unpark ends the wait of e's rank, if it waits.
func (e *endpoint) unpark() {
	for word := e.park.Load(); word != 0 && !e.unparkFrom(word); {
		word = e.park.Load()
	}
}

// unparkFrames ends the wait of e's rank if it waits for frames.
func (e *endpoint) unparkFrames() {
	if word := e.park.Load(); word&parkedMask == parkedOnFrames {
		e.unparkFrom(word)
	}
}

// frameWait is a wait for the state of a frame.
type frameWait struct {
	e     *endpoint
	slot  *slot
	state uint32 // to wait for
	other bool   // wait for any other state
	peer  int    // the rank that the wait needs
	from  int    // the rank whose frame is inspected when it is received, or -1
	only  bool   // only the state ends the wait
}

// waitFrame blocks until a is done, cannot be done any more, or ctx ends.
func (e *endpoint) waitFrame(ctx context.Context, a frameWait) error {
	e.frame = a
	e.frame.e = e
	return e.waiter.Wait(ctx, &e.frame)
}

func (a *frameWait) Poll() bool { return a.slot.state.Load() == a.state != a.other }

func (a *frameWait) Progress() uint64 { return 0 }

func (a *frameWait) Nap(time.Duration) bool { return false }

func (a *frameWait) Park(ctx context.Context) (err error) {
	a.e.parkOn(parkedOnFrames)
	if !a.only {
		if err = a.e.hub.lost(a.peer); err == nil {
			err = a.e.unexpected(a.from)
		}
	}
	if err == nil && !a.Poll() {
		if err = transport.Park(ctx, a.e.wake); err == nil {
			return nil
		}
	}
	a.e.unparkSelf()
	if a.Poll() {
		return nil
	}
	return err
}

// flagWait is a wait for flags.
type flagWait struct {
	e      *endpoint
	parity uint64 // of the number of the call
	rank   int    // the rank that the wait needs, or -1: all
	target uint64 // number of flags that it must have set
	start  bool   // the last of them is a flag 0
	passed int    // rank -1: number of ranks, in the order of after, that have set them
}

// behind returns a rank that has not set the flags that e waits for, or -1. It does not check again the ranks that it
// has passed.
func (v *flagWait) behind(e *endpoint) int {
	ends := e.hub.ends
	if v.rank >= 0 {
		if ends[v.rank].count(v.parity) < v.target {
			return v.rank
		}
		return -1
	}
	for ; v.passed < len(ends); v.passed++ {
		if r := e.after(v.passed); ends[r].count(v.parity) < v.target {
			return r
		}
	}
	return -1
}

// after returns the rank that is i places after the next one, cyclically: the last is the rank itself, which has set
// its flags.
func (e *endpoint) after(i int) int {
	if i += e.rank + 1; i >= e.hub.n {
		i -= e.hub.n
	}
	return i
}

func (v *flagWait) Poll() bool { return v.behind(v.e) < 0 }

func (v *flagWait) Progress() uint64 { return 0 }

func (v *flagWait) Nap(time.Duration) bool { return false }

func (v *flagWait) Park(ctx context.Context) error {
	e := v.e
	on := v.behind(e)
	if on < 0 {
		return nil
	}
	need := v.target<<2 | v.parity<<1
	if v.rank < 0 {
		need |= 1
	}
	e.need.Store(need)
	word := e.parkOn(parkedOnRank + on)
	err := e.impossible(v)
	if err == nil {
		e.joinWaiters(word)
		if err = transport.Park(ctx, e.wake); err == nil {
			if v.rank < 0 && e.granted == word>>parkedBits {
				v.passed = e.hub.n
			}
			return nil
		}
	}
	e.unparkSelf()
	if v.Poll() {
		return nil
	}
	return err
}

// impossible returns why v cannot be done any more, or nil.
func (e *endpoint) impossible(v *flagWait) error {
	for i := v.passed; i < e.hub.n; i++ {
		r := e.after(i)
		p := &e.hub.ends[r]
		word := p.slots[v.parity].flags.Load()
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

// joinWaiters adds e to the waiters of the rank that it is parked on, according to word. That rank may have set its
// flags before, so they are checked once more.
func (e *endpoint) joinWaiters(word uint64) {
	e.hub.ends[int(word&parkedMask)-parkedOnRank].waiters[e.rank/64].Or(1 << (e.rank % 64))
	e.wakeOrMove(word)
}

// wakeOrMove wakes e or moves it on. e is parked on the flags of a rank, according to word. If that rank has set what e
// waits for, e is parked on the next rank that has not, or woken if there is none. So a rank that waits for all is
// woken once, by the last. It reports whether e stays parked on the same rank, which has more flags to set.
//
// The rank that e is parked on calls it when it has set a flag and found e among its waiters, and e calls it after it
// has joined them: one of the two sees the other. need is written before park: it belongs to word, or to a later wait,
// and then park has changed and the compare-and-swap fails.
func (e *endpoint) wakeOrMove(word uint64) (stays bool) {
	first := word
	need := e.need.Load()
	for v := (flagWait{rank: -1, target: need >> 2, parity: need >> 1 & 1}); ; {
		on := &e.hub.ends[int(word&parkedMask)-parkedOnRank]
		if on.count(v.parity) < v.target {
			return word == first
		}
		next := -1
		if need&1 != 0 {
			v.passed = (on.rank - e.rank + e.hub.n) % e.hub.n // those before on were passed before
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

// wakeWaiters wakes or moves the ranks that are parked on e's flags. It ignores waiters that are parked on something
// else by now.
func (e *endpoint) wakeWaiters() {
	for w := range e.waiters {
		if e.waiters[w].Load() == 0 {
			continue
		}
		for set := e.waiters[w].Swap(0); set != 0; set &= set - 1 {
			peer := &e.hub.ends[w*64+bits.TrailingZeros64(set)]
			if word := peer.park.Load(); word&parkedMask == uint64(parkedOnRank+e.rank) && peer.wakeOrMove(word) {
				e.waiters[w].Or(1 << (peer.rank % 64))
			}
		}
	}
}
