package distribute

import (
	"context"

	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
)

// Context is the context that code runs in: a [*Replica] (replica context), a [*CrossReplica] (cross-replica context)
// or the [*Component] of an update function. No other type implements it.
type Context interface {
	// Strategy returns the strategy that the context belongs to.
	Strategy() *Strategy
	sealed()
}

// frame is the innermost strategy context that a context.Context carries.
type frame struct {
	strategy  *Strategy
	replica   *Replica       // in replica context
	merge     *Strategy      // in a merge function: the strategy whose replicas wait for it
	run       *deadlock.Run  // in a merge function, and in scopes and update functions inside of it: its Run
	component *Component     // that an update function changes, or nil
	colocate  *[]device.Spec // devices on which new variables are placed, or nil
	set       bool           // by WithStrategy, outside of all scopes
	err       error          // the scope was entered in the wrong place: every use returns it
}

type frameKey struct{}

// frameOf returns the innermost context of a strategy other than the default one, or nil.
func frameOf(ctx context.Context) *frame {
	if f := innermost(ctx); f != nil && f.strategy.kind != defaultKind {
		return f
	}
	return nil
}

// innermost returns the innermost context of any strategy, or nil.
func innermost(ctx context.Context) *frame {
	f, _ := ctx.Value(frameKey{}).(*frame)
	return f
}

// requireCross returns an error unless ctx is in s's cross-replica context or outside of all strategies.
func (s *Strategy) requireCross(ctx context.Context, op string) error {
	if f := innermost(ctx); f != nil && f.err != nil {
		return f.err
	}
	f := frameOf(ctx)
	if in := innermost(ctx); f == nil && in != nil && in.strategy == s {
		f = in // in a step of the default strategy, or in its scope
	}
	switch {
	case f == nil:
		return nil
	case f.strategy != s && s.kind == defaultKind:
		return errorf(op, ErrContext, "must not nest strategies: mixing different strategies, the default strategy inside %v",
			f.strategy)
	case f.strategy != s:
		return errorf(op, ErrContext, "mixing different strategies: %v is not %v", f.strategy, s)
	case f.replica != nil:
		return errorf(op, ErrContext, "called inside a step function; the method requires being in cross-replica context: "+
			"use MergeCall")
	}
	return failureOf(f.run)
}

// runOf returns the Run of s whose merge function ctx belongs to, or nil.
func (s *Strategy) runOf(ctx context.Context) *deadlock.Run {
	if f := innermost(ctx); f != nil && f.strategy == s {
		return f.run
	}
	return nil
}

// failureOf returns the failure of the Run that code is part of, or nil. run is nil outside of all Runs.
func failureOf(run *deadlock.Run) error {
	if run == nil {
		return nil
	}
	return run.Err()
}

// endedRun returns the error of code that writes after its Run has ended.
func endedRun(op string, run *deadlock.Run) error {
	if err := failureOf(run); err != nil {
		return err
	}
	return errorf(op, ErrContext, "the Run that this code is part of has ended: write during the Run")
}

// stepContext is a step's context: the Run's context with the replica's frame.
type stepContext struct {
	context.Context
	frame *frame
}

func (c *stepContext) Value(key any) any {
	if key == (frameKey{}) {
		return c.frame
	}
	return c.Context.Value(key)
}
