package backend

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"unsafe"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"

	"github.com/lockstep-ml/lockstep/backend/internal/product"
	"github.com/lockstep-ml/lockstep/backend/internal/vector"
	"github.com/lockstep-ml/lockstep/internal/record"
)

// Executable is a plan with its memory. It may be executed concurrently.
type Executable struct {
	backend *Backend
	names   []string
	shapes  []shapes.Shape // of the parameters
	outputs []shapes.Shape
	classes []string // of the outputs, for free buffers

	slots     []slot
	constants []compute.Buffer
	// foreignOutputs are the slots of the outputs that the Go backend makes.
	foreignOutputs map[int]int
	instructions   []instruction
	pointed        bool // it has points
	arenaBytes     int
	scratchBytes   int
	planned        bool // the Go backend executes nothing

	mu        sync.Mutex
	free      []*frame
	finalized bool
}

var _ compute.Executable = (*Executable)(nil)

// slot is where the memory of a node comes from.
type slot struct {
	kind   slotKind
	index  int   // of the parameter, constant or output
	donors []int // of an output: the parameters whose memory it can take if they are donated
	offset int   // in the arena
	shape  shapes.Shape
}

type slotKind uint8

const (
	arenaSlot slotKind = iota
	parameterSlot
	constantSlot
	outputSlot
	sharedSlot  // a buffer of the Go backend, which reads it, or which a point hands out
	foreignSlot // a buffer that the Go backend makes
	pointSlot   // a buffer that a point returns
)

// frame is the memory of one execution.
type frame struct {
	arena   []uint64
	memory  []unsafe.Pointer // by slot
	buffers []compute.Buffer // by slot: those that the Go backend knows
	taken   []*Buffer        // donated arguments whose memory outputs have
	donated []*Buffer        // other donated arguments
	worker  worker
	job     job
	out     []compute.Buffer
	points  Points
	list    []compute.Buffer // of a point
}

// instruction executes a unit.
type instruction interface {
	run(e *Executable, f *frame) error
}

// newExecutable plans a graph.
func newExecutable(b *Backend, g *record.Builder, callOf map[*record.Op]int, buckets [][]int) (*Executable, error) {
	e := &Executable{backend: b, foreignOutputs: map[int]int{}}
	for _, v := range g.Parameters {
		e.names = append(e.names, v.Op.Attributes[0].(string))
		e.shapes = append(e.shapes, v.Shape)
	}
	p := newPlanner()
	needs := needed(g.Entry.Outputs)
	for o := range needs {
		for _, v := range o.Needs() {
			p.users[v]++
		}
	}
	for _, v := range g.Entry.Outputs {
		p.users[v]++
	}
	before := p.lowerAll(g, needs, callOf)
	outputs := e.chooseOutputs(p, g.Entry.Outputs, slices.Concat(buckets...))
	p.order(buckets, outputs, before)
	e.pointed = len(p.points) > 0
	p.prune(append(p.pointNodes(), outputs...))
	p.indexReaders()
	p.sink(outputs)
	p.assignPoints()
	order := p.ordered()
	stored := stored(order, outputs)
	for _, u := range order { // an output needs memory that belongs to the caller
		u.constant = u.constant &&
			!slices.ContainsFunc(u.nodes, func(n *node) bool { return slices.Contains(outputs, n) }) &&
			!slices.ContainsFunc(u.requires(), func(d *unit) bool { return !d.constant })
	}
	if err := e.planMemory(p, order, stored, outputs); err != nil {
		return nil, err
	}
	names := map[string]bool{} // of what the Go backend executes
	var once []instruction     // their results are constant
	for _, u := range order {
		if err := e.compile(u, stored); err != nil {
			return nil, err
		}
		if last := len(e.instructions) - 1; u.constant {
			once = append(once, e.instructions[last])
			e.instructions = e.instructions[:last]
		}
		for _, n := range u.nodes {
			if n.kind == foreignNode {
				names[n.foreignName()] = true
			}
		}
	}
	e.planned = len(names) == 0
	b.log("operations", "operations", slices.Sorted(maps.Keys(names))...)
	if len(once) == 0 {
		return e, nil
	}
	f, err := e.frame()
	if err != nil {
		return nil, err
	}
	e.free = append(e.free, f)
	for _, x := range once {
		if err := x.run(e, f); err != nil {
			return nil, err
		}
	}
	return e, nil
}

// chooseOutputs returns the node of each output: a different one for each, with the elements of the output. Nothing
// reads those in buckets, which are changed while the plan is executed.
func (e *Executable) chooseOutputs(p *planner, values []*record.Value, inBuckets []int) []*node {
	used, read := map[*node]bool{}, map[*node]bool{} // by any node, and by the Go backend
	for _, n := range p.nodes {
		for _, v := range n.in {
			used[v.of] = true
			read[v.of] = read[v.of] || n.kind == foreignNode
		}
	}
	var list []*node
	for k, x := range values {
		v := p.views[x]
		n := v.of
		sameShape := slices.Equal(n.dims, x.Shape.Dimensions)
		switch {
		case n.kind != pointNode && !(used[n] && slices.Contains(inBuckets, k)) && v.identity() &&
			n.unit != nil && !slices.Contains(list, n) && (sameShape || n.kind != foreignNode && !read[n]):
		case opaque(n.dtype):
			n = p.copiedElsewhere(x)
		default:
			n = &node{kind: elementNode, dims: v.dims, dtype: n.dtype, in: []view{v}}
			p.place(n)
			p.add(n)
		}
		list = append(list, n)
		e.outputs, e.classes = append(e.outputs, x.Shape), append(e.classes, x.Shape.String())
	}
	return list
}

// stored returns the nodes that need memory: those that another unit reads, and outputs.
func stored(order []*unit, outputs []*node) map[*node]bool {
	set := map[*node]bool{}
	for _, u := range order {
		for _, n := range u.nodes {
			if u.kind == singleUnit {
				set[n] = true
			}
			for _, v := range n.in {
				if v.of != nil && v.of.unit != nil && v.of.unit.root() != u {
					set[v.of] = true
				}
			}
		}
	}
	for _, n := range outputs {
		set[n] = true
	}
	return set
}

// planMemory gives slots to the nodes that need memory.
func (e *Executable) planMemory(p *planner, order []*unit, stored map[*node]bool, outputs []*node) error {
	for _, n := range p.nodes {
		switch n.kind {
		case parameterNode:
			e.slot(n, slot{kind: parameterSlot, index: n.parameter})
		case constantNode:
			flat, err := e.keep(n)
			if err != nil {
				return err
			}
			if size(n.dims) > 0 {
				bytes := size(n.dims) * n.bytes()
				copy(unsafe.Slice((*byte)(pointerOf(flat)), bytes), unsafe.Slice((*byte)(pointerOf(n.literal)), bytes))
			}
		}
	}
	for k, n := range outputs {
		if n.kind != foreignNode {
			s := slot{kind: outputSlot, index: k}
			if slices.Equal(n.dims, e.outputs[k].Dimensions) { // else a donated argument has another shape
				s.donors = p.donors(n, order)
			}
			e.slot(n, s)
			continue
		}
		e.slot(n, slot{kind: foreignSlot})
		e.foreignOutputs[k] = n.slot
	}
	for _, u := range order {
		for _, n := range u.nodes {
			if u.constant && stored[n] {
				if _, err := e.keep(n); err != nil {
					return err
				}
			}
		}
	}
	last := map[*node]int{} // unit that reads a node
	for i, u := range order {
		for _, n := range u.nodes {
			if u.kind == pointUnit && u.point.bucket < 0 {
				e.slot(n, slot{kind: pointSlot})
			}
			for _, v := range n.in {
				if v.of == nil {
					continue
				}
				last[v.of] = i
				if (u.kind == foreignUnit || u.kind == pointUnit) && v.of.slot < 0 && v.of.kind != foreignNode {
					e.slot(v.of, slot{kind: sharedSlot})
				}
			}
		}
	}
	// Blocks of the arena, in the order of their addresses. What a unit writes must not lie where it reads.
	type block struct{ offset, end, until int }
	var blocks []block
	for i, u := range order {
		blocks = slices.DeleteFunc(blocks, func(b block) bool { return b.until < i })
		for _, n := range u.nodes {
			switch {
			case !stored[n] || n.slot >= 0:
				continue
			case n.kind == foreignNode:
				e.slot(n, slot{kind: foreignSlot})
				continue
			}
			if x := e.replaced(n, last, i); x != nil {
				e.slot(n, slot{kind: arenaSlot, offset: e.slots[x.slot].offset})
				at := slices.IndexFunc(blocks, func(b block) bool { return b.offset == e.slots[x.slot].offset })
				blocks[at].until = max(last[n], i)
				delete(last, x)
				continue
			}
			bytes := (size(n.dims)*n.bytes() + alignment - 1) &^ (alignment - 1)
			at, gap := 0, 0
			for gap < len(blocks) && blocks[gap].offset-at < bytes {
				at = blocks[gap].end
				gap++
			}
			blocks = slices.Insert(blocks, gap, block{at, at + bytes, max(last[n], i)})
			e.slot(n, slot{kind: arenaSlot, offset: at})
			e.arenaBytes = max(e.arenaBytes, at+bytes)
		}
	}
	return nil
}

// replaced returns an operand of an element node whose memory the node can take, if there is one: the loop, unit i,
// reads it last, and only where it then writes the node.
func (e *Executable) replaced(n *node, last map[*node]int, i int) *node {
	if n.kind != elementNode || n.dtype == dtypes.Bool || size(n.dims) == 0 {
		return nil
	}
	home := n.unit.root()
next:
	for _, v := range n.in {
		x := v.of
		if until, used := last[x]; !used || until != i || x.slot < 0 || e.slots[x.slot].kind != arenaSlot ||
			x.unit.root() == home || x.dtype == dtypes.Bool || x.bytes() != n.bytes() || size(x.dims) != size(n.dims) ||
			home.levelOf(n) != elements {
			continue
		}
		for _, m := range home.nodes {
			for _, v := range m.in {
				if v.of == x && (m.index > n.index || !v.identity()) {
					continue next
				}
			}
		}
		return x
	}
	return nil
}

// keep gives a node memory that lasts as long as the executable.
func (e *Executable) keep(n *node) (flat any, err error) {
	b, flat, err := e.backend.inner.NewSharedBuffer(0, shapes.Make(n.dtype, n.dims...))
	if err != nil {
		return nil, err
	}
	e.slot(n, slot{kind: constantSlot, index: len(e.constants)})
	e.constants = append(e.constants, b)
	return flat, nil
}

// donors lists the parameters whose memory an output of a loop can take, the best one first: those whose elements
// nothing reads later than the output's elements are written.
func (p *planner) donors(n *node, order []*unit) []int {
	if n.unit.kind != loopUnit {
		return nil
	}
	home := n.unit.root()
	var candidates []*node
	for _, x := range p.nodes {
		if x.kind == parameterNode && x.dtype == n.dtype && slices.Equal(x.dims, n.dims) {
			candidates = append(candidates, x)
		}
	}
	at := slices.Index(order, home)
	for i, u := range order {
		for _, m := range u.nodes {
			for _, v := range m.in {
				if i > at || i == at && (m.index > n.index || !v.identity()) {
					candidates = slices.DeleteFunc(candidates, func(x *node) bool { return x == v.of })
				}
			}
		}
	}
	slices.SortStableFunc(candidates, func(a, b *node) int { return n.reads(b) - n.reads(a) })
	var list []int
	for _, x := range candidates {
		list = append(list, x.parameter)
	}
	return list
}

// reads returns 1 if an operand is x.
func (n *node) reads(x *node) int {
	if slices.ContainsFunc(n.in, func(v view) bool { return v.of == x }) {
		return 1
	}
	return 0
}

func (e *Executable) slot(n *node, s slot) {
	s.shape = shapes.Make(n.dtype, n.dims...)
	n.slot = len(e.slots)
	e.slots = append(e.slots, s)
}

// compile adds the instruction of a unit.
func (e *Executable) compile(u *unit, stored map[*node]bool) error {
	switch {
	case u.kind == loopUnit:
		l := compileLoop(u, stored)
		e.scratchBytes = max(e.scratchBytes, l.scratch)
		e.instructions = append(e.instructions, l.instruction())
	case u.kind == pointUnit:
		x := *u.point
		x.unit = nil
		for _, n := range u.nodes {
			if x.bucket < 0 {
				x.in, x.out = append(x.in, n.in[0].of.slot), append(x.out, n.slot)
			}
		}
		e.instructions = append(e.instructions, &x)
	case u.kind == foreignUnit:
		x, err := compileForeign(e, u, stored)
		if err != nil {
			return err
		}
		e.instructions = append(e.instructions, x)
	case u.nodes[0].kind == productNode:
		e.instructions = append(e.instructions, e.newProduct(u.nodes[0]))
	case u.nodes[0].kind == columnNode:
		e.instructions = append(e.instructions, newColumns(u.nodes[0]))
	case u.nodes[0].kind == tasksNode:
		x := u.nodes[0].newTasks(u.nodes[0])
		e.scratchBytes = max(e.scratchBytes, x.scratch)
		e.instructions = append(e.instructions, x)
	default:
		e.instructions = append(e.instructions, newAssembly(u.nodes[0]))
	}
	return nil
}

// tasksInstruction is divided into tasks.
type tasksInstruction struct {
	tasks   int
	scratch int
	task    func(task int, memory []unsafe.Pointer, w *worker)
}

func (l *loop) instruction() instruction {
	return &tasksInstruction{tasks: l.tasks(), scratch: l.scratch, task: l.run}
}

func (x *tasksInstruction) run(e *Executable, f *frame) error {
	if x.tasks == 1 {
		x.task(0, f.memory, &f.worker)
		return nil
	}
	e.backend.team.execute(x, f.memory, &f.job, &f.worker)
	return nil
}

// taskOperations is how many operations a task of a product has at least, apart from the last one.
const taskOperations = 2 << 20

// fewRows is for how many rows or columns a product takes as long as for one: it reads the other matrix.
const fewRows = 16

func (e *Executable) newProduct(n *node) instruction {
	e.scratchBytes = max(e.scratchBytes, product.ScratchBytes)
	p := n.product
	a, b, to := n.in[0].of.slot, n.in[1].of.slot, n.slot
	if p.Rows == 1 && p.B.Row == 1 && p.B.Column > 1 { // the left matrix needs no copy
		q := *p
		q.Product = product.Product{
			Rows: p.Columns, Columns: 1, Depth: p.Depth,
			A: product.Strides{Row: p.B.Column, Column: 1}, B: product.Strides{Row: p.A.Column, Column: 1}, C: 1,
		}
		q.first[0], q.first[1] = p.first[1], p.first[0]
		q.stride[0], q.stride[1] = p.stride[1], p.stride[0]
		p, a, b = &q, b, a
	}
	perBatch := max(1, 2*max(p.Rows, fewRows)*max(p.Columns, fewRows)*p.Depth)
	batch := size(p.batch)
	x := &tasksInstruction{scratch: product.ScratchBytes}
	if batch > 1 || perBatch < 2*taskOperations {
		each := max(1, taskOperations/perBatch, (batch+mostTasks-1)/mostTasks)
		x.tasks = (batch + each - 1) / each
		x.task = func(task int, memory []unsafe.Pointer, w *worker) {
			for i := task * each; i < min((task+1)*each, batch); i++ {
				p.run(n.dtype, memory[to], memory[a], memory[b], i, 0, p.Rows, 0, p.Columns, w.scratch)
			}
		}
		return x
	}
	parts := min(perBatch/taskOperations, 32)
	few := 2 * (len(e.backend.team.helpers) + 1)
	if columns, ok := p.Copies(n.bytes()); ok && p.Rows > fewRows && p.Columns >= columns { // each task copies its rows
		parts = min(parts, few)
	}
	// Columns in whole panels; rows, if there are too few of them.
	panel := 32
	if p.Rows == 1 {
		panel = 128 // whole widths of the kernel of one row
	}
	columnParts := min(parts, (p.Columns+panel-1)/panel)
	if p.Columns < 8*panel && p.Rows > p.Columns {
		columnParts = 1
	}
	rowParts := max(1, min(parts/columnParts, p.Rows/128, few)) // each packs all panels
	x.tasks = columnParts * rowParts
	panels := (p.Columns + panel - 1) / panel
	x.task = func(task int, memory []unsafe.Pointer, w *worker) {
		i, j := task/columnParts, task%columnParts
		p.run(n.dtype, memory[to], memory[a], memory[b], 0, p.Rows*i/rowParts, p.Rows*(i+1)/rowParts,
			min(panels*j/columnParts*panel, p.Columns), min(panels*(j+1)/columnParts*panel, p.Columns), w.scratch)
	}
	return x
}

// run computes a part of the product of one combination of batch indices.
func (p *productPlan) run(t dtypes.DType, c, a, b unsafe.Pointer, batch, r0, r1, j0, j1 int, scratch unsafe.Pointer) {
	atA, atB, atC := p.first[0], p.first[1], 0
	for axis, d := range slices.Backward(p.batch) {
		atA += batch % d * p.stride[0][axis]
		atB += batch % d * p.stride[1][axis]
		atC += batch % d * p.stride[2][axis]
		batch /= d
	}
	if t == dtypes.Float32 {
		multiply[float32](&p.Product, c, a, b, atC, atA, atB, r0, r1, j0, j1, scratch)
	} else {
		multiply[float64](&p.Product, c, a, b, atC, atA, atB, r0, r1, j0, j1, scratch)
	}
}

func multiply[T product.Float](p *product.Product, c, a, b unsafe.Pointer, atC, atA, atB, r0, r1, j0, j1 int,
	scratch unsafe.Pointer,
) {
	bytes := int(unsafe.Sizeof(*new(T)))
	part := func(from unsafe.Pointer, at, rows, columns, row, column int) []T {
		n := 0
		if rows > 0 && columns > 0 {
			n = (rows-1)*row + (columns-1)*column + 1
		}
		return unsafe.Slice((*T)(unsafe.Add(from, at*bytes)), n)
	}
	product.Run(p, part(c, atC, p.Rows, p.Columns, p.C, 1), part(a, atA, p.Rows, p.Depth, p.A.Row, p.A.Column),
		part(b, atB, p.Depth, p.Columns, p.B.Row, p.B.Column), r0, r1, j0, j1, scratch)
}

// newColumns reduces the middle axis of (outer, reduced, inner), in groups of columnGroup rows.
func newColumns(n *node) *tasksInstruction {
	v := n.in[0]
	outer, gone := len(n.parts[0].dims), len(n.parts[1].dims)
	outerView := view{offset: v.offset, dims: v.dims[:outer], strides: v.strides[:outer]}
	goneView := view{dims: v.dims[outer : outer+gone], strides: v.strides[outer : outer+gone]}.collapsed()
	inner := size(v.dims[outer+gone:])
	outers, reduced := size(outerView.dims), size(goneView.dims)
	from, to := v.of.slot, n.slot
	width := min(inner, blockElements)
	perRow := (inner + width - 1) / width
	if outers == 1 && perRow == 1 && inner >= 64 && reduced*inner > taskElements {
		width = (inner/4 + 31) &^ 31
		perRow = (inner + width - 1) / width
	}
	t, bytes := typeOf(n.dtype)
	run, step := 1, 0 // rows that are evenly spaced
	if last := len(goneView.dims) - 1; last >= 0 {
		run, step = goneView.dims[last], goneView.strides[last]*bytes
	}
	return &tasksInstruction{
		tasks: outers * perRow, scratch: width * bytes,
		task: func(task int, memory []unsafe.Pointer, w *worker) {
			o, column := task/perRow, task%perRow*width
			count := min(width, inner-column)
			base := unsafe.Add(memory[from], (outerView.at(o)+column)*bytes)
			total := unsafe.Add(memory[to], (o*inner+column)*bytes)
			for group := 0; group < reduced; group += columnGroup {
				sum := total
				if group > 0 {
					sum = w.scratch
				}
				end := min(group+columnGroup, reduced)
				row := unsafe.Add(base, goneView.at(group)*bytes)
				copy(unsafe.Slice((*byte)(sum), count*bytes), unsafe.Slice((*byte)(row), count*bytes))
				for i := group + 1; i < end; {
					rows := min(run-i%run, end-i)
					vector.ReduceRows(n.reduce, t, sum, unsafe.Add(base, goneView.at(i)*bytes), rows, step, count)
					i += rows
				}
				if group > 0 {
					vector.ReduceRows(n.reduce, t, total, sum, 1, 0, count)
				}
			}
		},
	}
}

// columnGroup is the number of rows whose sum is added to those before.
const columnGroup = 256

// at returns the position of an element by its number in row-major order.
func (v view) at(i int) int {
	offset := v.offset
	for axis, d := range slices.Backward(v.dims) {
		offset += i % d * v.strides[axis]
		i /= d
	}
	return offset
}

// newAssembly copies parts of a node from operands. Tasks divide each part. If parts overlap there is one task, since
// later parts replace earlier ones.
func newAssembly(n *node) *tasksInstruction {
	bytes, to := n.bytes(), n.slot
	type part struct {
		slot          int
		from          view
		rows          view // of the part
		count         int  // of rows
		inner, stride int  // elements of a row
	}
	var parts []part
	for i, v := range n.in {
		if size(v.dims) == 0 {
			continue
		}
		x := part{slot: v.of.slot, from: v.collapsed(), inner: 1, stride: 1}
		c := n.parts[i].collapsed()
		if last := len(c.dims) - 1; last >= 0 {
			x.inner, x.stride = c.dims[last], c.strides[last]
			c.dims, c.strides = c.dims[:last], c.strides[:last]
		}
		x.rows, x.count = c, size(c.dims)
		parts = append(parts, x)
	}
	tasks := 1
	if !n.overlap {
		tasks = max(1, min(mostTasks, size(n.dims)/taskElements))
	}
	return &tasksInstruction{tasks: tasks, task: func(task int, memory []unsafe.Pointer, _ *worker) {
		for i := range parts {
			x := &parts[i]
			for r := x.count * task / tasks; r < x.count*(task+1)/tasks; r++ {
				at := unsafe.Add(memory[to], x.rows.at(r)*bytes)
				if x.stride == 1 {
					copyView(at, memory[x.slot], x.from, bytes, r*x.inner, (r+1)*x.inner)
					continue
				}
				for j := range x.inner {
					k := r*x.inner + j
					copyView(unsafe.Add(at, j*x.stride*bytes), memory[x.slot], x.from, bytes, k, k+1)
				}
			}
		}
	}}
}

// foreign executes a subgraph by the Go backend.
type foreign struct {
	exe     compute.Executable
	names   []string // of the operations
	in, out []int    // slots
}

// foreignName is the name of a foreignNode in messages.
func (n *node) foreignName() string { return fmt.Sprintf("%s(%s)", n.op.Name, n.dtype) }

func compileForeign(e *Executable, u *unit, stored map[*node]bool) (*foreign, error) {
	x := &foreign{}
	b := e.backend.inner.Builder("part")
	main := b.Main()
	values, done, emission := map[*node]compute.Value{}, map[*record.Op]bool{}, record.NewEmission(b)
	value := func(v view, of *record.Value) (compute.Value, error) {
		switch {
		case of == nil:
			return nil, nil
		case v.of == nil:
			list, err := of.Op.Emit(main, nil, nil)
			if err != nil {
				return nil, err
			}
			return list[0], nil
		}
		y, known := values[v.of]
		if !known {
			var err error
			y, err = main.Parameter(fmt.Sprint("#", len(x.in)), e.slots[v.of.slot].shape, nil)
			if err != nil {
				return nil, err
			}
			values[v.of], x.in = y, append(x.in, v.of.slot)
		}
		if slices.Equal(v.dims, v.of.dims) {
			return y, nil
		}
		return main.Reshape(y, v.dims...)
	}
	byOp := map[*record.Op][]*node{}
	for _, n := range u.nodes {
		byOp[n.op] = append(byOp[n.op], n)
	}
	var outputs []compute.Value
	for _, n := range u.nodes {
		if done[n.op] {
			continue
		}
		done[n.op] = true
		x.names = append(x.names, n.foreignName())
		for i, of := range uses(n.op) {
			var err error
			if emission.Values[of], err = value(n.in[i], of); err != nil {
				return nil, err
			}
		}
		if err := emission.Add(n.op, main); err != nil {
			return nil, err
		}
		for _, m := range byOp[n.op] {
			values[m] = emission.Values[n.op.Outputs[m.result]]
		}
	}
	for _, n := range u.nodes {
		if stored[n] {
			outputs, x.out = append(outputs, values[n]), append(x.out, n.slot)
		}
	}
	if err := main.Return(outputs, nil); err != nil {
		return nil, err
	}
	var err error
	x.exe, err = b.Compile()
	return x, err
}

func (x *foreign) run(e *Executable, f *frame) error {
	in := make([]compute.Buffer, len(x.in))
	for i, s := range x.in {
		in[i] = f.buffers[s]
	}
	out, err := executeInner(x.exe, strings.Join(x.names, ", "), in, nil)
	if err != nil {
		return err
	}
	for i, s := range x.out {
		flat, err := out[i].Data()
		if err != nil {
			return err
		}
		f.buffers[s], f.memory[s] = out[i], pointerOf(flat)
	}
	return nil
}

// Finalize implements compute.Executable.
func (e *Executable) Finalize() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.finalized = true
	for _, f := range e.free {
		f.release(e)
	}
	e.free = nil
	for _, x := range e.instructions {
		if y, ok := x.(*foreign); ok {
			y.exe.Finalize()
		}
	}
	for _, b := range e.constants {
		_ = b.Finalize() // it is freed with the backend otherwise
	}
	e.instructions, e.constants = nil, nil
}

func (f *frame) release(e *Executable) {
	for i, s := range e.slots {
		if s.kind == sharedSlot {
			_ = f.buffers[i].Finalize() // it is freed with the backend otherwise
		}
	}
}

// Inputs implements compute.Executable.
func (e *Executable) Inputs() ([]string, []shapes.Shape) { return e.names, e.shapes }

// Planned reports whether the Go backend executes no part of the graph. Then an execution with arguments of the right
// shapes cannot fail.
func (e *Executable) Planned() bool { return e.planned }

// Outputs implements compute.Executable.
func (e *Executable) Outputs() []shapes.Shape { return e.outputs }

// frame returns memory for an execution.
func (e *Executable) frame() (*frame, error) {
	e.mu.Lock()
	if e.finalized {
		e.mu.Unlock()
		return nil, errors.New("the executable is finalized")
	}
	if n := len(e.free); n > 0 {
		f := e.free[n-1]
		e.free = e.free[:n-1]
		e.mu.Unlock()
		return f, nil
	}
	e.mu.Unlock()
	f := &frame{
		arena:  make([]uint64, (e.arenaBytes+alignment)/8+1),
		memory: make([]unsafe.Pointer, len(e.slots)), buffers: make([]compute.Buffer, len(e.slots)),
	}
	preferHugePages(f.arena)
	f.worker.reserve(e.scratchBytes)
	arena := align(unsafe.Pointer(&f.arena[0]))
	for i, s := range e.slots {
		switch s.kind {
		case arenaSlot:
			f.memory[i] = unsafe.Add(arena, s.offset)
		case sharedSlot, constantSlot:
			if s.kind == constantSlot {
				f.buffers[i] = e.constants[s.index]
			} else {
				b, _, err := e.backend.inner.NewSharedBuffer(0, s.shape)
				if err != nil {
					return nil, err
				}
				f.buffers[i] = b
			}
			flat, err := f.buffers[i].Data()
			if err != nil {
				return nil, err
			}
			f.memory[i] = pointerOf(flat)
		}
	}
	return f, nil
}

// Execute implements compute.Executable. It fails for a plan with points.
func (e *Executable) Execute(in []compute.Buffer, donate []bool, _ compute.DeviceNum) ([]compute.Buffer, error) {
	if e.pointed {
		return nil, errors.New("a plan with points must be executed by Executable.Run")
	}
	out := make([]compute.Buffer, len(e.outputs))
	if err := e.Run(out, in, donate, Points{}); err != nil {
		return nil, err
	}
	return out, nil
}

// Run executes the plan like Execute, and calls points. It sets out to the outputs, nil for those in buckets. After an
// error out has those that were made, which the caller must not read.
func (e *Executable) Run(out, in []compute.Buffer, donate []bool, points Points) error {
	b := e.backend
	if b.IsFinalized() {
		return errFinalized
	}
	if len(in) != len(e.shapes) || len(donate) != 0 && len(donate) != len(in) || len(out) != len(e.outputs) {
		return fmt.Errorf("the graph has %d parameters and %d outputs, but was executed with %d arguments, %d to "+
			"donate, and %d outputs", len(e.shapes), len(e.outputs), len(in), len(donate), len(out))
	}
	for i, x := range in {
		if err := b.fits(x, e.shapes[i]); err != nil {
			return fmt.Errorf("argument %d (%s): %w", i, e.names[i], err)
		}
	}
	f, err := e.frame()
	if err != nil {
		return err
	}
	clear(out)
	f.out, f.points = out, points
	b.team.running.Add(1)
	err = e.execute(f, in, donate)
	b.team.running.Add(-1)
	f.out, f.points = nil, Points{}
	clear(f.list)
	for i, s := range e.slots {
		switch s.kind {
		case foreignSlot:
			if f.buffers[i] != nil {
				_ = f.buffers[i].Finalize() // garbage otherwise
			}
			f.buffers[i], f.memory[i] = nil, nil
		case parameterSlot, outputSlot, pointSlot:
			f.buffers[i], f.memory[i] = nil, nil
		}
	}
	if err == nil {
		for i, yes := range donate {
			if x := in[i].(*Buffer); yes && x.detach() { // all before recycle, since an argument can be there twice
				f.donated = append(f.donated, x)
			}
		}
		_ = b.recycle(f.donated...) // an error would mean that the backend is finalized
		f.donated = f.donated[:0]
		b.reuse(f.taken) // after an error the caller may finalize them
	}
	f.taken = f.taken[:0]
	e.mu.Lock()
	e.free = append(e.free, f)
	e.mu.Unlock()
	return err
}

// output returns a buffer for an output: with the memory of a donated argument, if possible.
func (e *Executable) output(s slot, f *frame, in []compute.Buffer, donate []bool) (*Buffer, error) {
	for _, p := range s.donors {
		if len(donate) == 0 || !donate[p] || in[p].(*Buffer).inner == nil {
			continue
		}
		if at := slices.Index(in, in[p]); at < p || slices.Contains(in[p+1:], in[p]) { // another argument, too
			continue
		}
		f.taken = append(f.taken, in[p].(*Buffer))
		return e.backend.take(in[p].(*Buffer)), nil
	}
	return e.backend.buffer(e.outputs[s.index], e.classes[s.index])
}

// execute runs the instructions. The slots of parameters are before those of outputs, which may take their memory.
func (e *Executable) execute(f *frame, in []compute.Buffer, donate []bool) error {
	for i, s := range e.slots {
		var b *Buffer
		switch s.kind {
		case parameterSlot:
			b = in[s.index].(*Buffer)
		case outputSlot:
			var err error
			if b, err = e.output(s, f, in, donate); err != nil {
				return err
			}
			f.out[s.index] = b
		default:
			continue
		}
		var err error
		if f.memory[i], err = b.pointer(); err != nil {
			return err
		}
		f.buffers[i] = b.inner
	}
	for _, x := range e.instructions {
		if err := x.run(e, f); err != nil {
			return err
		}
	}
	for k := range e.foreignOutputs {
		e.takeForeign(f, k)
	}
	return nil
}

// takeForeign sets output k, if the Go backend makes it and it is not in a bucket that is handed over.
func (e *Executable) takeForeign(f *frame, k int) {
	if s, foreign := e.foreignOutputs[k]; foreign && f.buffers[s] != nil {
		f.out[k] = &Buffer{backend: e.backend, inner: f.buffers[s], shape: e.outputs[k]}
		f.buffers[s] = nil
	}
}
