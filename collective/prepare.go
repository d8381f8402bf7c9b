package collective

import (
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/collective/chooser"
	"github.com/lockstep-ml/lockstep/collective/internal/executor"
	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/tensor"
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
	row     plan.Algorithm
	hash    uint32         // of the algorithm's name
	plan    *executor.Plan // where the domain can access all memories that the algorithm needs
	private *executor.Plan // otherwise; made when it is first needed
}

// plansMax bounds the plans that a member caches. A model has fewer distinct calls; a program with more
// regenerates plans occasionally.
const plansMax = 512

// prepare makes what the executor needs to execute a valid call. p is nil for a call of two ranks.
func (m *member) prepare(r *Running) (p *planned, err error) {
	call, c := r.Call, &m.call
	c.Reduce, c.Type, c.Partial = call.Reduce, call.Type, partialType(call, &r.Options)
	c.Src, c.Dst = call.sides(m.rank)
	if call.pairwise() {
		m.message.Message(call.Peer, r.Count, call.Op == Send)
		c.Plan = &m.message
		return nil, nil
	}
	if p, err = m.planOf(r); err == nil {
		c.Plan = p.plan
	}
	return p, err
}

// planOf returns the plan of a collective.
func (m *member) planOf(r *Running) (p *planned, err error) {
	call, o := r.Call, &r.Options
	key := planKey{
		algorithm: o.Algorithm, op: call.Op, mean: call.mean(), order: o.Order,
		element: uint8(m.call.Partial.Bytes()), count: r.Count,
	}
	if call.Op.Rooted() {
		key.root = call.Root
	}
	if call.Counts != nil {
		key.counts = fingerprint.HashInts(fingerprint.Seed, call.Counts)
	}
	if p := m.last; p != nil && m.lastKey == key && slices.Equal(p.plan.Problem.Counts, call.Counts) {
		return p, nil
	}
	p = m.plans[key]
	if p == nil || !slices.Equal(p.plan.Problem.Counts, call.Counts) {
		if p, err = m.newPlan(call, key); err != nil {
			return nil, err
		}
		if len(m.plans) >= plansMax {
			clear(m.plans)
		}
		m.plans[key] = p
	}
	m.last, m.lastKey = p, key
	return p, nil
}

// partialType returns the type of a call's partial sums.
func partialType(call *Call, o *Options) DType {
	if o.Accumulate == AccumulateFloat32 && call.Op.Reduces() && call.Type.IsFloat() && call.Type.Bytes() == 2 {
		return tensor.Float32
	}
	return call.Type
}

// newPlan chooses an algorithm for a call and makes its plan.
func (m *member) newPlan(call *Call, key planKey) (*planned, error) {
	s := &m.site
	p := Problem{
		Op: call.Op, Reduce: Sum, Size: m.team.size, Count: key.count, Counts: slices.Clone(call.Counts), Root: key.root,
		Places: s.places, Order: key.order,
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
	row, err := m.team.choose(p, where, key.algorithm)
	if err != nil {
		return nil, err
	}
	p.Private = false
	made := &planned{row: row, plan: executor.NewPlan(row, p, m.rank, m.site.domain)}
	hash := fingerprint.HashString(fingerprint.Seed, row.Name)
	for range made.plan.Interleaved {
		hash = fingerprint.HashString(hash, " in turns") // its frames have a different order
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

// PrivatePlan implements [executor.Caller].
func (m *member) PrivatePlan() (*executor.Plan, error) {
	p := m.last
	if p.private != nil {
		return p.private, nil
	}
	private, row := p.plan.Problem, p.row
	private.Private = true
	if err := row.Fits(private); err != nil {
		if m.site.spread() {
			return nil, m.failure(ErrInvalid, fmt.Errorf("algorithm %s: %w", row.Name, err))
		}
		where := m.site.where
		where.ElementBytes = int(m.lastKey.element)
		if row, err = m.team.choose(private, where, m.lastKey.algorithm); err != nil {
			return nil, m.failure(ErrInvalid, err)
		}
	}
	p.private = executor.NewPlan(row, private, m.rank, m.site.domain)
	return p.private, nil
}
