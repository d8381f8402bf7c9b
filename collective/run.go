package collective

import (
	"errors"
	"time"

	"github.com/lockstep-ml/lockstep/collective/internal/executor"
	"github.com/lockstep-ml/lockstep/transport"
)

// Run executes a call.
func (m *member) Run(r *Running) error {
	m.diagnosis.begin(r)
	m.waiter.begin(r)
	if err := m.prepare(r); err != nil {
		return m.front.Error(r, ErrInvalid, err)
	}
	err := m.down()
	if err == nil {
		err = m.exec.Execute(&m.waiter, &m.call)
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

// prepare makes what the executor needs to execute a valid call, and notes the call.
func (m *member) prepare(r *Running) error {
	p, err := m.plan(r)
	if err != nil {
		return err
	}
	last := m.signer.last
	s := m.signer.sign(r.Call, r.Count, &r.Options, p)
	slot := &m.call.Slot
	if s != last {
		slot.Header, slot.Name, slot.Shape, slot.Algorithm = s.call.Header, s.call.Name, s.call.Shape, s.call.Algorithm
	}
	slot.Seq, slot.Sum = r.seq, s.sum+r.seq*transport.SumStep
	m.calls.note(r, s, &m.diagnosis.begun)
	return nil
}

// plan makes the executor's call, except for its slot. p is nil for a call of two ranks.
func (m *member) plan(r *Running) (p *planned, err error) {
	call, c := r.Call, &m.call
	c.Reduce, c.Type, c.Partial = call.Reduce, call.Type, partialType(call, &r.Options)
	c.Src, c.Dst = call.sides(m.rank)
	if call.pairwise() {
		m.message.Message(call.Peer, r.Count, call.Op == Send)
		c.Plan = &m.message
		return nil, nil
	}
	if p, err = m.planner.plan(r, c.Partial); err == nil {
		c.Plan = p.plan
	}
	return p, err
}

// Failed implements [executor.Caller].
func (m *member) Failed() bool { return m.front.Failing() }

// Mismatch implements [executor.Caller].
func (m *member) Mismatch() error { return m.diagnosis.mismatch(func(int) bool { return true }) }

// PrivatePlan implements [executor.Caller].
func (m *member) PrivatePlan() (*executor.Plan, error) {
	p, err := m.planner.private()
	if err != nil {
		return nil, m.diagnosis.failure(ErrInvalid, err)
	}
	return p, nil
}

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

// diagnose translates an error of the transport or the executor.
func (m *member) diagnose(err error) error {
	d := &m.diagnosis
	e := (*Error)(nil)
	down := (*transport.PeerDown)(nil)
	departed := (*departure)(nil)
	other := (*executor.OtherCall)(nil)
	missing := (*executor.MissingFrame)(nil)
	switch {
	case errors.As(err, &departed):
		return d.lost(&departed.down)
	case errors.As(err, &e):
		return err
	case errors.As(err, &other):
		return d.oddity(other)
	case errors.As(err, &missing):
		return d.failure(ErrMismatch, missing)
	case errors.As(err, &down):
		return d.lost(down)
	case errors.Is(err, transport.ErrSize):
		return d.failure(ErrMismatch, err)
	case errors.Is(err, transport.ErrClosed):
		return d.failure(ErrClosed, err)
	}
	return d.failure(ErrAborted, err)
}

// down checks whether a peer is gone without which the call cannot succeed. A peer that has closed its
// endpoint may have done its part of a call by frames; it cannot have entered a call in memory.
func (m *member) down() error {
	d := &m.diagnosis
	for d.departed == nil {
		select {
		case down := <-m.end.Down():
			if !errors.Is(down.Err, transport.ErrClosed) || m.site.marker != nil && m.site.in(down.Rank) {
				d.departed = keep(down)
			}
			continue
		default:
		}
		return nil
	}
	if left := d.departed; !errors.Is(left.down.Err, transport.ErrClosed) || !d.run.Call.pairwise() {
		return left
	}
	return nil
}

// interrupted returns why the current call can never start: a rank has withdrawn, or a team has failed. If it
// is this team, its cause is known or will be shortly. Otherwise it is another team over the same transport,
// which is sending its cause.
func (m *member) interrupted() error {
	t := m.team
	if t.local == t.size || t.execs.Withdrawing() || m.front.Failing() {
		return executor.ErrFailed
	}
	if left := m.diagnosis.departed; left != nil {
		return left
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
			return m.diagnosis.failure(ErrPeerLost, errors.New("a rank of another group over this transport has left the call"))
		}
	}
}

// causeWait is how long a rank waits for the reason why a call cannot start. It arrives at once, or never.
const causeWait = time.Second
