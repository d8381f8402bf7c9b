package distribute

import (
	"context"
	"sync/atomic"

	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
)

// CrossReplica is the cross-replica context: code that runs once for all replicas. A merge function gets one,
// and [Strategy.Cross] returns one outside of steps. If the Run of a merge
// function fails while the function is still running, every later use of its context returns the Run's failure.
type CrossReplica struct {
	strategy *Strategy
	device   device.Spec     // device to read mirrored values on, if they have a component there
	merge    bool            // of a merge function
	run      *deadlock.Run   // of the merge function; nil outside of all Runs
	over     atomic.Bool     // the merge function has returned
	ctx      context.Context // for collective calls; nil: that of the Run, or none
}

// Strategy returns the strategy that the context belongs to.
func (c *CrossReplica) Strategy() *Strategy { return c.strategy }

func (*CrossReplica) sealed() {}

// Cross returns the strategy's cross-replica context, for operations on variables outside of steps. Mirrored
// variables are read on ctx's current device (see [device.With]) if they have a component there. It is an error
// to call it inside a step, or to use the context while a Run is in progress.
func (s *Strategy) Cross(ctx context.Context) (*CrossReplica, error) {
	if err := s.requireCross(ctx, "Cross"); err != nil {
		return nil, err
	}
	return &CrossReplica{strategy: s, device: device.Host(ctx), run: s.runOf(ctx), ctx: ctx}, nil
}

// context returns the context for collective calls.
func (c *CrossReplica) context() context.Context {
	if c.ctx == nil {
		return context.Background()
	}
	return c.ctx
}

// valid returns an error if the context must not be used now.
func (c *CrossReplica) valid(op string) error {
	switch {
	case c.over.Load():
		return errorf(op, ErrContext, "the *CrossReplica of a merge function was used after the function had returned")
	case !c.merge && c.strategy.inRun():
		return errorf(op, ErrContext, "a Run is in progress; need its replica context: give the operation the step's "+
			"*Replica, or use MergeCall")
	}
	return failureOf(c.run)
}

// mergeFunc is a function that runs once for all replicas.
type mergeFunc = func(context.Context, *CrossReplica, ...Value) (Value, error)

// mergeCall holds one replica's arguments of a merge call.
type mergeCall struct {
	name string // the operation that makes the merge call
	f    mergeFunc
	args []Value
}
