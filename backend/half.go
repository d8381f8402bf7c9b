package backend

import (
	"slices"

	"github.com/gomlx/compute/dtypes"

	"github.com/lockstep-ml/lockstep/internal/record"
)

// half reports whether a type is float16 or bfloat16. Operations on elements of half types compute in float32.
func half(t dtypes.DType) bool { return t == dtypes.Float16 || t == dtypes.BFloat16 }

func (v view) half() bool { return v.of != nil && half(v.of.dtype) }

// inFloat32 lowers an operation with operands or a result of a half type: it reads the operands as float32, computes
// as the operation of float32 does, and rounds the result once, to nearest even.
func (p *planner) inFloat32(o *record.Op, in []view) (_ view, ok bool) {
	if o.Name == "Add" { // of values padded by zeros
		if v, ok := p.joined(in[0], in[1]); ok {
			return v, true
		}
	}
	wide := make([]view, len(in))
	for i, v := range in {
		wide[i] = p.widened(v)
	}
	op, result := *o, *o.Outputs[0]
	dtype, dims := result.Shape.DType, result.Shape.Dimensions
	if half(dtype) {
		result.Shape = result.Shape.Clone()
		result.Shape.DType = dtypes.Float32
	}
	op.Outputs = []*record.Value{&result}
	v, ok := p.own(&op, wide)
	if !ok || !half(dtype) {
		return v, ok
	}
	v.dims = dims
	return p.elements("ConvertDType", dtype, dims, v)
}

// widened returns a value of a half type as float32, and any other as it is.
func (p *planner) widened(v view) view {
	if !v.half() {
		return v
	}
	if size(v.dims) < size(v.of.dims) {
		w, _ := p.elements("ConvertDType", dtypes.Float32, v.dims, v)
		return w
	}
	w, _ := p.elements("ConvertDType", dtypes.Float32, v.of.dims, whole(v.of))
	return view{of: w.of, offset: v.offset, dims: v.dims, strides: slices.Clone(v.strides)}
}
