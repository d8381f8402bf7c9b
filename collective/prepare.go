package collective

import (
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/collective/chooser"
	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// planKey is what the plans of a call depend on, but for the Counts, which are in it as a hash.
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

// planned is how a rank carries out calls of one key.
type planned struct {
	problem Problem
	row     plan.Algorithm
	hash    uint32  // of the row's name
	open    script  // where the domain reaches all memories that the row needs
	private *script // else; made when it is needed first
}

// script is a plan, and what the executor must know before it begins.
type script struct {
	steps []plan.Step
	// early is how many steps stand before the first Await: they need to know nothing of the peers.
	early int
	// alone is how many steps stand after the last Await: no rank learns any more whether another carried them out.
	alone int
	// reaches says that a rank of the domain touches the Src or Dst of another.
	reaches bool
	// joint says that ranks of the domain which share one Dst may run it as it is: whatever is written to a Dst is final, comes
	// from a Src, and is awaited by all.
	joint   bool
	tame    bool // what stands before the first Await writes to Stage only
	work    bool // the plan uses Work
	scratch int  // elements of Scratch that it uses
}

// plansMax bounds the plans that a member remembers. A model has fewer distinct calls; one that has more pays for
// generating plans now and then.
const plansMax = 512

// prepare checks the call by itself and finds its plan.
func (x *executor) prepare(call *Call, o *Options) (count int, p *planned, err error) {
	m := x.m
	if count, err = call.check(m.rank, m.team.size, o); err != nil || call.pairwise() {
		return count, nil, err
	}
	key := planKey{
		algorithm: o.Algorithm, op: call.Op, mean: call.mean(), order: o.Order,
		element: uint8(partialType(call, o).Bytes()), count: count,
	}
	if call.Op.Rooted() {
		key.root = call.Root
	}
	if call.Counts != nil {
		key.counts = hashInts(hashSeed, call.Counts)
	}
	if p := x.last; p != nil && x.lastKey == key && slices.Equal(p.problem.Counts, call.Counts) {
		return count, p, nil
	}
	p = x.plans[key]
	if p == nil || !slices.Equal(p.problem.Counts, call.Counts) {
		if p, err = x.plan(call, key, o); err != nil {
			return count, nil, err
		}
		if len(x.plans) >= plansMax {
			clear(x.plans)
		}
		x.plans[key] = p
	}
	x.last, x.lastKey = p, key
	return count, p, nil
}

// partialType is the type of a call's partial sums.
func partialType(call *Call, o *Options) DType {
	if o.Accumulate == AccumulateFloat32 && call.Op.Reduces() && call.Type.IsFloat() && call.Type.Bytes() == 2 {
		return tensor.Float32
	}
	return call.Type
}

// plan chooses a row for a call and makes its plan.
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
	// Of several domains each decides for itself whether it is private, so the row must do for both.
	p.Private = s.spread()
	row, err := x.m.team.choose(p, where, o.Algorithm)
	if err != nil {
		return nil, err
	}
	p.Private = false
	made := &planned{problem: p, row: row, open: x.script(row, p)}
	hash := hashString(hashSeed, row.Name)
	for i := range made.open.steps {
		if plan.InTurns(p.Size, made.open.steps[i:]) > 0 {
			hash = hashString(hash, " in turns") // its frames come in another order
		}
	}
	made.hash = uint32(hash)
	return made, nil
}

// choose returns the row for a problem: the one that the call names, then what the configuration asks for, then the
// chooser's.
func (t *team) choose(p Problem, w chooser.Where, named string) (plan.Algorithm, error) {
	if named != "" {
		return chooser.Named(named, p, w)
	}
	return t.prefer.choose(t.cfg.Chooser, p, w)
}

// hide returns the plan for a domain in which not every rank's memory is reached by all.
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
	s := script{steps: plan.Fuse(slices.Collect(row.Steps(p, x.m.rank))), joint: true}
	s.early = max(0, slices.IndexFunc(s.steps, func(step plan.Step) bool { return step.Kind == plan.Await }))
	for i := range s.steps {
		if s.steps[i].Kind == plan.Await {
			s.alone = len(s.steps) - 1 - i
		}
	}
	s.tame = !slices.ContainsFunc(s.steps[:s.early], func(step plan.Step) bool {
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
	if x.m.site.marker != nil { // the domain must agree, so it is what holds for all of it that counts
		for _, rank := range x.m.site.domain {
			s.look(rank, slices.Collect(row.Steps(p, rank)))
		}
	}
	return s
}

// look adds what the plan of a rank of the domain is.
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
			s.reaches = s.reaches || in
			s.joint = s.joint && straight(step)
		case plan.Push:
			s.reaches = s.reaches || out
			s.joint = s.joint && straight(step)
		case plan.Combine:
			s.reaches = s.reaches || in && (step.Ranks.Lo != rank || step.Ranks.Hi != rank+1) || out && step.To != rank
			s.joint = s.joint && straight(step) && step.To < 0
		case plan.Copy:
			s.joint = s.joint && straight(step)
		default:
			s.joint = false
		}
	}
	end := len(steps) - 1
	s.joint = s.joint && end > 0 && steps[end].Kind == plan.Await && steps[end].From < 0 && steps[end].Mark > 0
}

// shown reports whether a span is of a call's own memory.
func shown(s plan.Span) bool { return s.Buffer == plan.Src || s.Buffer == plan.Dst }

// show shows the peers of the domain a call.
func (x *executor) show(w *work) {
	l := &x.sig.label
	x.m.site.marker.Publish(transport.Slot{
		Sum: x.sum, Header: x.header, Name: l.name, Shape: l.shape, Algorithm: l.algo, Src: x.visible(w.src), Dst: x.visible(w.dst),
	})
}

// visible is a memory as the peers see it.
func (x *executor) visible(m tensor.Memory) tensor.Memory {
	if m.Bytes > 0 && !x.m.site.marker.Reachable(m) {
		m.Ptr = nil
	}
	return m
}
