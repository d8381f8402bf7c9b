package distribute

import (
	"context"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
)

// CrossReplica is the cross-replica context: code that runs once for all replicas. A merge function gets one,
// and [Strategy.Cross] returns one outside of steps. Its methods are those of the strategy.
type CrossReplica struct {
	strategy *Strategy
	device   Device      // device to read mirrored values on, if they have a component there
	merge    bool        // of a merge function
	over     atomic.Bool // the merge function has returned
}

// Strategy returns the strategy that the context belongs to.
func (c *CrossReplica) Strategy() *Strategy { return c.strategy }

// Cross returns the strategy's cross-replica context, for operations on variables outside of steps. Mirrored
// variables are read on ctx's current device (see [WithDevice]) if they have a component there. It is an error
// to call it inside a step, or to use the context while a Run is in progress.
func (s *Strategy) Cross(ctx context.Context) (*CrossReplica, error) {
	if err := s.requireCross(ctx, "Cross"); err != nil {
		return nil, err
	}
	return &CrossReplica{strategy: s, device: hostDevice(ctx)}, nil
}

// valid returns an error if the context must not be used now.
func (c *CrossReplica) valid(op string) error {
	switch {
	case c.over.Load():
		return errorf(op, ErrContext, "the *CrossReplica of a merge function was used after the function had returned")
	case !c.merge && c.strategy.running.Load():
		return errorf(op, ErrContext, "a Run is in progress; need its replica context: give the operation the step's *Replica, or use Replica.MergeCall")
	}
	return nil
}

// MergeCall waits until all replicas have called it, then calls f once for all of them, in cross-replica
// context. It returns f's result on every replica: the replica's component of a distributed value, and any
// other value unchanged. f gets the replicas' arguments regrouped, so the tensors of all replicas become one
// [*PerReplica]. MergeCall uses the f of replica 0. f's context ends with the Run.
//
// An error of f is returned on every replica.
func (r *Replica) MergeCall(ctx context.Context, f MergeFunc, args ...Value) (Value, error) {
	return r.mergeCall(ctx, mergeCallName, r.strategy.options.Timeout, f, args)
}

// mergeCallName is the operation's name in merge calls by the user.
const mergeCallName = "MergeCall"

// MergeFunc is a function that runs once for all replicas.
type MergeFunc = func(context.Context, *CrossReplica, ...Value) (Value, error)

func (r *Replica) mergeCall(ctx context.Context, name string, timeout time.Duration, f MergeFunc, args []Value) (Value, error) {
	run, err := r.inRun(ctx, name)
	if err != nil {
		return nil, located(err)
	}
	s := r.home
	if f == nil {
		return nil, located(errorf(name, ErrInvalid, "the merge function is nil"))
	}
	if run == nil {
		return s.callMerge(ctx, f, args)
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
	begin := r.stats.arrive(r)
	purpose := ""
	if name != mergeCallName {
		purpose = name
	}
	out, err := run.Merge(ctx, r.local, purpose, timeout, func() (any, error) { return s.mergeAll(ctx, run) })
	if err != nil {
		return nil, err
	}
	r.stats.leave(r, begin)
	return SelectReplica(r.local, out)
}

// mergeCall holds one replica's arguments of a merge call.
type mergeCall struct {
	name string // the operation that makes the merge call
	f    MergeFunc
	args []Value
}

// mergeAll runs the merge function of a call that all replicas have entered. The last of them calls it.
func (s *Strategy) mergeAll(ctx context.Context, run *deadlock.Run) (Value, error) {
	first := s.replicas[0].merging.Load()
	n := len(first.args)
	perArg := make([][]Value, n)
	for i := range s.replicas {
		r := &s.replicas[i]
		call := r.merging.Load()
		if len(call.args) != n {
			return nil, run.Fail(errorf(first.name, ErrMismatch, "replica %d gives %d arguments, replica 0 %d", r.id, len(call.args), n))
		}
		for i, arg := range call.args {
			perArg[i] = append(perArg[i], arg)
		}
	}
	args := make([]Value, n)
	for i := range args {
		var err error
		if args[i], err = regroup(fmt.Sprintf("%s: argument %d", first.name, i), perArg[i], false); err != nil {
			return nil, run.Fail(err)
		}
	}
	return s.callMerge(ctx, first.f, args)
}

// callMerge calls a merge function in cross-replica context.
func (s *Strategy) callMerge(ctx context.Context, f MergeFunc, args []Value) (Value, error) {
	c := &CrossReplica{strategy: s.self, device: hostDevice(ctx), merge: true}
	defer c.over.Store(true)
	return f(&stepContext{ctx, &frame{strategy: s.self, merge: s, update: -1}}, c, args...)
}

// ReduceTo is [Strategy.ReduceTo].
func (c *CrossReplica) ReduceTo(ctx context.Context, op ReduceOp, v Value, to Destination, opts ...Options) (Value, error) {
	if err := c.valid("ReduceTo"); err != nil {
		return nil, err
	}
	return c.strategy.ReduceTo(ctx, op, v, to, opts...)
}

// BatchReduceTo is [Strategy.BatchReduceTo].
func (c *CrossReplica) BatchReduceTo(ctx context.Context, op ReduceOp, batch []ValueTo, opts ...Options) ([]Value, error) {
	if err := c.valid("BatchReduceTo"); err != nil {
		return nil, err
	}
	return c.strategy.BatchReduceTo(ctx, op, batch, opts...)
}

// Reduce is [Strategy.Reduce].
func (c *CrossReplica) Reduce(ctx context.Context, op ReduceOp, v Value, opts ReduceOptions) (Value, error) {
	if err := c.valid("Reduce"); err != nil {
		return nil, err
	}
	return c.strategy.Reduce(ctx, op, v, opts)
}

// LocalResults is [Strategy.LocalResults].
func (c *CrossReplica) LocalResults(v Value) []Value { return c.strategy.LocalResults(v) }
