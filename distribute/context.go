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
	replica  *Replica  // in replica context
	merge    *Strategy // in a merge function: whose replicas wait for it
	update   int       // replica whose component an update function changes, or -1
	at       *Device   // where the component that an update function changes lives
	colocate *Variable // whose devices new variables get
	set      bool      // by WithStrategy, outside of every scope
	err      error     // the scope was entered where it must not be: every use reports it
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

// StrategyFrom returns the strategy whose scope or Run ctx belongs to, or nil: ctx is then in no strategy but the default
// one (TensorFlow's has_strategy).
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

// ReplicaFrom returns the replica whose step ctx belongs to, or nil: ctx is then in cross-replica context, or outside of
// every strategy.
func ReplicaFrom(ctx context.Context) *Replica {
	if f := innermost(ctx); f != nil {
		return f.replica
	}
	return nil
}

// CurrentReplica returns the replica whose step ctx belongs to and, outside of every strategy, the one replica of
// [Default], with which code that is written for a replica runs undistributed; nil in cross-replica context
// (TensorFlow's get_replica_context).
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

// UpdateReplica returns the replica whose component the update function that ctx belongs to is changing. A variable that
// has one component for all replicas has it on a device, see [UpdateDevice], and on no replica.
func UpdateReplica(ctx context.Context) (int, bool) {
	if f := innermost(ctx); f != nil && f.update >= 0 {
		return f.update, true
	}
	return 0, false
}

// UpdateDevice returns the device of the component that the update function that ctx belongs to is changing, in
// TensorFlow's full form.
func UpdateDevice(ctx context.Context) (string, bool) {
	if f := innermost(ctx); f != nil && f.at != nil {
		return f.at.String(), true
	}
	return "", false
}

// Scope returns a context in whose functions s is the current strategy: what they create belongs to it. A scope of
// another strategy, or inside a step, is an error that everything done with the context returns.
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

// WithStrategy returns a context in which s is the current strategy from the outside, as if all that is done with it were
// in its scope; a nil s makes it none. It takes the place of an earlier WithStrategy, and is an error inside a scope or a
// step (TensorFlow's experimental_set_strategy, without the global variable: a program does it once with the context
// that it gives to everything).
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

// ColocateVariablesWith returns a context, of a scope of s, in which new variables live on the devices of v, which must be
// the strategy's (TensorFlow's colocate_vars_with).
func (s *Strategy) ColocateVariablesWith(ctx context.Context, v *Variable) (context.Context, error) {
	const op = "ColocateVariablesWith"
	if err := s.requireCross(ctx, op); err != nil {
		return nil, err
	}
	f := frameOf(ctx)
	if f == nil && s.kind == defaultKind {
		f = &frame{strategy: s, update: -1} // the default strategy's scope is outside of every other one
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

// requireCross reports an error unless ctx is in s's cross-replica context or outside of every strategy.
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
		return errorf(op, ErrContext, "called inside a step function; the method requires being in cross-replica context: use Replica.MergeCall, whose function is")
	}
	return nil
}

type deviceKey struct{}

// WithDevice returns a context in which d is the current device: parts that d leaves open are those of the device around
// it (TensorFlow's tf.device). Results that go to no place in particular are put there, and a mirrored variable is read
// there.
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

// ResolveDevice parses a device string and fills what it leaves open from the current device, and then as
// [CanonicalDevice] does (TensorFlow's device_util.resolve).
func ResolveDevice(ctx context.Context, name string) (Device, error) {
	if d, ok := CurrentDevice(ctx); ok {
		return CanonicalDevice(name, d.String())
	}
	return CanonicalDevice(name)
}

// hostDevice returns where results go that nobody said a place for: the current device, or CPU:0.
func hostDevice(ctx context.Context) Device {
	d, _ := CurrentDevice(ctx)
	return Device.fill(d, localCPU)
}
