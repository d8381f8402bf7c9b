package shm

import (
	"context"
	"math"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ml/lockstep/transport"
)

// If there is a processor for every rank, a wait polls some hundred times, about as long as peers that compute at
// the same pace are apart. Then it yields its processor between polls: if the awaited peer needs it, a call takes
// microseconds, where further spinning would take until the end of a time slice. If that ends the wait, the next one
// polls less before, since yielding takes as long as a small call. It blocks after about the time that
// blocking and waking up costs. The processor is yielded to other threads, not to other goroutines (runtime.Gosched):
// that makes the runtime wake threads to look for work, which compete with the peers.
const (
	spinTime      = 50 * time.Microsecond
	separateEvery = 16 // waits that yield or block: how often it compares its processor with those of other ranks
)

// spin polls for a while, and reports whether the awaited condition is true.
func (e *endpoint) spin() bool {
	first := e.polls
	if first == pollsNot {
		if e.yields++; e.yields%separateEvery == 0 {
			e.countNow(time.Now())
		}
		return false
	}
	if first == pollsFirst && !e.handedOver {
		first = pollsLong
	}
	var since time.Time
	yielded := 0 // the last check after which it yielded its processor
	for i := 1; ; i++ {
		if e.happened() {
			e.handedOver = yielded > 0 && yielded == i-1
			return true
		}
		if i < first || i%pollsEach != 0 {
			continue
		}
		if e.want.flag == 0 && e.doubted() {
			return false
		}
		if since.IsZero() {
			since = time.Now()
			if e.yields++; e.yields%separateEvery == 0 {
				e.countNow(since)
				if first >= pollsFirst {
					e.separate()
				}
			}
		} else if time.Since(since) > spinTime {
			return false
		}
		unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
		yielded = i
	}
}

// want is what a rank waits for: flags, or with frames set the progress of its exchange.
type want struct {
	frames bool
	rank   int // whose flag, or -1: all
	flag   int
	target uint64
}

// The values of block.whose besides a rank.
const (
	whoseAll    = -1
	whoseFrames = -2
)

// happened reports whether the awaited condition is true. It moves frames as far as possible.
func (e *endpoint) happened() bool {
	if e.want.frames {
		return e.move()
	}
	return e.isSet(e.want.rank, e.want.target)
}

// A wait that has spun in vain blocks: in a short wait if its rank has no processor for itself, and after shortWait, or
// otherwise, in a long one. A short wait sleeps on the thread of the rank, in a futex, until another rank wakes it. A
// long wait calls [transport.Park], which also ends by the context. Where ranks share processors, a short wait ends
// much sooner, since a long one ends by way of Go's poller, another goroutine and often another thread. Where they do
// not, it ends as soon and takes more processor time: Go's monitor thread wakes up to see that the thread sleeps.
var shortWait = 20 * time.Millisecond // replaced in tests

// The values of block.parked.
const (
	parkedNot   = iota
	parkedLong  // woken by a token, or by the bell of the rank's process
	parkedShort // woken by the futex of this word
)

// wait blocks until the condition of e.want is true, cannot become true, or ctx ends.
//
// No wake-up is lost. The waiter writes what it waits for, sets its word parked, then checks the condition, then
// blocks. A rank that makes a condition true does that first, and then reads parked. All of these are sequentially
// consistent, so either the waiter sees the condition, or the waker sees parked. Where a condition needs several ranks,
// the last of them sees what all others did. A waker changes parked to parkedNot, so that only one wakes.
//
// It ends a short wait by the futex, which does not sleep if parked has changed. It ends a long wait by a token in the
// channel: directly if the waiter is of its process, else by the bell of the waiter's process. The goroutine that
// listens to the bell then gives a token to all ranks that wait although their word is parkedNot. Ringing does nothing
// if the bell's counter is full: then its reader has not read it yet, and checks afterwards.
//
// If a waker is killed after it has changed parked and before it wakes the waiter, the end of its process wakes all. If
// it is stopped there, the waiter checks once more when the time of a short wait, or its context, ends the wait. A
// token that arrives late or twice ends a later wait early, which checks and blocks again.
func (e *endpoint) wait(ctx context.Context) error {
	if e.spin() {
		return nil
	}
	var end time.Time // of short waits, which follow each other while frames move
	for {
		how := uint32(parkedLong)
		if e.blocksShortly(&end) {
			how = parkedShort
		}
		e.park(how)
		err := e.impossible()
		switch {
		case err != nil || e.happened():
		case how == parkedShort:
			if !futexWait(&e.mine.parked, parkedShort, time.Until(end)) {
				end = time.Now() // the next wait is a long one
			}
		default:
			err = transport.Park(ctx, e.wake)
		}
		e.unpark()
		if e.happened() {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// blocksShortly reports whether the next wait is a short one, which ends at end. A zero end is that of the first short
// wait since the last long one. There is none while other goroutines want this processor of Go's scheduler, which the
// system call would keep from them for up to 10 ms.
func (e *endpoint) blocksShortly(end *time.Time) bool {
	if e.g.polls == pollsNot || e.polls >= pollsFirst {
		return false
	}
	now := time.Now()
	if runtime.Gosched(); time.Since(now) > spinTime {
		return false
	}
	if end.IsZero() {
		*end = now.Add(shortWait)
	} else if !now.Before(*end) {
		*end = time.Time{}
		return false
	}
	return true
}

// Operations of the system call futex. The words are in shared memory, so they are not FUTEX_PRIVATE.
const (
	opFutexWait = 0
	opFutexWake = 1
)

// futexWait sleeps until the word is woken, unless it does not have this value, for the given time at most. It may also
// return early. It reports whether the system has this call: a sandbox may refuse it, and kernels without 32-bit times
// have it on 64-bit platforms only.
func futexWait(word *atomic.Uint32, value uint32, most time.Duration) bool {
	t := unix.NsecToTimespec(max(most, 0).Nanoseconds())
	_, _, err := unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), opFutexWait, uintptr(value),
		uintptr(unsafe.Pointer(&t)), 0, 0)
	return err == 0 || err == unix.EAGAIN || err == unix.EINTR || err == unix.ETIMEDOUT
}

// futexWake wakes all threads that sleep on the word.
func futexWake(word *atomic.Uint32) {
	unix.RawSyscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), opFutexWake, math.MaxInt32, 0, 0, 0)
}

// park announces that the rank is about to block, in this way.
func (e *endpoint) park(how uint32) {
	b := e.mine
	whose := e.want.rank
	if e.want.frames {
		whose = whoseFrames
	}
	e.waiting.Store(true)
	if b.at.Load() != 0 {
		b.at.Store(0) // it will not run there
	}
	b.whose.Store(int32(whose))
	b.target.Store(e.want.target)
	b.slot.Store(uint32(e.calls & 1))
	e.g.head.parkers.Add(1)
	b.parked.Store(how)
}

func (e *endpoint) unpark() {
	e.mine.parked.Store(parkedNot)
	e.g.head.parkers.Add(^uint32(0))
	e.waiting.Store(false)
}

// token ends a wait of the rank.
func (e *endpoint) token() {
	if e.mine.parked.CompareAndSwap(parkedShort, parkedNot) {
		futexWake(&e.mine.parked)
		return
	}
	select {
	case e.wake <- struct{}{}:
	default: // it has one already
	}
}

// impossible returns why the condition of e.want cannot become true any more, or nil.
func (e *endpoint) impossible() error {
	w := &e.want
	if w.frames {
		return e.exchangeImpossible()
	}
	if w.flag == 0 && e.doubted() && !e.decide() {
		return transport.ErrInterrupted
	}
	for r := range e.blocks {
		if (w.rank == r || w.rank < 0) && !e.isSet(r, w.target) {
			if err := e.g.lost(r); err != nil && !e.isSet(r, w.target) {
				return &transport.PeerDown{Rank: r, Err: err}
			}
		}
	}
	return nil
}
