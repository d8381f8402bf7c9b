package record

import (
	"fmt"
	"reflect"
	"slices"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/shapes"
)

// Function records the operations of one function: the main one, one with a name, or a closure.
type Function struct {
	Operations

	Of      *Builder
	Base    compute.Function // in the graph of the wrapped backend
	Ops     []*Op            // including parameters
	Outputs []*Value

	name   string
	parent *Function // of a closure
}

var _ compute.Function = (*Function)(nil)

// Name implements compute.Function.
func (f *Function) Name() string { return f.name }

// Builder implements compute.Function.
func (f *Function) Builder() compute.Builder { return f.Of }

// Parent implements compute.Function.
func (f *Function) Parent() compute.Function {
	if f.parent == nil {
		return nil
	}
	return f.parent
}

// Closure implements compute.Function.
func (f *Function) Closure() (compute.Function, error) {
	real, err := f.Base.Closure()
	if err != nil {
		return nil, err
	}
	return f.Of.function(&Function{Base: real, parent: f}), nil
}

// Shape implements compute.Function.
func (f *Function) Shape(v compute.Value) (shapes.Shape, error) {
	real, err := unwrap("Shape", v)
	if err != nil {
		return shapes.Shape{}, err
	}
	return f.Base.Shape(real)
}

// add records an operation and adds it to the whole graph. attributes are its arguments that are not values.
func (f *Function) add(name string, attributes []any, emit Emit, inputs ...compute.Value) ([]compute.Value, error) {
	if err := f.fuses(name, inputs); err != nil {
		return nil, err
	}
	o := &Op{
		Name: name, Attributes: attributes,
		Emit: func(to compute.Function, in []compute.Value, _ []compute.Function) ([]compute.Value, error) {
			return emit(to, in)
		},
	}
	return f.record(o, inputs)
}

// record adds o to the whole graph, and to the list of operations if the backend accepts it.
func (f *Function) record(o *Op, inputs []compute.Value) ([]compute.Value, error) {
	real, err := unwrapAll(o.Name, inputs)
	if err != nil {
		return nil, err
	}
	o.Fn, o.Index = f, f.Of.ops
	if f.Of.Check != nil {
		if err := f.Of.Check(o); err != nil {
			return nil, err
		}
	}
	functions := make([]compute.Function, len(o.Functions))
	for i, g := range o.Functions {
		functions[i] = g.Base
	}
	results, err := o.Emit(f.Base, real, functions)
	if err != nil {
		return nil, err
	}
	for _, v := range inputs {
		x, _ := v.(*Value)
		o.Inputs = append(o.Inputs, x)
	}
	f.Of.ops++
	f.Ops = append(f.Ops, o)
	out := make([]compute.Value, len(results))
	for i, r := range results {
		v := &Value{Op: o, Real: r, Shape: shapes.Invalid()}
		if s, err := f.Of.Builder.OpShape(r); err == nil {
			v.Shape = s
		}
		o.Outputs = append(o.Outputs, v)
		out[i] = v
	}
	return out, nil
}

// Parameter implements compute.Function.
func (f *Function) Parameter(name string, shape shapes.Shape, sharding *compute.ShardingSpec) (compute.Value, error) {
	o := &Op{Name: "Parameter", Attributes: []any{name, shape}, Parameter: len(f.Of.Parameters)}
	o.Emit = func(to compute.Function, _ []compute.Value, _ []compute.Function) ([]compute.Value, error) {
		return list1(to.Parameter(name, shape, sharding))
	}
	v, err := first1(f.record(o, nil))
	if err == nil && f == f.Of.Entry {
		f.Of.Parameters = append(f.Of.Parameters, v.(*Value))
	}
	return v, err
}

// Constant implements compute.Function.
func (f *Function) Constant(flat any, dims ...int) (compute.Value, error) {
	dims = slices.Clone(dims)
	if x := reflect.ValueOf(flat); x.Kind() == reflect.Slice { // a copy, as the wrapped backend makes
		flat = reflect.AppendSlice(reflect.MakeSlice(x.Type(), 0, x.Len()), x).Interface()
	}
	v, err := first1(f.add("Constant", []any{dims},
		func(to compute.Function, _ []compute.Value) ([]compute.Value, error) {
			return list1(to.Constant(flat, dims...))
		}))
	if err == nil {
		v.(*Value).Op.Literal = flat
	}
	return v, err
}

// Identity implements compute.Function.
func (f *Function) Identity(x compute.Value) (compute.Value, error) {
	return first1(f.add("Identity", nil, func(to compute.Function, in []compute.Value) ([]compute.Value, error) {
		return list1(to.Identity(in[0]))
	}, x))
}

// AllReduce implements compute.Function.
func (f *Function) AllReduce(operands []compute.Value, reduction compute.ReduceOpType, groups [][]int) ([]compute.Value,
	error,
) {
	return f.add("AllReduce", []any{reduction, groups},
		func(to compute.Function, in []compute.Value) ([]compute.Value, error) {
			return to.AllReduce(in, reduction, groups)
		}, operands...)
}

// Return implements compute.Function.
func (f *Function) Return(outputs []compute.Value, shardings []*compute.ShardingSpec) error {
	real, err := unwrapAll("Return", outputs)
	if err != nil {
		return err
	}
	if err := f.Base.Return(real, shardings); err != nil {
		return err
	}
	for _, v := range outputs {
		f.Outputs = append(f.Outputs, v.(*Value))
	}
	return nil
}

func (f *Function) withFunctions(name string, attributes []any, functions []compute.Function, inputs []compute.Value,
	emit Emitter,
) ([]compute.Value, error) {
	o := &Op{Name: name, Attributes: attributes, Emit: emit}
	for _, g := range functions {
		r, ok := g.(*Function)
		if !ok {
			return nil, fmt.Errorf("%s was given a %T, which is not a function of this graph", name, g)
		}
		o.Functions = append(o.Functions, r)
	}
	return f.record(o, inputs)
}
