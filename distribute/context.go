package distribute

import "context"

// Context is where code runs: a [*Replica] in replica context, a [*CrossReplica] in cross-replica context. There are no
// other ones.
type Context interface {
	// Strategy returns the strategy that the context belongs to.
	Strategy() *Strategy
	sealed()
}

func (*Replica) sealed()      {}
func (*CrossReplica) sealed() {}

// frame is what a context.Context carries: the innermost context of a strategy.
type frame struct {
	strategy *Strategy
	replica  *Replica // in replica context
	update   int      // replica whose component an update function changes, or -1
	err      error    // the scope was entered where it must not be: every use reports it
}

type frameKey struct{}

func frameOf(ctx context.Context) *frame {
	f, _ := ctx.Value(frameKey{}).(*frame)
	return f
}

// StrategyFrom returns the strategy whose scope or Run ctx belongs to, or nil.
func StrategyFrom(ctx context.Context) *Strategy {
	if f := frameOf(ctx); f != nil {
		return f.strategy
	}
	return nil
}

// ReplicaFrom returns the replica whose step ctx belongs to, or nil: ctx is then in cross-replica context, or outside of
// every strategy.
func ReplicaFrom(ctx context.Context) *Replica {
	if f := frameOf(ctx); f != nil {
		return f.replica
	}
	return nil
}

// InCrossReplica reports whether ctx is in cross-replica context: in a scope, a merge function or an update function.
func InCrossReplica(ctx context.Context) bool {
	f := frameOf(ctx)
	return f != nil && f.replica == nil
}

// UpdateReplica returns the replica whose component the update function that ctx belongs to is changing.
func UpdateReplica(ctx context.Context) (int, bool) {
	if f := frameOf(ctx); f != nil && f.update >= 0 {
		return f.update, true
	}
	return 0, false
}

// Scope returns a context in whose functions s is the current strategy: what they create belongs to it. A scope of
// another strategy, or inside a step, is an error that everything done with the context returns.
func (s *Strategy) Scope(ctx context.Context) context.Context {
	f := &frame{strategy: s, update: -1}
	if err := s.requireCross(ctx, "Scope"); err != nil {
		f.err = err
	}
	return context.WithValue(ctx, frameKey{}, f)
}

// requireCross reports an error unless ctx is in s's cross-replica context or outside of every strategy.
func (s *Strategy) requireCross(ctx context.Context, op string) error {
	f := frameOf(ctx)
	switch {
	case f == nil:
		return nil
	case f.err != nil:
		return f.err
	case f.replica != nil:
		return errorf(op, ErrContext, "called inside a step function; the method requires being in cross-replica context: use Replica.MergeCall, whose function is")
	case f.strategy != s:
		return errorf(op, ErrContext, "mixing different strategies: %v is not %v", f.strategy, s)
	}
	return nil
}
