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

// rendezvous is where the replicas meet for merge calls, run after run until one fails. To the search it is one more
// communicator.
type rendezvous struct {
	monitor *Monitor
	seats   []seat

	// Guarded by the detector's lock.
	arrived   int
	executing bool // a merge function runs
	executor  int  // the replica on whose goroutine it runs

	// The result of the last merge function. Written before the waiting replicas are woken, and not again before all
	// of them have come back for the next one.
	value any
	err   error
}

// seat is one replica's place in the rendezvous.
type seat struct {
	call     collective.Call // stands for the merge call in reports
	manifest collective.Manifest
	woken    chan struct{} // gets a token when the result is there
	timer    *time.Timer   // made on first use
}

func newRendezvous(l *Detector) *rendezvous {
	m := &rendezvous{monitor: newMonitor(l, "", nil, nil), seats: make([]seat, l.Replicas())}
	m.monitor.isMerge = true
	for i := range m.seats {
		s := &m.seats[i]
		s.call.Manifest, s.woken = &s.manifest, make(chan struct{}, 1)
	}
	return m
}

// Merge is one replica's part in a merge call: it waits until all replicas have come, the last one's goroutine runs f
// for all of them, and all return f's value and error. Only that one f runs, so all replicas must give the same.
// While it runs, no goroutine of another replica is outside Merge. purpose says what the merge call is for, in reports; it
// may be empty. Merge calls that differ in it are a failure of the run that matches [collective.ErrMismatch].
//
// timeout bounds the wait including f's run; zero means the detector's [Config.Timeout], negative none. The wait also ends
// when ctx does, and when the run fails; each of these is a failure of the run. So is a panic or runtime.Goexit of f,
// while an error of f's is handed to all replicas and is no failure by itself.
func (r *Run) Merge(ctx context.Context, replica int, purpose string, timeout time.Duration, f func() (any, error)) (any, error) {
	if err := r.Acquire(replica); err != nil {
		return nil, err
	}
	defer r.Release(replica)
	m := r.merge
	seq := m.monitor.slots[replica].entered.Load()
	m.seats[replica].manifest.Name = purpose
	m.monitor.Enter(replica, seq, &m.seats[replica].call)
	defer m.monitor.Leave(replica, seq, nil)
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

// arrive counts the replica in, and parks it unless it is the last.
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
		found = r.failLocked(fault{kind: faultFound, replica: replica, monitor: m.monitor, seq: seq, cause: collective.ErrMismatch})
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

// differ reports whether the replicas, which all have come, have come for different things.
func (m *rendezvous) differ() bool {
	for i := range m.seats {
		if m.seats[i].manifest.Name != m.seats[0].manifest.Name {
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
		// A panic becomes the failure of all; after runtime.Goexit this goroutine is on its way out.
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
	for other := range m.seats {
		if other != replica {
			m.seats[other].woken <- struct{}{}
		}
	}
	return value, err
}

// await blocks until the result is there or the run has failed.
func (m *rendezvous) await(ctx context.Context, r *Run, replica int, seq uint64, timeout time.Duration) (any, error) {
	var (
		seat    = &m.seats[replica]
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
		if seat.timer == nil {
			seat.timer = time.NewTimer(d)
		} else {
			seat.timer.Reset(d)
		}
		expired = seat.timer.C
	}
	arm()
	defer func() {
		if seat.timer != nil {
			seat.timer.Stop()
		}
	}()
	for {
		select {
		case <-seat.woken:
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

// explain makes what ended a wait the failure of the run.
func (m *rendezvous) explain(r *Run, replica int, seq uint64, cause error, waited time.Duration) error {
	return r.fail(fault{
		kind: faultFound, replica: replica, monitor: m.monitor, seq: seq, cause: cause, waited: waited,
	})
}

// logStall says once what a merge call has been waiting for.
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

// firstStack reads the text of one goroutine's stack.
func firstStack(text []byte) []stacks.Frame {
	all := stacks.Parse(string(text))
	if len(all) == 0 {
		return nil
	}
	return all[0].Frames
}
