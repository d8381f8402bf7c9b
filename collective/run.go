package collective

import (
	"errors"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/collective/internal/executor"
	"github.com/lockstep-ml/lockstep/transport"
)

// notesMu returns the lock of what is noted of the calls, for readers on other goroutines. It is that of the
// front end's record: so a call locks once.
func (m *member) notesMu() *sync.Mutex { return &m.front.c.log.mu }

// Run executes a call.
func (m *member) Run(r *Running) error {
	m.wait.begin(r)
	*m.begun.of(r.Call)++
	p, err := m.prepare(r)
	if err != nil {
		return m.front.Error(r, ErrInvalid, err)
	}
	m.note(r, p)
	if err = m.down(); err == nil {
		err = m.exec.Execute(&m.wait, &m.call)
	}
	if err == nil {
		return nil
	}
	if m.exec.Entered() {
		m.team.breakOff()
	}
	err = m.fail(err)
	m.exec.Leave(&m.call)
	return err
}

// Failed implements [executor.Caller].
func (m *member) Failed() bool { return m.front.Failing() }

// Mismatch implements [executor.Caller].
func (m *member) Mismatch() error { return m.mismatch(func(int) bool { return true }) }

// fail determines what a failed wait means for the communicator, and returns the cause of its failure.
func (m *member) fail(err error) error {
	f := m.front
	if errors.Is(err, executor.ErrFailed) {
		<-f.Failed()
		return f.Err()
	}
	if v := (*monitorError)(nil); errors.As(err, &v) {
		return f.Abort(v.err)
	}
	if errors.Is(err, transport.ErrInterrupted) {
		if err = m.interrupted(); errors.Is(err, executor.ErrFailed) {
			return m.fail(err)
		}
	}
	return f.Fail(m.diagnose(err))
}

// diagnose translates an error of the transport.
func (m *member) diagnose(err error) error {
	e := (*Error)(nil)
	down := (*transport.PeerDown)(nil)
	other := (*executor.OtherCall)(nil)
	missing := (*executor.MissingFrame)(nil)
	if told := (*departure)(nil); errors.As(err, &told) {
		err = &told.down
	}
	switch {
	case errors.As(err, &e):
		return err
	case errors.As(err, &other):
		return m.oddity(other)
	case errors.As(err, &missing):
		return m.failure(ErrMismatch, missing)
	case errors.As(err, &down):
		if failure := (*transport.Failure)(nil); errors.As(down.Err, &failure) {
			if told, ok := decodeFailure(failure.Reason); ok {
				return told
			}
		}
		e = m.failure(ErrPeerLost, down)
		e.Peers = []int{down.Rank}
		return e
	case errors.Is(err, transport.ErrSize):
		return m.failure(ErrMismatch, err)
	case errors.Is(err, transport.ErrClosed):
		return m.failure(ErrClosed, err)
	}
	return m.failure(ErrAborted, err)
}

// failure returns an error of the current call.
func (m *member) failure(kind, err error) *Error {
	e := m.front.Error(m.wait.run, kind, err)
	e.Peers = m.missing()
	return e
}

// missing returns the ranks that the current wait is for.
func (m *member) missing() []int { return m.exec.Missing(nil) }

// down checks whether a peer is gone without which the call cannot succeed. A peer that has closed its
// endpoint may have done its part of a call by frames; it cannot have entered a call in memory.
func (m *member) down() error {
	for m.wait.told == nil {
		select {
		case down := <-m.end.Down():
			if !errors.Is(down.Err, transport.ErrClosed) || m.site.marker != nil && m.site.in(down.Rank) {
				m.wait.told = keep(down)
			}
			continue
		default:
		}
		return nil
	}
	if told := m.wait.told; !errors.Is(told.down.Err, transport.ErrClosed) || !m.wait.call.pairwise() {
		return told
	}
	return nil
}

// departure is the loss of a peer that ends a call, as the endpoint reported it. It is not a PeerDown,
// because a transport on top of others may translate the ranks of PeerDown errors that pass through it.
type departure struct{ down transport.PeerDown }

func keep(down transport.PeerDown) *departure { return &departure{down} }

func (d *departure) Error() string { return d.down.Error() }

// interrupted returns why the current call can never start: a rank has withdrawn, or a team has failed. If it
// is this team, its cause is known or will be shortly. Otherwise it is another team over the same transport,
// which is sending its cause.
func (m *member) interrupted() error {
	t := m.team
	if t.local == t.size || t.execs.Withdrawing() || m.front.Failing() {
		return executor.ErrFailed
	}
	if told := m.wait.told; told != nil {
		return told
	}
	timer := time.NewTimer(causeWait)
	defer timer.Stop()
	for {
		select {
		case down := <-m.end.Down():
			if !errors.Is(down.Err, transport.ErrClosed) || m.site.in(down.Rank) {
				return keep(down)
			}
		case <-m.front.Failed():
			return executor.ErrFailed
		case <-timer.C:
			return m.failure(ErrPeerLost, errors.New("a rank of another group over this transport has left the call"))
		}
	}
}

// causeWait is how long a rank waits for the reason why a call cannot start. It arrives at once, or never.
const causeWait = time.Second
