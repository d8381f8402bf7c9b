package stages

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/shapes"

	"github.com/lockstep-ml/lockstep/internal/record"
)

// function records the operations of one function: the main one, one with a name, or a closure. The operations that
// a newer version of GoMLX adds return an error.
type function struct {
	record.Operations

	b       *builder
	real    compute.Function
	name    string
	parent  *function // of a closure
	ops     []*op     // including parameters
	outputs []*value
}

var _ compute.Function = (*function)(nil)

func (f *function) Name() string             { return f.name }
func (f *function) Builder() compute.Builder { return f.b }

func (f *function) Parent() compute.Function {
	if f.parent == nil {
		return nil
	}
	return f.parent
}

func (f *function) Closure() (compute.Function, error) {
	real, err := f.real.Closure()
	if err != nil {
		return nil, err
	}
	return f.b.function(&function{real: real, parent: f}), nil
}

func (f *function) Shape(v compute.Value) (shapes.Shape, error) {
	real, err := unwrap("Shape", v)
	if err != nil {
		return shapes.Shape{}, err
	}
	return f.real.Shape(real)
}

// add records an operation and adds it to the whole graph. attributes are its arguments that are not values.
func (f *function) add(name string, attributes []any, emit record.Emit, inputs ...compute.Value) ([]compute.Value,
	error,
) {
	o := &op{
		name: name, attributes: attributes,
		emit: func(to compute.Function, in []compute.Value, _ []compute.Function) ([]compute.Value, error) {
			return emit(to, in)
		},
	}
	return f.record(o, inputs)
}

// record adds o to the whole graph, and to the list of operations if the backend accepts it.
func (f *function) record(o *op, inputs []compute.Value) ([]compute.Value, error) {
	real, err := unwrapAll(o.name, inputs)
	if err != nil {
		return nil, err
	}
	functions := make([]compute.Function, len(o.functions))
	for i, g := range o.functions {
		functions[i] = g.real
	}
	results, err := o.emit(f.real, real, functions)
	if err != nil {
		return nil, err
	}
	for _, v := range inputs {
		x, _ := v.(*value)
		o.inputs = append(o.inputs, x)
	}
	o.fn, o.index = f, f.b.ops
	f.b.ops++
	f.ops = append(f.ops, o)
	out := make([]compute.Value, len(results))
	for i, r := range results {
		v := &value{op: o, real: r}
		o.outputs = append(o.outputs, v)
		out[i] = v
	}
	return out, nil
}

func (f *function) Parameter(name string, shape shapes.Shape, sharding *compute.ShardingSpec) (compute.Value, error) {
	o := &op{name: "Parameter", attributes: []any{name, shape}, kind: parameterOp, parameter: len(f.b.parameters)}
	o.emit = func(to compute.Function, _ []compute.Value, _ []compute.Function) ([]compute.Value, error) {
		return list1(to.Parameter(name, shape, sharding))
	}
	v, err := first1(f.record(o, nil))
	if err == nil && f == f.b.main {
		f.b.parameters = append(f.b.parameters, v.(*value))
	}
	return v, err
}

func (f *function) Constant(flat any, dims ...int) (compute.Value, error) {
	dims = slices.Clone(dims)
	return first1(f.add("Constant", []any{constant(flat, dims)},
		func(to compute.Function, _ []compute.Value) ([]compute.Value, error) {
			return list1(to.Constant(flat, dims...))
		}))
}

// Identity adds an identity, or an all-reduce within Recorder.AllReduce.
func (f *function) Identity(x compute.Value) (compute.Value, error) {
	o := &op{name: "Identity", emit: func(to compute.Function, in []compute.Value, _ []compute.Function) ([]compute.Value,
		error,
	) {
		return list1(to.Identity(in[0]))
	}}
	if f.b.recorder.next != "" {
		if f != f.b.main {
			return nil, errors.New("an all-reduce must not be inside a condition, a loop or another function: replicas could " +
				"execute it in different orders")
		}
		o.name, o.kind, o.parameter = f.b.recorder.next, sumOp, len(f.b.sums)
		f.b.recorder.next = ""
	}
	v, err := first1(f.record(o, []compute.Value{x}))
	if err != nil {
		return nil, err
	}
	if o.kind == sumOp {
		f.b.sums = append(f.b.sums, v.(*value))
	}
	return v, nil
}

// AllReduce would be the backend's all-reduce between its devices. Lockstep does not support it.
func (f *function) AllReduce([]compute.Value, compute.ReduceOpType, [][]int) ([]compute.Value, error) {
	return nil, errors.New("graph.Distributed().AllReduce is not supported in models that Lockstep distributes: use " +
		"gomlx.AllReduce")
}

func (f *function) Return(outputs []compute.Value, shardings []*compute.ShardingSpec) error {
	real, err := unwrapAll("Return", outputs)
	if err != nil {
		return err
	}
	for _, v := range outputs {
		f.outputs = append(f.outputs, v.(*value))
	}
	if f == f.b.main && f.b.recorder.Defer {
		return nil // when it is compiled
	}
	return f.real.Return(real, shardings)
}

func (f *function) withFunctions(name string, attributes []any, functions []compute.Function, inputs []compute.Value,
	emit record.Emitter,
) ([]compute.Value, error) {
	o := &op{name: name, attributes: attributes, emit: emit}
	for _, g := range functions {
		r, ok := g.(*function)
		if !ok {
			return nil, fmt.Errorf("stages: %s was given a %T, which is not a function of this graph", name, g)
		}
		o.functions = append(o.functions, r)
	}
	return f.record(o, inputs)
}

func first1(list []compute.Value, err error) (compute.Value, error) {
	if err != nil {
		return nil, err
	}
	return list[0], nil
}

func list1(a compute.Value, err error) ([]compute.Value, error) { return []compute.Value{a}, err }
