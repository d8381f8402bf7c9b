package stages

import (
	"fmt"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/shapes"

	"github.com/lockstep-ml/lockstep/internal/record"
)

// Recorder is the backend of one graph. It computes nothing, and owns no resources.
type Recorder struct {
	compute.Backend

	// Defer postpones compilation: when GoMLX compiles a graph, its outputs are recorded, and the executable
	// is a [Deferred].
	Defer bool

	next string // if not empty, the next Identity becomes an all-reduce with this name
}

// New returns a Recorder that wraps b, for one graph.
func New(b compute.Backend) *Recorder { return &Recorder{Backend: b} }

// AllReduce calls identity, which must add one Identity to the graph, and turns that into an all-reduce. Its
// output is the sum of the input over the replicas. name is its name in errors. For GoMLX it is an identity,
// for which a gradient can be set.
func (r *Recorder) AllReduce(name string, identity func()) {
	r.next = name
	identity()
	r.next = ""
}

// Pending reports whether the Identity of the AllReduce in progress has not been added yet.
func (r *Recorder) Pending() bool { return r.next != "" }

// Builder implements compute.Backend.
func (r *Recorder) Builder(name string) compute.Builder {
	real := r.Backend.Builder(name)
	b := &builder{Builder: real, recorder: r, name: name}
	b.main = b.function(&function{real: real.Main(), name: compute.MainName})
	return b
}

// builder records operations. The methods that it does not override are for distribution by the backend,
// which Lockstep does not use.
type builder struct {
	compute.Builder
	recorder   *Recorder
	name       string
	main       *function
	functions  []*function // all of them
	parameters []*value
	sums       []*value // outputs of the all-reduces
	ops        int
}

func (b *builder) Main() compute.Function { return b.main }

func (b *builder) NewFunction(name string) (compute.Function, error) {
	real, err := b.Builder.NewFunction(name)
	if err != nil {
		return nil, err
	}
	return b.function(&function{real: real, name: name}), nil
}

func (b *builder) function(f *function) *function {
	f.b, f.Record, f.RecordWithFunctions = b, f.add, f.withFunctions
	f.ErrFn = func(op compute.OpType) error {
		return fmt.Errorf("gomlx: the operation %v cannot be recorded: this version of Lockstep does not know it", op)
	}
	b.functions = append(b.functions, f)
	return f
}

func (b *builder) OpShape(v compute.Value) (shapes.Shape, error) {
	real, err := unwrap("OpShape", v)
	if err != nil {
		return shapes.Shape{}, err
	}
	return b.Builder.OpShape(real)
}

// Compile returns the backend's executable, a [Program] if the graph has all-reduces, or a [Deferred].
func (b *builder) Compile() (compute.Executable, error) {
	if b.recorder.Defer {
		return &Deferred{b: b}, nil
	}
	return b.compile(nil)
}

func (b *builder) compile(buckets [][]int) (compute.Executable, error) {
	if len(b.sums) == 0 && len(buckets) < 2 {
		return b.Builder.Compile()
	}
	p, err := newProgram(b, buckets)
	if err != nil {
		return nil, err
	}
	return p, nil
}

// value is one output of an operation.
type value struct {
	op   *op
	real compute.Value // in the whole graph
}

// unwrap returns the backend's value, nil for nil: some operations have optional arguments.
func unwrap(what string, v compute.Value) (compute.Value, error) {
	if v == nil {
		return nil, nil
	}
	x, ok := v.(*value)
	if !ok {
		return nil, fmt.Errorf("stages: %s was given a %T, which is not a value of this graph", what, v)
	}
	return x.real, nil
}

func unwrapAll(what string, list []compute.Value) ([]compute.Value, error) {
	out := make([]compute.Value, len(list))
	for i, v := range list {
		var err error
		if out[i], err = unwrap(what, v); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// op is a recorded operation.
type op struct {
	name       string
	attributes []any // the arguments that are not values
	index      int   // in order of recording
	fn         *function
	inputs     []*value // nil for an omitted argument
	functions  []*function
	outputs    []*value
	emit       record.Emitter
	parameter  int // its index if kind is parameterOp or sumOp
	kind       opKind
	plan       // of operations of the main function
}

type opKind uint8

const (
	plainOp opKind = iota
	parameterOp
	sumOp
)

// needs lists the values of the main function that the operation uses, directly or in its functions.
func (o *op) needs() []*value {
	var list []*value
	add := func(inputs []*value) {
		for _, v := range inputs {
			if v != nil && v.op.fn == v.op.fn.b.main {
				list = append(list, v)
			}
		}
	}
	add(o.inputs)
	for _, f := range o.functions {
		add(f.outputs)
		for _, inner := range f.ops {
			add(inner.needs())
		}
	}
	return list
}
