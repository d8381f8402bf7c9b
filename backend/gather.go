package backend

import (
	"encoding/binary"
	"math/bits"
	"math/rand/v2"
	"slices"
	"unsafe"

	"github.com/gomlx/compute/dtypes"

	"github.com/lockstep-ml/lockstep/backend/internal/vector"
	"github.com/lockstep-ml/lockstep/internal/record"
)

// withTasks adds a node whose tasks newTasks makes.
func (p *planner) withTasks(dims []int, dtype dtypes.DType, newTasks func(n *node) *tasksInstruction,
	in ...view,
) view {
	n := &node{kind: tasksNode, dims: dims, dtype: dtype, in: in, newTasks: newTasks}
	p.alone(n)
	return p.add(n)
}

// indexed lowers the operations that read or write at positions which values give.
func (p *planner) indexed(o *record.Op, in []view) (_ view, ok bool) {
	switch o.Name {
	case "Gather":
		return p.gather(o, in)
	case "ScatterSum":
		return p.scatter("Add", o, in)
	case "ScatterMax":
		return p.scatter("Max", o, in)
	case "ScatterMin":
		return p.scatter("Min", o, in)
	case "ArgMinMax":
		return p.argMinMax(o, in[0])
	}
	return view{}, false
}

// positions returns indices as rows of numbers, contiguous, and the dimensions before those rows. axis is that of the
// rows, or the rank if a row has one number.
func (p *planner) positions(v view, axis int) (rows view, batch []int, ok bool) {
	if indexReaders[v.of.dtype] == nil {
		return view{}, nil, false
	}
	if axis == len(v.dims) {
		v, _ = v.reshaped(append(slices.Clone(v.dims), 1))
	}
	v = v.transposed(append(without(len(v.dims), []int{axis}), axis))
	if !v.contiguous() {
		v = p.copied(v)
	}
	return v, v.dims[:len(v.dims)-1], true
}

// without lists the axes of a rank that are not in a list.
func without(rank int, list []int) (rest []int) {
	for i := range rank {
		if !slices.Contains(list, i) {
			rest = append(rest, i)
		}
	}
	return rest
}

// indexReader reads the index at a position.
type indexReader func(from unsafe.Pointer, at int) int

func readIndex[T int8 | int16 | int32 | int64 | uint8 | uint16 | uint32 | uint64](from unsafe.Pointer, at int) int {
	return int(*(*T)(unsafe.Add(from, at*int(unsafe.Sizeof(*new(T))))))
}

var indexReaders = map[dtypes.DType]indexReader{
	dtypes.Int8: readIndex[int8], dtypes.Int16: readIndex[int16], dtypes.Int32: readIndex[int32],
	dtypes.Int64: readIndex[int64], dtypes.Uint8: readIndex[uint8], dtypes.Uint16: readIndex[uint16],
	dtypes.Uint32: readIndex[uint32], dtypes.Uint64: readIndex[uint64],
}

// gather copies windows of the operand, whose positions are rows of indices.
func (p *planner) gather(o *record.Op, in []view) (_ view, ok bool) {
	x := in[0]
	offsetAxes, collapsed := o.Attributes[1].([]int), o.Attributes[2].([]int)
	axes, sizes := o.Attributes[3].([]int), o.Attributes[4].([]int)
	rows, batch, ok := p.positions(in[1], o.Attributes[0].(int))
	if !ok {
		return view{}, false
	}
	window := view{dims: sizes, strides: x.strides}
	kept := window.transposed(without(len(sizes), collapsed)).dims
	newTasks := func(n *node) *tasksInstruction {
		read, bytes := indexReaders[rows.of.dtype], n.bytes()
		part, each := window.collapsed(), size(sizes)
		perTask := max(1, taskElements/each)
		from, at, to := x.of.slot, rows.of.slot, n.slot
		return &tasksInstruction{
			tasks: (size(batch) + perTask - 1) / perTask,
			task: func(task int, memory []unsafe.Pointer, _ *worker) {
				for i := task * perTask; i < min((task+1)*perTask, size(batch)); i++ {
					first := x.offset
					for k, axis := range axes {
						index := read(memory[at], rows.offset+i*len(axes)+k)
						first += x.strides[axis] * min(max(index, 0), max(x.dims[axis]-sizes[axis], 0))
					}
					copyView(unsafe.Add(memory[to], i*each*bytes), unsafe.Add(memory[from], first*bytes), part, bytes, 0, each)
				}
			},
		}
	}
	v := p.withTasks(slices.Concat(batch, kept), x.of.dtype, newTasks, x, rows)
	permutation := make([]int, len(v.dims)) // of the axes of the result
	for i, axis := range slices.Concat(without(len(v.dims), offsetAxes), offsetAxes) {
		permutation[axis] = i
	}
	return v.transposed(permutation), true
}

// scatter combines windows of the result, whose positions are rows of indices, with updates, in their order. Windows
// that do not lie in the operand are left out. Tasks divide the first axis of the result.
func (p *planner) scatter(combine string, o *record.Op, in []view) (_ view, ok bool) {
	x, updates := in[0], in[2]
	windowAxes, inserted, axes := o.Attributes[1].([]int), o.Attributes[2].([]int), o.Attributes[3].([]int)
	t, known := types[x.of.dtype]
	loop := vector.Lookup(combine, t, t)
	if !known || loop == nil {
		return view{}, false
	}
	rows, batch, ok := p.positions(in[1], o.Attributes[0].(int))
	if !ok {
		return view{}, false
	}
	updates = updates.transposed(slices.Concat(without(len(updates.dims), windowAxes), windowAxes))
	if !updates.contiguous() {
		updates = p.copied(updates)
	}
	window := make([]int, len(x.dims)) // its dimensions
	for i := range window {
		window[i] = 1
	}
	for i, axis := range without(len(x.dims), inserted) {
		window[axis] = updates.dims[len(batch)+i]
	}
	newTasks := func(n *node) *tasksInstruction {
		s := &scatterTasks{
			loop: loop, read: indexReaders[rows.of.dtype], n: n, operand: x, rows: rows, updates: updates, axes: axes,
			window: window, count: size(batch),
		}
		return s.instruction()
	}
	return p.withTasks(x.dims, x.of.dtype, newTasks, x, rows, updates), true
}

// scatterTasks combines windows of the result n with updates.
type scatterTasks struct {
	loop    vector.Loop
	read    indexReader
	n       *node
	operand view
	rows    view // of indices
	updates view
	axes    []int // of the result, for the indices of a row
	window  []int // dimensions
	count   int   // windows

	divided int // the axis that tasks divide: the first one of more than one element
	high    int // elements of the divided axis in a window
	rest    int // elements of the result for one of the divided axis
	each    int // those of a window
	run     int // elements of a window that lie side by side in the result
	runs    view
}

func (s *scatterTasks) instruction() *tasksInstruction {
	dims, last := s.n.dims, len(s.n.dims)-1
	for s.divided < last && dims[s.divided] == 1 {
		s.divided++
	}
	first := 1
	s.high, s.rest, s.each, s.run = 1, 1, 1, 1
	if last >= 0 {
		first, s.high = dims[s.divided], s.window[s.divided]
		s.rest, s.each = size(dims[s.divided+1:]), size(s.window[s.divided+1:])
		at := last
		for at > s.divided && s.window[at] == dims[at] {
			at--
		}
		if at > s.divided {
			at--
		}
		s.run = size(s.window[at+1:])
		s.runs = view{dims: s.window[s.divided+1 : at+1], strides: rowMajor(dims)[s.divided+1 : at+1]}
	}
	s.operand = s.operand.collapsed()
	tasks := min(first, 16, 1+(size(dims)+s.count*s.high*s.each)/taskElements)
	return &tasksInstruction{
		tasks: tasks,
		task: func(task int, memory []unsafe.Pointer, w *worker) {
			s.part(first*task/tasks, first*(task+1)/tasks, memory, w)
		},
	}
}

// part computes elements low to high of the divided axis.
func (s *scatterTasks) part(low, high int, memory []unsafe.Pointer, w *worker) {
	bytes := s.n.bytes()
	to := memory[s.n.slot]
	rows := unsafe.Add(memory[s.rows.of.slot], s.rows.offset*s.rows.of.bytes())
	copyView(unsafe.Add(to, low*s.rest*bytes), memory[s.operand.of.slot], s.operand, bytes, low*s.rest, high*s.rest)
	for i := range s.count {
		first, start, inside := 0, 0, true // the place of the window, and its first element of the divided axis
		for k, axis := range s.axes {
			index := s.read(rows, i*len(s.axes)+k)
			inside = inside && index >= 0 && index <= s.n.dims[axis]-s.window[axis]
			first += index * size(s.n.dims[axis+1:])
			if axis == s.divided {
				start = index
			}
		}
		from, until := max(low-start, 0), min(high-start, s.high)
		if !inside || from >= until {
			continue
		}
		target := unsafe.Add(to, first*bytes)
		source := unsafe.Add(memory[s.updates.of.slot], (s.updates.offset+i*s.high*s.each)*bytes)
		if s.each == s.rest {
			s.combine(target, source, from*s.rest, from*s.rest, (until-from)*s.rest, w)
			continue
		}
		for j := from; j < until; j++ {
			for r := range s.each / s.run {
				s.combine(target, source, j*s.rest+s.runs.at(r), j*s.each+r*s.run, s.run, w)
			}
		}
	}
}

func (s *scatterTasks) combine(target, source unsafe.Pointer, to, from, n int, w *worker) {
	bytes := s.n.bytes()
	sum, update := unsafe.Add(target, to*bytes), unsafe.Add(source, from*bytes)
	w.in = [3]unsafe.Pointer{sum, update, update}
	s.loop(sum, &w.in, n)
}

// argMinMax finds the index of the smallest or largest element along an axis: the first one, or the last NaN.
func (p *planner) argMinMax(o *record.Op, x view) (_ view, ok bool) {
	axis, isMin := o.Attributes[0].(int), o.Attributes[2].(bool)
	shape := o.Outputs[0].Shape
	find, write := finders[x.of.dtype], indexWriters[shape.DType]
	if find == nil || write == nil {
		return view{}, false
	}
	kept := x.transposed(without(len(x.dims), []int{axis}))
	count, step := x.dims[axis], x.strides[axis]
	return p.withTasks(shape.Dimensions, shape.DType, func(n *node) *tasksInstruction {
		from, to, bytes := x.of.slot, n.slot, x.of.bytes()
		results := size(n.dims)
		each := max(1, taskElements/count)
		return &tasksInstruction{
			tasks: (results + each - 1) / each,
			task: func(task int, memory []unsafe.Pointer, _ *worker) {
				for i := task * each; i < min((task+1)*each, results); i++ {
					first := unsafe.Add(memory[from], kept.at(i)*bytes)
					write(memory[to], i, find(first, count, step, isMin))
				}
			},
		}
	}, x), true
}

type ordered interface {
	float32 | float64 | int8 | int16 | int32 | int64 | uint8 | uint16 | uint32 | uint64
}

// finder returns the index of the smallest or largest of some elements.
type finder func(first unsafe.Pointer, count, step int, isMin bool) int

func findBest[T ordered](first unsafe.Pointer, count, step int, isMin bool) int {
	bytes := int(unsafe.Sizeof(*new(T)))
	best, at := *(*T)(first), 0
	for i := 1; i < count; i++ {
		x := *(*T)(unsafe.Add(first, i*step*bytes))
		if isMin && x < best || !isMin && x > best || x != x {
			best, at = x, i
		}
	}
	return at
}

var finders = map[dtypes.DType]finder{
	dtypes.Float32: findBest[float32], dtypes.Float64: findBest[float64], dtypes.Int8: findBest[int8],
	dtypes.Int16: findBest[int16], dtypes.Int32: findBest[int32], dtypes.Int64: findBest[int64],
	dtypes.Uint8: findBest[uint8], dtypes.Uint16: findBest[uint16], dtypes.Uint32: findBest[uint32],
	dtypes.Uint64: findBest[uint64],
}

func writeIndex[T ordered](to unsafe.Pointer, at, index int) {
	*(*T)(unsafe.Add(to, at*int(unsafe.Sizeof(*new(T))))) = T(index)
}

var indexWriters = map[dtypes.DType]func(to unsafe.Pointer, at, index int){
	dtypes.Int8: writeIndex[int8], dtypes.Int16: writeIndex[int16], dtypes.Int32: writeIndex[int32],
	dtypes.Int64: writeIndex[int64], dtypes.Uint8: writeIndex[uint8], dtypes.Uint16: writeIndex[uint16],
	dtypes.Uint32: writeIndex[uint32], dtypes.Uint64: writeIndex[uint64],
}

// bitcast reads elements as those of another type of the same size.
func (p *planner) bitcast(x view, dtype dtypes.DType) (_ view, ok bool) {
	from := x.of.dtype
	switch {
	case from == dtype:
		return x, true
	case from.Size() != dtype.Size() || from == dtypes.Bool || dtype == dtypes.Bool || from.IsPacked():
		return view{}, false
	}
	n := &node{kind: elementNode, dims: x.dims, dtype: dtype, in: []view{x}}
	p.place(n)
	return p.add(n), true
}

// randomBits makes the numbers that GoMLX's Go backend makes of a state: those of rand.PCG. The new state is that of
// the generator, in the order of bytes that the Go backend gives it.
func (p *planner) randomBits(o *record.Op, in []view) bool {
	x, shape := in[0], o.Outputs[1].Shape
	if x.of.dtype != dtypes.Uint64 || !slices.Equal(x.dims, []int{3}) || !x.contiguous() || shape.DType.IsPacked() ||
		shape.DType == dtypes.Bool || shape.Size() == 0 {
		return false
	}
	bytes := shape.Size() * int(shape.DType.Size())
	numbers := (bytes + 7) / 8
	state := func(memory []unsafe.Pointer) []uint64 {
		return unsafe.Slice((*uint64)(unsafe.Add(memory[x.of.slot], x.offset*8)), 3)
	}
	p.views[o.Outputs[0]] = p.withTasks(x.dims, dtypes.Uint64, func(n *node) *tasksInstruction {
		return &tasksInstruction{tasks: 1, task: func(_ int, memory []unsafe.Pointer, _ *worker) {
			from, to := state(memory), unsafe.Slice((*uint64)(memory[n.slot]), 3)
			high, low := pcgAfter(from[0], from[1], uint64(numbers))
			to[0], to[1], to[2] = bits.ReverseBytes64(high), bits.ReverseBytes64(low), from[2]
		}}
	}, x)
	p.views[o.Outputs[1]] = p.withTasks(shape.Dimensions, shape.DType, func(n *node) *tasksInstruction {
		const each = taskElements / 4
		return &tasksInstruction{
			tasks: (numbers + each - 1) / each,
			task: func(task int, memory []unsafe.Pointer, _ *worker) {
				from := state(memory)
				g := rand.NewPCG(pcgAfter(from[0], from[1], uint64(task*each)))
				to := unsafe.Slice((*byte)(memory[n.slot]), bytes)[task*each*8 : min((task+1)*each*8, bytes)]
				for ; len(to) >= 8; to = to[8:] {
					binary.LittleEndian.PutUint64(to, g.Uint64())
				}
				if len(to) > 0 {
					var last [8]byte
					binary.LittleEndian.PutUint64(last[:], g.Uint64())
					copy(to, last[:])
				}
			},
		}
	}, x)
	return true
}

// pcgAfter returns the state of rand.PCG after n numbers. A step is s → s·a + c, modulo 2¹²⁸. So two of them are
// s → s·a² + c·(a + 1), and so on (Brown, Random number generation with arbitrary strides).
func pcgAfter(high, low, n uint64) (uint64, uint64) {
	aHigh, aLow := uint64(2549297995355413924), uint64(4865540595714422341)
	cHigh, cLow := uint64(6364136223846793005), uint64(1442695040888963407)
	for ; n > 0; n /= 2 {
		if n%2 == 1 {
			high, low = multiply128(high, low, aHigh, aLow)
			high, low = add128(high, low, cHigh, cLow)
		}
		nextHigh, nextLow := add128(aHigh, aLow, 0, 1)
		cHigh, cLow = multiply128(cHigh, cLow, nextHigh, nextLow)
		aHigh, aLow = multiply128(aHigh, aLow, aHigh, aLow)
	}
	return high, low
}

func add128(high, low, otherHigh, otherLow uint64) (uint64, uint64) {
	sum, carry := bits.Add64(low, otherLow, 0)
	return high + otherHigh + carry, sum
}

func multiply128(high, low, otherHigh, otherLow uint64) (uint64, uint64) {
	h, l := bits.Mul64(low, otherLow)
	return h + high*otherLow + low*otherHigh, l
}
