// Package record records the operations of a GoMLX graph while it is built, and passes each to a wrapped backend,
// which infers the shapes and reports errors. A recorded operation can be added to other graphs ([Emission]).
package record

//go:generate go run generate.go

import (
	"fmt"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/shapes"
)

// Builder records a graph. The embedded Builder is that of the wrapped backend.
type Builder struct {
	compute.Builder
	Entry      *Function   // the main function
	Functions  []*Function // all of them
	Parameters []*Value    // of the main function

	ComposeBatchNorm bool // make batch normalization of other operations, for a backend that has none

	// WidenHalf computes products of float16 and bfloat16 in float32, and makes GoMLX build fused operations of other
	// ones, for a backend that has fused operations of float32 and float64 only.
	WidenHalf bool

	// Check, if set, is called with each operation before it is added. It may change its name, and set its Note. An error
	// keeps the operation out of the graph, and is returned to the program that adds it.
	Check func(*Op) error

	ops int
}

// New returns a builder that wraps real.
func New(real compute.Builder) *Builder {
	b := &Builder{Builder: real}
	b.Entry = b.function(&Function{Base: real.Main(), name: compute.MainName})
	return b
}

// Main implements compute.Builder.
func (b *Builder) Main() compute.Function { return b.Entry }

// NewFunction implements compute.Builder.
func (b *Builder) NewFunction(name string) (compute.Function, error) {
	real, err := b.Builder.NewFunction(name)
	if err != nil {
		return nil, err
	}
	return b.function(&Function{Base: real, name: name}), nil
}

func (b *Builder) function(f *Function) *Function {
	f.Of, f.Record, f.RecordWithFunctions = b, f.add, f.withFunctions
	f.ErrFn = func(op compute.OpType) error {
		return fmt.Errorf("the operation %v cannot be recorded: this version of Lockstep does not know it", op)
	}
	b.Functions = append(b.Functions, f)
	return f
}

// OpShape implements compute.Builder.
func (b *Builder) OpShape(v compute.Value) (shapes.Shape, error) {
	real, err := unwrap("OpShape", v)
	if err != nil {
		return shapes.Shape{}, err
	}
	return b.Builder.OpShape(real)
}

// Value is one output of an operation.
type Value struct {
	Op    *Op
	Real  compute.Value // in the graph of the wrapped backend
	Shape shapes.Shape
}

// unwrap returns the backend's value, nil for nil: some operations have optional arguments.
func unwrap(what string, v compute.Value) (compute.Value, error) {
	if v == nil {
		return nil, nil
	}
	x, ok := v.(*Value)
	if !ok {
		return nil, fmt.Errorf("%s was given a %T, which is not a value of this graph", what, v)
	}
	return x.Real, nil
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

// Emitter adds an operation to a function of another graph. functions are the counterparts, in that graph, of the
// operation's function arguments.
type Emitter func(to compute.Function, in []compute.Value, functions []compute.Function) ([]compute.Value, error)

// Op is a recorded operation.
type Op struct {
	Name       string
	Attributes []any // the arguments that are not values
	Index      int   // in order of recording
	Fn         *Function
	Inputs     []*Value // nil for an omitted argument
	Functions  []*Function
	Outputs    []*Value
	Emit       Emitter
	Parameter  int // its index if it is a parameter
	Literal    any // the elements of a constant
	Note       any // what the owner of the Builder knows about it
}
