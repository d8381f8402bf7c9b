package record

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
)

// fused are the operations that GoMLX's Go backend accepts when a graph is built, and does not implement when it runs,
// of dtypes other than float32 and float64.
var fused = []string{
	"FusedSoftmax", "FusedGelu", "FusedLayerNorm", "FusedDense", "FusedScaledDotProductAttention",
	"FusedAttentionQKVProjection",
}

// fuses returns nil if the backend has the operation for the dtype of its first input, and otherwise an error that
// makes GoMLX build it of operations that the backend also has for float16 and bfloat16.
func (f *Function) fuses(name string, inputs []compute.Value) error {
	if !f.Of.WidenHalf || !slices.Contains(fused, name) {
		return nil
	}
	shape, err := f.Shape(inputs[0])
	if d := shape.DType; err == nil && d != dtypes.Float32 && d != dtypes.Float64 {
		err = fmt.Errorf("a fused operation of %s: %w", d, compute.ErrNotImplemented)
	}
	return err
}

// DotGeneral implements compute.Function.
func (f *Function) DotGeneral(lhs compute.Value, lhsContractingAxes, lhsBatchAxes []int, rhs compute.Value,
	rhsContractingAxes, rhsBatchAxes []int, config compute.DotGeneralConfig,
) (compute.Value, error) {
	shape, err := f.Shape(lhs)
	if err != nil {
		return nil, err
	}
	if !f.Of.WidenHalf || shape.DType != dtypes.Float16 && shape.DType != dtypes.BFloat16 {
		return f.Operations.DotGeneral(lhs, lhsContractingAxes, lhsBatchAxes, rhs, rhsContractingAxes, rhsBatchAxes, config)
	}
	if lhs, err = f.ConvertDType(lhs, dtypes.Float32); err != nil {
		return nil, err
	}
	if rhs, err = f.ConvertDType(rhs, dtypes.Float32); err != nil {
		return nil, err
	}
	product, err := f.Operations.DotGeneral(lhs, lhsContractingAxes, lhsBatchAxes, rhs, rhsContractingAxes, rhsBatchAxes,
		compute.DotGeneralConfig{})
	result := cmp.Or(config.OutputDType, shape.DType)
	if err != nil || result == dtypes.Float32 {
		return product, err
	}
	return f.ConvertDType(product, result)
}
