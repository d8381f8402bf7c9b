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

// Run is one step of all replicas. After its first failure every method returns that failure, always the same
// *[StepError].
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
	told    chan struct{} // made with failure; closed when, after that, all communicators have been aborted
	running int           // replicas that have not ended
	over    bool          // Wait returns: what fails now concerns nobody else
	aborts  []func(error)
}

// replica is what the detector knows of one replica in one run.
type replica struct {
	before    uint64        // calls that it had finished when the run began
	goroutine atomic.Uint64 // the goroutine that is inside Do
	busy      atomic.Bool   // between Acquire and Release
	parked    atomic.Bool   // its goroutine blocks in wait; set under the detector's lock, cleared without

	// Guarded by the detector's lock.
	wait  waiting // meaningful while parked
	state State   // Idle, Running, or how it ended
	err   error   // what it returned
	value any     // of the panic
	text  string  // of one of these
	stack []stacks.Frame

	_ [64]byte // the next replica's marks are on another cache line
}

// waiting names a call that a replica is parked in.
type waiting struct {
	monitor *Monitor
	seq     uint64
}

// runContext is the context of a run: it leads to the run, and ends with its first failure.
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

// newRun returns a run that has not begun. The caller holds the lock.
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

// Context returns the context of the run, derived from the one that Begin got. The first failure cancels it with the
// *[StepError] as its cause; so does the end of [Run.Wait], with [context.Canceled].
func (r *Run) Context() context.Context { return &r.ctx }

// Do runs f as a replica's part of the step on the calling goroutine, and tells the detector how it ended. It must be
// called exactly once per replica and run. A panic in f is caught; runtime.Goexit goes on after it is noted. If f
// returns an error, panics or exits, the run has failed: that is the failure that every replica gets, unless another
// came first. Do returns the run's failure so far, or nil.
//
// goroutine is the calling goroutine's number, which [stacks.ID] tells at a price: a goroutine that takes part in many runs
// asks once. Do asks if it is 0.
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
		// The deferred call stands on top of the panicking frames, so its stack has them.
		r.end(replica, ending{state: state, value: value, stack: userPart(firstStack(debug.Stack()), true)})
		failure = r.Err()
	}()
	err := f(&r.ctx)
	normal = true
	r.end(replica, ending{state: Returned, err: err})
	return r.Err()
}

// Acquire says that a goroutine begins a call on behalf of a replica. If the replica is in another call, from
// another goroutine or from inside its own merge function, the run fails with [collective.ErrBusy]; the report
// shows both. Every nil Acquire is followed by a Release.
func (r *Run) Acquire(replica int) error {
	if failure := r.failure.Load(); failure != nil {
		return failure
	}
	if r.replicas[replica].busy.CompareAndSwap(false, true) {
		return nil
	}
	return r.fail(fault{kind: faultBusy, replica: replica, cause: collective.ErrBusy})
}

// Release says that the call is over.
func (r *Run) Release(replica int) { r.replicas[replica].busy.Store(false) }

// Fail makes err the failure of the run, unless it has one. It returns the run's failure.
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

// Wait waits until every replica has ended, closes the run, and returns its failure or nil. After a failure, or the end
// of the context, it gives the replicas [Config.Grace] to end. One that is then still blocked outside the library,
// which the failure shows with its stack, is left behind: whatever it calls later returns the run's failure, and
// abandoned names it.
//
// After Wait the next run may begin. If this one failed, all communicators are poisoned and must be rebuilt before.
func (r *Run) Wait() (abandoned []int, err error) {
	select {
	case <-r.ended:
	case <-r.ctx.Done(): // after a failure, too
		if abandoned = r.waitGrace(); len(abandoned) > 0 && r.Err() == nil {
			r.fail(fault{kind: faultLeft, replica: abandoned[0], cause: endOf(&r.ctx)})
		}
	}
	l := r.detector
	l.mu.Lock()
	r.over = true
	err = r.Err()
	told := r.told
	l.mu.Unlock()
	if err != nil {
		<-told // nothing may abort the communicators that take the place of the old ones
	} else {
		r.merge.value, r.merge.err = nil, nil
	}
	r.cancel(nil)
	l.current.Store(nil)
	<-l.turn
	return abandoned, err
}

// waitGrace waits for the replicas of a run that is to end, and returns those that did not.
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
		panic(fmt.Sprintf("deadlock: Do of replica %d twice in one run", replica))
	}
	r.replicas[replica].state = Running
}

// ending is how a replica ended.
type ending struct {
	state State
	err   error
	value any
	text  string // of err or value
	stack []stacks.Frame
}

// end notes the end of a replica and looks for what it means for the others.
func (r *Run) end(replica int, e ending) {
	// The user's methods are called before the lock is taken: they may do anything.
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
	me.busy.Store(true) // no call may begin any more
	failure := r.failure.Load()
	spread := false
	if failure == nil {
		if f, bad := r.judgeEnd(replica, e); bad {
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

// judgeEnd says whether the end of a replica is a failure. The caller holds the lock.
func (r *Run) judgeEnd(replica int, e ending) (fault, bool) {
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

// panicCause returns the value of a panic as an error to match with errors.Is, if it is one.
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

// fail makes f the failure of the run, unless it has one, and tells everybody. The caller does not hold the lock.
func (r *Run) fail(f fault) *StepError {
	f.text = f.say()
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

// failLocked makes f the failure of the run, which has none yet. The caller holds the lock, and calls spread after
// it has given it up.
func (r *Run) failLocked(f fault) *StepError {
	failure := r.report(f)
	r.told = make(chan struct{})
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

// spread ends every wait of the run: those for merge calls, and the user's own code, watch its context, those of
// communicators are aborted. It is called once, without the lock.
func (r *Run) spread(failure *StepError) {
	r.cancel(failure)
	for _, abort := range r.aborts {
		abort(failure)
	}
	close(r.told)
}
