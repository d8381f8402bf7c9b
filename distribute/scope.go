package distribute

import "context"

// Scope returns a context in which s is the current strategy (TensorFlow's Strategy.scope): variables and datasets
// created with it belong to s. A scope inside a scope of another strategy, or inside a step, is an error; everything
// that uses the context returns it.
func (s *Strategy) Scope(ctx context.Context) context.Context {
	if s.kind == defaultKind && frameOf(ctx) == nil {
		return ctx // outside of every other scope is its scope
	}
	f := &frame{strategy: s, run: s.runOf(ctx)}
	if err := s.requireCross(ctx, "Scope"); err != nil {
		f.err = err
	}
	return context.WithValue(ctx, frameKey{}, f)
}

// WithStrategy returns a context in which s is the current strategy, as if all code that uses the context ran
// in its scope. A nil s clears it. WithStrategy replaces an earlier WithStrategy, and is an error inside a
// scope or a step. It is TensorFlow's experimental_set_strategy without the global variable: a program calls it
// once and passes the context on.
func WithStrategy(ctx context.Context, s *Strategy) (context.Context, error) {
	if f := frameOf(ctx); f != nil && !f.set {
		return nil, errorf("WithStrategy", ErrContext, "must not be called inside a scope or a step of a strategy (here of "+
			"%v): use it on the context from outside", f.strategy)
	}
	if s == nil {
		s = Default()
	}
	f := &frame{strategy: s, set: true}
	if s.kind == defaultKind {
		f = nil
	}
	return context.WithValue(ctx, frameKey{}, f), nil
}

// CurrentStrategy returns the strategy whose scope or Run ctx belongs to, or [Default] (TensorFlow's get_strategy; its
// has_strategy reports whether it is another one than Default).
func CurrentStrategy(ctx context.Context) *Strategy {
	if f := frameOf(ctx); f != nil {
		return f.strategy
	}
	return Default()
}

// CurrentReplica returns the replica whose step ctx belongs to. Outside of all strategies it returns the only
// replica of [Default], so that code written for replicas also runs undistributed. In cross-replica context it
// returns nil (TensorFlow's get_replica_context, and in_cross_replica_context).
func CurrentReplica(ctx context.Context) *Replica {
	if f := innermost(ctx); f != nil {
		return f.replica
	}
	return defaultStrategy()
}

// CurrentComponent returns the component that the update function changes which ctx belongs to, or nil (TensorFlow's
// get_update_replica_id).
func CurrentComponent(ctx context.Context) *Component {
	if f := innermost(ctx); f != nil {
		return f.component
	}
	return nil
}
