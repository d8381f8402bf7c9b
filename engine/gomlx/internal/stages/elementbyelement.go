package stages

import (
	"slices"

	"github.com/lockstep-ml/lockstep/internal/record"
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
	var numbers []*record.Value
	seen := map[*record.Value]bool{}
	for pending := slices.Clone(d.b.Entry.Outputs); len(pending) > 0; {
		v := pending[len(pending)-1]
		pending = pending[:len(pending)-1]
		if n := number(v); n != nil {
			numbers = append(numbers, n)
			continue
		}
		if seen[v] {
			continue
		}
		seen[v] = true
		switch {
		case part(v):
		case !byElement(v):
			return false
		default:
			pending = append(pending, v.Op.Inputs...)
		}
	}
	for reached := map[*record.Op]bool{}; len(numbers) > 0; {
		v := numbers[len(numbers)-1]
		numbers = numbers[:len(numbers)-1]
		if reached[v.Op] {
			continue
		}
		reached[v.Op] = true
		if planOf(v.Op).kind == parameterOp && v.Shape.Size() != 1 {
			return false
		}
		numbers = append(numbers, v.Op.Needs()...)
	}
	return true
}

// number returns the scalar whose value all elements of v have, or nil if it is not of that kind.
func number(v *record.Value) *record.Value {
	for len(v.Shape.Dimensions) > 0 {
		switch v.Op.Name {
		case "BroadcastInDim", "Reshape", "Identity":
			v = v.Op.Inputs[0]
		default:
			return nil
		}
	}
	return v
}

// part reports whether v is a range of the elements of a parameter.
func part(v *record.Value) bool {
	for planOf(v.Op).kind != parameterOp {
		if planOf(v.Op).kind != plainOp {
			return false
		}
		switch v.Op.Name {
		case "Reshape", "Identity":
		case "Slice":
			strides, whole := v.Op.Attributes[2].([]int), v.Op.Inputs[0].Shape
			if !slices.Equal(v.Shape.Dimensions[1:], whole.Dimensions[1:]) || len(strides) > 0 && strides[0] != 1 {
				return false
			}
		default:
			return false
		}
		v = v.Op.Inputs[0]
	}
	return true
}

// byElement reports whether the operation of v computes it element by element.
func byElement(v *record.Value) bool {
	if planOf(v.Op).kind != plainOp || v.Op.Fn != v.Op.Fn.Of.Entry || !elementwise[v.Op.Name] {
		return false
	}
	for _, in := range v.Op.Inputs {
		if number(in) == nil && !slices.Equal(in.Shape.Dimensions, v.Shape.Dimensions) {
			return false
		}
	}
	return true
}
