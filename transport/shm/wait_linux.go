package shm

import (
	"context"
	"math"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ml/lockstep/internal/transport/waiting"
	"github.com/lockstep-ml/lockstep/transport"
)

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

// Poll reports whether the awaited condition is true. It moves frames as far as possible.
func (e *endpoint) Poll() bool {
	if e.want.frames {
		return e.move()
	}
	return e.isSet(e.want.rank, e.want.target)
}

// Progress counts the bytes of an exchange.
func (e *endpoint) Progress() uint64 {
	if e.want.frames {
		return uint64(e.x.put + e.x.got)
	}
	return 0
}

// A nap sleeps on the thread of the rank, in a futex, until another rank wakes it. A long wait calls
// [transport.Park], which also ends by the context. Where ranks share processors, a nap ends much sooner, since a
// long wait ends by way of Go's poller, another goroutine and often another thread.

// The values of block.parked.
const (
	parkedNot  = iota
	parkedLong // woken by a token, or by the bell of the rank's process
	parkedNap  // woken by the futex of this word
)

// No wake-up is lost. The waiter writes what it waits for, sets its word parked, then checks the condition, then
// blocks. A rank that makes a condition true does that first, and then reads parked. All of these are sequentially
// consistent, so either the waiter sees the condition, or the waker sees parked. Where a condition needs several ranks,
// the last of them sees what all others did. A waker changes parked to parkedNot, so that only one wakes.
//
// It ends a nap by the futex, which does not sleep if parked has changed. It ends a long wait by a token in the
// channel: directly if the waiter is of its process, else by the bell of the waiter's process. The goroutine that
// listens to the bell then gives a token to all ranks that wait although their word is parkedNot. Ringing does
// nothing if the bell's counter is full: then its reader has not read it yet, and checks afterwards.
//
// If a waker is killed after it has changed parked and before it wakes the waiter, the end of its process wakes
// all. If it is stopped there, the waiter checks once more when the time of a nap, or its context, ends the wait. A
// token that arrives late or twice ends a later wait early, which checks and blocks again.

// Nap sleeps in a futex. There is none where the awaited rank may need this processor of Go's scheduler, nor with a CPU
// for each rank: then it ends as late, and takes more processor time, since Go's monitor thread wakes up to see that
// the thread sleeps.
func (e *endpoint) Nap(most time.Duration) bool {
	if e.g.crowded || e.counts == waiting.Own {
		return false
	}
	e.park(parkedNap)
	slept := e.impossible() == nil && (e.Poll() || futexWait(&e.mine.parked, parkedNap, most))
	e.unpark()
	return slept
}

// Park blocks until a token, or the bell of this process, ends a long wait.
func (e *endpoint) Park(ctx context.Context) error {
	e.park(parkedLong)
	err := e.impossible()
	if err == nil && !e.Poll() {
		err = transport.Park(ctx, e.wake)
	}
	e.unpark()
	if e.Poll() {
		return nil
	}
	return err
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
	if e.mine.parked.CompareAndSwap(parkedNap, parkedNot) {
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
