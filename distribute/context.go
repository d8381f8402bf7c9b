package distribute

import "context"

// Context is the context that code runs in: a [*Replica] (replica context) or a [*CrossReplica] (cross-replica
// context). No other type implements it.
type Context interface {
	// Strategy returns the strategy that the context belongs to.
	Strategy() *Strategy
	sealed()
}

func (*Replica) sealed()      {}
func (*CrossReplica) sealed() {}

// frame is the innermost strategy context that a context.Context carries.
type frame struct {
	strategy *Strategy
	replica  *Replica  // in replica context
	merge    *Strategy // in a merge function: the strategy whose replicas wait for it
	update   int       // replica whose component an update function changes, or -1
	at       *Device   // device of the component that an update function changes
	colocate *Variable // variable on whose devices new variables are placed
	set      bool      // by WithStrategy, outside of all scopes
	err      error     // the scope was entered in the wrong place: every use returns it
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

// StrategyFrom returns the strategy whose scope or Run ctx belongs to, or nil if ctx is in no strategy other
// than the default one (TensorFlow's has_strategy).
func StrategyFrom(ctx context.Context) *Strategy {
	if f := frameOf(ctx); f != nil {
		return f.strategy
	}
	return nil
}

// CurrentStrategy returns the strategy whose scope or Run ctx belongs to, or [Default] (TensorFlow's get_strategy).
func CurrentStrategy(ctx context.Context) *Strategy {
	if f := frameOf(ctx); f != nil {
		return f.strategy
	}
	return Default()
}

// ReplicaFrom returns the replica whose step ctx belongs to, or nil if ctx is in cross-replica context or
// outside of all strategies.
func ReplicaFrom(ctx context.Context) *Replica {
	if f := innermost(ctx); f != nil {
		return f.replica
	}
	return nil
}

// CurrentReplica returns the replica whose step ctx belongs to. Outside of all strategies it returns the only
// replica of [Default], so that code written for replicas also runs undistributed. In cross-replica context it
// returns nil (TensorFlow's get_replica_context).
func CurrentReplica(ctx context.Context) *Replica {
	if f := innermost(ctx); f != nil {
		return f.replica
	}
	return defaultStrategy()
}

// InCrossReplica reports whether ctx is in cross-replica context: in a scope, a merge function or an update function.
func InCrossReplica(ctx context.Context) bool {
	f := innermost(ctx)
	return f != nil && f.replica == nil
}

// UpdateReplica returns the replica whose component is changed by the update function that ctx belongs to. It
// returns false if all replicas share one component; that has a device only, see [UpdateDevice].
func UpdateReplica(ctx context.Context) (int, bool) {
	if f := innermost(ctx); f != nil && f.update >= 0 {
		return f.update, true
	}
	return 0, false
}

// UpdateDevice returns the device of the component that is changed by the update function that ctx belongs to,
// in TensorFlow's full form.
func UpdateDevice(ctx context.Context) (string, bool) {
	if f := innermost(ctx); f != nil && f.at != nil {
		return f.at.String(), true
	}
	return "", false
}

// Scope returns a context in which s is the current strategy: variables and datasets created with it belong to
// s. A scope inside a scope of another strategy, or inside a step, is an error; everything that uses the
// context returns it.
func (s *Strategy) Scope(ctx context.Context) context.Context {
	if s.kind == defaultKind && frameOf(ctx) == nil {
		return ctx // outside of every other scope is its scope
	}
	f := &frame{strategy: s, update: -1}
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
		return nil, errorf("WithStrategy", ErrContext, "must not be called inside a scope or a step of a strategy (here of %v): use it on the context from outside", f.strategy)
	}
	if s == nil {
		s = Default()
	}
	f := &frame{strategy: s, update: -1, set: true}
	if s.kind == defaultKind {
		f = nil
	}
	return context.WithValue(ctx, frameKey{}, f), nil
}

// ColocateVariablesWith returns a context of a scope of s, in which new variables are placed on the devices of
// v. v must belong to s (TensorFlow's colocate_vars_with).
func (s *Strategy) ColocateVariablesWith(ctx context.Context, v *Variable) (context.Context, error) {
	const op = "ColocateVariablesWith"
	if err := s.requireCross(ctx, op); err != nil {
		return nil, err
	}
	f := frameOf(ctx)
	if f == nil && s.kind == defaultKind {
		f = &frame{strategy: s, update: -1} // code outside of all scopes is in the default strategy's scope
	}
	switch {
	case f == nil:
		return nil, errorf(op, ErrContext, "need to be inside a scope of %v: give a context that its Scope method returned", s)
	case v == nil || v.strategy != s:
		return nil, errorf(op, ErrInvalid, "ColocateVariablesWith must only be passed a variable created in this strategy's scope, not %v", v)
	default:
		in := *f
		in.colocate = v
		return context.WithValue(ctx, frameKey{}, &in), nil
	}
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
		return errorf(op, ErrContext, "must not nest strategies: mixing different strategies, the default strategy inside %v", f.strategy)
	case f.strategy != s:
		return errorf(op, ErrContext, "mixing different strategies: %v is not %v", f.strategy, s)
	case f.replica != nil:
		return errorf(op, ErrContext, "called inside a step function; the method requires being in cross-replica context: use Replica.MergeCall")
	}
	return nil
}

type deviceKey struct{}

// WithDevice returns a context in which d is the current device. Parts that d leaves open are taken from the
// current device of ctx (TensorFlow's tf.device). Results without a destination are placed on the current
// device, and mirrored variables are read there.
func WithDevice(ctx context.Context, d Device) context.Context {
	if outer, ok := ctx.Value(deviceKey{}).(Device); ok {
		d = d.fill(outer)
	}
	return context.WithValue(ctx, deviceKey{}, d)
}

// CurrentDevice returns the device of the innermost [WithDevice].
func CurrentDevice(ctx context.Context) (Device, bool) {
	d, ok := ctx.Value(deviceKey{}).(Device)
	return d, ok
}

// ResolveDevice parses a device string. Missing parts are taken from the current device, then from the defaults
// of [CanonicalDevice] (TensorFlow's device_util.resolve).
func ResolveDevice(ctx context.Context, name string) (Device, error) {
	if d, ok := CurrentDevice(ctx); ok {
		return CanonicalDevice(name, d.String())
	}
	return CanonicalDevice(name)
}

// hostDevice returns the device of results without a destination: the current device, or CPU:0.
func hostDevice(ctx context.Context) Device {
	d, _ := CurrentDevice(ctx)
	return Device.fill(d, localCPU)
}
