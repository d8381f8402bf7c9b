package distribute

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/distribute/internal/undo"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Synchronization specifies when a variable's components are combined (TensorFlow's VariableSynchronization).
type Synchronization uint8

// The synchronizations.
const (
	Auto            Synchronization = iota // OnWrite
	OnWrite                                // by writes: all components stay equal
	OnRead                                 // by reads in cross-replica context: each replica writes its own component
	SynchronizeNone                        // never; only with one device
)

// String returns TensorFlow's name: "ON_WRITE".
func (s Synchronization) String() string {
	return enumName("Synchronization", uint8(s), "AUTO", "ON_WRITE", "ON_READ", "NONE")
}

// Aggregation specifies how the replicas' values are combined (TensorFlow's VariableAggregation).
type Aggregation uint8

// The aggregations.
const (
	AggregateNone  Aggregation = iota // not at all
	AggregateSum                      // the sum over all replicas
	AggregateMean                     // the mean over all replicas
	AggregateFirst                    // replica 0's value; with several workers, that of each worker's first replica
)

// String returns TensorFlow's name: "ONLY_FIRST_REPLICA".
func (a Aggregation) String() string {
	return enumName("Aggregation", uint8(a), "NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")
}

// VariableConfig configures a variable.
type VariableConfig struct {
	// Name is the variable's name. Default "Variable". Several variables may have the same name, as in
	// TensorFlow.
	Name string
	// Initial is the value on every replica, a tensor or a host number. It is copied.
	Initial Value
	// Init makes the value if Initial is nil. It is called once.
	Init func(context.Context) (Value, error)
	// Synchronization specifies when the components are combined. Default: OnWrite, a mirrored variable.
	Synchronization Synchronization
	// Aggregation specifies how values that replicas write (OnWrite) or hold (OnRead) are combined. Default: none.
	Aggregation Aggregation
	// NotTrainable excludes the variable from training.
	NotTrainable bool
	// Trainable includes a sync-on-read variable, which is excluded by default.
	Trainable bool
}

// Variable is a value on every replica that is kept between steps (TensorFlow's DistributedVariable). A mirrored
// variable (OnWrite) is kept equal on all replicas by its updates. A sync-on-read variable (OnRead) has separate
// values on the replicas, which are aggregated when it is read in cross-replica context.
//
// A write replaces a component's tensor and leaves the old one unchanged: a tensor that was read keeps its values,
// and must not be changed. Values may be read while another goroutine writes.
//
// The writes of a Run are committed only if the whole Run succeeds. After a failed Run every component has the
// value from before it, and code of that Run that goes on cannot write any more.
//
// With [NewCentralStorageStrategy] a variable has one component for all replicas, on the parameter device,
// whatever its synchronization. The replicas' writes are combined by the aggregation, which is then required.
// With [NewOneDeviceStrategy] and [Default] it is a plain variable.
type Variable struct {
	strategy   *Strategy
	name       string
	devices    []device.Spec // of the components
	sync       Synchronization
	agg        Aggregation
	trainable  bool
	components []*undo.Cell // values by replica, or one for all
	storage    Storage      // of the components; nil: they have the values
	reforms    int          // Strategy.reforms of the components
	dtype      tensor.DType
	shape      []int
}

// Storage holds the components of a variable outside of this package, such as in the memory of a compute engine.
// component is the index of a local replica, or 0 if all replicas share one component. Several goroutines may call
// the methods at the same time.
type Storage interface {
	// Load returns a copy of a component's value.
	Load(component int) (*tensor.Tensor, error)
	// Store sets a component's value, of the same dtype and shape, by copying it.
	Store(component int, value *tensor.Tensor) error
}

// Name returns the variable's name, as TensorFlow writes it: "Variable:0".
func (v *Variable) Name() string { return v.name + ":0" }

// Strategy returns the strategy that the variable belongs to.
func (v *Variable) Strategy() *Strategy { return v.strategy }

// variableKind specifies how a strategy implements a variable.
type variableKind uint8

const (
	plainVariable       variableKind = iota // one component, for one replica
	mirroredVariable                        // one component per replica, kept equal by writes
	syncOnReadVariable                      // one component per replica, combined by reads
	aggregatingVariable                     // one component for several replicas; combined writes
)

// String returns the name of TensorFlow's class.
func (k variableKind) String() string {
	return [...]string{"ResourceVariable", "MirroredVariable", "SyncOnReadVariable", "AggregatingVariable"}[k]
}

// Kind returns how the strategy implements the variable, as the name of TensorFlow's class: MirroredVariable,
// SyncOnReadVariable, AggregatingVariable (one component for several replicas) or ResourceVariable (of one replica).
func (v *Variable) Kind() string { return v.kind().String() }

func (v *Variable) kind() variableKind {
	switch {
	case v.strategy.kind.mirrors() && v.sync == OnRead:
		return syncOnReadVariable
	case v.strategy.kind.mirrors():
		return mirroredVariable
	case len(v.strategy.devices) > 1:
		return aggregatingVariable
	}
	return plainVariable
}

// Devices returns the components' devices, in TensorFlow's full form.
func (v *Variable) Devices() []string { return v.strategy.deviceNames(v.devices) }

// Config returns the configuration: when the components are combined and how, and whether the variable takes part in
// training. It has no initial value.
func (v *Variable) Config() VariableConfig {
	return VariableConfig{
		Name: v.name, Synchronization: v.sync, Aggregation: v.agg, Trainable: v.trainable, NotTrainable: !v.trainable,
	}
}

// DType returns the type of the elements.
func (v *Variable) DType() tensor.DType { return v.dtype }

// Shape returns the shape; the caller must not change it.
func (v *Variable) Shape() []int { return v.shape }

// Values returns the components' values, by replica, or the value of the one component that all replicas share. For a
// variable of [Strategy.VariableIn] it panics if the storage fails; [Variable.Read] returns that error.
func (v *Variable) Values() []Value {
	out := make([]Value, len(v.components))
	for i := range v.components {
		out[i] = v.mustLoad(i)
	}
	return out
}

// load returns a component's value.
func (v *Variable) load(op string, i int) (*tensor.Tensor, error) {
	t, err := v.components[i].Load()
	if err != nil {
		return nil, errorf(op, nil, "reading %s: %w", v.ComponentName(i), err)
	}
	return t, nil
}

// mustLoad is load for methods without an error.
func (v *Variable) mustLoad(i int) *tensor.Tensor {
	t, err := v.load("Values", i)
	if err != nil {
		panic(err)
	}
	return t
}

// on returns the index of a replica's component.
func (v *Variable) on(replica int) int { return min(replica, len(v.components)-1) }

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
	for i := range v.components {
		t := v.mustLoad(i)
		lines[i] = fmt.Sprintf("<tf.Variable '%s' shape=%s dtype=%v, numpy=%s>", v.ComponentName(i),
			tensor.FormatShape(t.Shape()), t.DType(), numpy(t))
	}
	kind := v.kind()
	if kind == plainVariable || kind == aggregatingVariable {
		return lines[0]
	}
	for i := range lines {
		lines[i] = fmt.Sprintf("  %d: %s", i, lines[i])
	}
	return kind.String() + ":{\n" + strings.Join(lines, ",\n") + "\n}"
}

// numpy prints a tensor as TensorFlow does in a variable: on separate lines if it takes several.
func numpy(t *tensor.Tensor) string {
	s := t.Repr()
	if strings.Contains(s, "\n") {
		s = "\n" + s
	}
	return s
}

func (v *Variable) places() []device.Spec { return v.devices }

func (v *Variable) first() *tensor.Tensor { return v.mustLoad(0) }

func (v *Variable) keptEqual() bool { return v.sync == OnWrite }

// Read returns the value (TensorFlow's read_value). In replica context it is the replica's own. In cross-replica
// context it is the mirrored variable's value on the current device (see [Strategy.Cross]) or else on replica 0, or
// the aggregate of a sync-on-read variable. In an update function it is the component's value.
func (v *Variable) Read(in Context) (*tensor.Tensor, error) {
	const op = "Read"
	switch in := in.(type) {
	case *Replica:
		if err := v.checkOwner(op, in.strategy); err != nil {
			return nil, err
		}
		t, err := v.load(op, v.on(in.local))
		if err == nil && len(v.components) < len(in.strategy.devices) {
			t = t.Reshape(t.Shape()...) // what a replica reads is its value, also of the only component
		}
		return t, err
	case *CrossReplica:
		if err := errors.Join(v.checkOwner(op, in.strategy), in.valid(op)); err != nil {
			return nil, err
		}
		return v.readCross(in.context(), op, in.device)
	case *Component:
		if err := in.of(op, v); err != nil {
			return nil, err
		}
		return v.load(op, in.index)
	}
	return nil, errNoContext(op)
}

func errNoContext(op string) error {
	return errorf(op, ErrContext, "no context given: want the *Replica of a step, a *CrossReplica or a *Component")
}

// readCross returns the value in cross-replica context. A mirrored variable is read on the device at, if it has
// a component there.
func (v *Variable) readCross(ctx context.Context, op string, at device.Spec) (*tensor.Tensor, error) {
	if v.kind() != syncOnReadVariable {
		return v.load(op, max(slices.Index(v.devices, at), 0))
	}
	reduce := Sum
	switch v.agg {
	case AggregateFirst:
		return v.load(op, 0)
	case AggregateNone:
		return nil, errorf(op, ErrInvalid, "could not convert from `VariableAggregation.NONE`: reading the sync-on-read "+
			"variable %s in cross-replica context needs an aggregation", v.Name())
	case AggregateMean:
		reduce = Mean
	}
	if v.strategy.size == 1 {
		return v.load(op, 0)
	}
	values := make([]Value, len(v.components))
	for i := range values {
		var err error
		if values[i], err = v.load(op, i); err != nil {
			return nil, err
		}
	}
	out, err := v.strategy.reduceLeaf(ctx, op, reduce, values, v.devices[:1], v.strategy.options)
	if err != nil {
		return nil, err
	}
	return out.(*tensor.Tensor), nil
}

// checkOwner returns an error if the variable belongs to another strategy.
func (v *Variable) checkOwner(op string, s *Strategy) error {
	if v.strategy != s {
		return errorf(op, ErrContext, "mixing different strategies: variable %s belongs to %v, the context to another "+
			"strategy, %v", v.Name(), v.strategy, s)
	}
	if v.reforms != s.reforms {
		return errorf(op, ErrInvalid, "variable %s was made before the replicas were placed by Reform, which did not get "+
			"it: give Reform all variables", v.Name())
	}
	return nil
}

// componentOf returns a replica's part of a value: its component of a distributed value or variable, or the
// value itself.
func componentOf(replica int, x Value) (Value, error) {
	x = untyped(x, false)
	if src, ok := x.(*Variable); ok {
		return src.load("Read", src.on(replica))
	}
	return selectReplica(replica, x, nil)
}
