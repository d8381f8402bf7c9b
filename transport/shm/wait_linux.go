package shm

import (
	"context"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ml/lockstep/transport"
)

// A wait looks some hundred times, if the host has a processor for every rank, which takes about as long as peers that
// compute at the same pace need to meet. Then it gives its processor to whoever needs it between looks: if that is the
// peer that is waited for, a call takes microseconds, where spinning on would take until the end of a time slice. It
// blocks after about the time that it costs to block and to be woken. The processor is given away to other threads, not
// to other goroutines (runtime.Gosched): that makes the runtime wake threads to look for work, which get in the way of
// the peers.
const (
	looksFirst = 200 // before it gives the processor away, if there is one for every rank
	looksEach  = 32  // then, each time
	spinTime   = 50 * time.Microsecond
)

// spin looks for a while, and reports whether what the rank waits for has happened.
func (e *endpoint) spin() bool {
	first := e.g.looks
	if first == 0 {
		return false
	}
	var since time.Time
	for i := 1; ; i++ {
		if e.happened() {
			return true
		}
		if i < first || i%looksEach != 0 {
			continue
		}
		if e.want.mark == 0 && e.doubted() {
			return false
		}
		if since.IsZero() {
			since = time.Now()
		} else if time.Since(since) > spinTime {
			return false
		}
		unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
	}
}

// want is what a rank waits for: marks, or with frames set that its exchange goes on.
type want struct {
	frames bool
	rank   int // whose mark, or -1
	mark   int
	target uint64
}

// What block.whose says besides a rank.
const (
	whoseAll    = -1
	whoseFrames = -2
)

// happened reports whether what the rank waits for has happened. It moves frames as far as it can.
func (e *endpoint) happened() bool {
	if e.want.frames {
		return e.move()
	}
	return e.raised(e.want.rank, e.want.target)
}

// wait blocks until what e.want says has happened, or cannot happen, or ctx ends it.
//
// No wake-up is lost. The waiter writes what it waits for, sets its word parked, then looks at the condition, then
// blocks. The one who makes a condition true does that first, and then looks at parked. All of these are sequentially
// consistent, so either the waiter sees the condition, or the waker sees parked. Where a condition takes several ranks,
// the last of them sees what all others did. A waker turns parked from 1 to 0, so that one rings, and puts a token into
// the channel: itself if the waiter is of its process, else by a byte through the socket to the waiter's process. The
// goroutine that reads there then gives a token to all ranks that wait although their parked is 0. A byte may be left
// out if the socket is full: then others are there to be read, and whoever reads looks afterwards.
//
// A waker that is killed between the two is no loss either, for the end of its socket wakes all. If it is stopped
// there, the waiter looks once more when its context ends the wait. A token that comes late or twice ends a later wait
// early, which looks and blocks again.
func (e *endpoint) wait(ctx context.Context) error {
	if e.spin() {
		return nil
	}
	for {
		e.park()
		err := e.verdict()
		if !e.happened() && err == nil {
			err = transport.Park(ctx, e.wake)
			e.unpark()
			if err == nil {
				continue
			}
		} else {
			e.unpark()
		}
		if e.happened() {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// park says that the rank is about to block.
func (e *endpoint) park() {
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
	b.parked.Store(1)
}

func (e *endpoint) unpark() {
	e.mine.parked.Store(0)
	e.g.head.parkers.Add(^uint32(0))
	e.waiting.Store(false)
}

// token ends a wait of the rank.
func (e *endpoint) token() {
	select {
	case e.wake <- struct{}{}:
	default: // there is one already
	}
}

// verdict returns why what the rank waits for cannot happen any more, or nil.
func (e *endpoint) verdict() error {
	w := &e.want
	if w.frames {
		return e.exchangeVerdict()
	}
	if w.mark == 0 && e.doubted() && !e.decide() {
		return transport.ErrInterrupted
	}
	for r := range e.blocks {
		if (w.rank == r || w.rank < 0) && !e.raised(r, w.target) {
			if err := e.g.lost(r); err != nil && !e.raised(r, w.target) {
				return &transport.PeerDown{Rank: r, Err: err}
			}
		}
	}
	return nil
}
