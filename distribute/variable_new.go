package distribute

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/lockstep-ml/lockstep/distribute/internal/undo"
	"github.com/lockstep-ml/lockstep/tensor"
)

// NewVariable makes a variable on every replica (TensorFlow's tf.Variable in a scope). With several workers all workers
// call it, with the same name, dtype and shape; the variable starts with the value of replica 0 on all of them.
//
// Inside a step it makes one variable for all replicas. Every replica calls it with the step's context, in the same
// order and with the same name (a number at its end may differ), and gets the same variable, with the configuration of
// replica 0.
func (s *Strategy) NewVariable(ctx context.Context, cfg VariableConfig) (*Variable, error) {
	if f := innermost(ctx); f != nil && f.strategy == s && f.replica != nil {
		return f.replica.newVariable(ctx, cfg)
	}
	if err := s.requireCross(ctx, "NewVariable"); err != nil {
		return nil, err
	}
	return s.newVariable(ctx, cfg)
}

// newVariable makes one variable for all replicas inside a step.
func (r *Replica) newVariable(ctx context.Context, cfg VariableConfig) (*Variable, error) {
	s := r.strategy
	out, err := r.mergeCall(ctx, "NewVariable", s.options.Timeout,
		func(ctx context.Context, _ *CrossReplica, configs ...Value) (Value, error) {
			all := []Value{configs[0]}
			if p, ok := configs[0].(*perReplica); ok {
				all = p.values
			}
			first := all[0].(*VariableConfig)
			for i, c := range all {
				if name := c.(*VariableConfig).Name; baseName(name) != baseName(first.Name) {
					return nil, errorf("NewVariable", ErrMismatch, "tried to create variable %s with mismatching name on device %d: "+
						"replica 0 creates %s", name, i, first.Name)
				}
			}
			v, err := s.newVariable(ctx, *first)
			return &created{v}, err
		}, []Value{&cfg})
	if err != nil {
		return nil, err
	}
	return out.(*created).v, nil
}

// created wraps a variable so that a merge call returns it whole, instead of its components.
type created struct{ v *Variable }

func (s *Strategy) newVariable(ctx context.Context, cfg VariableConfig) (*Variable, error) {
	const op = "NewVariable"
	if cfg.Name == "" {
		cfg.Name = "Variable"
	}
	initial := cfg.Initial
	if initial == nil && cfg.Init != nil {
		var err error
		if initial, err = cfg.Init(ctx); err != nil {
			return nil, errorf(op, nil, "initial value of %s: %w", cfg.Name, err)
		}
	}
	value, err := hostTensor(initial)
	if err != nil {
		return nil, errorf(op, ErrInvalid, "initial value of %s: %w", cfg.Name, err)
	}
	if err := s.checkVariable(op, cfg, value.DType()); err != nil {
		return nil, err
	}
	v := s.unvalued(cfg)
	if f := frameOf(ctx); f != nil && f.colocate != nil {
		v.devices = *f.colocate
	}
	if s.workersInSync > 1 {
		name := fmt.Sprintf("initial value of %s (%v, %v)", v.Name(), v.sync, v.agg)
		if value, err = s.collective.broadcast(ctx, name, value, s.options); err != nil {
			return nil, errorf(op, nil, "%w", err)
		}
	}
	v.dtype, v.shape = value.DType(), slices.Clone(value.Shape())
	for _, d := range v.devices {
		v.components = append(v.components, undo.NewCell(value.Clone().OnDevice(d.Index)))
	}
	return v, nil
}

// checkVariable returns an error if a variable cannot have the configuration.
func (s *Strategy) checkVariable(op string, cfg VariableConfig, dtype tensor.DType) error {
	switch {
	case cfg.Synchronization == SynchronizeNone && s.kind.mirrors():
		return errorf(op, ErrInvalid, "NONE variable synchronization mode is not supported by %v: please change the "+
			"synchronization for variable: %s", s, cfg.Name)
	case cfg.Synchronization > SynchronizeNone:
		return errorf(op, ErrInvalid, "invalid variable synchronization mode: %v for variable: %s", cfg.Synchronization,
			cfg.Name)
	case cfg.Aggregation > AggregateFirst:
		return errorf(op, ErrInvalid, "invalid variable aggregation mode: %v for variable: %s", cfg.Aggregation, cfg.Name)
	case cfg.NotTrainable && cfg.Trainable:
		return errorf(op, ErrInvalid, "variable %s has both Trainable and NotTrainable set", cfg.Name)
	case cfg.Aggregation == AggregateMean && !dtype.IsFloat() && s.kind.mirrors():
		return errorf(op, ErrInvalid, "creating distributed variable %s with aggregation=MEAN and a non-floating "+
			"dtype is not supported, please use a different aggregation or dtype than %v", cfg.Name, dtype)
	}
	return nil
}

// unvalued returns a variable without components.
func (s *Strategy) unvalued(cfg VariableConfig) *Variable {
	v := &Variable{
		strategy: s, name: cfg.Name, sync: cfg.Synchronization, agg: cfg.Aggregation, devices: s.params, reforms: s.reforms,
	}
	if v.sync == Auto && s.kind.mirrors() {
		v.sync = OnWrite
	}
	v.trainable = !cfg.NotTrainable && (cfg.Synchronization != OnRead || cfg.Trainable)
	return v
}

// VariableIn returns a variable with the given dtype and shape whose components are in storage. It behaves as one of
// [Strategy.NewVariable], but keeps its values: cfg.Initial and cfg.Init are ignored, and workers exchange nothing. A
// failed Run restores the storage. If it fails, methods return its error; those without an error result panic.
func (s *Strategy) VariableIn(storage Storage, dtype tensor.DType, shape []int, cfg VariableConfig) (*Variable, error) {
	const op = "VariableIn"
	if err := s.checkVariable(op, cfg, dtype); err != nil {
		return nil, err
	}
	v := s.unvalued(cfg)
	v.dtype, v.shape, v.storage = dtype, slices.Clone(shape), storage
	for i := range v.devices {
		v.components = append(v.components, undo.NewCellIn(componentIn{storage, i}))
	}
	return v, nil
}

// componentIn is one component in a storage.
type componentIn struct {
	storage   Storage
	component int
}

func (c componentIn) Load() (*tensor.Tensor, error)    { return c.storage.Load(c.component) }
func (c componentIn) Store(value *tensor.Tensor) error { return c.storage.Store(c.component, value) }

// baseName strips a number at the end: foo_1 is foo.
func baseName(name string) string {
	if base := strings.TrimRight(name, "0123456789"); len(base) > 1 && base != name && strings.HasSuffix(base, "_") {
		return base[:len(base)-1]
	}
	return name
}

// ColocateVariablesWith returns a context of a scope of the strategy, in which new variables are placed on the
// devices of v, a variable of the strategy (colocate_vars_with).
func (e Extended) ColocateVariablesWith(ctx context.Context, v *Variable) (context.Context, error) {
	const op = "ColocateVariablesWith"
	if err := e.s.requireCross(ctx, op); err != nil {
		return nil, err
	}
	f := frameOf(ctx)
	if f == nil && e.s.kind == defaultKind {
		f = &frame{strategy: e.s} // code outside of all scopes is in the default strategy's scope
	}
	switch {
	case f == nil:
		return nil, errorf(op, ErrContext, "need to be inside a scope of %v: give a context that its Scope method returned",
			e.s)
	case v == nil || v.strategy != e.s:
		return nil, errorf(op, ErrInvalid, "ColocateVariablesWith must only be passed a variable created in this "+
			"strategy's scope, not %v", v)
	default:
		in := *f
		in.colocate = &v.devices
		return context.WithValue(ctx, frameKey{}, &in), nil
	}
}
