package stages

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/shapes"
)

// plan determines the stage in which an operation of the main function is computed.
type plan struct {
	planned bool
	level   int  // the number of all-reduces in sequence before it; for these, before their operands
	stage   int  // of the operations of its level, those that the first buckets need are in the first stages
	free    bool // it depends only on constants, so every stage that uses it computes it
}

// assign sets the levels of the operations that the results need: the earliest that their inputs allow.
func (b *builder) assign() {
	for _, v := range b.main.outputs {
		v.op.planned = true
	}
	for _, o := range slices.Backward(b.main.ops) {
		if o.planned {
			for _, v := range o.needs() {
				v.op.planned = true
			}
		}
	}
	for _, o := range b.main.ops {
		if !o.planned {
			continue
		}
		o.free = o.kind == plainOp
		for _, v := range o.needs() {
			o.free = o.free && v.op.free
			o.level = max(o.level, v.op.doneIn())
		}
	}
}

// repeated reports whether every stage that uses o computes it, instead of passing its value between stages.
func (o *op) repeated() bool { return o.free || o.name == "BroadcastInDim" }

// stage is one executable, and the all-reduces after it.
type stage struct {
	args    []*value // parameters, sums and values of earlier stages
	outputs []*value // operands of the all-reduces that end it, and values for later stages
	results []int    // results of the program, by index: they follow the outputs
	buckets []int    // whose last results are those of this stage
	sums    []int    // the all-reduces that end it
	exe     compute.Executable

	operands []*value // of sums
	last     []bool   // by argument: a value of an earlier stage that is not needed after this one
	dropped  []*value // not needed after the all-reduces
}

// stages splits the graph at its all-reduces and buckets. It sets the outputs of each stage; build finds its
// arguments and operations.
func (b *builder) stages(buckets [][]int) []*stage {
	bucketOf := make([]int, len(b.main.outputs))
	b.assign()
	for i := range b.main.outputs {
		bucketOf[i] = -1
	}
	levels := 1
	for _, o := range b.main.ops {
		if o.planned {
			levels = max(levels, o.doneIn()+1)
		}
	}
	last, stageOf := b.place(levels, buckets)
	list := make([]*stage, last[levels-1]+1)
	for i := range list {
		list[i] = &stage{}
	}
	for k, results := range buckets {
		list[stageOf[k]].buckets = append(list[stageOf[k]].buckets, k)
		for _, i := range results {
			bucketOf[i] = k
		}
	}
	for i, s := range b.sums {
		if s.op.planned {
			st := list[last[s.op.level]]
			st.sums = append(st.sums, i)
			st.operands = append(st.operands, s.op.inputs[0])
			st.output(s.op.inputs[0])
		}
	}
	for i, v := range b.main.outputs {
		at := len(list) - 1 // parameters, sums and constants
		switch k := bucketOf[i]; {
		case v.op.kind == plainOp && !v.op.free:
			at = v.op.stage
		case k >= 0:
			at = stageOf[k]
		}
		list[at].results = append(list[at].results, i)
	}
	for i, s := range slices.Backward(list) {
		for _, v := range s.uses(b, i) {
			if v.op.kind == plainOp {
				list[v.op.stage].output(v)
			}
			s.args = append(s.args, v)
		}
	}
	return list
}

// place sets the stage of every operation. A level has one stage per bucket that is complete in it, at least
// one; the all-reduces end the last one. An operation is in the stage of the first bucket of its level that needs
// it, or else in the last. Results outside of buckets are computed early. place returns the last stage of each
// level, and the stage of each bucket. Buckets complete in their order.
func (b *builder) place(levels int, buckets [][]int) (last, stageOf []int) {
	levelOf, in, level := make([]int, len(buckets)), make([]int, levels), 0
	bucketed := make([]bool, len(b.main.outputs))
	for k, results := range buckets {
		for _, i := range results {
			bucketed[i] = true
			level = max(level, b.main.outputs[i].op.doneIn())
		}
		levelOf[k] = level
		in[level]++
	}
	first := make([]int, levels)
	last, stageOf = make([]int, levels), make([]int, len(buckets))
	n := 0
	for i := range levels {
		first[i] = n
		n += max(1, in[i])
		last[i] = n - 1
	}
	next := slices.Clone(first)
	for k, level := range levelOf {
		stageOf[k] = next[level]
		next[level]++
	}
	for _, o := range b.main.ops {
		if o.planned {
			o.stage = last[o.level]
		}
	}
	for i, v := range b.main.outputs {
		if !bucketed[i] {
			v.op.stage = first[v.op.level]
		}
	}
	for k, results := range buckets {
		for _, i := range results {
			o := b.main.outputs[i].op
			o.stage = min(o.stage, stageOf[k])
		}
	}
	for _, o := range slices.Backward(b.main.ops) {
		if !o.planned || o.kind != plainOp {
			continue
		}
		for _, v := range o.needs() {
			if v.op.level == o.level {
				v.op.stage = min(v.op.stage, o.stage)
			}
		}
	}
	return last, stageOf
}

// doneIn returns the level in which the values of o can be results.
func (o *op) doneIn() int {
	if o.kind == sumOp {
		return o.level + 1
	}
	return o.level
}

// output adds an output unless it is already one.
func (s *stage) output(v *value) {
	if !slices.Contains(s.outputs, v) {
		s.outputs = append(s.outputs, v)
	}
}

// uses lists the values that stage i needs as arguments, in the order of recording.
func (s *stage) uses(b *builder, i int) []*value {
	seen := map[*value]bool{}
	var list []*value
	var visit func(v *value)
	visit = func(v *value) {
		if seen[v] {
			return
		}
		seen[v] = true
		if !v.op.inside(i) {
			list = append(list, v)
			return
		}
		for _, in := range v.op.needs() {
			visit(in)
		}
	}
	for _, v := range s.returned(b) {
		visit(v)
	}
	slices.SortFunc(list, compareValues)
	return list
}

// returned lists the outputs and the results.
func (s *stage) returned(b *builder) []*value {
	list := slices.Clone(s.outputs)
	for _, i := range s.results {
		list = append(list, b.main.outputs[i])
	}
	return list
}

// inside reports whether stage i computes o if it needs o.
func (o *op) inside(i int) bool { return o.kind == plainOp && (o.stage == i || o.repeated()) }

func compareValues(a, b *value) int {
	if c := cmp.Compare(a.op.index, b.op.index); c != 0 {
		return c
	}
	return cmp.Compare(slices.Index(a.op.outputs, a), slices.Index(b.op.outputs, b))
}

// emission is a stage being built.
type emission struct {
	main   compute.Function
	values map[*value]compute.Value
	named  map[*function]compute.Function
}

// build compiles stage i of b's graph.
func (s *stage) build(b *builder, i int) error {
	to := b.recorder.Backend.Builder(fmt.Sprintf("%s, stage %d", b.name, i))
	e := &emission{main: to.Main(), values: map[*value]compute.Value{}, named: map[*function]compute.Function{}}
	for k, v := range s.args {
		shape, err := b.Builder.OpShape(v.real)
		if err != nil {
			return err
		}
		if e.values[v], err = e.main.Parameter(fmt.Sprintf("#%d", k), shape, nil); err != nil {
			return err
		}
	}
	returned := s.returned(b)
	if len(returned) == 0 {
		return nil // the results of its buckets are those of earlier stages
	}
	outputs := make([]compute.Value, len(returned))
	for k, v := range returned {
		if err := e.compute(v.op, to); err != nil {
			return err
		}
		outputs[k] = e.values[v]
		if slices.Contains(s.args, v) || slices.Contains(returned[:k], v) { // each needs a separate buffer
			var err error
			if outputs[k], err = e.main.Identity(outputs[k]); err != nil {
				return err
			}
		}
	}
	if err := e.main.Return(outputs, nil); err != nil {
		return err
	}
	var err error
	s.exe, err = to.Compile()
	return err
}

// compute adds o and its inputs to the stage, unless they are already there.
func (e *emission) compute(o *op, to compute.Builder) error {
	if e.there(o) {
		return nil
	}
	for _, v := range o.needs() {
		if e.values[v] == nil {
			if err := e.compute(v.op, to); err != nil {
				return err
			}
		}
	}
	return e.emit(o, e.main, to)
}

// there reports whether the values of o are known in the stage.
func (e *emission) there(o *op) bool {
	return slices.ContainsFunc(o.outputs, func(v *value) bool { return e.values[v] != nil })
}

// emit adds o to a function of the stage.
func (e *emission) emit(o *op, f compute.Function, to compute.Builder) error {
	in := make([]compute.Value, len(o.inputs))
	for i, v := range o.inputs {
		if v != nil {
			in[i] = e.values[v]
		}
	}
	functions := make([]compute.Function, len(o.functions))
	for i, g := range o.functions {
		var err error
		if functions[i], err = e.function(g, to); err != nil {
			return err
		}
	}
	out, err := o.emit(f, in, functions)
	if err != nil {
		return fmt.Errorf("%s: %w", o.name, err)
	}
	for i, v := range o.outputs {
		e.values[v] = out[i]
	}
	return nil
}

// function rebuilds a closure, every time, or a function with a name, once.
func (e *emission) function(g *function, to compute.Builder) (compute.Function, error) {
	if f := e.named[g]; f != nil {
		return f, nil
	}
	var f compute.Function
	var err error
	if g.parent != nil {
		f, err = e.main.Closure()
	} else if f, err = to.NewFunction(g.name); err == nil {
		e.named[g] = f
	}
	if err != nil {
		return nil, err
	}
	for _, o := range g.ops {
		if err := e.emit(o, f, to); err != nil {
			return nil, err
		}
	}
	outputs := make([]compute.Value, len(g.outputs))
	for i, v := range g.outputs {
		outputs[i] = e.values[v]
	}
	return f, f.Return(outputs, nil)
}

// Sum describes one all-reduce of a program.
type Sum struct {
	Name  string
	Shape shapes.Shape
}
