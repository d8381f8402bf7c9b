package collective

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/lockstep-ml/lockstep/collective/internal/executor"
	"github.com/lockstep-ml/lockstep/collective/internal/fault"
	"github.com/lockstep-ml/lockstep/transport"
)

// waiter is the context that a rank passes to its transport: it blocks for the transport until the caller's
// context, the deadline or the communicator's failure ends the wait. It has one timer for all calls, and starts no
// goroutine.
//
// The timer runs on from wait to wait: it is set again only to fire earlier, or once it has fired. Setting and stopping
// it for each wait would cost more than all else that a wait does. So it may fire early, and then it is set again.
type waiter struct {
	*diagnosis
	ctx context.Context // the caller's

	timeout  time.Duration // of the call; negative: none
	stalled  bool          // the call's stall was logged
	pause    time.Duration // before the next probe
	waitsFor []int         // the ranks that the wait is for
	timer    *time.Timer

	// Moments, as [FrontEnd.Now] returns them.
	since time.Duration // when the call first blocked; 0: it has not blocked
	next  time.Duration // when the peers are probed next
	fires time.Duration // when the timer fires
}

var _ transport.Parker = (*waiter)(nil)

func (w *waiter) Deadline() (time.Time, bool) { return w.ctx.Deadline() }
func (w *waiter) Done() <-chan struct{}       { return w.ctx.Done() }
func (w *waiter) Err() error                  { return w.ctx.Err() }
func (w *waiter) Value(key any) any           { return w.ctx.Value(key) }

// begin prepares for a call.
func (w *waiter) begin(r *Running) {
	w.ctx, w.timeout, w.stalled, w.since = r.Ctx, r.Options.Timeout, false, 0
}

// monitorError is an error that the monitor returned: the communicator fails with it unchanged.
type monitorError struct{ err error }

func (v *monitorError) Error() string { return v.err.Error() }

// Park implements [transport.Parker].
func (w *waiter) Park(ready <-chan struct{}) error {
	select {
	case <-ready:
		return nil
	default:
	}
	var done <-chan struct{}
	failed := (<-chan struct{})(w.team.broken)
	var down <-chan transport.PeerDown
	if !w.exec.Entered() {
		done, failed, down = w.ctx.Done(), w.front.Failed(), w.end.Down()
		if err := w.compareEarly(); err != nil {
			return err
		}
		monitor, err := w.front.Park(w.run)
		if err != nil {
			return &monitorError{err}
		}
		if monitor != nil {
			defer monitor.Unpark(w.rank)
		}
	}
	w.setTimer()
	for {
		select {
		case <-ready:
			w.front.Resumes()
			return nil
		case <-done:
			return w.ended(endOf(w.ctx))
		case <-failed:
			return executor.ErrFailed
		case d := <-down:
			// A rank that has closed its endpoint may have done its part. If it has not, the transport ends
			// the wait.
			if closed := errors.Is(d.Err, transport.ErrClosed); !closed || w.site.in(d.Rank) {
				w.departed = &departure{d}
				if !closed {
					return w.departed
				}
			}
		case <-w.timer.C:
			if err := w.handleTimer(); err != nil {
				return err
			}
		}
	}
}

// never is later than any moment.
const never = time.Duration(math.MaxInt64)

// later returns the moment this long after another one.
func later(at, wait time.Duration) time.Duration {
	if wait > never-at {
		return never
	}
	return at + wait
}

// A rank that waits for a rank of another process probes it after probeFirst, and then again after pauses
// that double up to probeMost: so it is detected that two ranks wait for each other, although no frame is
// sent.
const (
	probeFirst = 100 * time.Millisecond
	probeMost  = 10 * time.Second
)

// setTimer sets the timer to the next event: a probe of the peer, the stall report or the deadline.
func (w *waiter) setTimer() {
	now := w.front.Now()
	w.waitsFor = w.exec.Missing(w.waitsFor[:0])
	w.front.Waits(w.run, now, w.waitsFor, nil)
	if w.since == 0 {
		w.since, w.next = now, never
		if !w.site.oneProcess {
			w.pause, w.next = probeFirst, later(now, probeFirst)
		}
	}
	at := w.next
	if stall := w.team.cfg.Stall; stall >= 0 && !w.stalled {
		at = min(at, later(w.since, stall))
	}
	if w.timeout >= 0 && !w.exec.Entered() {
		at = min(at, later(w.since, w.timeout))
	}
	switch {
	case w.timer == nil:
		w.timer = time.NewTimer(at - now)
	case at < w.fires || w.fires <= now:
		w.timer.Reset(at - now)
	default:
		return
	}
	w.fires = at
}

// handleTimer handles the timer: it reports the stall, probes the peer, or returns the error of the deadline.
func (w *waiter) handleTimer() error {
	w.fires = 0
	now := w.front.Now()
	waited := now - w.since
	if w.timeout >= 0 && !w.exec.Entered() && waited >= w.timeout {
		return w.overdue(waited, nil)
	}
	if stall := w.team.cfg.Stall; stall >= 0 && !w.stalled && waited >= stall {
		w.stalled = true
		w.stall(waited)
	}
	if now >= w.next {
		if err := w.probe(); err != nil {
			return err
		}
		w.pause = min(2*w.pause, probeMost)
		w.next = later(w.front.Now(), w.pause)
	}
	w.setTimer()
	return nil
}

// ended returns the error of a wait that the end of the caller's context ends. A caller that cancels knows
// the reason; a deadline is attributed to other ranks.
func (w *waiter) ended(end *ended) error {
	waited := w.front.Now() - w.since
	if errors.Is(end.kind(), ErrTimeout) {
		return w.overdue(waited, end)
	}
	return w.failure(end.kind(), fmt.Errorf("%s: %w", w.wait().Describe(waited, fault.Finding{}), end))
}
