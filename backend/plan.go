package backend

import (
	"fmt"
	"slices"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"

	"github.com/lockstep-ml/lockstep/backend/internal/vector"
	"github.com/lockstep-ml/lockstep/internal/record"
)

// node is a value that has memory, or is a register of a loop. Its elements lie in row-major order.
type node struct {
	kind  nodeKind
	index int // in order of creation
	dims  []int
	dtype dtypes.DType
	in    []view
	unit  *unit // that computes it; nil for parameters and constants
	slot  int   // its memory; -1 if it needs none

	// Of elementNode and rowNode.
	loop   vector.Loop
	cheap  bool             // the loop is nearly as fast as one that reads memory
	sunk   bool             // from the loop of its operands into that of its readers
	reduce vector.Reduction // also of columnNode

	parameter int          // of parameterNode
	literal   any          // of constantNode
	op        *record.Op   // of foreignNode
	result    int          // of foreignNode: which one of the operation's
	product   *productPlan // of productNode
	fixed     bool         // the product cannot be transposed again
	parts     []view       // of assembledNode: where each operand goes, in views of the node itself
	overlap   bool         // the parts do
	data      []box        // of assembledNode: the parts that are not a padding by zeros; nil if there is another padding

	newTasks    func(n *node) *tasksInstruction // of tasksNode
	convolution *convolutionPlan                // of tasksNode, if it is one
}

type nodeKind uint8

const (
	parameterNode nodeKind = iota
	constantNode
	elementNode   // computed element by element from operands of its dimensions
	rowNode       // reduces the last axes of its operand, which has the dimensions (rows, columns)
	columnNode    // reduces the first axis of its operand, which has the dimensions (outer, reduced, inner)
	productNode   // a product of matrices
	assembledNode // its parts are copied from operands
	tasksNode     // computed by tasks that newTasks makes
	foreignNode   // computed by the Go backend
	pointNode     // the result of an all-reduce, or a place where a bucket of outputs is complete
)

func (n *node) bytes() int { return int(n.dtype.Size()) }

// types has the types of elements that loops handle.
var types = map[dtypes.DType]vector.Type{
	dtypes.Float32: vector.Float32, dtypes.Float64: vector.Float64, dtypes.Int32: vector.Int32,
	dtypes.Int64: vector.Int64, dtypes.Uint8: vector.Uint8, dtypes.Uint32: vector.Uint32, dtypes.Uint64: vector.Uint64,
	dtypes.Bool: vector.Bool, dtypes.Float16: vector.Float16, dtypes.BFloat16: vector.BFloat16,
}

// unplannable says because of what no plan can execute a graph, so that the Go backend executes all of it. It is empty
// if a plan can.
func unplannable(b *record.Builder) string {
	for _, o := range b.Entry.Ops {
		for _, v := range o.Outputs {
			if v.Shape.IsDynamic() || v.Shape.IsTuple() || !v.Shape.Ok() {
				return "dynamic shapes"
			}
		}
		switch o.Name {
		case "DynamicShape", "DynamicDimensionSize", "DynamicReshape", "DynamicBroadcastInDim", "DynamicIota", "DynamicPad",
			"AllReduce":
			return o.Name
		}
	}
	return ""
}

// planner makes a plan of a graph.
type planner struct {
	nodes   []*node
	views   map[*record.Value]view
	same    map[string]view // what operations with equal attributes and operands have computed
	units   []*unit
	users   map[*record.Value]int
	foreign map[*record.Op][]*node
	readers map[*node][]*node
	calls   []*point // of all-reduces
	points  []*point // all, in their order
}

func newPlanner() *planner {
	return &planner{
		users: map[*record.Value]int{},
		views: map[*record.Value]view{}, same: map[string]view{},
		foreign: map[*record.Op][]*node{},
	}
}

// needed returns the operations from which values are computed.
func needed(values []*record.Value) map[*record.Op]bool {
	set := map[*record.Op]bool{}
	for pending := slices.Clone(values); len(pending) > 0; {
		v := pending[len(pending)-1]
		pending = pending[:len(pending)-1]
		if v != nil && !set[v.Op] {
			set[v.Op] = true
			pending = append(pending, v.Op.Needs()...)
		}
	}
	return set
}

func (p *planner) add(n *node) view {
	n.index, n.slot = len(p.nodes), -1
	p.nodes = append(p.nodes, n)
	return whole(n)
}

// uses lists the operands of an operation, nil for those that were omitted, and what its functions capture.
func uses(o *record.Op) []*record.Value { return slices.Concat(o.Inputs, o.Captured()) }

// lower makes nodes and views of an operation.
func (p *planner) lower(o *record.Op) {
	of := uses(o)
	in := make([]view, len(of))
	for i, v := range of {
		if v != nil {
			in[i] = p.views[v]
		}
	}
	key := ""
	if o.Name != "Parameter" && o.Name != "Constant" && o.Name != "RNGBitGenerator" && len(o.Outputs) == 1 &&
		len(o.Functions) == 0 {
		key = fmt.Sprint(o.Name, o.Attributes, o.Outputs[0].Shape)
		for _, v := range in {
			key += v.key()
		}
		if v, ok := p.same[key]; ok {
			p.views[o.Outputs[0]] = v
			return
		}
	}
	v, ok := view{}, false
	switch {
	case len(o.Functions) > 0:
	case len(o.Outputs) == 1:
		v, ok = p.own(o, in)
	case o.Name == "FusedAttentionQKVProjection":
		if p.attentionProjection(o, in) {
			return
		}
	case o.Name == "RNGBitGenerator":
		if p.randomBits(o, in) {
			return
		}
	}
	if !ok {
		for i, v := range p.elsewhere(o, in) {
			p.views[o.Outputs[i]] = v
		}
		return
	}
	v.dims = o.Outputs[0].Shape.Dimensions
	p.views[o.Outputs[0]] = v
	if key != "" {
		p.same[key] = v
	}
}

// opaque reports whether plans have no instructions for elements of a type, not even copies.
func opaque(t dtypes.DType) bool { return t.IsPacked() || t.Size() > 8 }

// own lowers an operation that plans have instructions for. ok is false for others.
func (p *planner) own(o *record.Op, in []view) (_ view, ok bool) {
	shape := o.Outputs[0].Shape
	dims, dtype := shape.Dimensions, shape.DType
	_, known := types[dtype]
	switch {
	case o.Name == "Parameter":
		return p.add(&node{kind: parameterNode, dims: dims, dtype: dtype, parameter: o.Parameter}), true
	case opaque(dtype):
		return view{}, false
	case o.Name == "Iota" && half(dtype):
		return p.inFloat32(o, in)
	}
	switch o.Name {
	case "Constant":
		return p.constant(dims, dtype, o.Literal), true
	case "Iota":
		return p.iota(shape, o.Attributes[1].(int))
	case "Identity":
		return in[0], true
	case "Reshape":
		if v, ok := in[0].reshaped(dims); ok {
			return v, true
		}
		if !known {
			return view{}, false
		}
		v, _ := p.copied(in[0]).reshaped(dims)
		return v, true
	case "Transpose":
		permutation := o.Attributes[0].([]int)
		if n := in[0].of; n.kind == productNode && !n.fixed && in[0].identity() && p.users[o.Inputs[0]] == 1 &&
			slices.Equal(in[0].dims, n.dims) {
			if v, ok := p.transposedProduct(n, permutation); ok {
				return v, true
			}
		}
		return in[0].transposed(permutation), true
	case "Slice":
		return in[0].sliced(o.Attributes[0].([]int), o.Attributes[1].([]int), o.Attributes[2].([]int)), true
	case "Reverse":
		return in[0].reversed(o.Attributes[0].([]int)), true
	case "BroadcastInDim":
		return in[0].broadcast(dims, o.Attributes[1].([]int)), true
	}
	if shape.Size() == 0 {
		return p.constant(dims, dtype, nil), true
	}
	for _, v := range in {
		if v.of != nil && size(v.dims) == 0 && o.Name != "DotGeneral" {
			return view{}, false
		}
	}
	switch o.Name {
	case "Concatenate":
		return p.concatenated(o.Attributes[0].(int), shape, in), true
	case "Pad":
		return p.padded(shape, in, o.Attributes[0].([]compute.PadAxis)), true
	case "Gather":
		return p.indexed(o, in)
	case "Bitcast":
		return p.bitcast(in[0], dtype)
	}
	if half(dtype) || slices.ContainsFunc(in, view.half) {
		return p.inFloat32(o, in)
	}
	switch o.Name {
	case "ScatterSum", "ScatterMax", "ScatterMin", "ArgMinMax":
		return p.indexed(o, in)
	case "ReduceSum":
		return p.reduced(vector.Sum, in[0], o.Attributes[0].([]int), dtype)
	case "ReduceMax":
		return p.reduced(vector.Largest, in[0], o.Attributes[0].([]int), dtype)
	case "ReduceMin":
		return p.reduced(vector.Smallest, in[0], o.Attributes[0].([]int), dtype)
	case "DotGeneral":
		c := o.Attributes[4].(compute.DotGeneralConfig)
		if c.AccumulatorDType != dtypes.InvalidDType && c.AccumulatorDType != dtype {
			return view{}, false
		}
		return p.dot(in[0], in[1], o.Attributes[0].([]int), o.Attributes[2].([]int), o.Attributes[1].([]int),
			o.Attributes[3].([]int), dtype)
	case "ReduceWindow":
		return p.reduceWindow(o, in[0], dims, dtype)
	case "SelectAndScatterMax", "SelectAndScatterMin":
		return p.selectAndScatter(o, in[0], in[1], dtype)
	case "ConvGeneral":
		return p.convolution(o, in)
	case "FusedDense":
		return p.dense(in, o.Attributes[0].(compute.DenseConfig), dtype)
	case "FusedSoftmax":
		return p.softmax(in[0], o.Attributes[0].(int), dtype)
	case "FusedGelu":
		return p.gelu(in[0], o.Attributes[0].(bool), dtype)
	case "FusedLayerNorm":
		return p.layerNorm(in, o.Attributes[0].([]int), o.Attributes[1].(float64), dtype)
	case "Add":
		if v, ok := p.biased(o, in); ok {
			return v, true
		}
	case "Clamp":
		low, ok := p.elements("Max", dtype, dims, in[0], in[1])
		if !ok {
			return view{}, false
		}
		return p.elements("Min", dtype, dims, low, in[2])
	}
	if len(in) == 0 || len(o.Attributes) > 1 {
		return view{}, false
	}
	return p.elements(o.Name, dtype, dims, in...)
}

// elements applies an operation to each element. ok reports whether a loop implements it.
func (p *planner) elements(name string, dtype dtypes.DType, dims []int, in ...view) (_ view, ok bool) {
	for _, v := range in {
		if v.of == nil {
			return view{}, false
		}
	}
	if name == "Add" {
		if v, ok := p.joined(in[0], in[1]); ok {
			return v, true
		}
	}
	from, known := types[in[len(in)-1].of.dtype]
	to, also := types[dtype]
	loop := vector.Lookup(name, from, to)
	if name == "ConvertDType" && known && also && from == to {
		return in[0], true
	}
	if !known || !also || loop == nil || len(in) > 3 {
		return view{}, false
	}
	n := &node{kind: elementNode, dims: dims, dtype: dtype, loop: loop}
	n.cheap = name == "Add" || name == "Sub" || name == "Mul" || name == "Neg"
	for _, v := range in {
		n.in = append(n.in, v.to(dims))
	}
	// Along axes where all operands repeat, the results do.
	if kept := n.varying(); len(kept) < len(dims) {
		var few []view
		for _, v := range n.in {
			few = append(few, v.transposed(kept))
		}
		v, ok := p.elements(name, dtype, few[0].dims, few...)
		return v.broadcast(dims, kept), ok
	}
	var keys []string
	for _, v := range n.in {
		keys = append(keys, v.squeezed().key())
	}
	if name == "Add" || name == "Mul" { // in any order
		slices.Sort(keys)
	}
	v, _ := p.once(fmt.Sprint("elements ", name, dtype, keys), func() view { return p.placed(n) }).reshaped(dims)
	return v, true
}

// varying lists the axes along which an operand does not repeat, and those of one element.
func (n *node) varying() (list []int) {
	for i, d := range n.dims {
		if d == 1 || slices.ContainsFunc(n.in, func(v view) bool { return v.strides[i] != 0 }) {
			list = append(list, i)
		}
	}
	return list
}

// placed adds a node to a unit.
func (p *planner) placed(n *node) view {
	p.place(n)
	return p.add(n)
}

// copied returns a copy of a view whose elements lie side by side.
func (p *planner) copied(v view) view {
	n := &node{kind: elementNode, dims: v.dims, dtype: v.of.dtype, in: []view{v}}
	return p.once("copy"+v.key(), func() view { return p.placed(n) })
}

// number returns a constant.
func (p *planner) number(x float64, dtype dtypes.DType) view {
	return p.constant(nil, dtype, shapes.CastAsDType([]float64{x}, dtype))
}

// constant returns a constant. Equal numbers are one.
func (p *planner) constant(dims []int, dtype dtypes.DType, literal any) view {
	n := &node{kind: constantNode, dims: dims, dtype: dtype, literal: literal}
	if size(dims) != 1 {
		return p.add(n)
	}
	return p.once(fmt.Sprint("constant ", dims, dtype, literal), func() view { return p.add(n) })
}

// once returns the view of a key, which it creates at the first use.
func (p *planner) once(key string, create func() view) view {
	v, ok := p.same[key]
	if !ok {
		v = create()
		p.same[key] = v
	}
	return v
}

// key identifies a view.
func (v view) key() string { return fmt.Sprintf(" %p %d %v %v", v.of, v.offset, v.dims, v.strides) }

// iota returns the numbers of the elements along an axis, as a constant.
func (p *planner) iota(shape shapes.Shape, axis int) (_ view, ok bool) {
	n := shape.Dimensions[axis]
	list := make([]float64, n)
	for i := range list {
		list[i] = float64(i)
	}
	if _, known := types[shape.DType]; !known || shape.DType == dtypes.Bool || n == 0 {
		return view{}, false
	}
	row := p.add(&node{
		kind: constantNode, dims: []int{n}, dtype: shape.DType, literal: shapes.CastAsDType(list, shape.DType),
	})
	return row.broadcast(shape.Dimensions, []int{axis}), true
}

func (p *planner) concatenated(axis int, shape shapes.Shape, in []view) view {
	n := &node{kind: assembledNode, dims: shape.Dimensions, dtype: shape.DType}
	at := 0
	for _, v := range in {
		starts, limits := make([]int, len(n.dims)), slices.Clone(n.dims)
		starts[axis], limits[axis] = at, at+v.dims[axis]
		n.in, n.parts = append(n.in, v), append(n.parts, whole(n).sliced(starts, limits, nil))
		at += v.dims[axis]
	}
	p.alone(n)
	return p.add(n)
}

// padded fills a value with a number around its elements and between them. Negative numbers of elements cut.
func (p *planner) padded(shape shapes.Shape, in []view, axes []compute.PadAxis) view {
	n := &node{kind: assembledNode, dims: shape.Dimensions, dtype: shape.DType}
	firsts, ends := make([]int, len(n.dims)), make([]int, len(n.dims)) // of the elements that are kept
	starts, limits, steps := make([]int, len(n.dims)), make([]int, len(n.dims)), make([]int, len(n.dims))
	for i, d := range in[0].dims {
		var a compute.PadAxis
		if i < len(axes) {
			a = axes[i]
		}
		steps[i] = a.Interior + 1
		firsts[i] = max(0, (steps[i]-1-a.Start)/steps[i])
		ends[i] = min(d, (n.dims[i]-1-a.Start+steps[i])/steps[i])
		if ends[i] <= firsts[i] {
			return in[1].to(n.dims)
		}
		starts[i] = a.Start + firsts[i]*steps[i]
		limits[i] = starts[i] + (ends[i]-firsts[i]-1)*steps[i] + 1
	}
	x := in[0].sliced(firsts, ends, nil)
	if slices.Max(append(steps, 1)) == 1 {
		return p.placedIn(n, in[1], []box{{x, starts, limits}})
	}
	n.overlap = true // fill all
	n.in = []view{in[1].to(n.dims), x}
	n.parts = []view{whole(n), whole(n).sliced(starts, limits, steps)}
	p.alone(n)
	return p.add(n)
}

// box is a value, and the part of a node that has its elements.
type box struct {
	of             view
	starts, limits []int
}

// placedIn adds a node whose elements are those of boxes, which are apart, and a padding elsewhere.
func (p *planner) placedIn(n *node, padding view, data []box) view {
	add := func(b box) {
		part := whole(n).sliced(b.starts, b.limits, nil)
		n.in, n.parts = append(n.in, b.of.to(part.dims)), append(n.parts, part)
	}
	filled := 0
	for _, b := range data {
		filled += size(b.of.dims)
	}
	switch {
	case filled == size(n.dims):
	case len(data) == 1: // pad each side of an axis, between those of the axes before
		b := data[0]
		first, end := make([]int, len(n.dims)), slices.Clone(n.dims)
		for i := range n.dims {
			for _, side := range [][2]int{{0, b.starts[i]}, {b.limits[i], n.dims[i]}} {
				if side[0] < side[1] {
					first[i], end[i] = side[0], side[1]
					add(box{padding, first, end})
				}
			}
			first[i], end[i] = b.starts[i], b.limits[i]
		}
	default: // pad all
		n.overlap = true
		add(box{padding, make([]int, len(n.dims)), n.dims})
	}
	for _, b := range data {
		add(b)
	}
	if c := padding.of; c.kind == constantNode && fmt.Sprint(c.literal) == "[0]" {
		n.data = data
	}
	p.alone(n)
	return p.add(n)
}

// joined returns the sum of values that are padded by zeros, if their boxes are apart: one node with both. The gradient
// of slices is one.
func (p *planner) joined(a, b view) (_ view, ok bool) {
	for _, v := range []view{a, b} {
		if v.of.data == nil || !v.identity() || !slices.Equal(v.dims, v.of.dims) || !slices.Equal(v.dims, a.dims) {
			return view{}, false
		}
	}
	for _, x := range a.of.data {
		for _, y := range b.of.data {
			apart := false
			for i := range x.starts {
				apart = apart || x.limits[i] <= y.starts[i] || y.limits[i] <= x.starts[i]
			}
			if !apart {
				return view{}, false
			}
		}
	}
	n := &node{kind: assembledNode, dims: a.of.dims, dtype: a.of.dtype}
	return p.placedIn(n, p.number(0, n.dtype), slices.Concat(a.of.data, b.of.data)), true
}

// reduced reduces some axes, all if none is listed.
func (p *planner) reduced(r vector.Reduction, v view, axes []int, dtype dtypes.DType) (_ view, ok bool) {
	switch dtype {
	case dtypes.Float32, dtypes.Float64, dtypes.Int32, dtypes.Int64:
	default:
		return view{}, false
	}
	if v.of.dtype != dtype {
		return view{}, false
	}
	var kept, gone, dims []int
	for i, d := range v.dims {
		if slices.Contains(axes, i) || len(axes) == 0 {
			gone = append(gone, i)
		} else {
			kept, dims = append(kept, i), append(dims, d)
		}
	}
	c := v.transposed(slices.Concat(kept, gone))
	rows := size(dims)
	columns := size(c.dims) / rows
	last := -1 // the innermost axis of more than one element
	for i, d := range v.dims {
		if d > 1 {
			last = i
		}
	}
	if last >= 0 && slices.Contains(kept, last) && columns > 1 {
		return p.columnSums(r, v, kept, gone, dims, dtype), true
	}
	if rows == 1 && columns > longRow {
		for parts := columns / longRow; parts > 1; parts-- {
			if columns%parts == 0 && columns/parts <= 8*longRow {
				if x, ok := c.reshaped([]int{parts, columns / parts}); ok {
					first, _ := p.reduced(r, x, []int{1}, dtype)
					return p.reduced(r, first, nil, dtype)
				}
			}
		}
	}
	x, ok := c.reshaped([]int{rows, columns})
	if !ok {
		x = c
	}
	n := &node{kind: rowNode, dims: dims, dtype: dtype, in: []view{x}, reduce: r}
	return p.once(fmt.Sprint("rows ", r, dims, x.key()), func() view { return p.placed(n) }), true
}

// longRow is the number of elements from which a reduction to a number has two steps.
const longRow = 4096

// columnSums reduces axes before the innermost one.
func (p *planner) columnSums(r vector.Reduction, v view, kept, gone, dims []int, dtype dtypes.DType) view {
	// The axes after the last reduced one are the inner ones.
	inner := 0
	for len(kept) > inner && kept[len(kept)-1-inner] > gone[len(gone)-1] {
		inner++
	}
	outer := kept[:len(kept)-inner]
	c := v.transposed(slices.Concat(outer, gone, kept[len(outer):]))
	if _, stride, ok := merged(c.dims[len(c.dims)-inner:], c.strides[len(c.dims)-inner:]); !ok || stride != 1 {
		c = p.copied(c)
	}
	o, last := c.dims[:len(outer)], c.dims[len(outer)+len(gone):]
	total, columns := size(c.dims[len(outer):])/size(last), size(last)
	if columns <= longRow && total*columns > 8*taskElements && size(o)*columns < taskElements {
		for parts := 32; parts > 1; parts-- { // in two steps, since there would be few tasks
			rest, fold := total/parts, 8 // rows that are one vector
			for fold > 1 && (rest%fold != 0 || fold*columns > 512) {
				fold /= 2
			}
			if total%parts != 0 || rest == fold {
				continue
			}
			if x, ok := c.reshaped(slices.Concat(o, []int{parts, rest / fold, fold}, last)); ok {
				first, _ := p.reduced(r, x, []int{len(o) + 1}, dtype)
				y, _ := p.reduced(r, first, []int{len(o), len(o) + 1}, dtype)
				return y
			}
		}
	}
	n := &node{kind: columnNode, dims: dims, dtype: dtype, in: []view{c}, reduce: r}
	n.parts = []view{{dims: c.dims[:len(outer)]}, {dims: c.dims[len(outer) : len(outer)+len(gone)]}}
	p.alone(n)
	return p.add(n)
}

// copiedElsewhere lets the Go backend copy a value.
func (p *planner) copiedElsewhere(x *record.Value) *node {
	o := &record.Op{Name: "Identity", Inputs: []*record.Value{x}, Outputs: []*record.Value{x}}
	o.Emit = func(to compute.Function, in []compute.Value, _ []compute.Function) ([]compute.Value, error) {
		v, err := to.Identity(in[0])
		return []compute.Value{v}, err
	}
	return p.elsewhere(o, []view{p.views[x]})[0].of
}

// elsewhere lets the Go backend compute an operation.
func (p *planner) elsewhere(o *record.Op, in []view) []view {
	var operands []view
	for i, of := range uses(o) {
		v := in[i]
		if of == nil || of.Op.Name == "Constant" {
			operands = append(operands, view{})
			continue
		}
		if !v.identity() {
			v = p.copied(v)
		}
		operands = append(operands, v)
	}
	var list []view
	var nodes []*node
	for i, v := range o.Outputs {
		n := &node{kind: foreignNode, dims: v.Shape.Dimensions, dtype: v.Shape.DType, in: operands, op: o, result: i}
		if i > 0 {
			n.unit = nodes[0].unit
			n.unit.nodes = append(n.unit.nodes, n)
		} else {
			p.place(n)
		}
		nodes, list = append(nodes, n), append(list, p.add(n))
	}
	p.foreign[o] = nodes
	return list
}
