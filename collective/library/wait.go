package library

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
)

// wait is the waits of one call: they end with the awaited event, the team's failure, the end of the context,
// or the deadline.
type wait struct {
	m    *member
	ctx  context.Context
	call *collective.Call
	ticket
	own bool // runs on the caller's goroutine, which the monitor watches

	missing  func() []int // the ranks that have not arrived, as far as known
	deadline *time.Timer  // nil: no wait yet, or no deadline
	stall    *time.Timer
	began    bool
}

// begin starts the clocks at the first wait.
func (w *wait) begin() {
	if w.began {
		return
	}
	w.began = true
	cfg := &w.m.team.cfg
	limit := cfg.Timeout
	if o := w.call.Options; o != nil && o.Timeout != 0 {
		limit = o.Timeout
	}
	if limit > 0 {
		w.deadline = time.NewTimer(limit)
	}
	if cfg.Stall > 0 {
		w.stall = time.NewTimer(cfg.Stall)
	}
}

func (w *wait) stop() {
	if w.deadline != nil {
		w.deadline.Stop()
	}
	if w.stall != nil {
		w.stall.Stop()
	}
}

func expired(t *time.Timer) <-chan time.Time {
	if t == nil {
		return nil
	}
	return t.C
}

// until waits for the result of f, which runs on a separate goroutine.
func (w *wait) until(f func(done chan<- error)) error {
	done := make(chan error, 1)
	go f(done)
	return w.on(done)
}

// on waits for a result. It returns the result, or the team's failure.
func (w *wait) on(done <-chan error) error {
	select {
	case err := <-done:
		return err
	default:
	}
	m := w.m
	if w.own {
		monitor, err := m.team.watchPark(m.rank, w.ticket, w.call)
		if err != nil {
			m.Abort(err)
			return m.team.fail(err, m.rank)
		}
		if monitor != nil {
			defer monitor.Unpark(m.rank)
		}
	}
	w.begin()
	m.blocks(w.ticket, w.missing)
	started := time.Now()
	for {
		select {
		case err := <-done:
			return err
		case <-m.team.done:
			return m.team.err
		case <-w.ctx.Done():
			return m.team.fail(w.ended(w.ctx, "waiting for the other ranks"), m.rank)
		case <-expired(w.deadline):
			e := w.failure(collective.ErrTimeout, fmt.Errorf("did not complete within %v: %s", time.Since(started).Round(time.Millisecond), w.lack()))
			return m.team.fail(e, m.rank)
		case <-expired(w.stall):
			m.team.cfg.Logger.Warn("collective: a call waits for other ranks", "communicator", m.team.cfg.Name, "rank", m.rank, "call", w.seq,
				"operation", w.call.Op.String(), "waiting", time.Since(started).Round(time.Second).String(), "why", w.lack())
		}
	}
}

// lack describes what is missing.
func (w *wait) lack() string {
	text := fmt.Sprintf("waiting for other processes; %s does not report which of them are missing", w.m.team.backend.Transport())
	if w.missing == nil {
		return text
	}
	if missing := w.missing(); len(missing) > 0 {
		return fmt.Sprintf("ranks %v have not entered the call", missing)
	}
	return text
}

// failure returns an error of this call.
func (w *wait) failure(kind, err error) *collective.Error {
	e := w.m.failure(kind, err)
	e.Op, e.Seq = w.call.Op, w.seq
	if w.call.Manifest != nil {
		e.Name = w.call.Manifest.Name
	}
	if w.missing != nil {
		e.Peers = w.missing()
	}
	if len(e.Peers) == 0 && kind != collective.ErrInvalid {
		e.Peers = w.m.team.others()
	}
	return e
}

// ended returns the error of a context's end, in the form of package collective.
func (w *wait) ended(ctx context.Context, what string) *collective.Error {
	kind := collective.ErrAborted
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		kind = collective.ErrTimeout
	}
	err := ctx.Err()
	if cause := context.Cause(ctx); !errors.Is(err, cause) {
		err = fmt.Errorf("%w: %w", err, cause)
	}
	return w.failure(kind, fmt.Errorf("%s: %w", what, err))
}

// outcome returns the error of an operation that the backend could not execute.
func (w *wait) outcome(err error) error {
	if err == nil {
		return nil
	}
	if cause := w.m.team.cause(); cause != nil {
		return cause
	}
	kind := collective.ErrPeerLost
	for _, k := range []error{collective.ErrMismatch, collective.ErrInvalid, collective.ErrTimeout} {
		if errors.Is(err, k) {
			kind = k
		}
	}
	return w.m.team.fail(w.failure(kind, err), w.m.rank)
}
