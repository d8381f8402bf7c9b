package collective

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/lockstep-ml/lockstep/collective/internal/executor"
	"github.com/lockstep-ml/lockstep/collective/internal/fault"
	"github.com/lockstep-ml/lockstep/transport"
)

// waiter is the context that a rank passes to its transport: it blocks for the transport until the caller's
// context, the deadline or the communicator's failure ends the wait. It has one timer for all calls, set only when a
// wait blocks, and starts no goroutine.
type waiter struct {
	m    *member
	run  *Running
	ctx  context.Context // the caller's
	call *Call

	timeout time.Duration // of the call; negative: none
	timer   *time.Timer
	since   time.Time // when the call first blocked; zero: it has not blocked
	stalled bool      // the call's stall was logged
	probe   time.Time // when the peers are probed next; zero: never
	pause   time.Duration
	silent  int // the rank that did not answer the last probe, or -1

	// told is a departure that was reported while a rank waited. The wait may have ended for another reason,
	// so it is kept for later.
	told *departure
}

var _ transport.Parker = (*waiter)(nil)

func (w *waiter) Deadline() (time.Time, bool) { return w.ctx.Deadline() }
func (w *waiter) Done() <-chan struct{}       { return w.ctx.Done() }
func (w *waiter) Err() error                  { return w.ctx.Err() }
func (w *waiter) Value(key any) any           { return w.ctx.Value(key) }

// begin prepares for a call.
func (w *waiter) begin(r *Running) {
	w.run, w.ctx, w.call = r, r.Ctx, r.Call
	w.timeout, w.stalled, w.since, w.silent = r.Options.Timeout, false, time.Time{}, -1
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
	failed := (<-chan struct{})(w.m.team.broken)
	var down <-chan transport.PeerDown
	if !w.m.exec.Entered() {
		done, failed, down = w.ctx.Done(), w.m.front.Failed(), w.m.end.Down()
		if err := w.m.early(); err != nil {
			return err
		}
		monitor, err := w.m.front.Park(w.run)
		if err != nil {
			return &monitorError{err}
		}
		if monitor != nil {
			defer monitor.Unpark(w.m.rank)
		}
	}
	w.arm()
	defer w.timer.Stop()
	for {
		select {
		case <-ready:
			w.m.front.Resumes()
			return nil
		case <-done:
			return w.ended(endOf(w.ctx))
		case <-failed:
			return executor.ErrFailed
		case d := <-down:
			// A rank that has closed its endpoint may have done its part. If it has not, the transport ends
			// the wait.
			if closed := errors.Is(d.Err, transport.ErrClosed); !closed || w.m.site.in(d.Rank) {
				w.told = keep(d)
				if !closed {
					return w.told
				}
			}
		case <-w.timer.C:
			if err := w.ring(); err != nil {
				return err
			}
		}
	}
}

// never is the duration of a timer that is not needed.
const never = 1000 * time.Hour

// A rank that waits for a rank of another process probes it after probeFirst, and then again after pauses
// that double up to probeMost: so it is detected that two ranks wait for each other, although no frame is
// sent.
const (
	probeFirst = 100 * time.Millisecond
	probeMost  = 10 * time.Second
)

// arm sets the timer to the next event: a probe of the peer, the stall report or the deadline.
func (w *waiter) arm() {
	now := time.Now()
	w.m.waitsFor = w.m.exec.Missing(w.m.waitsFor[:0])
	w.m.front.Waits(w.run, now, w.m.waitsFor)
	if w.since.IsZero() {
		w.since = now
		w.probe = time.Time{}
		if !w.m.site.whole {
			w.pause, w.probe = probeFirst, now.Add(probeFirst)
		}
	}
	next := never
	if stall := w.m.team.cfg.Stall; stall >= 0 && !w.stalled {
		next = w.since.Add(stall).Sub(now)
	}
	if w.timeout >= 0 && !w.m.exec.Entered() {
		next = min(next, w.since.Add(w.timeout).Sub(now))
	}
	if !w.probe.IsZero() {
		next = min(next, w.probe.Sub(now))
	}
	if w.timer == nil {
		w.timer = time.NewTimer(next)
	} else {
		w.timer.Reset(next)
	}
}

// ring handles the timer: it reports the stall, probes the peer, or returns the error of the deadline.
func (w *waiter) ring() error {
	now := time.Now()
	waited := now.Sub(w.since)
	if w.timeout >= 0 && !w.m.exec.Entered() && waited >= w.timeout {
		return w.overdue(nil)
	}
	if stall := w.m.team.cfg.Stall; stall >= 0 && !w.stalled && waited >= stall {
		w.stalled = true
		w.stall(waited)
	}
	if !w.probe.IsZero() && !now.Before(w.probe) {
		if err := w.m.probe(); err != nil {
			return err
		}
		w.pause = min(2*w.pause, probeMost)
		w.probe = time.Now().Add(w.pause)
	}
	w.arm()
	return nil
}

// ended returns the error of a wait that the end of the caller's context ends. A caller that cancels knows
// the reason; a deadline is attributed to other ranks.
func (w *waiter) ended(end *ended) error {
	if errors.Is(end.kind(), ErrTimeout) {
		return w.overdue(end)
	}
	return w.m.failure(end.kind(), fmt.Errorf("%s: %w", w.fault().Describe(time.Since(w.since), fault.Finding{}), end))
}
