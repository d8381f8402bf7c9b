package backend

import (
	"fmt"
	"slices"
	"unsafe"

	"github.com/gomlx/compute/dtypes"

	"github.com/lockstep-ml/lockstep/backend/internal/vector"
)

// loop executes the nodes of a loop unit: for blocks of rows, one operation after another. So what it computes for a
// block stays in the cache.
type loop struct {
	rows, columns       int // a row per element if no row is reduced
	blockRows, taskRows int

	registers []register
	setup     []step // once per task: what is the same for every block
	steps     []step
	scratch   int // bytes
}

// register is where a block of a value is: in scratch memory, or in the memory of a node.
type register struct {
	slot   int // -1: scratch memory
	offset int // in bytes; of scratch memory, or of the first element
	row    int // bytes from a row of the node to the next
}

// step is an operation on registers.
type step struct {
	kind   stepKind
	loop   vector.Loop
	to     int
	in     [3]int
	count  level // what it is done for: rows or elements
	bytes  int   // of an element
	source int   // slot of the operand of a load
	view   view  // of a load
	reduce vector.Reduction
	dtype  vector.Type
}

type stepKind uint8

const (
	applyStep  stepKind = iota
	loadStep            // copy elements of a view
	moveStep            // copy a register
	spreadStep          // repeat the number of each row
	reduceStep
	expandStep // make masks of booleans
	shrinkStep // make booleans of masks
)

// Sizes of blocks and tasks, in elements.
const (
	blockElements = 1024
	taskElements  = 1 << 14
	mostTasks     = 64
	longestRow    = 4 * blockElements // of a loop without reductions
)

// loopCompiler makes a loop of a unit.
type loopCompiler struct {
	*loop
	u       *unit
	values  map[*node]int
	spreads map[int]int
	loads   map[string]int
	last    []int // by register: the last step that uses it; -1 for registers that are not of scratch memory
	sizes   []int
}

func compileLoop(u *unit, stored map[*node]bool) *loop {
	l := &loop{rows: u.elements, columns: 1}
	if u.elements == 0 {
		return l
	}
	c := &loopCompiler{loop: l, u: u, values: map[*node]int{}, spreads: map[int]int{}, loads: map[string]int{}}
	if u.columns > 0 {
		l.rows, l.columns = u.elements/max(1, u.columns), u.columns
	} else {
		l.columns = c.natural()
		l.rows = u.elements / l.columns
	}
	l.blockRows = max(1, blockElements/l.columns)
	l.blockRows = min(l.blockRows, max(1, l.rows))
	blocks := max(1, taskElements/(l.blockRows*l.columns), (l.rows+l.blockRows*mostTasks-1)/(l.blockRows*mostTasks))
	l.taskRows = blocks * l.blockRows
	for _, n := range u.nodes {
		c.node(n, stored[n])
	}
	c.assignScratch()
	return l
}

// natural returns the length of the rows of a loop without reductions: that of the last axis of the operands that are
// not contiguous, or 1. It is 1 if that axis is long, too, since a block has whole rows.
func (c *loopCompiler) natural() int {
	for _, n := range c.u.nodes {
		for _, v := range n.in {
			if v.of.unit != nil && v.of.unit.root() == c.u || v.constant() || v.contiguous() {
				continue
			}
			if x := v.collapsed(); len(x.dims) > 1 {
				if n := x.dims[len(x.dims)-1]; n <= longestRow {
					return n
				}
			}
		}
	}
	return 1
}

// typeOf returns the type of a node's elements in registers; raw bytes for types that loops only copy.
func typeOf(t dtypes.DType) (vector.Type, int) {
	if x, ok := types[t]; ok {
		return x, x.Bytes()
	}
	return vector.Uint8, int(t.Size())
}

func (c *loopCompiler) length(l level) int {
	if l == perRow {
		return c.blockRows
	}
	return c.blockRows * c.columns
}

// fresh returns a register in scratch memory.
func (c *loopCompiler) fresh(l level, bytes int) int {
	c.registers = append(c.registers, register{slot: -1})
	c.last = append(c.last, 0)
	c.sizes = append(c.sizes, (c.length(l)*bytes+alignment-1)&^(alignment-1))
	return len(c.registers) - 1
}

// memory returns a register that is the memory of a node.
func (c *loopCompiler) memory(slot, first int, l level, bytes int) int {
	r := register{slot: slot, offset: first * bytes, row: bytes}
	if l == elements {
		r.row *= c.columns
	}
	c.registers = append(c.registers, r)
	c.last, c.sizes = append(c.last, -1), append(c.sizes, 0)
	return len(c.registers) - 1
}

func (c *loopCompiler) emit(s step) { c.steps = append(c.steps, s) }

// operand returns the register with what a node reads.
func (c *loopCompiler) operand(v view, want level) int {
	if v.of.unit != nil && v.of.unit.root() == c.u {
		r := c.values[v.of]
		if want == perRow || c.u.levelOf(v.of) == elements {
			return r
		}
		if s, ok := c.spreads[r]; ok {
			return s
		}
		_, bytes := typeOf(v.of.dtype)
		s := c.fresh(elements, bytes)
		c.emit(step{kind: spreadStep, to: s, in: [3]int{r}, count: elements, bytes: bytes})
		c.spreads[r] = s
		return s
	}
	key := fmt.Sprintf("%p %d %v %v %d", v.of, v.offset, v.dims, v.strides, want)
	if r, ok := c.loads[key]; ok {
		return r
	}
	r := c.load(v, want, -1)
	c.loads[key] = r
	return r
}

// load returns a register with elements of another unit's node. to is the register to load to, or -1.
func (c *loopCompiler) load(v view, want level, to int) int {
	t, bytes := typeOf(v.of.dtype)
	stored := v.of.bytes()
	isBool := t == vector.Bool
	hoist := v.constant()
	x := v.collapsed()
	if want == elements && !hoist && c.columns > 1 {
		if y, ok := v.reshaped([]int{c.rows, c.columns}); ok && y.strides[0] == 0 {
			hoist = true
		}
	}
	if v.contiguous() && !hoist && !isBool && to < 0 {
		return c.memory(v.of.slot, v.offset, want, bytes)
	}
	if y, ok := v.reshaped([]int{c.rows, c.columns}); ok && want == elements && y.strides[0] == 1 && y.strides[1] == 0 &&
		!isBool {
		if to < 0 {
			to = c.fresh(want, bytes)
		}
		from := c.memory(v.of.slot, v.offset, perRow, bytes)
		c.emit(step{kind: spreadStep, to: to, in: [3]int{from}, count: want, bytes: bytes})
		return to
	}
	s := step{kind: loadStep, count: want, bytes: stored, source: v.of.slot, view: x}
	var steps []step
	if isBool {
		if v.contiguous() && !hoist {
			s.to = c.memory(v.of.slot, v.offset, want, stored)
		} else {
			s.to = c.fresh(want, stored)
			steps = append(steps, s)
		}
		if to < 0 {
			to = c.fresh(want, bytes)
		}
		steps = append(steps, step{kind: expandStep, to: to, in: [3]int{s.to}, count: want})
	} else {
		if to < 0 {
			to = c.fresh(want, bytes)
		} else {
			hoist = false
		}
		s.to = to
		steps = append(steps, s)
	}
	if hoist {
		c.setup = append(c.setup, steps...)
		for _, s := range steps {
			c.last[s.to] = -2 // for the whole loop
		}
	} else {
		c.steps = append(c.steps, steps...)
	}
	return to
}

// node adds the steps that compute n.
func (c *loopCompiler) node(n *node, stored bool) {
	t, bytes := typeOf(n.dtype)
	at := c.u.levelOf(n)
	var to int
	if stored && t != vector.Bool {
		to = c.memory(n.slot, 0, at, bytes)
	} else {
		to = c.fresh(at, bytes)
	}
	c.values[n] = to
	s := step{to: to, count: at, bytes: bytes, dtype: t}
	switch {
	case n.kind == rowNode:
		s.kind, s.reduce, s.in[0] = reduceStep, n.reduce, c.operand(n.in[0], elements)
		c.emit(s)
	case n.loop == nil && (n.in[0].of.unit == nil || n.in[0].of.unit.root() != c.u):
		c.load(n.in[0], at, to)
	case n.loop == nil:
		s.kind, s.in[0] = moveStep, c.operand(n.in[0], at)
		c.emit(s)
	default:
		s.loop = n.loop
		for i, v := range n.in {
			s.in[i] = c.operand(v, at)
		}
		for i := len(n.in); i < len(s.in); i++ {
			s.in[i] = s.in[0]
		}
		c.emit(s)
	}
	if stored && t == vector.Bool {
		c.emit(step{kind: shrinkStep, to: c.memory(n.slot, 0, at, 1), in: [3]int{to}, count: at})
	}
}

// uses lists the registers that a step reads.
func (s *step) uses() []int {
	switch s.kind {
	case loadStep:
		return nil
	case applyStep:
		return s.in[:]
	}
	return s.in[:1]
}

// assignScratch gives the registers scratch memory. Those that are not used at the same time share it.
func (c *loopCompiler) assignScratch() {
	for i, s := range c.steps {
		for _, r := range append(s.uses(), s.to) {
			if c.last[r] >= 0 {
				c.last[r] = i
			}
		}
	}
	free, placed := map[int][]int{}, make([]bool, len(c.registers)) // offsets by size
	place := func(r int) {
		if placed[r] || c.last[r] == -1 {
			return
		}
		placed[r] = true
		if list := free[c.sizes[r]]; len(list) > 0 && c.last[r] >= 0 {
			c.registers[r].offset = list[len(list)-1]
			free[c.sizes[r]] = list[:len(list)-1]
			return
		}
		c.registers[r].offset = c.scratch
		c.scratch += c.sizes[r]
	}
	for _, s := range c.setup {
		place(s.to)
	}
	for i, s := range c.steps {
		place(s.to)
		done := slices.Compact(slices.Sorted(slices.Values(append(s.uses(), s.to))))
		for _, r := range done {
			if c.last[r] == i && placed[r] {
				free[c.sizes[r]] = append(free[c.sizes[r]], c.registers[r].offset)
			}
		}
	}
}

func (l *loop) tasks() int {
	if l.rows*l.columns == 0 {
		return 0
	}
	return (l.rows + l.taskRows - 1) / l.taskRows
}

// run executes one task. memory has the addresses of the slots.
func (l *loop) run(task int, memory []unsafe.Pointer, w *worker) {
	if len(w.registers) < len(l.registers) {
		w.registers = make([]unsafe.Pointer, len(l.registers))
	}
	at := w.registers
	first, end := task*l.taskRows, min((task+1)*l.taskRows, l.rows)
	for from := first; from < end; from += l.blockRows {
		until := min(from+l.blockRows, end)
		for i := range l.registers {
			r := &l.registers[i]
			if r.slot >= 0 {
				at[i] = unsafe.Add(memory[r.slot], r.offset+from*r.row)
			} else {
				at[i] = unsafe.Add(w.scratch, r.offset)
			}
		}
		if from == first {
			for i := range l.setup { // for whole blocks
				l.execute(&l.setup[i], at, &w.in, memory, 0, min(l.blockRows, l.rows))
			}
		}
		for i := range l.steps {
			l.execute(&l.steps[i], at, &w.in, memory, from, until)
		}
	}
}

func (l *loop) execute(s *step, at []unsafe.Pointer, in *[3]unsafe.Pointer, memory []unsafe.Pointer, from, until int) {
	n := until - from
	if s.count == elements {
		n *= l.columns
	}
	to := at[s.to]
	switch s.kind {
	case applyStep:
		in[0], in[1], in[2] = at[s.in[0]], at[s.in[1]], at[s.in[2]]
		s.loop(to, in, n)
	case loadStep:
		if s.count == elements {
			from, until = from*l.columns, until*l.columns
		}
		copyView(to, memory[s.source], s.view, s.bytes, from, until)
	case moveStep:
		copy(unsafe.Slice((*byte)(to), n*s.bytes), unsafe.Slice((*byte)(at[s.in[0]]), n*s.bytes))
	case spreadStep:
		vector.Spread(to, at[s.in[0]], until-from, l.columns, s.bytes)
	case reduceStep:
		vector.Reduce(s.reduce, s.dtype, to, at[s.in[0]], until-from, l.columns)
	case expandStep:
		vector.Expand(to, at[s.in[0]], n)
	case shrinkStep:
		vector.Shrink(to, at[s.in[0]], n)
	}
}
