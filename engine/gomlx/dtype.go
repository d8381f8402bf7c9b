package gomlx

import (
	"fmt"
	"reflect"
	"unsafe"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// dtypeTable lists the dtypes that Lockstep and GoMLX share. The elements of a pair have the same bits.
var dtypeTable = []struct {
	ours   tensor.DType
	theirs dtypes.DType
}{
	{tensor.Bool, dtypes.Bool},
	{tensor.Int8, dtypes.Int8},
	{tensor.Int16, dtypes.Int16},
	{tensor.Int32, dtypes.Int32},
	{tensor.Int64, dtypes.Int64},
	{tensor.Uint8, dtypes.Uint8},
	{tensor.Uint16, dtypes.Uint16},
	{tensor.Uint32, dtypes.Uint32},
	{tensor.Uint64, dtypes.Uint64},
	{tensor.Float16, dtypes.Float16},
	{tensor.BFloat16, dtypes.BFloat16},
	{tensor.Float32, dtypes.Float32},
	{tensor.Float64, dtypes.Float64},
}

// toGoMLX converts a dtype to GoMLX's.
func toGoMLX(d tensor.DType) (dtypes.DType, error) {
	for _, pair := range dtypeTable {
		if pair.ours == d {
			return pair.theirs, nil
		}
	}
	return dtypes.InvalidDType, fmt.Errorf("gomlx: dtype %v is not supported", d)
}

// fromGoMLX converts a dtype of GoMLX.
func fromGoMLX(d dtypes.DType) (tensor.DType, error) {
	for _, pair := range dtypeTable {
		if pair.theirs == d {
			return pair.ours, nil
		}
	}
	return tensor.Invalid, fmt.Errorf("gomlx: GoMLX's dtype %s is not supported", d)
}

// batchShape returns the shape of rows rows of a feature.
func batchShape(f engine.Feature, rows int) (shapes.Shape, error) {
	d, err := toGoMLX(f.DType)
	if err != nil {
		return shapes.Invalid(), err
	}
	dims := append([]int{rows}, f.Shape...)
	for _, n := range dims {
		if n < 1 {
			return shapes.Invalid(), fmt.Errorf("gomlx: shape %s has a dimension below 1", tensor.FormatShape(dims))
		}
	}
	return shapes.Make(d, dims...), nil
}

// flatOf returns host memory as the flat slice that GoMLX's buffers use. It shares the memory.
func flatOf(m tensor.Memory, d dtypes.DType, elements int) any {
	if elements == 0 {
		return dtypes.MakeAnySlice(d, 0)
	}
	return dtypes.UnsafeAnySliceFromBytes(m.Ptr, d, elements)
}

// memoryOf returns the memory of a flat slice of GoMLX, shared.
func memoryOf(flat any, shape shapes.Shape, device int) tensor.Memory {
	n := int(shape.ByteSize())
	if flat == nil || n == 0 {
		return tensor.Memory{Device: device}
	}
	return tensor.Memory{Ptr: unsafe.Pointer(reflect.ValueOf(flat).Pointer()), Bytes: n, Device: device}
}

// AtLeastFloat32 converts x to float32 if it is float16 or bfloat16, and otherwise returns x. Use it to
// count, sum or average many numbers, for which the 11 or 8 bits of those types are too few.
func AtLeastFloat32(x *graph.Node) *graph.Node {
	if d := x.DType(); d == dtypes.Float16 || d == dtypes.BFloat16 {
		return graph.ConvertDType(x, dtypes.Float32)
	}
	return x
}
