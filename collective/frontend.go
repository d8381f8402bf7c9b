package collective

import (
	"fmt"
	"sync/atomic"
	"time"
)

// FrontEnd is a rank's communicator as its backend sees it. Its methods can be called by any goroutine unless
// they say otherwise.
type FrontEnd struct {
	c    *communicator
	fate *atomic.Uint32 // of the group: every segment of a call reads it
}

// Config returns the configuration, with its defaults filled in. It must not be changed.
func (f FrontEnd) Config() *Config { return &f.c.group.cfg }

// Failing reports whether the communicator has failed, or is about to fail.
func (f FrontEnd) Failing() bool { return f.fate.Load() != sound }

// Failed returns a channel that is closed when the communicator has failed.
func (f FrontEnd) Failed() <-chan struct{} { return f.c.group.done }

// Err returns the cause of the failure, or nil if there is none yet.
func (f FrontEnd) Err() error { return f.c.group.cause() }

// Fail makes err the cause of the failure of all local ranks' communicators, and returns the cause. It first waits for
// the description of the ranks concerned ([Config].Describe) and the monitor's explanation; the peers are notified
// without them after 0.1 s. If another error is the cause already, or is about to be, Fail waits until it is settled,
// and drops err.
func (f FrontEnd) Fail(err error) error { return f.c.group.fail(err, f.c.rank) }

// Abort is Fail for an error that needs no description or explanation, because the monitor has returned it.
func (f FrontEnd) Abort(err error) error {
	g := f.c.group
	g.abort(f.c.asError(err))
	<-g.done
	return g.err
}

// over returns how many calls of the rank have ended.
func (f FrontEnd) over() uint64 {
	_, over := f.c.counts()
	return over
}

// Error returns an error of a call.
func (f FrontEnd) Error(r *Running, kind, err error) *Error {
	return f.c.callError(r.Call, r.ticket, kind, err)
}

// ContextError returns the error of a call that the end of its context ends; why describes what it waited for.
func (f FrontEnd) ContextError(r *Running, why string) *Error {
	return f.c.contextError(r.Ctx, r.Call, r.ticket, why)
}

// LogStall logs that a call has waited long, for which ranks, and why.
func (f FrontEnd) LogStall(r *Running, waited time.Duration, ranks, why string) {
	f.c.group.cfg.Logger.Warn("collective: a call is stalled", "communicator", f.c.group.cfg.Name, "rank", f.c.rank,
		"call", r.seq, "operation", f.c.log.latest(), "waited", waited, "waits_for", ranks, "because", why)
}

// Begin records that a call begins; by names what executes it. Only Run may call it.
func (f FrontEnd) Begin(r *Running, by string) {
	record := newRecord(r.Call, r.Count, &r.Options, by)
	f.c.log.mu.Lock()
	f.c.log.add(r, &record, true)
	f.c.log.mu.Unlock()
}

// Now returns the time since the communicator was opened. It is never 0.
func (f FrontEnd) Now() time.Duration { return f.c.log.now() }

// Waits records that the current call waits for other ranks since a moment, as [FrontEnd.Now] returned it. If missing
// is nil, these are ranks, which it copies. Else missing returns the current ones; any goroutine may call it, even
// after Run has returned. A call that fails counts as waiting until it has ended. Only the goroutine that executes Run
// may call Waits.
func (f FrontEnd) Waits(r *Running, since time.Duration, ranks []int, missing func() []int) {
	f.c.log.waitsFor(r.turn, since, ranks, missing)
}

// Resumes records that the current call does not wait any more. Only the goroutine that executes Run may call it.
func (f FrontEnd) Resumes() { f.c.log.resumes() }

// Park reports to the monitor that the rank is about to wait, if it runs on the caller's goroutine. It returns
// the monitor to notify by Unpark when the rank runs again, or nil; an error means that the wait would never
// end: Abort takes it.
func (f FrontEnd) Park(r *Running) (Monitor, error) {
	if !r.user {
		return nil, nil
	}
	return f.c.parkMonitor(r.seq, r.Call)
}

// OpenBackends makes a communicator of this process's ranks over backends, in the order of rank, which it
// attaches and closes. All local ranks have the same Size, and no two have the same Rank. After an error the backends
// are still the caller's.
func OpenBackends(backends []Backend, cfg Config) (Group, error) {
	cfg, err := cfg.filled()
	if err != nil {
		return nil, err
	}
	if err := checkLocal("backend", backends); err != nil {
		return nil, err
	}
	return openGroup(backends, cfg, &book{}), nil
}

// checkLocal checks that the endpoints or backends of the local ranks can be those of one communicator.
func checkLocal[E interface {
	Rank() int
	Size() int
}](what string, local []E) error {
	if len(local) == 0 {
		return fmt.Errorf("collective: a communicator needs at least one %s", what)
	}
	size := local[0].Size()
	taken := make([]bool, max(size, 0))
	for i, e := range local {
		switch r := e.Rank(); {
		case e.Size() != size:
			return fmt.Errorf("collective: %s %d belongs to a group of %d ranks, %s 0 to one of %d",
				what, i, e.Size(), what, size)
		case r < 0 || r >= size:
			return fmt.Errorf("collective: %s %d is of rank %d in a group of %d ranks", what, i, r, size)
		case taken[r]:
			return fmt.Errorf("collective: two %ss of rank %d", what, r)
		default:
			taken[r] = true
		}
	}
	return nil
}
