package stages

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/shapes"

	"github.com/lockstep-ml/lockstep/internal/record"
)

// plan determines the stage in which an operation of the main function is computed. It is the operation's Note.
type plan struct {
	kind    opKind
	index   int // among the parameters or the all-reduces
	planned bool
	level   int  // the number of all-reduces in sequence before it; for these, before their operands
	stage   int  // of the operations of its level, those that the first buckets need are in the first stages
	free    bool // it depends only on constants
	// repeated: every stage that uses it computes it, instead of passing its value between stages.
	repeated bool
}

func planOf(o *record.Op) *plan { return o.Note.(*plan) }

// assign sets the levels of the operations that the results need: the earliest that their inputs allow.
func (b *builder) assign() {
	for _, v := range b.Entry.Outputs {
		planOf(v.Op).planned = true
	}
	for _, o := range slices.Backward(b.Entry.Ops) {
		if planOf(o).planned {
			for _, v := range o.Needs() {
				planOf(v.Op).planned = true
			}
		}
	}
	for _, o := range b.Entry.Ops {
		p := planOf(o)
		if !p.planned {
			continue
		}
		p.free = p.kind == plainOp
		for _, v := range o.Needs() {
			p.free = p.free && planOf(v.Op).free
			p.level = max(p.level, planOf(v.Op).doneIn())
		}
		p.repeated = p.free || o.Name == "BroadcastInDim"
	}
}

// stage is one executable, and the all-reduces after it.
type stage struct {
	args    []*record.Value // parameters, sums and values of earlier stages
	outputs []*record.Value // operands of the all-reduces that end it, and values for later stages
	results []int           // results of the program, by index: they follow the outputs
	buckets []int           // whose last results are those of this stage
	sums    []int           // the all-reduces that end it
	exe     compute.Executable

	operands []*record.Value // of sums
	last     []bool          // by argument: a value of an earlier stage that is not needed after this one
	dropped  []*record.Value // not needed after the all-reduces
}

// stages splits the graph at its all-reduces and buckets. It sets the outputs of each stage; build finds its
// arguments and operations.
func (b *builder) stages(buckets [][]int) []*stage {
	bucketOf := make([]int, len(b.Entry.Outputs))
	b.assign()
	for i := range b.Entry.Outputs {
		bucketOf[i] = -1
	}
	levels := 1
	for _, o := range b.Entry.Ops {
		if planOf(o).planned {
			levels = max(levels, planOf(o).doneIn()+1)
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
	for i, o := range b.sums {
		if planOf(o).planned {
			st := list[last[planOf(o).level]]
			st.sums = append(st.sums, i)
			st.operands = append(st.operands, o.Inputs[0])
			st.output(o.Inputs[0])
		}
	}
	for i, v := range b.Entry.Outputs {
		at := len(list) - 1 // parameters, sums and constants
		p := planOf(v.Op)
		switch k := bucketOf[i]; {
		case p.kind == plainOp && !p.free:
			at = p.stage
		case k >= 0:
			at = stageOf[k]
		}
		list[at].results = append(list[at].results, i)
	}
	for i, s := range slices.Backward(list) {
		for _, v := range s.uses(b, i) {
			if p := planOf(v.Op); p.kind == plainOp {
				list[p.stage].output(v)
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
	bucketed := make([]bool, len(b.Entry.Outputs))
	for k, results := range buckets {
		for _, i := range results {
			bucketed[i] = true
			level = max(level, planOf(b.Entry.Outputs[i].Op).doneIn())
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
	for _, o := range b.Entry.Ops {
		if p := planOf(o); p.planned {
			p.stage = last[p.level]
		}
	}
	for i, v := range b.Entry.Outputs {
		if p := planOf(v.Op); !bucketed[i] {
			p.stage = first[p.level]
		}
	}
	for k, results := range buckets {
		for _, i := range results {
			p := planOf(b.Entry.Outputs[i].Op)
			p.stage = min(p.stage, stageOf[k])
		}
	}
	for _, o := range slices.Backward(b.Entry.Ops) {
		p := planOf(o)
		if !p.planned || p.kind != plainOp {
			continue
		}
		for _, v := range o.Needs() {
			if of := planOf(v.Op); of.level == p.level {
				of.stage = min(of.stage, p.stage)
			}
		}
	}
	return last, stageOf
}

// doneIn returns the level in which the values of the operation can be results.
func (p *plan) doneIn() int {
	if p.kind == sumOp {
		return p.level + 1
	}
	return p.level
}

// output adds an output unless it is already one.
func (s *stage) output(v *record.Value) {
	if !slices.Contains(s.outputs, v) {
		s.outputs = append(s.outputs, v)
	}
}

// uses lists the values that stage i needs as arguments, in the order of recording.
func (s *stage) uses(b *builder, i int) []*record.Value {
	seen := map[*record.Value]bool{}
	var list []*record.Value
	var visit func(v *record.Value)
	visit = func(v *record.Value) {
		if seen[v] {
			return
		}
		seen[v] = true
		if !planOf(v.Op).inside(i) {
			list = append(list, v)
			return
		}
		for _, in := range v.Op.Needs() {
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
func (s *stage) returned(b *builder) []*record.Value {
	list := slices.Clone(s.outputs)
	for _, i := range s.results {
		list = append(list, b.Entry.Outputs[i])
	}
	return list
}

// inside reports whether stage i computes the operation if it needs it.
func (p *plan) inside(i int) bool { return p.kind == plainOp && (p.stage == i || p.repeated) }

func compareValues(a, b *record.Value) int {
	if c := cmp.Compare(a.Op.Index, b.Op.Index); c != 0 {
		return c
	}
	return cmp.Compare(slices.Index(a.Op.Outputs, a), slices.Index(b.Op.Outputs, b))
}

// emission is a stage being built.
type emission struct {
	*record.Emission
	main compute.Function
}

// build compiles stage i of b's graph.
func (s *stage) build(b *builder, i int) error {
	to := b.recorder.Backend.Builder(fmt.Sprintf("%s, stage %d", b.name, i))
	e := &emission{record.NewEmission(to), to.Main()}
	var err error
	for k, v := range s.args {
		if e.Values[v], err = e.main.Parameter(fmt.Sprintf("#%d", k), v.Shape, nil); err != nil {
			return err
		}
	}
	returned := s.returned(b)
	if len(returned) == 0 {
		return nil // the results of its buckets are those of earlier stages
	}
	outputs := make([]compute.Value, len(returned))
	for k, v := range returned {
		if err := e.compute(v.Op); err != nil {
			return err
		}
		outputs[k] = e.Values[v]
		if slices.Contains(s.args, v) || slices.Contains(returned[:k], v) { // each needs a separate buffer
			if outputs[k], err = e.main.Identity(outputs[k]); err != nil {
				return err
			}
		}
	}
	if err := e.main.Return(outputs, nil); err != nil {
		return err
	}
	s.exe, err = to.Compile()
	return err
}

// compute adds o and its inputs to the stage, unless they are already there.
func (e *emission) compute(o *record.Op) error {
	if e.there(o) {
		return nil
	}
	for _, v := range o.Needs() {
		if e.Values[v] == nil {
			if err := e.compute(v.Op); err != nil {
				return err
			}
		}
	}
	return e.Add(o, e.main)
}

// there reports whether the values of o are known in the stage.
func (e *emission) there(o *record.Op) bool {
	return slices.ContainsFunc(o.Outputs, func(v *record.Value) bool { return e.Values[v] != nil })
}

// Sum describes one all-reduce of a program.
type Sum struct {
	Name  string
	Shape shapes.Shape
}

func (b *builder) listSums() (list []Sum) {
	for _, o := range b.sums {
		list = append(list, Sum{Name: o.Name, Shape: o.Outputs[0].Shape})
	}
	return list
}
