package distribute

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
)

// MergeCall waits until all replicas of this worker have called it, then calls f once for all of them, in cross-replica
// context, with what each of them gave (TensorFlow's ReplicaContext.merge_call). It returns f's result on every
// replica. MergeCall uses the f of replica 0. f's context ends with the Run.
//
// An error of f is returned on every replica.
func MergeCall[I, O any](
	ctx context.Context, r *Replica, f func(context.Context, *CrossReplica, PerReplica[I]) (O, error), in I,
) (O, error) {
	var merge mergeFunc
	if f != nil {
		merge = func(ctx context.Context, c *CrossReplica, args ...Value) (Value, error) {
			all := make(PerReplica[I], len(r.home.devices))
			for i, mine := range r.strategy.onReplicas(args[0]) {
				at, ok := mine.(*I)
				if !ok {
					return nil, errorf(mergeCallName, ErrMismatch, "replica %d gives a %T, replica 0 a %T", i, mine, &in)
				}
				all[i] = *at
			}
			out, err := f(ctx, c, all)
			return &out, err
		}
	}
	out, err := r.mergeCall(ctx, mergeCallName, r.strategy.options.Timeout, merge, []Value{&in})
	if at, ok := out.(*O); ok && err == nil {
		return *at, nil
	} else if err == nil {
		err = errorf(mergeCallName, ErrMismatch, "the merge function of replica 0 returns a %T: want a %T", out, at)
	}
	var none O
	return none, err
}

// mergeCallName is the operation's name in merge calls by the user.
const mergeCallName = "MergeCall"

func (r *Replica) mergeCall(
	ctx context.Context, name string, timeout time.Duration, f mergeFunc, args []Value,
) (Value, error) {
	run, err := r.inRun(ctx, name)
	if err != nil {
		return nil, located(err)
	}
	s := r.home
	if f == nil {
		return nil, located(errorf(name, ErrInvalid, "the merge function is nil"))
	}
	if run == nil {
		return s.callMerge(ctx, nil, f, args)
	}
	call := &mergeCall{name, f, args}
	for !r.merging.CompareAndSwap(nil, call) {
		// Another goroutine is in a merge call of this replica, or about to enter one: the deadlock detector
		// reports it.
		if err := run.Acquire(r.local); err != nil {
			return nil, err
		}
		run.Release(r.local)
		runtime.Gosched()
	}
	defer r.merging.Store(nil)
	begin := r.arrive()
	purpose := ""
	if name != mergeCallName {
		purpose = name
	}
	out, err := run.Merge(ctx, r.local, purpose, timeout, func() (any, error) { return r.mergeAll(ctx, run) })
	if err != nil {
		return nil, err
	}
	r.leave(begin)
	return selectReplica(r.local, out, nil)
}

// mergeAll runs the merge function of a call that all replicas have entered. The last of them calls it.
func (r *Replica) mergeAll(ctx context.Context, run *deadlock.Run) (Value, error) {
	first := r.all[0].merging.Load()
	n := len(first.args)
	perArg := make([][]Value, n)
	for i := range r.all {
		call := r.all[i].merging.Load()
		if len(call.args) != n {
			return nil, run.Fail(errorf(first.name, ErrMismatch, "replica %d gives %d arguments, replica 0 %d", r.all[i].id,
				len(call.args), n))
		}
		for i, arg := range call.args {
			perArg[i] = append(perArg[i], arg)
		}
	}
	args := make([]Value, n)
	for i := range args {
		var err error
		if args[i], err = regroup(fmt.Sprintf("%s: argument %d", first.name, i), perArg[i]); err != nil {
			return nil, run.Fail(err)
		}
	}
	return r.home.callMerge(ctx, run, first.f, args)
}

// callMerge calls a merge function in cross-replica context. run is nil outside of all Runs.
func (s *Strategy) callMerge(ctx context.Context, run *deadlock.Run, f mergeFunc, args []Value) (Value, error) {
	c := &CrossReplica{strategy: s.self, device: device.Host(ctx), merge: true, run: run}
	defer c.over.Store(true)
	return f(&stepContext{ctx, &frame{strategy: s.self, merge: s, run: run}}, c, args...)
}
