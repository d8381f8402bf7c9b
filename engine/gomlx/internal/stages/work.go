package stages

import (
	"github.com/gomlx/compute"

	"github.com/lockstep-ml/lockstep/internal/record"
)

// Work estimates the floating-point operations of the graph's outputs: for each of the given ones, in their order,
// those of the operations that it needs and that none before it does. Outputs that are not listed come first: what only
// they need, or need too, counts for the first listed one. The estimate depends on the graph only: products by their
// sizes, and a few operations for each element of what others read and write. Loops count once. Work must be called
// before Compile.
func (d *Deferred) Work(outputs []int) []int64 {
	list, seen := make([]int64, len(outputs)), map[*record.Op]bool{}
	add := func(to int, v *record.Value) {
		for pending := []*record.Value{v}; len(pending) > 0; {
			o := pending[len(pending)-1].Op
			pending = pending[:len(pending)-1]
			if !seen[o] {
				seen[o] = true
				list[to] += work(o)
				pending = append(pending, o.Needs()...)
			}
		}
	}
	if len(list) == 0 {
		return nil
	}
	listed := map[int]bool{}
	for _, i := range outputs {
		listed[i] = true
	}
	for i, v := range d.b.Entry.Outputs {
		if !listed[i] {
			add(0, v)
		}
	}
	for k, i := range outputs {
		add(k, d.b.Entry.Outputs[i])
	}
	return list
}

// elementWork is the estimate for an element that an operation reads or writes: most wait for memory.
const elementWork = 4

// work estimates the floating-point operations of o.
func work(o *record.Op) int64 {
	size := func(v *record.Value) int64 { return int64(v.Shape.Size()) }
	switch {
	case planOf(o).kind == parameterOp || o.Name == "Constant" || o.Name == "Reshape" || o.Name == "BroadcastInDim":
		return 0
	case o.Name == "DotGeneral":
		if axes, ok := o.Attributes[0].([]int); ok {
			n := 2 * size(o.Outputs[0])
			for _, axis := range axes {
				n *= int64(o.Inputs[0].Shape.Dimensions[axis])
			}
			return n
		}
	case o.Name == "ConvGeneral":
		if axes, ok := o.Attributes[0].(compute.ConvolveAxesConfig); ok {
			shape := o.Inputs[1].Shape
			return 2 * size(o.Outputs[0]) * int64(shape.Size()/max(1, shape.Dimensions[axes.KernelOutputChannels]))
		}
	}
	n := int64(0)
	for _, v := range append(o.Inputs[:len(o.Inputs):len(o.Inputs)], o.Outputs...) {
		if v != nil {
			n += elementWork * size(v)
		}
	}
	for _, f := range o.Functions {
		for _, inner := range f.Ops {
			n += work(inner)
		}
	}
	return n
}
