package record

import (
	"fmt"

	"github.com/gomlx/compute"
)

// Emission adds recorded operations to another graph.
type Emission struct {
	Values map[*Value]compute.Value // their counterparts in that graph

	to    compute.Builder
	named map[*Function]compute.Function
}

// NewEmission returns an emission to the graph of a builder. The caller sets the Values that operations need from
// elsewhere.
func NewEmission(to compute.Builder) *Emission {
	return &Emission{Values: map[*Value]compute.Value{}, to: to, named: map[*Function]compute.Function{}}
}

// Add adds o to a function of the graph, and its results to Values.
func (e *Emission) Add(o *Op, f compute.Function) error {
	in := make([]compute.Value, len(o.Inputs))
	for i, v := range o.Inputs {
		if v != nil {
			in[i] = e.Values[v]
		}
	}
	functions := make([]compute.Function, len(o.Functions))
	for i, g := range o.Functions {
		var err error
		if functions[i], err = e.function(g); err != nil {
			return err
		}
	}
	out, err := o.Emit(f, in, functions)
	if err != nil {
		return fmt.Errorf("%s: %w", o.Name, err)
	}
	for i, v := range o.Outputs {
		e.Values[v] = out[i]
	}
	return nil
}

// function rebuilds a closure, every time, or a function with a name, once.
func (e *Emission) function(g *Function) (compute.Function, error) {
	if f := e.named[g]; f != nil {
		return f, nil
	}
	var f compute.Function
	var err error
	if g.Parent() != nil {
		f, err = e.to.Main().Closure()
	} else if f, err = e.to.NewFunction(g.Name()); err == nil {
		e.named[g] = f
	}
	if err != nil {
		return nil, err
	}
	for _, o := range g.Ops {
		if err := e.Add(o, f); err != nil {
			return nil, err
		}
	}
	outputs := make([]compute.Value, len(g.Outputs))
	for i, v := range g.Outputs {
		outputs[i] = e.Values[v]
	}
	return f, f.Return(outputs, nil)
}

// Needs lists the values of the main function that o uses: its inputs, without those that were omitted, and what its
// functions capture.
func (o *Op) Needs() []*Value { return append(ofMain(o.Inputs), o.Captured()...) }

// Captured lists the values of the main function that the functions of o use.
func (o *Op) Captured() []*Value {
	var list []*Value
	for _, f := range o.Functions {
		list = append(list, ofMain(f.Outputs)...)
		for _, inner := range f.Ops {
			list = append(list, inner.Needs()...)
		}
	}
	return list
}

func ofMain(values []*Value) (list []*Value) {
	for _, v := range values {
		if v != nil && v.Op.Fn == v.Op.Fn.Of.Entry {
			list = append(list, v)
		}
	}
	return list
}
