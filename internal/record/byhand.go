package record

import (
	"slices"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/notimplemented"
)

// Operations has the methods of compute.Function that add operations, apart from Parameter, Constant, Identity,
// AllReduce and Return. It calls Record for each. The operations that a newer version of GoMLX adds return an error:
// the embedded Function has them.
type Operations struct {
	notimplemented.Function

	// Record adds an operation. attributes are its arguments that are not values. emit adds it to another function.
	Record func(name string, attributes []any, emit Emit, inputs ...compute.Value) ([]compute.Value, error)

	// RecordWithFunctions adds an operation with functions among its arguments.
	RecordWithFunctions func(name string, attributes []any, functions []compute.Function, inputs []compute.Value,
		emit Emitter) ([]compute.Value, error)
}

// Emit adds an operation to a function.
type Emit = func(to compute.Function, in []compute.Value) ([]compute.Value, error)

// Call implements compute.Function.
func (f *Operations) Call(called compute.Function, inputs ...compute.Value) ([]compute.Value, error) {
	return f.RecordWithFunctions("Call", nil, []compute.Function{called}, inputs,
		func(to compute.Function, in []compute.Value, functions []compute.Function) ([]compute.Value, error) {
			return to.Call(functions[0], in...)
		})
}

// Sort implements compute.Function.
func (f *Operations) Sort(comparator compute.Function, axis int, isStable bool, inputs ...compute.Value) (
	[]compute.Value, error,
) {
	return f.RecordWithFunctions("Sort", []any{axis, isStable}, []compute.Function{comparator}, inputs,
		func(to compute.Function, in []compute.Value, functions []compute.Function) ([]compute.Value, error) {
			return to.Sort(functions[0], axis, isStable, in...)
		})
}

// While implements compute.Function.
func (f *Operations) While(cond, body compute.Function, initialState ...compute.Value) ([]compute.Value, error) {
	return f.RecordWithFunctions("While", nil, []compute.Function{cond, body}, initialState,
		func(to compute.Function, in []compute.Value, functions []compute.Function) ([]compute.Value, error) {
			return to.While(functions[0], functions[1], in...)
		})
}

// If implements compute.Function.
func (f *Operations) If(pred compute.Value, trueBranch, falseBranch compute.Function) ([]compute.Value, error) {
	return f.RecordWithFunctions("If", nil, []compute.Function{trueBranch, falseBranch}, []compute.Value{pred},
		func(to compute.Function, in []compute.Value, functions []compute.Function) ([]compute.Value, error) {
			return to.If(in[0], functions[0], functions[1])
		})
}

// DynamicReshape implements compute.Function.
func (f *Operations) DynamicReshape(operand compute.Value, dimensions ...compute.DynamicDimensionSpec) (compute.Value,
	error,
) {
	static, values := dimensionValues(dimensions)
	return first1(f.Record("DynamicReshape", []any{static},
		func(to compute.Function, in []compute.Value) ([]compute.Value, error) {
			return list1(to.DynamicReshape(in[0], withValues(static, in[1:])...))
		}, append([]compute.Value{operand}, values...)...))
}

// DynamicBroadcastInDim implements compute.Function.
func (f *Operations) DynamicBroadcastInDim(operand compute.Value, broadcastAxes []int,
	dimensions ...compute.DynamicDimensionSpec,
) (compute.Value, error) {
	broadcastAxes = slices.Clone(broadcastAxes)
	static, values := dimensionValues(dimensions)
	return first1(f.Record("DynamicBroadcastInDim", []any{broadcastAxes, static},
		func(to compute.Function, in []compute.Value) ([]compute.Value, error) {
			return list1(to.DynamicBroadcastInDim(in[0], broadcastAxes, withValues(static, in[1:])...))
		}, append([]compute.Value{operand}, values...)...))
}

// DynamicIota implements compute.Function.
func (f *Operations) DynamicIota(dtype dtypes.DType, iotaAxis int, dimensions ...compute.DynamicDimensionSpec) (
	compute.Value, error,
) {
	static, values := dimensionValues(dimensions)
	return first1(f.Record("DynamicIota", []any{dtype, iotaAxis, static},
		func(to compute.Function, in []compute.Value) ([]compute.Value, error) {
			return list1(to.DynamicIota(dtype, iotaAxis, withValues(static, in)...))
		}, values...))
}

// dimensionValues returns copies of the dimensions without their values, and the values.
func dimensionValues(dimensions []compute.DynamicDimensionSpec) (static []compute.DynamicDimensionSpec,
	values []compute.Value,
) {
	static = slices.Clone(dimensions)
	for i, d := range dimensions {
		values, static[i].Value = append(values, d.Value), nil
	}
	return static, values
}

// withValues returns the dimensions with their values.
func withValues(static []compute.DynamicDimensionSpec, in []compute.Value) []compute.DynamicDimensionSpec {
	list := slices.Clone(static)
	for i := range list {
		list[i].Value = in[i]
	}
	return list
}

// DynamicPad implements compute.Function.
func (f *Operations) DynamicPad(x, fillValue compute.Value, axes ...compute.DynamicPadAxis) (compute.Value, error) {
	inputs, static := []compute.Value{x, fillValue}, slices.Clone(axes)
	for i, a := range axes {
		inputs = append(inputs, a.StartValue, a.EndValue, a.InteriorValue)
		static[i].StartValue, static[i].EndValue, static[i].InteriorValue = nil, nil, nil
	}
	return first1(f.Record("DynamicPad", []any{static},
		func(to compute.Function, in []compute.Value) ([]compute.Value, error) {
			list := slices.Clone(static)
			for i := range list {
				v := in[2+3*i:]
				list[i].StartValue, list[i].EndValue, list[i].InteriorValue = v[0], v[1], v[2]
			}
			return list1(to.DynamicPad(in[0], in[1], list...))
		}, inputs...))
}

// QuantizedEmbeddingLookup implements compute.Function.
func (f *Operations) QuantizedEmbeddingLookup(data, indices compute.Value, q *compute.Quantization) (compute.Value,
	error,
) {
	return first1(f.Record("QuantizedEmbeddingLookup", []any{*quantization(q, []compute.Value{nil, nil})},
		func(to compute.Function, in []compute.Value) ([]compute.Value, error) {
			return list1(to.QuantizedEmbeddingLookup(in[0], in[1], quantization(q, in[2:])))
		}, data, indices, q.Scale, q.ZeroPoint))
}

// FusedQuantizedDense implements compute.Function.
func (f *Operations) FusedQuantizedDense(x, weights, bias compute.Value, q *compute.Quantization,
	activation compute.ActivationType,
) (compute.Value, error) {
	return first1(f.Record("FusedQuantizedDense", []any{*quantization(q, []compute.Value{nil, nil}), activation},
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

// FusedScaledDotProductAttention implements compute.Function.
func (f *Operations) FusedScaledDotProductAttention(query, key, val compute.Value, layout compute.AttentionAxesLayout,
	options *compute.ScaledDotProductAttentionConfig,
) (compute.Value, []compute.Value, error) {
	out, err := f.Record("FusedScaledDotProductAttention", attentionAttributes(layout, options),
		func(to compute.Function, in []compute.Value) ([]compute.Value, error) {
			output, states, err := to.FusedScaledDotProductAttention(in[0], in[1], in[2], layout, attention(options, in[3:]))
			return append([]compute.Value{output}, states...), err
		}, append([]compute.Value{query, key, val}, attentionValues(options)...)...)
	if err != nil {
		return nil, nil, err
	}
	return out[0], out[1:], nil
}

// FusedScaledDotProductAttentionVJP implements compute.Function.
func (f *Operations) FusedScaledDotProductAttentionVJP(query, key, val compute.Value,
	layout compute.AttentionAxesLayout, options *compute.ScaledDotProductAttentionConfig, output compute.Value,
	states []compute.Value,
	dOutput compute.Value,
) (compute.Value, compute.Value, compute.Value, error) {
	inputs := append([]compute.Value{query, key, val, output, dOutput}, attentionValues(options)...)
	n := len(inputs)
	return first3(f.Record("FusedScaledDotProductAttentionVJP", attentionAttributes(layout, options),
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
