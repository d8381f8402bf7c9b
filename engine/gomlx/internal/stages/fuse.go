package stages

import (
	"fmt"
	"reflect"
	"slices"
	"unsafe"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"

	"github.com/lockstep-ml/lockstep/engine/gomlx/internal/elementwise"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Fused computes results of a graph that depend element by element on its parameters, such as an optimizer's new values
// of one variable and its slots.
type Fused struct {
	Program *elementwise.Program
	Inputs  []FusedInput
	Numbers []FusedNumber
	Results []int // by output of the program: the result of the graph
	Size    int   // elements of each
}

// FusedInput is an input of a fused program: a parameter of the graph, from an element on.
type FusedInput struct{ Parameter, From int }

// FusedNumber is where a number comes from.
type FusedNumber struct {
	Source   NumberSource
	Index    int                // of the result or the parameter
	Constant elementwise.Number // if that is the source
	DType    tensor.DType
}

// NumberSource is a kind of sources of numbers.
type NumberSource uint8

// The sources.
const (
	ConstantNumber  NumberSource = iota
	ParameterNumber              // a parameter of the graph
	ResultNumber                 // a result of the compiled graph
	FactorNumber                 // the factor of a parameter
)

// Fusion is what [Deferred.Fuse] has found.
type Fusion struct {
	Programs []*Fused
	Rest     []int        // the results that the compiled graph has first; the numbers of the programs follow
	Needs    map[int]bool // the parameters that the compiled graph needs
}

// Load copies a number from the memory of its buffer.
func (n *FusedNumber) Load(to *elementwise.Number, b compute.Buffer) error {
	flat, err := b.Data()
	if err != nil {
		return fmt.Errorf("stages: a number of a fused program: %w", err)
	}
	copyNumber(to, flat)
	return nil
}

// Set sets a number of a floating-point type.
func (n *FusedNumber) Set(to *elementwise.Number, x float64) {
	if n.DType == tensor.Float32 {
		*(*float32)(unsafe.Pointer(to)) = float32(x)
	} else {
		*(*float64)(unsafe.Pointer(to)) = x
	}
}

// copyNumber copies the first element of a slice.
func copyNumber(to *elementwise.Number, flat any) {
	v := reflect.ValueOf(flat)
	copy(to[:], unsafe.Slice((*byte)(v.UnsafePointer()), v.Type().Elem().Size()))
}

// fusedTypes are the types of elements that package elementwise shares with GoMLX. The Go backend converts small
// numbers of float16 in another way.
var fusedTypes = map[dtypes.DType]tensor.DType{
	dtypes.Bool: tensor.Bool, dtypes.BFloat16: tensor.BFloat16,
	dtypes.Float32: tensor.Float32, dtypes.Float64: tensor.Float64,
}

// Fuse takes results out of the graph for which wanted is true and that depend element by element on parameters and
// numbers. The programs first multiply the parameters for which scaled is true by a factor. Fuse must be called before
// Compile.
func (d *Deferred) Fuse(wanted func(result int) bool, scaled func(parameter int) bool) *Fusion {
	f := &fusion{b: d.b, can: map[*value]bool{}, group: map[*value]*value{}, joined: map[*value]bool{}, scaled: scaled}
	found, byGroup := &Fusion{Needs: map[int]bool{}}, map[*value]*Fused{}
	for i, v := range d.b.main.outputs {
		whole := len(d.b.sums) > 0 || d.b.hosts > 0 || !wanted(i) || f.number(v) != nil
		if whole || !f.fusable(v) {
			found.Rest, f.results = append(found.Rest, i), append(f.results, v)
		} else {
			f.join(v)
		}
	}
	for i, v := range d.b.main.outputs {
		if slices.Contains(found.Rest, i) {
			continue
		}
		at := f.root(v)
		if byGroup[at] == nil {
			byGroup[at] = &Fused{Program: &elementwise.Program{}, Size: f.shape(v).Size()}
			found.Programs = append(found.Programs, byGroup[at])
		}
		byGroup[at].Results = append(byGroup[at].Results, i)
	}
	for _, x := range found.Programs {
		f.build(x)
	}
	d.b.main.outputs, d.b.fused = f.results, len(found.Programs) > 0
	f.reach(f.results, found.Needs)
	return found
}

// ElementByElement reports whether every output of the graph depends element by element on the parameters, and on
// numbers that depend on no elements of a parameter of more than one.
func (d *Deferred) ElementByElement() bool {
	f := &fusion{b: d.b, can: map[*value]bool{}}
	if len(d.b.sums) > 0 || d.b.hosts > 0 {
		return false
	}
	var numbers []*value
	seen := map[*value]bool{}
	var visit func(v *value) bool
	visit = func(v *value) bool {
		if n := f.number(v); n != nil {
			numbers = append(numbers, n)
			return true
		}
		if seen[v] {
			return true
		}
		seen[v] = true
		if !f.fusable(v) {
			return false
		}
		if _, _, ok := f.part(v); ok {
			return true
		}
		for _, in := range v.op.inputs {
			if !visit(in) {
				return false
			}
		}
		return true
	}
	for _, v := range d.b.main.outputs {
		if !visit(v) {
			return false
		}
	}
	needed := map[int]bool{}
	f.reach(numbers, needed)
	for i := range needed {
		if f.shape(d.b.parameters[i]).Size() != 1 {
			return false
		}
	}
	return true
}

// fusion finds the parts of a graph that depend element by element on parameters.
type fusion struct {
	b     *builder
	can   map[*value]bool
	group map[*value]*value // a forest of the values of each part

	joined  map[*value]bool
	scaled  func(parameter int) bool
	results []*value // of the compiled graph
}

// reach notes the parameters from which values are computed.
func (f *fusion) reach(values []*value, parameters map[int]bool) {
	seen := map[*op]bool{}
	for pending := slices.Clone(values); len(pending) > 0; {
		v := pending[len(pending)-1]
		pending = pending[:len(pending)-1]
		if seen[v.op] {
			continue
		}
		seen[v.op] = true
		if v.op.kind == parameterOp {
			parameters[v.op.parameter] = true
		}
		pending = append(pending, v.op.needs()...)
	}
}

func (f *fusion) shape(v *value) shapes.Shape {
	s, err := f.b.Builder.OpShape(v.real)
	if err != nil {
		return shapes.Invalid() // it has no supported type
	}
	return s
}

// number returns the scalar whose value all elements of v have, or nil if it is not of that kind.
func (f *fusion) number(v *value) *value {
	for len(f.shape(v).Dimensions) > 0 {
		switch v.op.name {
		case "BroadcastInDim", "Reshape", "Identity":
			v = v.op.inputs[0]
		default:
			return nil
		}
	}
	return v
}

// part returns the parameter of which v is a range of elements, and the first one. ok is false if v is none.
func (f *fusion) part(v *value) (parameter, from int, ok bool) {
	for v.op.kind != parameterOp {
		if v.op.kind != plainOp {
			return 0, 0, false
		}
		switch v.op.name {
		case "Reshape", "Identity":
		case "Slice":
			starts, strides, whole := v.op.attributes[0].([]int), v.op.attributes[2].([]int), f.shape(v.op.inputs[0])
			rows := whole.Size() / max(1, whole.Dimensions[0])
			if !slices.Equal(f.shape(v).Dimensions[1:], whole.Dimensions[1:]) || len(strides) > 0 && strides[0] != 1 {
				return 0, 0, false
			}
			from += starts[0] * rows
		default:
			return 0, 0, false
		}
		v = v.op.inputs[0]
	}
	return v.op.parameter, from, true
}

// fusable reports whether v is computed element by element from parameters and numbers.
func (f *fusion) fusable(v *value) bool {
	if can, known := f.can[v]; known {
		return can
	}
	can := f.check(v)
	f.can[v] = can
	return can
}

func (f *fusion) check(v *value) bool {
	shape := f.shape(v)
	t, ok := fusedTypes[shape.DType]
	if !ok || v.op.fn != f.b.main {
		return false
	}
	if n := f.number(v); n != nil {
		return true
	}
	if _, _, ok := f.part(v); ok {
		return true
	}
	if v.op.kind != plainOp || len(v.op.outputs) != 1 || len(v.op.functions) > 0 {
		return false
	}
	var types []tensor.DType
	for _, in := range v.op.inputs {
		if in == nil || !f.fusable(in) {
			return false
		}
		s := f.shape(in)
		if f.number(in) == nil && !slices.Equal(s.Dimensions, shape.Dimensions) {
			return false
		}
		types = append(types, fusedTypes[s.DType])
	}
	return elementwise.Supports(v.op.name, t, types...)
}

// root returns the value that identifies the part of v.
func (f *fusion) root(v *value) *value {
	for f.group[v] != nil {
		v = f.group[v]
	}
	return v
}

// join puts v and all that it is computed from, except numbers, into one part.
func (f *fusion) join(v *value) {
	if f.joined[v] {
		return
	}
	f.joined[v] = true
	if _, _, ok := f.part(v); ok {
		return
	}
	for _, in := range v.op.inputs {
		if f.number(in) != nil {
			continue
		}
		if a, b := f.root(in), f.root(v); a != b {
			f.group[a] = b
		}
		f.join(in)
	}
}

// build makes the program of x. Numbers that the graph has to compute are added to its results.
func (f *fusion) build(x *Fused) {
	p, values := x.Program, map[*value]elementwise.Value{}
	var of func(v *value) elementwise.Value
	of = func(v *value) elementwise.Value {
		if n := f.number(v); n != nil {
			v = n
		}
		if made, known := values[v]; known {
			return made
		}
		t := fusedTypes[f.shape(v).DType]
		var made elementwise.Value
		if parameter, from, ok := f.part(v); f.number(v) != nil {
			made = p.Number(t)
			x.Numbers = append(x.Numbers, f.source(v, t))
		} else if ok {
			made = p.Input(t)
			x.Inputs = append(x.Inputs, FusedInput{parameter, from})
			if f.scaled(parameter) {
				made = p.Apply("Mul", t, made, p.Number(t))
				x.Numbers = append(x.Numbers, FusedNumber{Source: FactorNumber, Index: parameter, DType: t})
			}
		} else {
			var in []elementwise.Value
			for _, operand := range v.op.inputs {
				in = append(in, of(operand))
			}
			made = p.Apply(v.op.name, t, in...)
		}
		values[v] = made
		return made
	}
	var outputs []elementwise.Value
	for _, i := range x.Results {
		outputs = append(outputs, of(f.b.main.outputs[i]))
	}
	p.Outputs(outputs...)
}

// source returns where a number comes from.
func (f *fusion) source(v *value, t tensor.DType) FusedNumber {
	n := FusedNumber{DType: t}
	switch {
	case v.op.kind == parameterOp:
		n.Source, n.Index = ParameterNumber, v.op.parameter
	case v.op.literal != nil:
		copyNumber(&n.Constant, v.op.literal)
	default:
		n.Source, n.Index = ResultNumber, slices.Index(f.results, v)
		if n.Index < 0 {
			n.Index, f.results = len(f.results), append(f.results, v)
		}
	}
	return n
}
