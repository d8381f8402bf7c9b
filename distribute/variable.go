package distribute

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Synchronization says when a variable's components are made one.
type Synchronization uint8

// The synchronizations. Auto is OnWrite.
const (
	Auto Synchronization = iota
	OnWrite
	OnRead
	SynchronizeNone // only where there is one device
)

// String returns TensorFlow's name: "ON_WRITE".
func (s Synchronization) String() string {
	switch s {
	case Auto:
		return "AUTO"
	case OnWrite:
		return "ON_WRITE"
	case OnRead:
		return "ON_READ"
	case SynchronizeNone:
		return "NONE"
	}
	return fmt.Sprintf("Synchronization(%d)", uint8(s))
}

// Aggregation says how the replicas' values become one.
type Aggregation uint8

// The aggregations.
const (
	AggregateNone Aggregation = iota
	AggregateSum
	AggregateMean
	AggregateFirst // replica 0's value
)

// String returns TensorFlow's name: "ONLY_FIRST_REPLICA".
func (a Aggregation) String() string {
	switch a {
	case AggregateNone:
		return "NONE"
	case AggregateSum:
		return "SUM"
	case AggregateMean:
		return "MEAN"
	case AggregateFirst:
		return "ONLY_FIRST_REPLICA"
	}
	return fmt.Sprintf("Aggregation(%d)", uint8(a))
}

// VariableConfig describes a variable.
type VariableConfig struct {
	// Name; default "Variable", and "Variable_1", … where the name is taken.
	Name string
	// Initial is the value on every replica, a tensor or a host number. Init makes it instead, once, if Initial is nil.
	Initial Value
	Init    func(context.Context) (Value, error)
	// Synchronization; default OnWrite: a mirrored variable.
	Synchronization Synchronization
	// Aggregation of what replicas write (OnWrite) or hold (OnRead); default none.
	Aggregation Aggregation
	// NotTrainable: no gradient is wanted for it. Sync-on-read variables never are unless Trainable is set.
	NotTrainable bool
	Trainable    bool
}

// Variable is a value on every replica that lasts over steps. A mirrored variable (OnWrite) is kept equal on all replicas
// by its updates; a sync-on-read variable (OnRead) is each replica's own, and aggregated when it is read in
// cross-replica context.
//
// What a Run writes is final only when the whole Run has succeeded: after a failed one every component has the value
// from before it.
type Variable struct {
	strategy   *Strategy
	name       string
	sync       Synchronization
	agg        Aggregation
	trainable  bool
	components []*component
}

// component is a variable's value on one replica.
type component struct {
	value atomic.Pointer[tensor.Tensor]

	// The value before the Run number saved; used by the replica's goroutine, or one that acts for all.
	before *tensor.Tensor
	saved  uint64
}

func (c *component) load() *tensor.Tensor { return c.value.Load() }

// update computes a component's new value from the old one and what it is given.
type update func(old, x *tensor.Tensor) *tensor.Tensor

func replace(_, x *tensor.Tensor) *tensor.Tensor { return x }
func plus(old, x *tensor.Tensor) *tensor.Tensor  { return added(old, x) }
func minus(old, x *tensor.Tensor) *tensor.Tensor { return added(old, negated(x)) }

// NewVariable makes a variable on every replica, in cross-replica context or outside of every strategy.
// [Replica.NewVariable] makes one inside a step.
func (s *Strategy) NewVariable(ctx context.Context, cfg VariableConfig) (*Variable, error) {
	if err := s.requireCross(ctx, "NewVariable"); err != nil {
		return nil, err
	}
	return s.newVariable(ctx, cfg)
}

// NewVariable makes one variable for all replicas from inside a step: every replica calls it, in the same order and with
// the same name but for a number at its end, and gets the same variable with the configuration of replica 0.
func (r *Replica) NewVariable(ctx context.Context, cfg VariableConfig) (*Variable, error) {
	s := r.strategy
	out, err := r.mergeCall(ctx, "NewVariable", s.options.Timeout, func(ctx context.Context, _ *CrossReplica, configs ...Value) (Value, error) {
		all := []Value{configs[0]}
		if p, ok := configs[0].(*PerReplica); ok {
			all = p.values
		}
		first := all[0].(*VariableConfig)
		for i, c := range all {
			if name := c.(*VariableConfig).Name; baseName(name) != baseName(first.Name) {
				return nil, errorf("NewVariable", ErrMismatch, "tried to create variable %s with mismatching name on device %d: replica 0 creates %s", name, i, first.Name)
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

// LazyVariable makes a variable on its first use inside a step and keeps it for the Runs that follow, as TensorFlow's
// functions do with variables that they create. The zero value is ready to use; one belongs to one strategy.
type LazyVariable struct{ made atomic.Pointer[Variable] }

// Get returns the variable. The first Run in which it is called makes it, by [Replica.NewVariable]: all replicas have to
// call it then.
func (l *LazyVariable) Get(ctx context.Context, r *Replica, cfg VariableConfig) (*Variable, error) {
	if v := l.made.Load(); v != nil {
		return v, v.mine("LazyVariable", r.strategy)
	}
	// No replica can see the variable before all of them have come here, for NewVariable waits for all.
	v, err := r.NewVariable(ctx, cfg)
	if err == nil {
		l.made.Store(v)
	}
	return v, err
}

// created carries a variable out of a merge call as it is, where a variable itself would be split.
type created struct{ v *Variable }

func (s *Strategy) newVariable(ctx context.Context, cfg VariableConfig) (*Variable, error) {
	const op = "NewVariable"
	if cfg.Name == "" {
		cfg.Name = "Variable"
	}
	switch {
	case cfg.Synchronization == SynchronizeNone && !s.oneDevice:
		return nil, errorf(op, ErrInvalid, "NONE variable synchronization mode is not supported by %v: please change the synchronization for variable: %s", s, cfg.Name)
	case cfg.Synchronization > SynchronizeNone:
		return nil, errorf(op, ErrInvalid, "invalid variable synchronization mode: %v for variable: %s", cfg.Synchronization, cfg.Name)
	case cfg.Aggregation > AggregateFirst:
		return nil, errorf(op, ErrInvalid, "invalid variable aggregation mode: %v for variable: %s", cfg.Aggregation, cfg.Name)
	case cfg.NotTrainable && cfg.Trainable:
		return nil, errorf(op, ErrInvalid, "variable %s is said to be both trainable and not", cfg.Name)
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
	if cfg.Aggregation == AggregateMean && !value.DType().IsFloat() && !s.oneDevice {
		return nil, errorf(op, ErrInvalid, "creating distributed variable %s with aggregation=MEAN and a non-floating dtype is not supported, please use a different aggregation or dtype than %v", cfg.Name, value.DType())
	}
	v := &Variable{strategy: s, name: s.uniqueName(cfg.Name), sync: cfg.Synchronization, agg: cfg.Aggregation}
	if v.sync == Auto && !s.oneDevice {
		v.sync = OnWrite
	}
	v.trainable = !cfg.NotTrainable && (cfg.Synchronization != OnRead || cfg.Trainable)
	for _, d := range s.devices {
		c := &component{}
		c.value.Store(value.Clone().OnDevice(d.Index))
		v.components = append(v.components, c)
	}
	return v, nil
}

// uniqueName returns name, or name_1, name_2, … if it is taken.
func (s *Strategy) uniqueName(name string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.names[name]
	s.names[name] = n + 1
	if n == 0 || name != "Variable" {
		return name
	}
	return fmt.Sprintf("%s_%d", name, n)
}

// baseName strips a number at the end: foo_1 is foo.
func baseName(name string) string {
	if base := strings.TrimRight(name, "0123456789"); len(base) > 1 && base != name && strings.HasSuffix(base, "_") {
		return base[:len(base)-1]
	}
	return name
}

// Name returns the variable's name, as TensorFlow writes it: "Variable:0".
func (v *Variable) Name() string { return v.name + ":0" }

// Strategy returns the strategy that the variable belongs to.
func (v *Variable) Strategy() *Strategy { return v.strategy }

// Synchronization returns when the components are made one.
func (v *Variable) Synchronization() Synchronization { return v.sync }

// Aggregation returns how the replicas' values become one.
func (v *Variable) Aggregation() Aggregation { return v.agg }

// Trainable reports whether a gradient is wanted for the variable.
func (v *Variable) Trainable() bool { return v.trainable }

// DType returns the type of the elements.
func (v *Variable) DType() tensor.DType { return v.components[0].load().DType() }

// Shape returns the shape; the caller must not change it.
func (v *Variable) Shape() []int { return v.components[0].load().Shape() }

// Values returns the components' values by replica.
func (v *Variable) Values() []Value {
	out := make([]Value, len(v.components))
	for i, c := range v.components {
		out[i] = c.load()
	}
	return out
}

// ComponentName returns the name of the component on a replica: "v:0", "v/replica_1:0".
func (v *Variable) ComponentName(replica int) string {
	if replica == 0 {
		return v.Name()
	}
	return fmt.Sprintf("%s/replica_%d:0", v.name, replica)
}

// String prints the components as TensorFlow does.
func (v *Variable) String() string {
	lines := make([]string, len(v.components))
	for i, c := range v.components {
		t := c.load()
		lines[i] = fmt.Sprintf("<tf.Variable '%s' shape=%s dtype=%v, numpy=%s>", v.ComponentName(i), tensor.FormatShape(t.Shape()), t.DType(), numpy(t))
	}
	if v.strategy.oneDevice {
		return lines[0]
	}
	kind := "MirroredVariable"
	if v.sync == OnRead {
		kind = "SyncOnReadVariable"
	}
	for i := range lines {
		lines[i] = fmt.Sprintf("  %d: %s", i, lines[i])
	}
	return kind + ":{\n" + strings.Join(lines, ",\n") + "\n}"
}

// numpy prints a tensor as NumPy's repr does.
func numpy(t *tensor.Tensor) string {
	s := t.Format()
	if t.Rank() == 0 {
		return s
	}
	dtype := fmt.Sprintf(", dtype=%v", t.DType())
	switch t.DType() {
	case tensor.Bool, tensor.Int64, tensor.Float64: // NumPy's defaults
		dtype = ""
	case tensor.String:
		dtype = ", dtype=object"
	}
	s = separators.ReplaceAllString(s, "$1,$2")
	return "array(" + strings.ReplaceAll(s, "\n", "\n"+strings.Repeat(" ", len("array("))) + dtype + ")"
}

// separators finds the end of an element or a row that another one follows. (Spaces inside of strings pass for such.)
var separators = regexp.MustCompile(`([^\s\[])(\s+)`)

func (v *Variable) destination(string) ([]Device, error) { return v.strategy.devices, nil }

func (v *Variable) perReplica() *PerReplica { return NewPerReplica(v.Values()...) }

func (v *Variable) mirrored() *Mirrored { return NewMirrored(v.Values()...) }

// Read returns the value: in replica context the replica's own, in cross-replica context that of a mirrored variable
// on replica 0, or the aggregate of a sync-on-read one.
func (v *Variable) Read(in Context) (*tensor.Tensor, error) {
	const op = "Read"
	switch in := in.(type) {
	case *Replica:
		if err := v.mine(op, in.strategy); err != nil {
			return nil, err
		}
		return v.components[in.id].load(), nil
	case *CrossReplica:
		if err := errors.Join(v.mine(op, in.strategy), in.valid(op)); err != nil {
			return nil, err
		}
		return v.readCross(op)
	}
	return nil, errorf(op, ErrContext, "no context given: want the *Replica of a step or a *CrossReplica")
}

func (v *Variable) readCross(op string) (*tensor.Tensor, error) {
	if v.sync != OnRead || v.agg == AggregateFirst || len(v.components) == 1 {
		return v.components[0].load(), nil
	}
	reduce := Sum
	switch v.agg {
	case AggregateNone:
		return nil, errorf(op, ErrInvalid, "could not convert from `VariableAggregation.NONE`: reading the sync-on-read variable %s in cross-replica context needs an aggregation", v.Name())
	case AggregateMean:
		reduce = Mean
	}
	out, err := v.strategy.reduceLeaf(context.Background(), op, reduce, v.perReplica(), v.strategy.devices[:1], v.strategy.options)
	if err != nil {
		return nil, err
	}
	return out.(*tensor.Tensor), nil
}

// Assign sets the value. In cross-replica context every component gets x, or its own component of a distributed x. In
// replica context a mirrored variable first combines the replicas' values by its aggregation, which is a merge call
// that all replicas must make; without an aggregation, and for sync-on-read variables, each replica sets its own
// component.
func (v *Variable) Assign(in Context, x Value) error {
	return v.write("Assign", in, x, replace)
}

// AssignAdd adds to the value, as [Variable.Assign] sets it.
func (v *Variable) AssignAdd(in Context, x Value) error {
	return v.write("AssignAdd", in, x, plus)
}

// AssignSub subtracts from the value, as [Variable.Assign] sets it.
func (v *Variable) AssignSub(in Context, x Value) error {
	return v.write("AssignSub", in, x, minus)
}

func (v *Variable) write(op string, in Context, x Value, change update) error {
	switch in := in.(type) {
	case *Replica:
		if err := v.mine(op, in.strategy); err != nil {
			return err
		}
		return v.writeReplica(op, in, x, change)
	case *CrossReplica:
		if err := errors.Join(v.mine(op, in.strategy), in.valid(op)); err != nil {
			return err
		}
		if v.sync == OnRead && op != "Assign" && v.agg == AggregateSum {
			return errorf(op, ErrInvalid, "SyncOnReadVariable does not support %s in cross-replica context when aggregation is set to SUM", op)
		}
		if v.sync == OnRead && v.agg == AggregateSum && len(v.components) > 1 {
			return v.setShares(op, x, change)
		}
		return v.setAll(op, x, change)
	}
	return errorf(op, ErrContext, "no context given: want the *Replica of a step or a *CrossReplica")
}

func (v *Variable) writeReplica(op string, r *Replica, x Value, change update) error {
	if err := r.current(op); err != nil {
		return err
	}
	if v.sync == OnRead || v.agg == AggregateNone || len(v.components) == 1 {
		return v.setOne(op, r.id, x, change)
	}
	_, err := r.mergeCall(&r.ctx, op, r.strategy.options.Timeout, func(ctx context.Context, c *CrossReplica, args ...Value) (Value, error) {
		s, value := v.strategy, args[0]
		var err error
		switch v.agg {
		case AggregateFirst:
			value, err = SelectReplica(0, value)
		case AggregateSum:
			value, err = s.reduceTo(ctx, op, Sum, value, s.devices, s.options)
		case AggregateMean:
			value, err = s.reduceTo(ctx, op, Mean, value, s.devices, s.options)
		}
		if err != nil {
			return nil, err
		}
		return nil, v.setAll(op, value, change)
	}, []Value{x})
	return err
}

// setAll changes every component by x, or by its own component of a distributed x. All are checked before any is changed.
func (v *Variable) setAll(op string, x Value, change update) error {
	values := make([]*tensor.Tensor, len(v.components))
	for i := range v.components {
		mine, err := componentOf(i, x)
		if err != nil {
			return errorf(op, ErrInvalid, "%w", err)
		}
		if values[i], err = v.fit(op, mine); err != nil {
			return err
		}
	}
	for i, c := range v.components {
		v.strategy.store(c, change(c.load(), values[i]).OnDevice(v.strategy.devices[i].Index))
	}
	return nil
}

// setOne changes the component of one replica.
func (v *Variable) setOne(op string, replica int, x Value, change update) error {
	mine, err := componentOf(replica, x)
	if err != nil {
		return errorf(op, ErrInvalid, "%w", err)
	}
	value, err := v.fit(op, mine)
	if err != nil {
		return err
	}
	c := v.components[replica]
	v.strategy.store(c, change(c.load(), value).OnDevice(v.strategy.devices[replica].Index))
	return nil
}

// setShares gives every component an equal share of x, so that their sum reads as x.
func (v *Variable) setShares(op string, x Value, change update) error {
	value, err := v.fit(op, x)
	if err != nil {
		return err
	}
	share := divide(value, len(v.components))
	if share.DType() != value.DType() {
		share = converted(share, value.DType())
	}
	return v.setAll(op, share, change)
}

// fit returns x as a tensor of the variable's dtype and shape.
func (v *Variable) fit(op string, x Value) (*tensor.Tensor, error) {
	t, err := hostTensor(x)
	if err != nil {
		return nil, errorf(op, ErrInvalid, "variable %s: %w", v.Name(), err)
	}
	if _, isTensor := x.(*tensor.Tensor); !isTensor && t.DType() != v.DType() && v.DType().IsNumeric() && t.DType().IsNumeric() {
		t = converted(t, v.DType()) // a host number takes the variable's type
	}
	switch {
	case t.DType() != v.DType():
		return nil, errorf(op, ErrInvalid, "variable %s has dtype %v, the value %v", v.Name(), v.DType(), t.DType())
	case !t.SameShape(v.components[0].load()):
		return nil, errorf(op, ErrInvalid, "shapes %s of the value and %s of variable %s must be equal", tensor.FormatShape(t.Shape()), tensor.FormatShape(v.Shape()), v.Name())
	}
	return t, nil
}

// mine reports an error if the variable belongs to another strategy.
func (v *Variable) mine(op string, s *Strategy) error {
	if v.strategy != s {
		return errorf(op, ErrContext, "mixing different strategies: variable %s belongs to %v, the context to %v, which is not it", v.Name(), v.strategy, s)
	}
	return nil
}

// componentOf returns a replica's part of a value: its component of a distributed value or variable, or the value.
func componentOf(replica int, x Value) (Value, error) {
	if src, ok := x.(*Variable); ok && replica < len(src.components) {
		return src.components[replica].load(), nil
	}
	return SelectReplica(replica, x)
}

// undoLog holds what a Run has overwritten.
type undoLog struct {
	mu      sync.Mutex
	changed []*component
}

// store sets a component, keeping its old value until the Run in progress has succeeded.
func (s *Strategy) store(c *component, t *tensor.Tensor) {
	if s.running.Load() && c.saved != s.runs {
		c.before, c.saved = c.load(), s.runs
		s.undo.mu.Lock()
		s.undo.changed = append(s.undo.changed, c)
		s.undo.mu.Unlock()
	}
	c.value.Store(t)
}

// clear makes what the Run has written final.
func (u *undoLog) clear() {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, c := range u.changed {
		c.before = nil
	}
	clear(u.changed)
	u.changed = u.changed[:0]
}

// restore takes back what the Run has written.
func (u *undoLog) restore() {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, c := range u.changed {
		c.value.Store(c.before)
		c.before = nil
	}
	clear(u.changed)
	u.changed = u.changed[:0]
}
