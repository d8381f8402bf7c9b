package collective

import (
	"errors"
	"time"

	"github.com/lockstep-ml/lockstep/collective/internal/executor"
	"github.com/lockstep-ml/lockstep/transport"
)

// Run executes a call.
func (b *planBackend) Run(r *Running) error {
	d := &b.diagnosis
	d.run, d.silent = r, -1
	d.begun.Next(r.Call.Op, r.Call.Peer)
	b.waiter.begin(r)
	if err := b.prepare(r); err != nil {
		return b.front.Error(r, ErrInvalid, err)
	}
	err := b.down()
	if err == nil {
		err = b.exec.Execute(&b.waiter, &b.call)
	}
	if err == nil {
		return nil
	}
	if b.exec.Entered() {
		b.team.breakOff()
	}
	err = b.fail(err)
	b.exec.Leave(&b.call)
	return err
}

// prepare makes what the executor needs to execute a valid call, and notes the call.
func (b *planBackend) prepare(r *Running) error {
	last := b.signer.last
	s := b.signer.repeated(r)
	if s == nil {
		p, err := b.planner.plan(r)
		if err != nil {
			return err
		}
		s = b.signer.sign(r, p)
	}
	slot := &b.call.Slot
	if s != last {
		slot.Header, slot.Name, slot.Shape, slot.Algorithm = s.call.Header, s.call.Name, s.call.Shape, s.call.Algorithm
		b.use(r, s.key.plan)
	}
	slot.Seq, slot.Sum = r.seq, s.sum+r.seq*transport.SumStep
	r.Call.sides(b.rank, &b.call)
	b.calls.note(r, s, &b.diagnosis.begun)
	return nil
}

// use makes the executor's call, except for its slot and its memory, with a plan that [planner.plan] returned.
func (b *planBackend) use(r *Running, p *planned) {
	call, c := r.Call, &b.call
	c.Reduce, c.Type, c.Partial = call.Reduce, call.Type, partialType(call, &r.Options)
	if p == nil {
		b.message.Message(call.Peer, r.Count, call.Op == Send)
		c.Plan = &b.message
		return
	}
	c.Plan, b.planner.last = p.plan, p
}

// Failed implements [executor.Caller].
func (b *planBackend) Failed() bool { return b.front.Failing() }

// Mismatch implements [executor.Caller].
func (b *planBackend) Mismatch() error { return b.diagnosis.mismatch(func(int) bool { return true }) }

// PrivatePlan implements [executor.Caller].
func (b *planBackend) PrivatePlan() (*executor.Plan, error) {
	p, err := b.planner.private()
	if err != nil {
		return nil, b.diagnosis.failure(ErrInvalid, err)
	}
	return p, nil
}

// fail determines what a failed wait means for the communicator, and returns the cause of its failure.
func (b *planBackend) fail(err error) error {
	f := b.front
	if errors.Is(err, executor.ErrFailed) {
		<-f.Failed()
		return f.Err()
	}
	if v := (*monitorError)(nil); errors.As(err, &v) {
		return f.Abort(v.err)
	}
	if errors.Is(err, transport.ErrInterrupted) {
		if err = b.interrupted(); errors.Is(err, executor.ErrFailed) {
			return b.fail(err)
		}
	}
	return f.Fail(b.diagnose(err))
}

// diagnose translates an error of the transport or the executor.
func (b *planBackend) diagnose(err error) error {
	d := &b.diagnosis
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
		return d.otherCall(other)
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
func (b *planBackend) down() error {
	d := &b.diagnosis
	for d.departed == nil {
		select {
		case down := <-b.end.Down():
			if !errors.Is(down.Err, transport.ErrClosed) || b.site.sharesMemory() && b.site.in(down.Rank) {
				d.departed = &departure{down}
			}
			continue
		default:
		}
		return nil
	}
	if left := d.departed; !errors.Is(left.down.Err, transport.ErrClosed) || !d.run.Call.Op.Pairwise() {
		return left
	}
	return nil
}

// interrupted returns why the current call can never start: a rank has withdrawn, or a team has failed. If it
// is this team, its cause is known or will be shortly. Otherwise it is another team over the same transport,
// which is sending its cause.
func (b *planBackend) interrupted() error {
	t := b.team
	if t.local == t.size || t.executors.Withdrawing() || b.front.Failing() {
		return executor.ErrFailed
	}
	if left := b.diagnosis.departed; left != nil {
		return left
	}
	timer := time.NewTimer(causeWait)
	defer timer.Stop()
	for {
		select {
		case down := <-b.end.Down():
			if !errors.Is(down.Err, transport.ErrClosed) || b.site.in(down.Rank) {
				return &departure{down}
			}
		case <-b.front.Failed():
			return executor.ErrFailed
		case <-timer.C:
			return b.diagnosis.failure(ErrPeerLost, errors.New("a rank of another group over this transport has left the call"))
		}
	}
}

// causeWait is how long a rank waits for the reason why a call cannot start. It arrives at once, or never.
const causeWait = time.Second
