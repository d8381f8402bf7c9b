package deadlock

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/stacks"
)

// rendezvous implements the merge calls of all replicas, for all runs until one fails. The search treats it as another
// communicator.
type rendezvous struct {
	monitor *Monitor
	members []member

	// Guarded by the detector's lock.
	arrived   int
	executing bool // a merge function runs
	executor  int  // the replica on whose goroutine it runs

	// The result of the last merge function. It is written before the waiting replicas are woken, and not again before
	// all of them have entered the next merge call.
	value any
	err   error
}

// member is the part of one replica in the rendezvous.
type member struct {
	call     collective.Call // describes the merge call in reports
	manifest collective.Manifest
	woken    chan struct{} // receives a token when the result is available
	timer    *time.Timer   // made on first use
}

func newRendezvous(l *Detector) *rendezvous {
	m := &rendezvous{monitor: newMonitor(l, "", nil, nil), members: make([]member, l.Replicas())}
	m.monitor.isMerge = true
	for i := range m.members {
		s := &m.members[i]
		s.call.Manifest, s.woken = &s.manifest, make(chan struct{}, 1)
	}
	return m
}

// Merge performs a merge call for one replica. It waits until all replicas have called it; then the last one's
// goroutine runs f for all of them, and all return f's value and error. Only that f runs, so all replicas must pass
// the same function. While it runs, the goroutines of all other replicas are inside Merge. purpose describes the
// merge call in reports; it may be empty. Merge calls with different purposes fail the run with an error that matches
// [collective.ErrMismatch].
//
// timeout bounds the wait including the execution of f; zero means [Config.Timeout], negative no limit. The wait also
// ends with ctx, and when the run fails. A timeout, the end of ctx, and a panic or runtime.Goexit of f are failures
// of the run. An error of f is returned to all replicas and is not a failure of the run.
func (r *Run) Merge(
	ctx context.Context, replica int, purpose string, timeout time.Duration, f func() (any, error),
) (any, error) {
	if err := r.Acquire(replica); err != nil {
		return nil, err
	}
	defer r.Release(replica)
	m := r.merge
	seq := m.monitor.slots[replica].entered.Load()
	m.members[replica].manifest.Name = purpose
	m.monitor.enter(replica, seq, &m.members[replica].call)
	defer m.monitor.leave(replica, seq)
	if ctx.Err() != nil {
		return nil, m.explain(r, replica, seq, endOf(ctx), 0)
	}
	last, failure := r.arrive(replica, seq)
	switch {
	case failure != nil:
		return nil, failure
	case last:
		return m.execute(r, replica, seq, f)
	}
	defer r.replicas[replica].parked.Store(false)
	return m.await(ctx, r, replica, seq, orDefault(timeout, r.detector.cfg.Timeout))
}

// arrive counts the replica, and parks it unless it is the last.
func (r *Run) arrive(replica int, seq uint64) (last bool, failure error) {
	l, m := r.detector, r.merge
	l.mu.Lock()
	if failure := r.failure.Load(); failure != nil {
		l.mu.Unlock()
		return false, failure
	}
	m.arrived++
	last = m.arrived == len(r.replicas)
	var found *StepError
	switch {
	case !last:
		found = r.parkLocked(replica, waiting{m.monitor, seq})
	case m.differ():
		found = r.failLocked(fault{
			kind: faultFound, replica: replica, monitor: m.monitor, seq: seq,
			cause: collective.ErrMismatch,
		})
	default:
		m.arrived, m.executing, m.executor = 0, true, replica
	}
	l.mu.Unlock()
	if found != nil {
		r.replicas[replica].parked.Store(false)
		r.spread(found)
		return false, found
	}
	return last, nil
}

// differ reports whether the merge calls of the replicas have different purposes. All replicas have arrived.
func (m *rendezvous) differ() bool {
	for i := range m.members {
		if m.members[i].manifest.Name != m.members[0].manifest.Name {
			return true
		}
	}
	return false
}

// execute runs f and wakes the others.
func (m *rendezvous) execute(r *Run, replica int, seq uint64, f func() (any, error)) (value any, err error) {
	normal := false
	defer func() {
		if normal {
			return
		}
		// A panic becomes the failure of the run; after runtime.Goexit this goroutine exits.
		panicked := recover()
		kind := faultMergeGone
		if panicked != nil {
			kind = faultMergePanicked
		}
		value, err = nil, r.fail(fault{
			kind: kind, replica: replica, monitor: m.monitor, seq: seq,
			cause: panicCause(panicked), value: panicked, stack: userPart(firstStack(debug.Stack()), true),
		})
	}()
	value, err = f()
	normal = true

	l := r.detector
	l.mu.Lock()
	if failure := r.failure.Load(); failure != nil {
		l.mu.Unlock()
		return nil, failure
	}
	m.value, m.err = value, err
	m.executing = false
	l.mu.Unlock()
	for other := range m.members {
		if other != replica {
			m.members[other].woken <- struct{}{}
		}
	}
	return value, err
}

// await blocks until the result is available or the run has failed.
func (m *rendezvous) await(ctx context.Context, r *Run, replica int, seq uint64, timeout time.Duration) (any, error) {
	var (
		member  = &m.members[replica]
		stall   = r.detector.cfg.Stall
		stalled = stall <= 0 || timeout > 0 && timeout <= stall // nothing to log any more
		start   = time.Now()
		expired <-chan time.Time
	)
	arm := func() {
		d := timeout - time.Since(start)
		if !stalled {
			d = stall
		} else if timeout <= 0 {
			return
		}
		if member.timer == nil {
			member.timer = time.NewTimer(d)
		} else {
			member.timer.Reset(d)
		}
		expired = member.timer.C
	}
	arm()
	defer func() {
		if member.timer != nil {
			member.timer.Stop()
		}
	}()
	for {
		select {
		case <-member.woken:
			return m.value, m.err
		case <-ctx.Done():
			return nil, m.explain(r, replica, seq, endOf(ctx), 0)
		case <-r.ctx.Done(): // also when the run fails, which is then what explain returns
			return nil, m.explain(r, replica, seq, endOf(&r.ctx), 0)
		case <-expired:
			if stalled {
				return nil, m.explain(r, replica, seq, collective.ErrTimeout, timeout)
			}
			stalled = true
			m.logStall(r, replica, seq, stall)
			expired = nil
			arm()
		}
	}
}

// endOf returns an error that matches both the context's error and its cause.
func endOf(ctx context.Context) error {
	err, cause := ctx.Err(), context.Cause(ctx)
	if errors.Is(cause, err) {
		return cause
	}
	return fmt.Errorf("%w: %w", err, cause)
}

// explain makes the error that ended a wait the failure of the run.
func (m *rendezvous) explain(r *Run, replica int, seq uint64, cause error, waited time.Duration) error {
	return r.fail(fault{
		kind: faultFound, replica: replica, monitor: m.monitor, seq: seq, cause: cause, waited: waited,
	})
}

// logStall logs what a merge call waits for.
func (m *rendezvous) logStall(r *Run, replica int, seq uint64, waited time.Duration) {
	l := r.detector
	l.mu.Lock()
	var absent []string
	for other := range r.replicas {
		if m.monitor.slots[other].entered.Load() <= seq {
			absent = append(absent, l.name(other))
		}
	}
	executing, executor := m.executing, m.executor
	l.mu.Unlock()
	call := waiting{m.monitor, seq}.call(replica).brief()
	if executing {
		l.logger().Warn("merge function still runs", slog.String("call", call), slog.Duration("waited", waited),
			slog.String("waiting", l.name(replica)), slog.String("runs on", l.name(executor)))
		return
	}
	l.logger().Warn("merge call stalls", slog.String("call", call), slog.Duration("waited", waited),
		slog.String("waiting", l.name(replica)), slog.Any("missing", absent))
}

// firstStack parses the text of one goroutine's stack.
func firstStack(text []byte) []stacks.Frame {
	all := stacks.Parse(string(text))
	if len(all) == 0 {
		return nil
	}
	return all[0].Frames
}
