package backend

import (
	"fmt"
	"slices"

	"github.com/gomlx/compute"

	"github.com/lockstep-ml/lockstep/internal/record"
)

// Points are what a plan calls back for while it is executed. Both functions may be nil if the plan has no such points.
type Points struct {
	// AllReduce receives the operands of a call, which it must not keep, and returns the results: buffers of the backend,
	// which remain owned by AllReduce, and must keep their values until the execution ends. Operands have memory, but
	// need not be buffers of this backend.
	AllReduce func(call int, operands []compute.Buffer) ([]compute.Buffer, error)
	// Bucket receives the results of a bucket, as soon as they are computed, and owns them. It must not keep the slice.
	Bucket func(bucket int, results []compute.Buffer) error
}

// CompileWithPoints compiles the graph to a plan with points. calls lists the all-reduces of each call: results of
// Identity, which the plan takes from Points.AllReduce. The operands of a call must not depend on its own results or on
// those of later ones. buckets lists outputs by their index. The points of the plan are in the order of calls and
// buckets. Buckets that need no result of a call are before it, and each point is as early as this order allows. The
// result is nil if no plan can execute the graph.
func (x *builder) CompileWithPoints(calls [][]compute.Value, buckets [][]int) (*Executable, error) {
	if unplannable(x.Builder) != "" {
		return nil, nil
	}
	callOf := map[*record.Op]int{}
	for c, list := range calls {
		for _, v := range list {
			callOf[v.(*record.Value).Op] = c
		}
	}
	return newExecutable(x.backend, x.Builder, callOf, buckets)
}

// lowerAll lowers the operations that are needed. Operations that need the results of a call are lowered after all
// operands of the call, since a loop could otherwise join operations before the call with operations after it. It
// returns the number of calls before each output.
func (p *planner) lowerAll(g *record.Builder, needs map[*record.Op]bool, callOf map[*record.Op]int) (before []int) {
	const each = 2 // steps of a call: its operands, and its results
	steps, ops := map[*record.Op]int{}, make([]*record.Op, 0, len(g.Entry.Ops))
	for _, o := range g.Entry.Ops {
		if !needs[o] {
			continue
		}
		ops = append(ops, o)
		for _, v := range o.Needs() {
			steps[o] = max(steps[o], (steps[v.Op]+1)/each*each)
		}
		if c, yes := callOf[o]; yes {
			steps[o] = each*c + 1
		}
	}
	slices.SortStableFunc(ops, func(a, b *record.Op) int { return steps[a] - steps[b] })
	for _, o := range ops {
		if c, yes := callOf[o]; yes {
			p.allReduce(o, c)
		} else {
			p.lower(o)
		}
	}
	for _, v := range g.Entry.Outputs {
		before = append(before, (steps[v.Op]+1)/each)
	}
	return before
}

// allReduce adds the result of an all-reduce to the unit of its call.
func (p *planner) allReduce(o *record.Op, call int) {
	v := p.views[o.Inputs[0]]
	if !v.identity() || !slices.Equal(v.dims, v.of.dims) {
		v = p.copied(v)
	}
	n := &node{kind: pointNode, dims: v.dims, dtype: v.of.dtype, in: []view{v}}
	for len(p.calls) <= call {
		p.calls = append(p.calls, &point{unit: newUnit(pointUnit, n), call: len(p.calls), bucket: -1})
	}
	p.calls[call].unit.point = p.calls[call]
	p.enter(n, p.calls[call].unit)
	p.views[o.Outputs[0]] = p.add(n)
}

// order lists the points: the buckets whose outputs need no result of a call are before it.
func (p *planner) order(buckets [][]int, outputs []*node, before []int) {
	next, level := 0, 0
	for k, list := range buckets {
		n := &node{kind: pointNode}
		for _, i := range list {
			level = max(level, before[i])
			n.in = append(n.in, whole(outputs[i]))
		}
		for ; next < level; next++ {
			p.points = append(p.points, p.calls[next])
		}
		x := &point{unit: newUnit(pointUnit, n), bucket: k, outputs: list}
		x.unit.point = x
		p.enter(n, x.unit)
		p.add(n)
		p.points = append(p.points, x)
	}
	p.points = append(p.points, p.calls[next:]...)
}

// pointNodes lists the nodes of the points.
func (p *planner) pointNodes() (list []*node) {
	for _, x := range p.points {
		list = append(list, x.unit.nodes...)
	}
	return list
}

// assignPoints sets, for each unit, the first point that needs it.
func (p *planner) assignPoints() {
	for _, u := range p.units {
		u.first = len(p.points)
	}
	for i, x := range p.points {
		for pending := []*unit{x.unit}; len(pending) > 0; {
			u := pending[len(pending)-1]
			pending = pending[:len(pending)-1]
			if u.first > i {
				u.first = i
				pending = append(pending, u.requires()...)
			}
		}
	}
}

// point is where a plan calls back.
type point struct {
	unit    *unit // until the plan is made
	call    int
	bucket  int   // -1: it is a call
	outputs []int // of the bucket
	in, out []int // slots of the operands and results of a call
}

func (x *point) run(e *Executable, f *frame) error {
	f.list = f.list[:0]
	if x.bucket >= 0 {
		for _, i := range x.outputs {
			e.takeForeign(f, i)
			f.list = append(f.list, f.out[i])
			f.out[i] = nil
		}
		return f.points.Bucket(x.bucket, f.list)
	}
	for _, s := range x.in {
		f.list = append(f.list, f.buffers[s])
	}
	e.backend.team.running.Add(-1)
	sums, err := f.points.AllReduce(x.call, f.list)
	e.backend.team.running.Add(1)
	if err != nil {
		return err
	}
	for i, s := range x.out {
		if err := e.backend.fits(sums[i], e.slots[s].shape); err != nil {
			return fmt.Errorf("result %d of all-reduce call %d: %w", i, x.call, err)
		}
		b := sums[i].(*Buffer)
		f.buffers[s] = b.inner
		if f.memory[s], err = b.pointer(); err != nil {
			return err
		}
	}
	return nil
}
