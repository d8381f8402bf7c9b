package collective

import (
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/collective/chooser"
	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// planKey is the inputs of a plan. The Counts are part of it as a hash.
type planKey struct {
	algorithm string
	op        Op
	mean      bool
	order     Order
	element   uint8 // bytes of a partial sum's element
	count     int
	root      int
	counts    uint64
}

// planned is how a rank executes calls with one key.
type planned struct {
	problem Problem
	row     plan.Algorithm
	hash    uint32  // of the algorithm's name
	open    script  // where the domain can access all memories that the algorithm needs
	private *script // otherwise; made when it is first needed
}

// script is a plan, and what the executor must know before it begins.
type script struct {
	steps []plan.Step
	// early is the number of steps before the first Await: they depend on no peer.
	early int
	// committed is the number of steps after the last Await: no rank learns any more whether another has
	// executed them.
	committed int
	// touchesPeers reports that a rank of the domain accesses the Src or Dst of another.
	touchesPeers bool
	// sharedDst reports that ranks of the domain that share one Dst may run the plan unchanged: everything
	// written to a Dst is final, comes from a Src, and is awaited by all ranks.
	sharedDst       bool
	prefixStageOnly bool // the steps before the first Await write to Stage only
	work            bool // the plan uses Work
	scratch         int  // elements of Scratch that it uses
}

// plansMax bounds the plans that a member caches. A model has fewer distinct calls; a program with more
// regenerates plans occasionally.
const plansMax = 512

// prepare finds the plan of a valid call; a call of two ranks has none.
func (x *executor) prepare(r *Running) (p *planned, err error) {
	call, count, o := r.Call, r.Count, &r.Options
	if call.pairwise() {
		return nil, nil
	}
	key := planKey{
		algorithm: o.Algorithm, op: call.Op, mean: call.mean(), order: o.Order,
		element: uint8(partialType(call, o).Bytes()), count: count,
	}
	if call.Op.Rooted() {
		key.root = call.Root
	}
	if call.Counts != nil {
		key.counts = fingerprint.HashInts(fingerprint.Seed, call.Counts)
	}
	if p := x.last; p != nil && x.lastKey == key && slices.Equal(p.problem.Counts, call.Counts) {
		return p, nil
	}
	p = x.plans[key]
	if p == nil || !slices.Equal(p.problem.Counts, call.Counts) {
		if p, err = x.plan(call, key, o); err != nil {
			return nil, err
		}
		if len(x.plans) >= plansMax {
			clear(x.plans)
		}
		x.plans[key] = p
	}
	x.last, x.lastKey = p, key
	return p, nil
}

// partialType returns the type of a call's partial sums.
func partialType(call *Call, o *Options) DType {
	if o.Accumulate == AccumulateFloat32 && call.Op.Reduces() && call.Type.IsFloat() && call.Type.Bytes() == 2 {
		return tensor.Float32
	}
	return call.Type
}

// plan chooses an algorithm for a call and makes its plan.
func (x *executor) plan(call *Call, key planKey, o *Options) (*planned, error) {
	s := &x.m.site
	p := Problem{
		Op: call.Op, Reduce: Sum, Size: x.m.team.size, Count: key.count, Counts: slices.Clone(call.Counts), Root: key.root,
		Places: s.places, Order: o.Order,
	}
	if key.mean {
		p.Reduce = Mean
	}
	if key.element > 0 {
		p.Stage = s.half / int(key.element)
	}
	where := s.where
	where.ElementBytes = int(key.element)
	// Each of several domains decides for itself whether it is private, so the algorithm must support both.
	p.Private = s.spread()
	row, err := x.m.team.choose(p, where, o.Algorithm)
	if err != nil {
		return nil, err
	}
	p.Private = false
	made := &planned{problem: p, row: row, open: x.script(row, p)}
	hash := fingerprint.HashString(fingerprint.Seed, row.Name)
	for i := range made.open.steps {
		if plan.InTurns(p.Size, made.open.steps[i:]) > 0 {
			hash = fingerprint.HashString(hash, " in turns") // its frames have a different order
		}
	}
	made.hash = uint32(hash)
	return made, nil
}

// choose returns the algorithm for a problem: the one that the call names, else the one that the
// configuration names, else the chooser's.
func (t *team) choose(p Problem, w chooser.Where, named string) (plan.Algorithm, error) {
	if named != "" {
		return chooser.Named(named, p, w)
	}
	return t.prefer.choose(t.cfg.Chooser, p, w)
}

// hide returns the plan for a domain in which some rank's memory is not accessible to all ranks.
func (x *executor) hide(p *planned, named string) (*script, error) {
	if p.private != nil {
		return p.private, nil
	}
	hidden, row := p.problem, p.row
	hidden.Private = true
	if err := row.Fits(hidden); err != nil {
		if x.m.site.spread() {
			return nil, fmt.Errorf("algorithm %s: %w", row.Name, err)
		}
		where := x.m.site.where
		where.ElementBytes = int(x.lastKey.element)
		if row, err = x.m.team.choose(hidden, where, named); err != nil {
			return nil, err
		}
	}
	s := x.script(row, hidden)
	p.private = &s
	return p.private, nil
}

// script makes this rank's plan.
func (x *executor) script(row plan.Algorithm, p Problem) script {
	s := script{steps: plan.Fuse(slices.Collect(row.Steps(p, x.m.rank))), sharedDst: true}
	s.early = max(0, slices.IndexFunc(s.steps, func(step plan.Step) bool { return step.Kind == plan.Await }))
	for i := range s.steps {
		if s.steps[i].Kind == plan.Await {
			s.committed = len(s.steps) - 1 - i
		}
	}
	s.prefixStageOnly = !slices.ContainsFunc(s.steps[:s.early], func(step plan.Step) bool {
		return step.Kind != plan.Signal && step.Out.Buffer != plan.Stage
	})
	for i := range s.steps {
		step := &s.steps[i]
		for _, span := range [...]plan.Span{step.In, step.Out, step.Own, step.Keep} {
			s.work = s.work || span.Buffer == plan.Work && span.Hi > span.Lo
			if span.Buffer == plan.Scratch {
				s.scratch = max(s.scratch, span.Hi)
			}
		}
	}
	if x.m.site.marker != nil { // the domain must agree, so these are the properties of all its plans together
		for _, rank := range x.m.site.domain {
			s.look(rank, slices.Collect(row.Steps(p, rank)))
		}
	}
	return s
}

// look merges the properties of the plan of a rank of the domain.
func (s *script) look(rank int, steps []plan.Step) {
	straight := func(step *plan.Step) bool {
		return step.In.Buffer == plan.Src && step.Out.Buffer == plan.Dst && step.Own == plan.Span{} && step.Keep == plan.Span{}
	}
	for i := range steps {
		step := &steps[i]
		in, out := shown(step.In), shown(step.Out)
		switch step.Kind {
		case plan.Signal, plan.Await:
		case plan.Pull:
			s.touchesPeers = s.touchesPeers || in
			s.sharedDst = s.sharedDst && straight(step)
		case plan.Push:
			s.touchesPeers = s.touchesPeers || out
			s.sharedDst = s.sharedDst && straight(step)
		case plan.Combine:
			s.touchesPeers = s.touchesPeers || in && (step.Ranks.Lo != rank || step.Ranks.Hi != rank+1) || out && step.To != rank
			s.sharedDst = s.sharedDst && straight(step) && step.To < 0
		case plan.Copy:
			s.sharedDst = s.sharedDst && straight(step)
		default:
			s.sharedDst = false
		}
	}
	end := len(steps) - 1
	s.sharedDst = s.sharedDst && end > 0 && steps[end].Kind == plan.Await && steps[end].From < 0 && steps[end].Mark > 0
}

// shown reports whether a span is in the call's Src or Dst.
func shown(s plan.Span) bool { return s.Buffer == plan.Src || s.Buffer == plan.Dst }

// show publishes a call to the peers of the domain.
func (x *executor) show(w *work) {
	c := &x.sig.call
	x.m.site.marker.Publish(transport.Slot{
		Sum: x.sum, Header: x.header, Name: c.Name, Shape: c.Shape, Algorithm: c.Algorithm, Src: x.visible(w.src), Dst: x.visible(w.dst),
	})
}

// visible returns a memory as the peers see it.
func (x *executor) visible(m tensor.Memory) tensor.Memory {
	if m.Bytes > 0 && !x.m.site.marker.Reachable(m) {
		m.Ptr = nil
	}
	return m
}
