package library

import (
	"fmt"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
	"github.com/lockstep-ml/lockstep/internal/ranges"
)

// wait is a running call and its waits: they end with the awaited event, the communicator's failure, the end of
// the context, or the deadline.
type wait struct {
	*collective.Running
	m     *rank
	print fingerprint.Call

	missing  func() []int  // the ranks that have not arrived, for any goroutine; nil: unknown
	began    time.Duration // the first wait, as the front end's Now; 0: none yet
	deadline *time.Timer   // nil: no wait yet, or no deadline
	stall    *time.Timer
}

// begin starts the clocks at the first wait.
func (w *wait) begin() {
	if w.began != 0 {
		return
	}
	w.began = w.m.front.Now()
	if limit := w.Options.Timeout; limit > 0 {
		w.deadline = time.NewTimer(limit)
	}
	if stall := w.m.front.Config().Stall; stall > 0 {
		w.stall = time.NewTimer(stall)
	}
}

// waited returns how long the call has waited.
func (w *wait) waited() time.Duration { return w.m.front.Now() - w.began }

func (w *wait) stop() {
	for _, t := range []*time.Timer{w.deadline, w.stall} {
		if t != nil {
			t.Stop()
		}
	}
}

func expired(t *time.Timer) <-chan time.Time {
	if t == nil {
		return nil
	}
	return t.C
}

// on waits for a result. It returns the result, or the cause of the communicator's failure.
func (w *wait) on(done <-chan error) error {
	select {
	case err := <-done:
		return err
	default:
	}
	f := w.m.front
	monitor, err := f.Park(w.Running)
	if err != nil {
		return f.Abort(err)
	}
	if monitor != nil {
		defer monitor.Unpark(w.m.rank)
	}
	w.begin()
	f.Waits(w.Running, w.began, nil, w.missing)
	for {
		select {
		case err := <-done:
			f.Resumes()
			return err
		case <-f.Failed():
			return f.Err()
		case <-w.Ctx.Done():
			err := f.ContextError(w.Running, w.why())
			err.Peers = w.peers()
			return f.Fail(err)
		case <-expired(w.deadline):
			return f.Fail(w.failure(collective.ErrTimeout, fmt.Errorf("%s", w.why())))
		case <-expired(w.stall):
			f.LogStall(w.Running, w.waited(), w.text(), w.why())
		}
	}
}

// waitsForPeer makes the peer of a Send or a Recv the rank that the call waits for. The caller may change the
// call as soon as it has ended, so the peer is copied.
func (w *wait) waitsForPeer() {
	peer := w.Call.Peer
	w.missing = func() []int { return []int{peer} }
}

// lacks returns the ranks that have not arrived, as far as known.
func (w *wait) lacks() []int {
	if w.missing == nil {
		return nil
	}
	return w.missing()
}

// text names the ranks that have not arrived.
func (w *wait) text() string {
	if lacks := w.lacks(); len(lacks) > 0 {
		return ranges.Text("rank", lacks)
	}
	return fmt.Sprintf("other processes (%s does not report which)", w.m.team.driver.Transport())
}

// why describes the wait.
func (w *wait) why() string {
	return fmt.Sprintf("rank %d waited %v for %s in %s",
		w.m.rank, w.waited().Round(time.Microsecond), w.text(), &w.print)
}

// peers returns the ranks that an error concerns: those that have not arrived or, if they are unknown, all ranks
// of other processes.
func (w *wait) peers() []int {
	if lacks := w.lacks(); len(lacks) > 0 {
		return lacks
	}
	return w.m.team.others()
}

// failure returns an error of this call.
func (w *wait) failure(kind, err error) *collective.Error {
	e := w.m.front.Error(w.Running, kind, err)
	e.Peers = w.peers()
	return e
}

// outcome returns the error of an operation that the driver could not execute.
func (w *wait) outcome(err error) error {
	if err == nil || w.m.front.Err() != nil {
		return err // or the cause takes precedence
	}
	return w.failure(outcome(err), err)
}
