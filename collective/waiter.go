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
	*diagnosis
	ctx context.Context // the caller's

	timeout  time.Duration // of the call; negative: none
	timer    *time.Timer
	since    time.Time // when the call first blocked; zero: it has not blocked
	stalled  bool      // the call's stall was logged
	next     time.Time // when the peers are probed next; zero: never
	pause    time.Duration
	waitsFor []int // the ranks that the wait is for
}

var _ transport.Parker = (*waiter)(nil)

func (w *waiter) Deadline() (time.Time, bool) { return w.ctx.Deadline() }
func (w *waiter) Done() <-chan struct{}       { return w.ctx.Done() }
func (w *waiter) Err() error                  { return w.ctx.Err() }
func (w *waiter) Value(key any) any           { return w.ctx.Value(key) }

// begin prepares for a call.
func (w *waiter) begin(r *Running) {
	w.ctx, w.timeout, w.stalled, w.since = r.Ctx, r.Options.Timeout, false, time.Time{}
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
	defer w.timer.Stop()
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

// never is the duration of a timer that is not needed.
const never = 1000 * time.Hour

// A rank that waits for a rank of another process probes it after probeFirst, and then again after pauses
// that double up to probeMost: so it is detected that two ranks wait for each other, although no frame is
// sent.
const (
	probeFirst = 100 * time.Millisecond
	probeMost  = 10 * time.Second
)

// setTimer sets the timer to the next event: a probe of the peer, the stall report or the deadline.
func (w *waiter) setTimer() {
	now := time.Now()
	w.waitsFor = w.exec.Missing(w.waitsFor[:0])
	w.front.Waits(w.run, now, w.waitsFor, nil)
	if w.since.IsZero() {
		w.since = now
		w.next = time.Time{}
		if !w.site.oneProcess {
			w.pause, w.next = probeFirst, now.Add(probeFirst)
		}
	}
	until := never
	if stall := w.team.cfg.Stall; stall >= 0 && !w.stalled {
		until = w.since.Add(stall).Sub(now)
	}
	if w.timeout >= 0 && !w.exec.Entered() {
		until = min(until, w.since.Add(w.timeout).Sub(now))
	}
	if !w.next.IsZero() {
		until = min(until, w.next.Sub(now))
	}
	if w.timer == nil {
		w.timer = time.NewTimer(until)
	} else {
		w.timer.Reset(until)
	}
}

// handleTimer handles the timer: it reports the stall, probes the peer, or returns the error of the deadline.
func (w *waiter) handleTimer() error {
	now := time.Now()
	waited := now.Sub(w.since)
	if w.timeout >= 0 && !w.exec.Entered() && waited >= w.timeout {
		return w.overdue(waited, nil)
	}
	if stall := w.team.cfg.Stall; stall >= 0 && !w.stalled && waited >= stall {
		w.stalled = true
		w.stall(waited)
	}
	if !w.next.IsZero() && !now.Before(w.next) {
		if err := w.probe(); err != nil {
			return err
		}
		w.pause = min(2*w.pause, probeMost)
		w.next = time.Now().Add(w.pause)
	}
	w.setTimer()
	return nil
}

// ended returns the error of a wait that the end of the caller's context ends. A caller that cancels knows
// the reason; a deadline is attributed to other ranks.
func (w *waiter) ended(end *ended) error {
	if errors.Is(end.kind(), ErrTimeout) {
		return w.overdue(time.Since(w.since), end)
	}
	return w.failure(end.kind(), fmt.Errorf("%s: %w", w.wait().Describe(time.Since(w.since), fault.Finding{}), end))
}
