package distribute

import (
	"context"
	"fmt"
	"runtime/debug"
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

// Follower starts a call that follows another one of the replica: see [Handle.Then].
type Follower struct {
	handle  Handle
	compute func()
}

// Then returns what starts a call that follows this one, such as the second round of a compressed exchange. The second
// call may be started at once. When the first one has ended, compute is called on a goroutine of the library, and then
// the second call begins; neither needs the replica's goroutine. compute may read what the first call has received and
// write what the second one sends. It must not use the replica. A Follower starts one call.
//
// Calls that follow others neither wait for other started calls nor delay them: they are made on a separate
// communicator. All replicas start them in the same order. The first one opens the communicator. With custom
// [CrossDeviceOps] the Wait of the second call makes both, unless the first one was awaited, and calls compute.
//
//	first, err := r.StartAllToAll(ctx, received, encoded, name)
//	second, err := first.Then(add).StartAllGather(ctx, sums, own, name)
//	… // compute and start the next buckets
//	err = errors.Join(first.Wait(ctx), second.Wait(ctx))
func (h Handle) Then(compute func()) Follower { return Follower{h, compute} }

// replica returns the replica of the call that is followed.
func (f *Follower) replica(name string) (*Replica, error) {
	if f.handle.call == nil || f.compute == nil {
		return nil, located(errorf(name, ErrInvalid, "the handle refers to no call, or the function to compute is nil"))
	}
	if f.awaits() && f.handle.call.followed.Load() {
		return nil, located(errorf(name, ErrInvalid, "another call follows the call of the handle: start one"))
	}
	return f.handle.replica, nil
}

// awaits reports whether the call that is followed was not awaited.
func (f *Follower) awaits() bool { return f.handle.call.number.Load() == f.handle.number }

// set makes c follow the call.
func (f *Follower) set(c *startedCall) {
	c.compute = f.compute
	if f.awaits() {
		f.handle.call.followed.Store(true)
		c.follows = f.handle.call
	}
}

// preparation returns what happens before the call begins; nil: nothing.
func (c *startedCall) preparation() func(context.Context) error {
	if c.compute == nil {
		return nil
	}
	return c.before
}

// unfollow is called when the call that follows another one has ended.
func (c *startedCall) unfollow() {
	if first := c.follows; first != nil {
		first.followed.Store(false)
		c.follows = nil
	}
}

// follow waits for the call that c follows, and computes what c sends. The goroutine that executes c's call calls it.
func (c *startedCall) follow(ctx context.Context) (err error) {
	if first := c.follows; first != nil {
		select {
		case <-first.over:
			first.over <- struct{}{} // for another call that follows it later; the channel is empty
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-c.run.Context().Done():
			return context.Cause(c.run.Context())
		}
	}
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("the function of Handle.Then panicked: %v\n%s", v, debug.Stack())
		}
	}()
	c.compute()
	return nil
}

// computeAlone computes what c, if it follows another call, would send to other replicas. The only replica of a
// strategy calls it: its calls end at once.
func (c *startedCall) computeAlone() {
	if c.compute != nil {
		c.compute()
		c.compute = nil
		c.unfollow()
	}
}

// followByOps waits for the call that c follows, unless it was awaited, and computes what c sends. It is follow for
// custom CrossDeviceOps.
func (c *startedCall) followByOps(ctx context.Context) error {
	if c.compute == nil {
		return nil
	}
	if first := c.follows; first != nil {
		c.unfollow()
		if first.number.Swap(0) > 0 {
			if err := first.wait(ctx); err != nil {
				return err
			}
		}
	}
	c.compute()
	return nil
}
