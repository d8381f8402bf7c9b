package stages

import (
	"slices"

	"github.com/gomlx/compute/shapes"
)

// elementwise are the operations that compute each element from those at its place in the operands.
var elementwise = map[string]bool{
	"Abs": true, "Add": true, "Clamp": true, "ConvertDType": true, "Div": true, "Equal": true, "GreaterOrEqual": true,
	"GreaterThan": true, "Identity": true, "IsFinite": true, "IsNaN": true, "LessOrEqual": true, "LessThan": true,
	"LogicalAnd": true, "LogicalNot": true, "LogicalOr": true, "Max": true, "Min": true, "Mul": true, "Neg": true,
	"NotEqual": true, "Sign": true, "Sqrt": true, "Sub": true, "Where": true,
}

// ElementByElement reports whether every output of the graph depends element by element on the parameters, and on
// numbers that depend on no elements of a parameter of more than one.
func (d *Deferred) ElementByElement() bool {
	if len(d.b.sums) > 0 {
		return false
	}
	var numbers []*value
	seen := map[*value]bool{}
	for pending := slices.Clone(d.b.main.outputs); len(pending) > 0; {
		v := pending[len(pending)-1]
		pending = pending[:len(pending)-1]
		if n := d.b.number(v); n != nil {
			numbers = append(numbers, n)
			continue
		}
		if seen[v] {
			continue
		}
		seen[v] = true
		switch {
		case d.b.part(v):
		case !d.b.byElement(v):
			return false
		default:
			pending = append(pending, v.op.inputs...)
		}
	}
	for reached := map[*op]bool{}; len(numbers) > 0; {
		v := numbers[len(numbers)-1]
		numbers = numbers[:len(numbers)-1]
		if reached[v.op] {
			continue
		}
		reached[v.op] = true
		if v.op.kind == parameterOp && d.b.shape(v).Size() != 1 {
			return false
		}
		numbers = append(numbers, v.op.needs()...)
	}
	return true
}

func (b *builder) shape(v *value) shapes.Shape {
	s, err := b.Builder.OpShape(v.real)
	if err != nil {
		return shapes.Invalid()
	}
	return s
}

// number returns the scalar whose value all elements of v have, or nil if it is not of that kind.
func (b *builder) number(v *value) *value {
	for len(b.shape(v).Dimensions) > 0 {
		switch v.op.name {
		case "BroadcastInDim", "Reshape", "Identity":
			v = v.op.inputs[0]
		default:
			return nil
		}
	}
	return v
}

// part reports whether v is a range of the elements of a parameter.
func (b *builder) part(v *value) bool {
	for v.op.kind != parameterOp {
		if v.op.kind != plainOp {
			return false
		}
		switch v.op.name {
		case "Reshape", "Identity":
		case "Slice":
			strides, whole := v.op.attributes[2].([]int), b.shape(v.op.inputs[0])
			if !slices.Equal(b.shape(v).Dimensions[1:], whole.Dimensions[1:]) || len(strides) > 0 && strides[0] != 1 {
				return false
			}
		default:
			return false
		}
		v = v.op.inputs[0]
	}
	return true
}

// byElement reports whether the operation of v computes it element by element.
func (b *builder) byElement(v *value) bool {
	if v.op.kind != plainOp || v.op.fn != b.main || !elementwise[v.op.name] {
		return false
	}
	for _, in := range v.op.inputs {
		if b.number(in) == nil && !slices.Equal(b.shape(in).Dimensions, b.shape(v).Dimensions) {
			return false
		}
	}
	return true
}
