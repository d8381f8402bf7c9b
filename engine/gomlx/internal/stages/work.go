package stages

import (
	"github.com/gomlx/compute"
)

// Work estimates the floating-point operations of the graph's outputs: for each of the given ones, in their order,
// those of the operations that it needs and that none before it does. Outputs that are not listed come first: what only
// they need, or need too, counts for the first listed one. The estimate depends on the graph only: products by their
// sizes, and a few operations for each element of what others read and write. Loops count once. Work must be called
// before Compile.
func (d *Deferred) Work(outputs []int) []int64 {
	list, seen := make([]int64, len(outputs)), map[*op]bool{}
	add := func(to int, v *value) {
		for pending := []*value{v}; len(pending) > 0; {
			o := pending[len(pending)-1].op
			pending = pending[:len(pending)-1]
			if !seen[o] {
				seen[o] = true
				list[to] += d.b.work(o)
				pending = append(pending, o.needs()...)
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
	for i, v := range d.b.main.outputs {
		if !listed[i] {
			add(0, v)
		}
	}
	for k, i := range outputs {
		add(k, d.b.main.outputs[i])
	}
	return list
}

// elementWork is the estimate for an element that an operation reads or writes: most wait for memory.
const elementWork = 4

// work estimates the floating-point operations of o.
func (b *builder) work(o *op) int64 {
	size := func(v *value) int64 {
		s, err := b.Builder.OpShape(v.real)
		if err != nil {
			return 0
		}
		return int64(s.Size())
	}
	switch {
	case o.kind == parameterOp || o.name == "Constant" || o.name == "Reshape" || o.name == "BroadcastInDim":
		return 0
	case o.name == "DotGeneral":
		if axes, ok := o.attributes[0].([]int); ok {
			shape, _ := b.Builder.OpShape(o.inputs[0].real)
			n := 2 * size(o.outputs[0])
			for _, axis := range axes {
				n *= int64(shape.Dimensions[axis])
			}
			return n
		}
	case o.name == "ConvGeneral":
		if axes, ok := o.attributes[0].(compute.ConvolveAxesConfig); ok {
			shape, _ := b.Builder.OpShape(o.inputs[1].real)
			return 2 * size(o.outputs[0]) * int64(shape.Size()/max(1, shape.Dimensions[axes.KernelOutputChannels]))
		}
	}
	n := int64(0)
	for _, v := range append(o.inputs[:len(o.inputs):len(o.inputs)], o.outputs...) {
		if v != nil {
			n += elementWork * size(v)
		}
	}
	for _, f := range o.functions {
		for _, inner := range f.ops {
			n += b.work(inner)
		}
	}
	return n
}
