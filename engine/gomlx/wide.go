package gomlx

import (
	"cmp"
	"fmt"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
)

// wideBackend is the Go engine's backend without those fused operations that it accepts when a graph is built, but
// does not implement when it runs: those of dtypes other than float32 and float64. GoMLX then builds them
// from operations that the backend also has for float16 and bfloat16.
//
// It computes products of float16 and bfloat16 in float32 (TestHalfProducts).
type wideBackend struct{ compute.Backend }

// Builder implements compute.Backend.
func (b wideBackend) Builder(name string) compute.Builder {
	real := b.Backend.Builder(name)
	w := &wideBuilder{Builder: real}
	w.main = &wideFunction{Function: real.Main(), builder: w}
	return w
}

type wideBuilder struct {
	compute.Builder
	main *wideFunction
}

// Main implements compute.Builder.
func (b *wideBuilder) Main() compute.Function { return b.main }

// NewFunction implements compute.Builder.
func (b *wideBuilder) NewFunction(name string) (compute.Function, error) {
	real, err := b.Builder.NewFunction(name)
	if err != nil {
		return nil, err
	}
	return &wideFunction{Function: real, builder: b}, nil
}

type wideFunction struct {
	compute.Function
	builder *wideBuilder
	parent  *wideFunction // of a closure
}

// Builder implements compute.Function.
func (f *wideFunction) Builder() compute.Builder { return f.builder }

// Parent implements compute.Function.
func (f *wideFunction) Parent() compute.Function {
	if f.parent == nil {
		return nil
	}
	return f.parent
}

// Closure implements compute.Function.
func (f *wideFunction) Closure() (compute.Function, error) {
	real, err := f.Function.Closure()
	if err != nil {
		return nil, err
	}
	return &wideFunction{Function: real, builder: f.builder, parent: f}, nil
}

// Operations that take functions need the backend's own functions.

// Call implements compute.Function.
func (f *wideFunction) Call(of compute.Function, inputs ...compute.Value) ([]compute.Value, error) {
	return f.Function.Call(narrow(of), inputs...)
}

// Sort implements compute.Function.
func (f *wideFunction) Sort(comparator compute.Function, axis int, isStable bool,
	inputs ...compute.Value,
) ([]compute.Value, error) {
	return f.Function.Sort(narrow(comparator), axis, isStable, inputs...)
}

// While implements compute.Function.
func (f *wideFunction) While(cond, body compute.Function, initialState ...compute.Value) ([]compute.Value, error) {
	return f.Function.While(narrow(cond), narrow(body), initialState...)
}

// If implements compute.Function.
func (f *wideFunction) If(pred compute.Value, trueBranch, falseBranch compute.Function) ([]compute.Value, error) {
	return f.Function.If(pred, narrow(trueBranch), narrow(falseBranch))
}

func narrow(f compute.Function) compute.Function {
	if w, ok := f.(*wideFunction); ok {
		return w.Function
	}
	return f
}

// fuses returns nil if the backend has fused operations for the dtype of x, and otherwise an error that makes
// GoMLX avoid them.
func (f *wideFunction) fuses(x compute.Value) error {
	shape, err := f.builder.OpShape(x)
	if err != nil {
		return err
	}
	if d := shape.DType; d != dtypes.Float32 && d != dtypes.Float64 {
		return fmt.Errorf("a fused operation of %s: %w", d, compute.ErrNotImplemented)
	}
	return nil
}

// DotGeneral implements compute.Function.
func (f *wideFunction) DotGeneral(lhs compute.Value, lhsContractingAxes, lhsBatchAxes []int, rhs compute.Value,
	rhsContractingAxes, rhsBatchAxes []int, config compute.DotGeneralConfig,
) (compute.Value, error) {
	shape, err := f.builder.OpShape(lhs)
	if err != nil {
		return nil, err
	}
	result := cmp.Or(config.OutputDType, shape.DType)
	if half(shape.DType) {
		config = compute.DotGeneralConfig{}
		if lhs, err = f.Function.ConvertDType(lhs, dtypes.Float32); err != nil {
			return nil, err
		}
		if rhs, err = f.Function.ConvertDType(rhs, dtypes.Float32); err != nil {
			return nil, err
		}
	}
	product, err := f.Function.DotGeneral(lhs, lhsContractingAxes, lhsBatchAxes, rhs, rhsContractingAxes, rhsBatchAxes,
		config)
	if err != nil || !half(shape.DType) || result == dtypes.Float32 {
		return product, err
	}
	return f.Function.ConvertDType(product, result)
}

// FusedSoftmax implements compute.FusedOps.
func (f *wideFunction) FusedSoftmax(x compute.Value, axis int) (compute.Value, error) {
	if err := f.fuses(x); err != nil {
		return nil, err
	}
	return f.Function.FusedSoftmax(x, axis)
}

// FusedGelu implements compute.FusedOps.
func (f *wideFunction) FusedGelu(x compute.Value, exact bool) (compute.Value, error) {
	if err := f.fuses(x); err != nil {
		return nil, err
	}
	return f.Function.FusedGelu(x, exact)
}

// FusedLayerNorm implements compute.FusedOps.
func (f *wideFunction) FusedLayerNorm(x compute.Value, axes []int, epsilon float64,
	gamma, beta compute.Value,
) (compute.Value, error) {
	if err := f.fuses(x); err != nil {
		return nil, err
	}
	return f.Function.FusedLayerNorm(x, axes, epsilon, gamma, beta)
}

// FusedDense implements compute.FusedOps.
func (f *wideFunction) FusedDense(x, weight, bias compute.Value, options compute.DenseConfig) (compute.Value, error) {
	if err := f.fuses(x); err != nil {
		return nil, err
	}
	return f.Function.FusedDense(x, weight, bias, options)
}

// FusedScaledDotProductAttention implements compute.FusedOps.
func (f *wideFunction) FusedScaledDotProductAttention(query, key, value compute.Value,
	layout compute.AttentionAxesLayout,
	options *compute.ScaledDotProductAttentionConfig,
) (compute.Value, []compute.Value, error) {
	if err := f.fuses(query); err != nil {
		return nil, nil, err
	}
	return f.Function.FusedScaledDotProductAttention(query, key, value, layout, options)
}

// FusedAttentionQKVProjection implements compute.FusedOps.
func (f *wideFunction) FusedAttentionQKVProjection(x, wQKV, biasQ, biasK, biasV compute.Value,
	queryDim, keyValueDim int,
) (q, k, v compute.Value, err error) {
	if err := f.fuses(x); err != nil {
		return nil, nil, nil, err
	}
	return f.Function.FusedAttentionQKVProjection(x, wQKV, biasQ, biasK, biasV, queryDim, keyValueDim)
}
