package mem

import (
	"context"
	"math/bits"
	"runtime"
	"time"

	"github.com/lockstep-ml/lockstep/internal/affinity"
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

// A wait spins in rounds of spinPolls checks before it blocks, some 10 microseconds in all, about as long as blocking
// and waking up takes. Between two rounds it yields, which takes as long as half a small call. So the first round has
// spinFirst checks, unless the last wait has ended as it yielded: then the awaited rank probably needs this processor.
// After streakMin waits that have not blocked, one may spin for spinLong rounds, about 100 microseconds: then it
// outlasts an interruption of the awaited rank, and the two need not be separated again (see [endpoint.separate]). The
// rounds after spinRounds also yield to other threads of the system.
const (
	spinRounds = 32
	spinLong   = 256
	streakMin  = 64
	spinPolls  = 128
	spinFirst  = 1024
)

// polls returns the number of checks in a round.
func (e *endpoint) polls(round int) int {
	if round == 0 && e.handovers == 0 {
		return spinFirst
	}
	return spinPolls
}

// spins reports whether a wait spins another round. With more ranks than processors it does not, since it would keep
// the other ranks from running. The number of processors is counted after each round, and at times when a wait blocks,
// so that a later change has an effect.
func (e *endpoint) spins(round int) bool {
	if round > 0 {
		switch {
		case round == 1 && e.handovers%handoverMax == handoverMax-1:
			e.yieldAndLeave()
		case round == spinRounds:
			e.separate()
		}
		if e.countProcessors(); round >= spinRounds {
			affinity.Yield()
		}
		runtime.Gosched()
	}
	if e.hub.n <= e.procs {
		if round < spinRounds || round < spinLong && (e.streak >= streakMin || e.hub.moving.Load()) {
			return true
		}
	}
	e.streak = 0
	if e.blocks++; e.blocks&15 == 0 {
		e.countProcessors()
	}
	return false
}

// spun notes how a wait has ended: in a round, after so many checks.
func (e *endpoint) spun(round, polls int) {
	if e.streak++; round >= spinRounds {
		e.streak = 0
	}
	if round > 0 && polls == 0 {
		e.handovers++
	} else {
		e.handovers = 0
	}
}

// Two ranks can be on one processor while another is idle. When Go's scheduler wakes a thread to take one of two ranks
// on a thread, the system may let that thread wait for the processor of the thread that wakes it. Linux does so in a
// virtual machine, until it balances the load after some milliseconds; probably it takes an idle processor, which the
// hypervisor has stopped, for a preempted one. So the ranks separate themselves: one moves its thread to another
// processor. The others spin meanwhile: if they blocked, their threads would be woken, to the same processor, again.

// handoverMax is the number of waits, in succession, that end as the rank yields, after which it assumes that another
// rank is on the same thread.
const handoverMax = 16

// yieldAndLeave yields this processor to other threads, and moves the rank's thread to another one if any has run: it
// was probably waiting to take a rank from this thread. If none has run, it is on its way to another processor.
func (e *endpoint) yieldAndLeave() {
	e.taken = e.taken[:0]
	e.move(func() bool {
		start := time.Now()
		affinity.Yield()
		return time.Since(start) >= yieldTime
	})
}

// yieldTime is longer than yielding to no thread takes.
const yieldTime = 4 * time.Microsecond

// separate moves the rank's thread to another processor if another rank was on this one, on another thread, in this
// call or a call next to it.
func (e *endpoint) separate() {
	own := e.locate()
	shared := false
	e.taken = e.taken[:0]
	for r := range e.hub.ends {
		at := e.hub.ends[r].at.Load()
		calls := int32(own>>placeCalls) - int32(at>>placeCalls)
		if r == e.rank || at&placeCPU == 0 || calls > 2 || calls < -2 {
			continue
		}
		e.taken = append(e.taken, int(at&placeCPU)-1)
		shared = shared || (own^at)&placeCPU == 0 && (own^at)&placeThread != 0
	}
	if shared {
		e.move(func() bool { return true })
	}
}

// move moves the rank's thread to another processor if should returns true: to one that is not taken, if there is any.
// It does nothing while another rank of the group moves.
func (e *endpoint) move(should func() bool) {
	if e.hub.moving.CompareAndSwap(false, true) {
		if should() {
			e.mover.Leave(affinity.Current(), e.taken)
			e.at.Store(0)
		}
		e.hub.moving.Store(false)
	}
}

// A place is the processor of a rank + 1, its thread, and the number of the call in which it was there.
const (
	placeCPU    = 1<<12 - 1
	placeThread = (1<<32 - 1) &^ placeCPU
	placeCalls  = 32
)

// locate determines where the rank is, and shows it to the others.
func (e *endpoint) locate() uint64 {
	at := e.calls<<placeCalls | uint64(affinity.Thread())<<12&placeThread | uint64(affinity.Current()+1)&placeCPU
	e.at.Store(at)
	return at
}

// countProcessors counts the processors that the ranks may use now.
func (e *endpoint) countProcessors() { e.procs = min(runtime.GOMAXPROCS(0), runtime.NumCPU()) }

// parkOn writes into park what the rank waits for, and returns it.
func (e *endpoint) parkOn(what int) uint64 {
	if e.at.Load() != 0 {
		e.at.Store(0) // it will not run there
	}
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
	slot  *slot
	state uint32 // to wait for
	other bool   // wait for any other state
	peer  int    // the rank that the wait needs
	from  int    // the rank whose frame is inspected when it is received, or -1
	only  bool   // only the state ends the wait
}

func (a *frameWait) done() bool { return a.slot.state.Load() == a.state != a.other }

// waitFrame blocks until a is done, cannot be done any more, or ctx ends.
func (e *endpoint) waitFrame(ctx context.Context, a *frameWait) error {
	for round := 0; e.spins(round); round++ {
		for i := range e.polls(round) {
			if a.done() {
				e.spun(round, i)
				return nil
			}
		}
	}
	for !a.done() {
		e.parkOn(parkedOnFrames)
		var err error
		if !a.only {
			if err = e.hub.lost(a.peer); err == nil {
				err = e.unexpected(a.from)
			}
		}
		if err == nil && !a.done() {
			if err = transport.Park(ctx, e.wake); err == nil {
				continue
			}
		}
		e.unparkSelf()
		if err != nil && !a.done() {
			return err
		}
	}
	return nil
}

// flagWait is a wait for flags.
type flagWait struct {
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

// waitFlags blocks until v is done, cannot be done any more, or ctx ends.
func (e *endpoint) waitFlags(ctx context.Context, v *flagWait) error {
	for round := 0; e.spins(round); round++ {
		for i := range e.polls(round) {
			if v.behind(e) < 0 {
				e.spun(round, i)
				return nil
			}
		}
	}
	need := v.target<<2 | v.parity<<1
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
		err := e.impossible(v)
		if err == nil {
			e.joinWaiters(word)
			if err = transport.Park(ctx, e.wake); err == nil {
				if e.hub.n <= e.procs {
					e.separate()
				}
				if e.granted == word>>parkedBits {
					return nil
				}
				continue
			}
		}
		e.unparkSelf()
		if v.behind(e) < 0 {
			return nil
		}
		return err
	}
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
		if e.hub.n <= e.procs {
			e.locate() // for the ranks that are woken
		}
		for set := e.waiters[w].Swap(0); set != 0; set &= set - 1 {
			peer := &e.hub.ends[w*64+bits.TrailingZeros64(set)]
			if word := peer.park.Load(); word&parkedMask == uint64(parkedOnRank+e.rank) && peer.wakeOrMove(word) {
				e.waiters[w].Or(1 << (peer.rank % 64))
			}
		}
	}
}
