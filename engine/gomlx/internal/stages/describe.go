package stages

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/shapes"

	"github.com/lockstep-ml/lockstep/internal/record"
)

// Deferred is a completely recorded graph that is compiled on first use. It is the executable of a graph
// whose [Recorder] has Defer set.
type Deferred struct {
	b   *builder
	exe compute.Executable
}

var _ compute.Executable = (*Deferred)(nil)

// Compile compiles the graph, if it is not compiled yet, to the backend's executable, or to a [Program] if it
// has all-reduces or has several buckets. buckets groups results that Program.Run hands over when they are
// complete, in this order, by their index. Compile drops the record, so Describe must be called before.
func (d *Deferred) Compile(buckets [][]int) (compute.Executable, error) {
	if d.exe != nil {
		return d.exe, nil
	}
	var err error
	if d.exe, err = d.b.compile(buckets); err == nil {
		d.b.forget()
	}
	return d.exe, err
}

// Describe lists the operations that the graph's outputs need, one per line, with everything that determines
// their results: attributes, the values of constants, names and shapes of parameters. Operations are numbered
// in the order in which they are reached from the outputs. So the lines depend only on the graph, not on the
// order in which it was built, on unused operations, or on the process.
func (d *Deferred) Describe() []string {
	w := &description{numbers: map[*record.Op]int{}}
	outputs := w.values(d.b.Entry.Outputs)
	return append(w.lines, "return "+outputs)
}

// Positions returns, for each output of the graph, the position of its operation in the order of recording.
func (d *Deferred) Positions() []int {
	list := make([]int, len(d.b.Entry.Outputs))
	for i, v := range d.b.Entry.Outputs {
		list[i] = v.Op.Index
	}
	return list
}

// Finalize implements compute.Executable.
func (d *Deferred) Finalize() {
	if d.exe != nil {
		d.exe.Finalize()
	}
}

// Inputs implements compute.Executable.
func (d *Deferred) Inputs() (names []string, inputShapes []shapes.Shape) {
	if d.exe == nil {
		return nil, nil
	}
	return d.exe.Inputs()
}

// Outputs implements compute.Executable.
func (d *Deferred) Outputs() []shapes.Shape {
	if d.exe == nil {
		return nil
	}
	return d.exe.Outputs()
}

// Execute implements compute.Executable. It compiles the graph if it is not compiled yet.
func (d *Deferred) Execute(inputs []compute.Buffer, donate []bool, device compute.DeviceNum) ([]compute.Buffer, error) {
	exe, err := d.Compile(nil)
	if err != nil {
		return nil, err
	}
	return exe.Execute(inputs, donate, device)
}

// forget drops the data that only Describe and stages need: mainly constants, of which the backend has
// copies.
func (b *builder) forget() {
	for _, f := range b.Functions {
		for _, o := range f.Ops {
			o.Emit, o.Attributes, o.Literal = nil, nil, nil
		}
	}
}

// description is a list of operations that is being built.
type description struct {
	lines   []string
	numbers map[*record.Op]int // of operations that have a line
}

// values returns the names of values, after adding the lines of the operations that compute them.
func (w *description) values(list []*record.Value) string {
	names := make([]string, len(list))
	for i, v := range list {
		switch {
		case v == nil:
			names[i] = "none"
		case len(v.Op.Outputs) == 1:
			names[i] = fmt.Sprintf("%%%d", w.operation(v.Op))
		default:
			names[i] = fmt.Sprintf("%%%d.%d", w.operation(v.Op), slices.Index(v.Op.Outputs, v))
		}
	}
	return strings.Join(names, ", ")
}

// operation returns the number of an operation, after adding its line. It visits the operation's inputs
// without recursion, because graphs may be thousands of operations deep.
func (w *description) operation(last *record.Op) int {
	pending := []*record.Op{last}
	for len(pending) > 0 {
		o := pending[len(pending)-1]
		if _, done := w.numbers[o]; done {
			pending = pending[:len(pending)-1]
			continue
		}
		ready := true
		for _, in := range slices.Backward(direct(o)) {
			if _, done := w.numbers[in]; !done {
				pending, ready = append(pending, in), false
			}
		}
		if ready {
			pending = pending[:len(pending)-1]
			w.line(o)
		}
	}
	return w.numbers[last]
}

// direct lists the operations whose values o uses, directly or in its functions, except those inside these
// functions.
func direct(o *record.Op) []*record.Op {
	var list []*record.Op
	add := func(inputs []*record.Value) {
		for _, v := range inputs {
			if v != nil {
				list = append(list, v.Op)
			}
		}
	}
	add(o.Inputs)
	inside := map[*record.Function]bool{}
	var visit func(f *record.Function)
	visit = func(f *record.Function) {
		if inside[f] {
			return
		}
		inside[f] = true
		add(f.Outputs)
		for _, inner := range f.Ops {
			add(inner.Inputs)
			for _, g := range inner.Functions {
				visit(g)
			}
		}
	}
	for _, f := range o.Functions {
		visit(f)
	}
	return slices.DeleteFunc(list, func(in *record.Op) bool { return inside[in.Fn] })
}

// line adds the line of an operation. The lines of its inputs must exist.
func (w *description) line(o *record.Op) {
	text := fmt.Sprintf("%s(%s)", o.Name, w.values(o.Inputs))
	attributes := o.Attributes
	if o.Literal != nil {
		attributes = []any{constant(o.Literal, o.Attributes[0].([]int))}
	}
	for _, a := range attributes {
		text += fmt.Sprintf(" %+v", a)
	}
	for _, f := range o.Functions {
		text += " {" + strings.Join(w.function(f), "; ") + "}"
	}
	w.numbers[o] = len(w.numbers)
	w.lines = append(w.lines, fmt.Sprintf("%%%d = %s", w.numbers[o], text))
}

// function describes a function argument of an operation. Its operations have numbers only while it is
// described. Operations of enclosing functions are in w.
func (w *description) function(f *record.Function) []string {
	inner := &description{numbers: map[*record.Op]int{}}
	for o, number := range w.numbers {
		inner.numbers[o] = number
	}
	for _, o := range f.Ops { // parameters by their position, whether they are used or not
		if planOf(o).kind == parameterOp {
			inner.operation(o)
		}
	}
	return append(inner.lines, "return "+inner.values(f.Outputs))
}

// shownConstant is the largest number of elements for which a constant's values are listed. For larger ones
// only a hash is.
const shownConstant = 8

// constant describes the value of a constant: flat is a slice of numbers.
func constant(flat any, dims []int) string {
	list := reflect.ValueOf(flat)
	text := fmt.Sprintf("%v%v", list.Type().Elem(), dims)
	h := sha256.New()
	if err := binary.Write(h, binary.LittleEndian, flat); err != nil {
		fmt.Fprintf(h, "%v", flat) // of a type without a fixed size: int
	}
	if list.Len() <= shownConstant {
		text += fmt.Sprintf(" %v", flat)
	}
	return fmt.Sprintf("%s, bits hashed %.8x", text, h.Sum(nil))
}
