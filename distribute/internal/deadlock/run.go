package deadlock

import (
	"context"
	"fmt"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/stacks"
)

// Run is one step of all replicas. After the first failure every method returns that failure, always the same
// *[StepError]. Its methods may be called concurrently.
type Run struct {
	detector *Detector
	step     any
	ctx      runContext
	cancel   context.CancelCauseFunc

	replicas []replica
	merge    *rendezvous
	failure  atomic.Pointer[StepError]
	ended    chan struct{} // closed when the last replica has ended

	// Guarded by the detector's lock.
	aborted chan struct{} // made with failure; closed when all communicators have been aborted after it
	running int           // number of replicas that have not ended
	over    bool          // Wait returns: later failures affect no other replica
	aborts  []func(error)
}

// replica is the state of one replica in one run.
type replica struct {
	before    uint64        // number of calls that it had finished when the run started
	goroutine atomic.Uint64 // the goroutine that is inside Do
	busy      atomic.Bool   // between Acquire and Release
	parked    atomic.Bool   // its goroutine blocks in wait; set under the detector's lock, cleared without

	// Guarded by the detector's lock.
	wait  waiting // meaningful while parked
	state State   // Idle, Running, or a state that is Ended
	err   error   // that it returned
	value any     // of the panic
	text  string  // of err or value
	stack []stacks.Frame

	_ [64]byte // the next replica's marks are on another cache line
}

// waiting identifies the call in which a replica is parked.
type waiting struct {
	monitor *Monitor
	seq     uint64
}

// runContext is the context of a run: it has the run as a value, and ends with its first failure.
type runContext struct {
	context.Context
	run *Run
}

type runKey struct{}

func (c *runContext) Value(key any) any {
	if key == (runKey{}) {
		return c.run
	}
	return c.Context.Value(key)
}

// newRun returns a run that has not started. The caller holds the lock.
func newRun(ctx context.Context, l *Detector, step any) *Run {
	r := &Run{
		detector: l,
		step:     step,
		replicas: make([]replica, l.Replicas()),
		merge:    l.merge,
		ended:    make(chan struct{}),
		running:  l.Replicas(),
	}
	r.ctx.Context, r.cancel = context.WithCancelCause(ctx)
	r.ctx.run = r
	for i := range r.replicas {
		r.replicas[i].before = r.callsLeft(i)
	}
	return r
}

// Context returns the context of the run, derived from that of Begin. The first failure cancels it, with the
// *[StepError] as its cause. The end of [Run.Wait] cancels it too, with [context.Canceled].
func (r *Run) Context() context.Context { return &r.ctx }

// Do runs f as a replica's part of the step on the calling goroutine, and records how it ended. It must be called
// exactly once per replica and run. Do recovers a panic in f; after runtime.Goexit it records the end, and the
// goroutine exits. If f returns an error, panics or exits, the run fails, and every replica gets that failure, unless
// the run had failed before. Do returns the failure of the run so far, or nil.
//
// goroutine is the number of the calling goroutine. [stacks.ID] is slow, so a goroutine that takes part in many runs
// should call it once. If goroutine is 0, Do calls it.
func (r *Run) Do(replica int, goroutine uint64, f func(ctx context.Context) error) (failure error) {
	me := &r.replicas[replica]
	if goroutine == 0 {
		goroutine = stacks.ID()
	}
	me.goroutine.Store(goroutine)
	r.start(replica)
	normal := false
	defer func() {
		if normal {
			return
		}
		state := Gone
		value := recover()
		if value != nil {
			state = Panicked
		}
		// The deferred call runs on top of the panicking frames, so its stack includes them.
		r.end(replica, ending{state: state, value: value, stack: userPart(firstStack(debug.Stack()), true)})
		failure = r.Err()
	}()
	err := f(&r.ctx)
	normal = true
	r.end(replica, ending{state: Returned, err: err})
	return r.Err()
}

// Acquire reports that a goroutine starts a call for a replica. If the replica is in another call, of another
// goroutine or of its merge function, the run fails with [collective.ErrBusy]; the report shows both. If Acquire
// returns nil, the caller must call Release.
func (r *Run) Acquire(replica int) error {
	if failure := r.failure.Load(); failure != nil {
		return failure
	}
	if r.replicas[replica].busy.CompareAndSwap(false, true) {
		return nil
	}
	return r.fail(fault{kind: faultBusy, replica: replica, cause: collective.ErrBusy})
}

// Release reports that the call has ended.
func (r *Run) Release(replica int) { r.replicas[replica].busy.Store(false) }

// Fail makes err the failure of the run, unless it has failed before. It returns the failure of the run.
func (r *Run) Fail(err error) error {
	if failure := r.failure.Load(); failure != nil {
		return failure
	}
	return r.fail(fault{kind: faultGiven, replica: -1, cause: err})
}

// Err returns the failure of the run, a *[StepError], or nil.
func (r *Run) Err() error {
	if failure := r.failure.Load(); failure != nil {
		return failure
	}
	return nil
}

// Wait waits until every replica has ended, and returns the failure of the run or nil. After a failure, or the end of
// the context, it waits at most [Config.Grace]. It abandons a replica that is then still blocked outside the library,
// and returns it in abandoned; the failure has its stack. Later calls of that replica return the failure of the run.
//
// If the run failed, all communicators are aborted and must be rebuilt before [Run.Close].
func (r *Run) Wait() (abandoned []int, err error) {
	select {
	case <-r.ended:
	case <-r.ctx.Done(): // also after a failure
		if abandoned = r.waitGrace(); len(abandoned) > 0 && r.Err() == nil {
			r.fail(fault{kind: faultLeft, replica: abandoned[0], cause: endOf(&r.ctx)})
		}
	}
	l := r.detector
	l.mu.Lock()
	r.over = true
	err = r.Err()
	aborted := r.aborted
	l.mu.Unlock()
	if err != nil {
		<-aborted // so that no late abort hits the communicators that replace the old ones
	} else {
		r.merge.value, r.merge.err = nil, nil
	}
	r.finish()
	return abandoned, err
}

// finish makes this run no longer the one in progress.
func (r *Run) finish() {
	r.cancel(nil)
	r.detector.current.Store(nil)
}

// Close lets the next run start. The caller calls it once, after [Run.Wait], or without it if the run started no
// replica.
func (r *Run) Close() {
	r.finish()
	<-r.detector.turn
}

// waitGrace waits for the replicas of an ending run for at most the grace period, and returns those that have not
// ended.
func (r *Run) waitGrace() (abandoned []int) {
	var expired <-chan time.Time
	if grace := r.detector.cfg.Grace; grace > 0 {
		timer := time.NewTimer(grace)
		defer timer.Stop()
		expired = timer.C
	}
	select {
	case <-r.ended:
	case <-expired:
		r.detector.mu.Lock()
		defer r.detector.mu.Unlock()
		for i := range r.replicas {
			if !r.replicas[i].state.Ended() {
				abandoned = append(abandoned, i)
			}
		}
	}
	return abandoned
}

func (r *Run) start(replica int) {
	l := r.detector
	l.mu.Lock()
	defer l.mu.Unlock()
	if r.replicas[replica].state != Idle {
		panic(fmt.Sprintf("deadlock: Do called twice for replica %d in one run", replica))
	}
	r.replicas[replica].state = Running
}

// ending describes how a replica ended.
type ending struct {
	state State
	err   error
	value any
	text  string // of err or value
	stack []stacks.Frame
}

// end records the end of a replica, and fails the run if it is a failure or other replicas need that replica.
func (r *Run) end(replica int, e ending) {
	// text calls methods of user code, so the lock must not be held.
	switch {
	case e.state == Panicked:
		e.text = text(e.value)
	case e.err != nil:
		e.text = text(e.err)
	}
	l := r.detector
	l.mu.Lock()
	me := &r.replicas[replica]
	me.state, me.err, me.value, me.text, me.stack = e.state, e.err, e.value, e.text, e.stack
	me.busy.Store(true) // prevents further calls
	failure := r.failure.Load()
	spread := false
	if failure == nil {
		if f, bad := r.endFault(replica, e); bad {
			failure = r.failLocked(f)
			spread = true
		}
	}
	r.running--
	last := r.running == 0
	l.mu.Unlock()
	if spread {
		r.spread(failure)
	}
	if last {
		close(r.ended)
	}
}

// endFault reports whether the end of a replica is a failure of the run, and which. The caller holds the lock.
func (r *Run) endFault(replica int, e ending) (fault, bool) {
	switch {
	case e.state == Panicked:
		return fault{kind: faultPanicked, replica: replica, cause: panicCause(e.value), text: e.text}, true
	case e.state == Gone:
		return fault{kind: faultGone, replica: replica}, true
	case e.err != nil:
		return fault{kind: faultReturned, replica: replica, cause: e.err, text: e.text}, true
	}
	if m, seq, open := r.openCall(replica); open {
		return fault{kind: faultOpenCall, replica: replica, monitor: m, seq: seq, cause: collective.ErrInvalid}, true
	}
	for other := range r.replicas {
		if chain := r.detector.search.from(r, other); chain != nil {
			return fault{kind: faultStuck, replica: other, chain: chain}, true
		}
	}
	return fault{}, false
}

// panicCause returns the value of a panic if it is an error, for errors.Is.
func panicCause(value any) error {
	err, _ := value.(error)
	return err
}

// openCall returns a call that a replica has entered and not left.
func (r *Run) openCall(replica int) (m *Monitor, seq uint64, open bool) {
	for _, m := range r.detector.monitors {
		if rank := m.rank(replica); rank >= 0 {
			if seq, open := m.slots[rank].open(); open {
				return m, seq, true
			}
		}
	}
	return nil, 0, false
}

// fail makes f the failure of the run, unless it has one, and ends all waits. The caller must not hold the lock.
func (r *Run) fail(f fault) *StepError {
	f.text = f.format()
	r.detector.mu.Lock()
	failure := r.failure.Load()
	spread := failure == nil
	if spread {
		failure = r.failLocked(f)
	}
	r.detector.mu.Unlock()
	if spread {
		r.spread(failure)
	}
	return failure
}

// failLocked makes f the failure of the run, which must not have one. The caller holds the lock, and calls spread
// after it has released it.
func (r *Run) failLocked(f fault) *StepError {
	failure := r.report(f)
	failure.ended = r.ended
	r.aborted = make(chan struct{})
	r.failure.Store(failure)
	if !r.over {
		r.detector.dirty = true
		for _, m := range r.detector.monitors {
			if m.abort != nil {
				r.aborts = append(r.aborts, m.abort)
			}
		}
	}
	return failure
}

// spread ends every wait of the run. It cancels the context, which merge calls and user code watch, and aborts the
// communicators. It is called once, without the lock.
func (r *Run) spread(failure *StepError) {
	r.cancel(failure)
	for _, abort := range r.aborts {
		abort(failure)
	}
	close(r.aborted)
}
