package stages

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/shapes"
)

// function records the operations of one function: the main one, one with a name, or a closure.
type function struct {
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
func (f *function) add(name string, attributes []any,
	emit func(to compute.Function, in []compute.Value) ([]compute.Value, error), inputs ...compute.Value) ([]compute.Value,
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
	v, err := first1(f.add("Constant", []any{constant(flat, dims)},
		func(to compute.Function, _ []compute.Value) ([]compute.Value, error) {
			return list1(to.Constant(flat, dims...))
		}))
	if err == nil {
		v.(*value).op.literal = flat
	}
	return v, err
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
	if r := f.b.recorder; r.noting {
		r.noted = append(r.noted, v.(*value))
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

func (f *function) Call(called compute.Function, inputs ...compute.Value) ([]compute.Value, error) {
	return f.withFunctions("Call", nil, []compute.Function{called}, inputs,
		func(to compute.Function, in []compute.Value, functions []compute.Function) ([]compute.Value, error) {
			return to.Call(functions[0], in...)
		})
}

func (f *function) Sort(comparator compute.Function, axis int, isStable bool, inputs ...compute.Value) ([]compute.Value,
	error,
) {
	return f.withFunctions("Sort", []any{axis, isStable}, []compute.Function{comparator}, inputs,
		func(to compute.Function, in []compute.Value, functions []compute.Function) ([]compute.Value, error) {
			return to.Sort(functions[0], axis, isStable, in...)
		})
}

func (f *function) While(cond, body compute.Function, initialState ...compute.Value) ([]compute.Value, error) {
	return f.withFunctions("While", nil, []compute.Function{cond, body}, initialState,
		func(to compute.Function, in []compute.Value, functions []compute.Function) ([]compute.Value, error) {
			return to.While(functions[0], functions[1], in...)
		})
}

func (f *function) If(pred compute.Value, trueBranch, falseBranch compute.Function) ([]compute.Value, error) {
	return f.withFunctions("If", nil, []compute.Function{trueBranch, falseBranch}, []compute.Value{pred},
		func(to compute.Function, in []compute.Value, functions []compute.Function) ([]compute.Value, error) {
			return to.If(in[0], functions[0], functions[1])
		})
}

func (f *function) withFunctions(name string, attributes []any, functions []compute.Function, inputs []compute.Value,
	emit emitter,
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

func (f *function) DynamicReshape(operand compute.Value, dimensions ...compute.DynamicDimensionSpec) (compute.Value,
	error,
) {
	dimensions = slices.Clone(dimensions)
	inputs := []compute.Value{operand}
	static := slices.Clone(dimensions)
	for i, d := range dimensions {
		inputs, static[i].Value = append(inputs, d.Value), nil
	}
	return first1(f.add("DynamicReshape", []any{static},
		func(to compute.Function, in []compute.Value) ([]compute.Value, error) {
			list := slices.Clone(dimensions)
			for i := range list {
				list[i].Value = in[1+i]
			}
			return list1(to.DynamicReshape(in[0], list...))
		}, inputs...))
}

func (f *function) QuantizedEmbeddingLookup(data, indices compute.Value, q *compute.Quantization) (compute.Value,
	error,
) {
	return first1(f.add("QuantizedEmbeddingLookup", []any{*quantization(q, []compute.Value{nil, nil})},
		func(to compute.Function, in []compute.Value) ([]compute.Value, error) {
			return list1(to.QuantizedEmbeddingLookup(in[0], in[1], quantization(q, in[2:])))
		}, data, indices, q.Scale, q.ZeroPoint))
}

func (f *function) FusedQuantizedDense(x, weights, bias compute.Value, q *compute.Quantization,
	activation compute.ActivationType,
) (compute.Value, error) {
	return first1(f.add("FusedQuantizedDense", []any{*quantization(q, []compute.Value{nil, nil}), activation},
		func(to compute.Function, in []compute.Value) ([]compute.Value, error) {
			return list1(to.FusedQuantizedDense(in[0], in[1], in[2], quantization(q, in[3:]), activation))
		}, x, weights, bias, q.Scale, q.ZeroPoint))
}

// quantization returns q with other values.
func quantization(q *compute.Quantization, in []compute.Value) *compute.Quantization {
	c := *q
	c.Scale, c.ZeroPoint = in[0], in[1]
	return &c
}

func (f *function) FusedScaledDotProductAttention(query, key, val compute.Value, layout compute.AttentionAxesLayout,
	options *compute.ScaledDotProductAttentionConfig,
) (compute.Value, []compute.Value, error) {
	out, err := f.add("FusedScaledDotProductAttention", attentionAttributes(layout, options),
		func(to compute.Function, in []compute.Value) ([]compute.Value, error) {
			output, states, err := to.FusedScaledDotProductAttention(in[0], in[1], in[2], layout, attention(options, in[3:]))
			return append([]compute.Value{output}, states...), err
		}, append([]compute.Value{query, key, val}, attentionValues(options)...)...)
	if err != nil {
		return nil, nil, err
	}
	return out[0], out[1:], nil
}

func (f *function) FusedScaledDotProductAttentionVJP(query, key, val compute.Value, layout compute.AttentionAxesLayout,
	options *compute.ScaledDotProductAttentionConfig, output compute.Value, states []compute.Value,
	dOutput compute.Value,
) (compute.Value, compute.Value, compute.Value, error) {
	inputs := append([]compute.Value{query, key, val, output, dOutput}, attentionValues(options)...)
	n := len(inputs)
	return first3(f.add("FusedScaledDotProductAttentionVJP", attentionAttributes(layout, options),
		func(to compute.Function, in []compute.Value) ([]compute.Value, error) {
			return list3(to.FusedScaledDotProductAttentionVJP(in[0], in[1], in[2], layout, attention(options, in[5:n]), in[3],
				in[n:], in[4]))
		}, append(inputs, states...)...))
}

// attentionValues lists the values in options, nil for those that are not set.
func attentionValues(options *compute.ScaledDotProductAttentionConfig) []compute.Value {
	if options == nil {
		return nil
	}
	return []compute.Value{options.QuerySeqLen, options.KeyValueSeqLen, options.Bias}
}

// attentionAttributes lists the parts of layout and options that are not values.
func attentionAttributes(layout compute.AttentionAxesLayout, options *compute.ScaledDotProductAttentionConfig) []any {
	if options == nil {
		return []any{layout}
	}
	return []any{layout, *attention(options, []compute.Value{nil, nil, nil})}
}

// attention returns options with other values.
func attention(options *compute.ScaledDotProductAttentionConfig,
	in []compute.Value,
) *compute.ScaledDotProductAttentionConfig {
	if options == nil {
		return nil
	}
	c := *options
	c.QuerySeqLen, c.KeyValueSeqLen, c.Bias = in[0], in[1], in[2]
	return &c
}

func first1(list []compute.Value, err error) (compute.Value, error) {
	if err != nil {
		return nil, err
	}
	return list[0], nil
}

func first2(list []compute.Value, err error) (a, b compute.Value, _ error) {
	if err != nil {
		return nil, nil, err
	}
	return list[0], list[1], nil
}

func first3(list []compute.Value, err error) (a, b, c compute.Value, _ error) {
	if err != nil {
		return nil, nil, nil, err
	}
	return list[0], list[1], list[2], nil
}

func list1(a compute.Value, err error) ([]compute.Value, error) { return []compute.Value{a}, err }

func list2(a, b compute.Value, err error) ([]compute.Value, error) { return []compute.Value{a, b}, err }

func list3(a, b, c compute.Value, err error) ([]compute.Value, error) {
	return []compute.Value{a, b, c}, err
}
