package executor

import (
	"iter"
	"slices"

	"github.com/lockstep-ml/lockstep/collective/plan"
)

// Plan is one rank's plan of a problem, and what the executor must know before it begins. It is immutable, except
// for a [Plan.Message].
type Plan struct {
	Problem plan.Problem
	// Interleaved is the number of pairs of exchanges whose frames alternate ([plan.InTurns]).
	Interleaved int

	steps []plan.Step
	// early is the number of steps before the first Await: they depend on no peer.
	early int
	// committed is the number of steps after the last Await: no rank learns any more whether another has
	// executed them.
	committed int
	// touchesPeers reports that a rank of the domain accesses the Src or Dst of another.
	touchesPeers bool
	exchanges    bool // touchesPeers is false, and ranks of the domain exchange frames
	// sharedDst reports that ranks of the domain that share one Dst may run the plan unchanged: everything
	// written to a Dst is final, comes from a Src, and is awaited by all ranks.
	sharedDst       bool
	prefixStageOnly bool // the steps before the first Await write to Stage only
	// atOnce reports that the plan is an all-reduce with one synchronisation: each rank copies its Src to its staging
	// buffer, sets flag 0, awaits that of all, and combines what is in all staging buffers, all of it one segment.
	atOnce   bool
	usesWork bool
	scratch  int // elements of Scratch that it uses
}

// NewPlan makes the plan of a rank by an algorithm that fits the problem. domain is the ranks of its domain.
func NewPlan(a plan.Algorithm, problem plan.Problem, rank int, domain []int) *Plan {
	p := &Plan{Problem: problem, steps: plan.Fuse(slices.Collect(a.Steps(problem, rank))), sharedDst: true}
	p.early = max(0, slices.IndexFunc(p.steps, func(s plan.Step) bool { return s.Kind == plan.Await }))
	for i := range p.steps {
		if p.steps[i].Kind == plan.Await {
			p.committed = len(p.steps) - 1 - i
		}
		if plan.InTurns(problem.Size, p.steps[i:]) > 0 {
			p.Interleaved++
		}
	}
	p.prefixStageOnly = !slices.ContainsFunc(p.steps[:p.early], func(s plan.Step) bool {
		return s.Kind != plan.Signal && s.Out.Buffer != plan.Stage
	})
	for i := range p.steps {
		s := &p.steps[i]
		for _, span := range [...]plan.Span{s.In, s.Out, s.Own, s.Keep} {
			p.usesWork = p.usesWork || span.Buffer == plan.Work && span.Hi > span.Lo
			if span.Buffer == plan.Scratch {
				p.scratch = max(p.scratch, span.Hi)
			}
		}
	}
	p.atOnce = p.prefixStageOnly && len(domain) == problem.Size && isAtOnce(p.steps, problem, rank)
	for _, r := range domain { // the domain must agree, so these are the properties of all its plans together
		p.merge(r, a.Steps(problem, r))
	}
	return p
}

// Steps returns the number of steps.
func (p *Plan) Steps() int { return len(p.steps) }

// isAtOnce reports whether a rank's steps are those of [Plan.atOnce].
func isAtOnce(steps []plan.Step, p plan.Problem, rank int) bool {
	whole := func(b plan.Buffer) plan.Span { return plan.Span{Buffer: b, Hi: p.Count} }
	want := []plan.Step{
		{Kind: plan.Copy, In: whole(plan.Src), Out: whole(plan.Stage)},
		{Kind: plan.Signal},
		{Kind: plan.Await},
		{Kind: plan.Combine, In: whole(plan.Stage), Out: whole(plan.Dst), Ranks: plan.Ranks{Hi: p.Size}},
	}
	if p.Op != plan.AllReduce || p.Count == 0 || p.Count > atOnceElements || len(steps) != len(want) {
		return false
	}
	for i := range want {
		s := &steps[i]
		switch w := &want[i]; {
		case s.Kind != w.Kind || s.Flag != 0 || s.In != w.In || s.Out != w.Out || s.Own != w.Own || s.Keep != w.Keep:
			return false
		case s.Kind == plan.Await && s.From != -1:
			return false
		case s.Kind == plan.Combine && (s.Ranks != w.Ranks || s.To != rank):
			return false
		}
	}
	return true
}

// atOnceElements bounds the elements of a call with [Plan.atOnce], so that they are one segment whatever their type is.
const atOnceElements = segmentBytes / 16

// merge merges the properties of the plan of a rank of the domain.
func (p *Plan) merge(rank int, steps iter.Seq[plan.Step]) {
	direct := func(s *plan.Step) bool {
		return s.In.Buffer == plan.Src && s.Out.Buffer == plan.Dst && s.Own == plan.Span{} && s.Keep == plan.Span{}
	}
	var last plan.Step
	for step := range steps {
		s := &step
		last = step
		in, out := published(s.In), published(s.Out)
		switch s.Kind {
		case plan.Signal, plan.Await:
		case plan.Exchange:
			p.exchanges, p.sharedDst = true, false
		case plan.Pull:
			p.touchesPeers = p.touchesPeers || in
			p.sharedDst = p.sharedDst && direct(s)
		case plan.Push:
			p.touchesPeers = p.touchesPeers || out
			p.sharedDst = p.sharedDst && direct(s)
		case plan.Combine:
			p.touchesPeers = p.touchesPeers || in && (s.Ranks.Lo != rank || s.Ranks.Hi != rank+1) || out && s.To != rank
			p.sharedDst = p.sharedDst && direct(s) && s.To < 0
		case plan.Copy:
			p.sharedDst = p.sharedDst && direct(s)
		default:
			p.sharedDst = false
		}
		if p.touchesPeers && !p.sharedDst {
			return // both are final
		}
	}
	p.sharedDst = p.sharedDst && last.Kind == plan.Await && last.From < 0 && last.Flag > 0
}

// published reports whether a span is in the call's Src or Dst, which a rank publishes to its domain.
func published(s plan.Span) bool { return s.Buffer == plan.Src || s.Buffer == plan.Dst }

// Message makes p the plan of one end of a message of count elements: it sends the rank's Src to the peer, or
// receives its Dst from the peer. A plan that was a message can be reused for the next one.
func (p *Plan) Message(peer, count int, send bool) {
	p.Problem.Op, p.Problem.Count = plan.Send, count
	step := plan.Step{Kind: plan.Exchange, To: -1, From: -1}
	if send {
		step.To, step.Out = peer, plan.Span{Buffer: plan.Src, Hi: count}
	} else {
		step.From, step.In = peer, plan.Span{Buffer: plan.Dst, Hi: count}
	}
	p.steps = append(p.steps[:0], step)
}
