package distribute

import (
	"context"
	"slices"
	"sync/atomic"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
)

// Handle is a started call of a replica, such as that of [Replica.StartAllReduce].
type Handle struct {
	replica *Replica
	run     *deadlock.Run
	reducer *cachedReducer // nil: it is another call, there are no peers, or later is set
	scalars *scalarSum     // nil: none
	sums    []float64      // where the sums of the scalars are stored
	// later makes the call in Wait: custom CrossDeviceOps need a merge call. Nil: it was started.
	later func(ctx context.Context) error
	open  atomic.Bool // it was started and not awaited

	// Of a call that is no reduction:
	started  collective.Handle
	call     collective.Call
	manifest collective.Manifest
	options  collective.Options
}

// newHandle returns an awaited handle for reuse, or a new one.
func (r *Replica) newHandle(run *deadlock.Run) *Handle {
	i := slices.IndexFunc(r.handles, func(h *Handle) bool { return !h.open.Load() })
	if i < 0 {
		i = len(r.handles)
		r.handles = append(r.handles, &Handle{})
	}
	h := r.handles[i]
	h.replica, h.run, h.reducer, h.scalars, h.sums, h.later, h.started = r, run, nil, nil, nil, nil, nil
	return h
}

// packed returns the reducer of a reduction, and sets the memories of its call.
func (r *Replica) packed(ctx context.Context, x *reduction) (*cachedReducer, error) {
	comm, err := r.home.group.comm(ctx, r.local, x.options)
	if err != nil {
		return nil, err
	}
	return r.reducers.of(comm, x)
}

// Wait returns when the results are there and the library no longer uses the memory of the call. It is called once,
// by a function that belongs to the replica's step; the Run awaits calls that the step function did not. Its error is
// the failure of the Run. The end of ctx fails the Run.
func (h *Handle) Wait(ctx context.Context) error {
	r, run := h.replica, h.run
	if !h.open.CompareAndSwap(true, false) {
		if err := r.current("Handle.Wait"); err != nil {
			return located(err)
		}
		return located(errorf("Handle.Wait", ErrInvalid, "the handle was awaited before"))
	}
	if h.later != nil {
		return h.later(ctx)
	}
	if !h.waits() {
		return nil
	}
	err := run.Acquire(r.local)
	if err != nil {
		_ = h.finish(ctx) // the Run has failed; the caller may free the memory
		return err
	}
	defer run.Release(r.local)
	begin := r.arrive()
	if err := h.finish(ctx); err != nil {
		return run.Fail(err)
	}
	if h.scalars != nil {
		h.scalars.result(h.sums)
	}
	r.leave(begin)
	return nil
}

// waits reports whether there is a call to wait for.
func (h *Handle) waits() bool { return h.reducer != nil || h.started != nil }

// finish waits for the call.
func (h *Handle) finish(ctx context.Context) error {
	if h.started != nil {
		return h.started.Wait(ctx)
	}
	return h.reducer.Finish(ctx)
}

// awaitStarted awaits the replica's started calls after its step function has returned without an error.
func (r *Replica) awaitStarted() error {
	for _, h := range r.handles {
		if h.open.Load() {
			if err := h.Wait(&r.ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

// finishStarted waits until no started call uses memory any more, after the Run has failed.
func (s *replicaState) finishStarted() {
	for _, h := range s.handles {
		if h.open.CompareAndSwap(true, false) && h.waits() {
			_ = h.finish(context.Background()) // the failure of the Run
		}
	}
}
