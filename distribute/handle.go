package distribute

import (
	"context"
	"slices"
	"sync/atomic"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
)

// Handle is a started call of a replica, such as that of [Replica.StartAllReduce]. Copies of it refer to the same
// call. The zero Handle refers to none. Unlike PyTorch's Work, it can be awaited only once, and the Run awaits calls
// that the step did not await.
type Handle struct {
	replica *Replica
	call    *startedCall
	number  uint64 // of the call; it was awaited if call has another one
}

// startedCall is the state of a call, which a later call reuses.
type startedCall struct {
	number  atomic.Uint64 // of the replica's calls, from 1; 0: it was awaited
	replica *Replica
	run     *deadlock.Run
	reducer *cachedReducer // nil: it is another call, there are no peers, or later is set
	scalars *scalarSum     // nil: none
	sums    []float64      // where the sums of the scalars are stored
	// Of a call that another one follows, or that follows one; see Follower.
	over     chan struct{} // has a token once the call has ended
	signal   func()        // puts it there
	follows  *startedCall  // nil: none, or it has been awaited
	followed atomic.Bool   // it is another call's follows
	compute  func()        // nil: the call follows none
	before   func(ctx context.Context) error

	// later makes the call in Wait: custom CrossDeviceOps need a merge call. Nil: it was started.
	later func(ctx context.Context) error

	// Of other calls than reductions:
	started  collective.Handle
	call     collective.Call
	manifest collective.Manifest
	options  collective.Options
}

// newCall returns an awaited call for reuse, or a new one.
func (r *Replica) newCall(run *deadlock.Run) *startedCall {
	i := slices.IndexFunc(r.started, func(c *startedCall) bool { return c.number.Load() == 0 && !c.followed.Load() })
	if i < 0 {
		i = len(r.started)
		c := &startedCall{over: make(chan struct{}, 1)}
		c.signal = func() { c.over <- struct{}{} } // the only token: it does not block
		c.before = c.follow
		r.started = append(r.started, c)
	}
	c := r.started[i]
	c.replica, c.run, c.reducer, c.scalars, c.sums, c.later, c.started = r, run, nil, nil, nil, nil, nil
	c.follows, c.compute = nil, nil
	select {
	case <-c.over:
	default:
	}
	return c
}

// handle returns the handle of a call that has started.
func (r *Replica) handle(c *startedCall) Handle {
	r.starts++
	c.number.Store(r.starts)
	return Handle{r, c, r.starts}
}

// packed returns the reducer of a reduction, and sets the memories of its call.
func (r *Replica) packed(ctx context.Context, x *reduction) (*cachedReducer, error) {
	comm, err := r.home.group.comm(ctx, r.local, x.lane)
	if err != nil {
		return nil, err
	}
	return r.reducers.of(comm, x)
}

// Wait returns when the results are there and the library no longer uses the memory of the call. It is called once,
// by a function that belongs to the replica's step; the Run awaits calls that the step function did not. Its error is
// the failure of the Run. The end of ctx fails the Run.
func (h Handle) Wait(ctx context.Context) error {
	if h.call == nil {
		return located(errorf("Handle.Wait", ErrInvalid, "the handle refers to no call: the method that starts "+
			"one returned an error"))
	}
	if !h.call.number.CompareAndSwap(h.number, 0) {
		if err := h.replica.current("Handle.Wait"); err != nil {
			return located(err)
		}
		return located(errorf("Handle.Wait", ErrInvalid, "the handle was awaited before"))
	}
	return h.call.wait(ctx)
}

// wait waits for a call that no one else awaits.
func (c *startedCall) wait(ctx context.Context) error {
	if c.later != nil {
		return c.later(ctx)
	}
	if !c.waits() {
		if c.compute == nil {
			return nil
		}
		err := c.follow(ctx)
		c.unfollow()
		return err
	}
	r, run := c.replica, c.run
	err := run.Acquire(r.local)
	if err != nil {
		_ = c.finish(ctx) // the Run has failed; the caller may free the memory
		return err
	}
	defer run.Release(r.local)
	begin := r.arrive()
	if err := c.finish(ctx); err != nil {
		return run.Fail(err)
	}
	if c.scalars != nil {
		c.scalars.result(c.sums)
	}
	r.leave(begin)
	return nil
}

// waits reports whether there is a call to wait for.
func (c *startedCall) waits() bool { return c.reducer != nil || c.started != nil }

// finish waits for the call.
func (c *startedCall) finish(ctx context.Context) error {
	defer c.unfollow()
	if c.started != nil {
		return c.started.Wait(ctx)
	}
	return c.reducer.Finish(ctx)
}

// awaitStarted awaits the replica's started calls after its step function has returned without an error: in the order
// in which they were started, because custom CrossDeviceOps make a call only now, and all replicas must make the same.
func (r *Replica) awaitStarted() error {
	for {
		var first *startedCall
		for _, c := range r.started {
			if n := c.number.Load(); n > 0 && (first == nil || n < first.number.Load()) {
				first = c
			}
		}
		if first == nil {
			return nil
		}
		first.number.Store(0)
		if err := first.wait(&r.ctx); err != nil {
			return err
		}
	}
}

// finishStarted waits until no started call uses memory any more, after the Run has failed.
func (s *replicaState) finishStarted() {
	for _, c := range s.started {
		c.followed.Store(false)
		if c.number.Swap(0) > 0 && c.waits() {
			_ = c.finish(context.Background()) // the failure of the Run
		}
	}
}
