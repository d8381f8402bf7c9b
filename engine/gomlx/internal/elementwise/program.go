package elementwise

import (
	"fmt"
	"slices"
	"unsafe"

	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Value is an operand or a result of an operation of one [Program].
type Value int

// Number is the memory of one number of any type of at most 8 bytes.
type Number [8]byte

// Program is a list of operations on vectors of one length. Add its values and operations, then its outputs. A program
// with outputs is not changed by runs, and several goroutines may run it.
type Program struct {
	inputs  []tensor.DType
	numbers []tensor.DType
	values  []value
	steps   []step
	outputs []Value
	ready   []step // steps, with the copies to the outputs
	buffers int    // of intermediate values
}

type kind uint8

const (
	input  kind = iota
	number      // one number for all elements
	buffer
	output
)

// value is where a value is.
type value struct {
	kind  kind
	dtype tensor.DType
	index int // among those of its kind
}

// step is one operation of a program.
type step struct {
	op     operation
	dtype  tensor.DType // of the operands
	result Value
	in     [3]Value
	single kernel.Single // of arithmetic
}

// operation identifies the loop of a step.
type operation uint8

const (
	minimum operation = iota + operation(kernel.Quotients) + 1 // after those of kernel.Combine
	maximum
	root
	negative
	absolute
	sign
	finite
	equal
	different
	less
	atMost
	both
	either
	not
	choose
	convert
	fill // copies a vector or a number
)

// operations are those that Apply knows by the name of the backend's operation.
var operations = map[string]struct {
	op       operation
	operands int
	swapped  bool // the operands are exchanged
}{
	"Add":            {operation(kernel.Sums), 2, false},
	"Sub":            {operation(kernel.Differences), 2, false},
	"Mul":            {operation(kernel.Products), 2, false},
	"Div":            {operation(kernel.Quotients), 2, false},
	"Min":            {minimum, 2, false},
	"Max":            {maximum, 2, false},
	"Sqrt":           {root, 1, false},
	"Neg":            {negative, 1, false},
	"Abs":            {absolute, 1, false},
	"Sign":           {sign, 1, false},
	"IsFinite":       {finite, 1, false},
	"Equal":          {equal, 2, false},
	"NotEqual":       {different, 2, false},
	"LessThan":       {less, 2, false},
	"LessOrEqual":    {atMost, 2, false},
	"GreaterThan":    {less, 2, true},
	"GreaterOrEqual": {atMost, 2, true},
	"LogicalAnd":     {both, 2, false},
	"LogicalOr":      {either, 2, false},
	"LogicalNot":     {not, 1, false},
	"Where":          {choose, 3, false},
	"ConvertDType":   {convert, 1, false},
	"Identity":       {fill, 1, false},
}

// Input adds an input vector.
func (p *Program) Input(t tensor.DType) Value {
	p.inputs = append(p.inputs, t)
	return p.add(value{input, t, len(p.inputs) - 1})
}

// Number adds a number, which is known when the program runs.
func (p *Program) Number(t tensor.DType) Value {
	p.numbers = append(p.numbers, t)
	return p.add(value{number, t, len(p.numbers) - 1})
}

func (p *Program) add(v value) Value {
	p.values = append(p.values, v)
	return Value(len(p.values) - 1)
}

// Supports reports whether Apply accepts an operation of the backend with these types.
func Supports(name string, result tensor.DType, in ...tensor.DType) bool {
	switch name {
	case "IsNaN":
		return len(in) == 1 && isFloat(in[0])
	case "Clamp":
		return len(in) == 3 && isFloat(in[0]) && in[0] == in[1] && in[1] == in[2]
	}
	o, ok := operations[name]
	if !ok || len(in) != o.operands {
		return false
	}
	switch o.op {
	case choose:
		return in[0] == tensor.Bool && in[1] == in[2] && (isFloat(in[1]) || in[1] == tensor.Bool)
	case both, either, not:
		return in[0] == tensor.Bool && in[len(in)-1] == tensor.Bool
	case convert:
		return convertible(result, in[0])
	case fill:
		return true
	}
	return isFloat(in[0]) && in[0] == in[len(in)-1]
}

func isFloat(t tensor.DType) bool { return t == tensor.Float32 || t == tensor.Float64 }

// convertible reports whether there is a loop for a conversion.
func convertible(to, from tensor.DType) bool {
	half := func(t tensor.DType) bool { return t == tensor.Float16 || t == tensor.BFloat16 }
	return to == from || isFloat(to) && isFloat(from) || to == tensor.Float32 && half(from) ||
		half(to) && from == tensor.Float32
}

// Apply adds an operation that [Supports] accepts, and returns its result, of the given type.
func (p *Program) Apply(name string, result tensor.DType, in ...Value) Value {
	switch name {
	case "IsNaN":
		return p.Apply("NotEqual", tensor.Bool, in[0], in[0])
	case "Clamp": // as the Go backend
		return p.Apply("Min", result, p.Apply("Max", result, in[0], in[1]), in[2])
	}
	o := operations[name]
	s := step{op: o.op, dtype: p.values[in[len(in)-1]].dtype}
	if o.swapped {
		in = []Value{in[1], in[0]}
	}
	copy(s.in[:], in)
	switch {
	case s.op <= operation(kernel.Quotients):
		s.single = p.single(&s)
	case s.op == choose: // a condition that is one number is evaluated once
		s.in[1], s.in[2] = p.vector(in[1]), p.vector(in[2])
	case s.op != fill:
		for i, v := range in {
			s.in[i] = p.vector(v)
		}
	}
	return p.append(s, result)
}

// single specifies which operand of an arithmetic operation is one number.
func (p *Program) single(s *step) kernel.Single {
	left, right := p.values[s.in[0]].kind == number, p.values[s.in[1]].kind == number
	switch {
	case left && right:
		s.in[0] = p.vector(s.in[0])
		return kernel.Right
	case left:
		return kernel.Left
	case right:
		return kernel.Right
	}
	return kernel.Neither
}

// vector returns a vector with the elements of v, which may be a number.
func (p *Program) vector(v Value) Value {
	if x := p.values[v]; x.kind == number {
		return p.append(step{op: fill, dtype: x.dtype, in: [3]Value{v}}, x.dtype)
	}
	return v
}

func (p *Program) append(s step, t tensor.DType) Value {
	s.result = p.add(value{buffer, t, -1})
	p.steps = append(p.steps, s)
	return s.result
}

// operands returns the values that a step reads.
func (s *step) operands() []Value {
	for _, o := range operations {
		if o.op == s.op {
			return s.in[:o.operands]
		}
	}
	panic(fmt.Sprintf("elementwise: operation %d", s.op))
}

// Outputs sets the outputs of the program. It must be called once, at the end.
func (p *Program) Outputs(list ...Value) {
	p.outputs, p.ready = list, slices.Clone(p.steps)
	for i, v := range list {
		if x := &p.values[v]; x.kind == buffer && x.index < 0 {
			*x = value{output, x.dtype, i}
			continue
		}
		x := p.values[v] // an input, a number or another output
		to := p.add(value{output, x.dtype, i})
		p.ready = append(p.ready, step{op: fill, dtype: x.dtype, in: [3]Value{v}, result: to})
	}
	p.place()
}

// place assigns buffers to intermediate values. A buffer is used again after the last use of its value.
func (p *Program) place() {
	last := make([]int, len(p.values))
	for i, s := range p.ready {
		for _, v := range s.operands() {
			last[v] = i
		}
	}
	var free []int
	for i, s := range p.ready {
		result := &p.values[s.result]
		// In place, an element of another size would overwrite others.
		release := func(sameSize bool) {
			for k, v := range s.operands() {
				x := p.values[v]
				if x.kind == buffer && last[v] == i && (x.dtype == result.dtype) == sameSize &&
					!slices.Contains(s.operands()[:k], v) {
					free = append(free, x.index)
				}
			}
		}
		release(true)
		if result.kind == buffer {
			if n := len(free); n > 0 {
				result.index, free = free[n-1], free[:n-1]
			} else {
				result.index = p.buffers
				p.buffers++
			}
		}
		release(false)
	}
}

// block is the number of elements that a step handles at once: few enough that all buffers stay in the first cache.
const block = 1024

// room is the bytes of a buffer.
const room = 8 * block

// span is a range of the elements of a run.
type span struct{ from, to int }

// run computes the outputs of a span. pointers has room for one per value, and memory for the buffers.
func (p *Program) run(j *Job, part span, pointers []unsafe.Pointer, memory unsafe.Pointer) {
	for at := part.from; at < part.to; at += block {
		n := min(block, part.to-at)
		for i, v := range p.values {
			switch v.kind {
			case input:
				pointers[i] = unsafe.Add(j.In[v.index], at*v.dtype.Bytes())
			case output:
				pointers[i] = unsafe.Add(j.Out[v.index], at*v.dtype.Bytes())
			case number:
				pointers[i] = unsafe.Pointer(&j.Numbers[v.index])
			case buffer:
				pointers[i] = unsafe.Add(memory, v.index*room)
			}
		}
		for i := range p.ready {
			s := &p.ready[i]
			s.run(pointers[s.result], pointers[s.in[0]], pointers[s.in[1]], pointers[s.in[2]], n,
				p.values[s.result].dtype, p.values[s.in[0]].kind == number)
		}
	}
}

// run executes a step for n elements. to is the type of the result; single says that a is one number.
func (s *step) run(dst, a, b, c unsafe.Pointer, n int, to tensor.DType, single bool) {
	switch {
	case s.op <= operation(kernel.Quotients):
		kernel.Combine(kernel.Arithmetic(s.op), s.dtype, dst, a, b, n, s.single)
	case s.op == minimum:
		kernel.Reduce(kernel.Min, s.dtype, dst, a, b, n)
	case s.op == maximum:
		kernel.Reduce(kernel.Max, s.dtype, dst, a, b, n)
	case s.op == root:
		kernel.SquareRoots(s.dtype, dst, a, n)
	case s.op == fill:
		copyElements(dst, a, s.dtype.Bytes(), n, single)
	case s.op == choose && single:
		if !*(*bool)(a) {
			b = c
		}
		copyElements(dst, b, s.dtype.Bytes(), n, false)
	case s.op == convert:
		convertElements(dst, a, to, s.dtype, n)
	case s.dtype == tensor.Float64:
		plain[float64](s.op, dst, a, b, c, n)
	case s.dtype == tensor.Float32:
		plain[float32](s.op, dst, a, b, c, n)
	default:
		logical(s.op, dst, a, b, c, n)
	}
}
