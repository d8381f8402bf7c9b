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
	key     planKey
	row     plan.Algorithm
	hash    uint32         // of the algorithm's name
	plan    *executor.Plan // where the domain can access all memories that the algorithm needs
	private *executor.Plan // otherwise; made when it is first needed
}

// plansMax bounds the plans that a planner caches. A model has fewer distinct calls; a program with more
// regenerates plans occasionally.
const plansMax = 512

// stepsMax bounds the steps of these plans, each of 152 bytes: an all-to-all has one for each rank. A single plan may
// have more.
const stepsMax = 1 << 17

// planner chooses the algorithms of a rank's collectives and makes their plans.
type planner struct {
	rank, size int
	site       *site
	table      *chooser.Table
	prefer     preference // of the configuration

	plans map[planKey]*planned
	steps int      // of the plans
	last  *planned // of the last collective
}

// plan returns the plan of a collective; nil for a call of two ranks.
func (x *planner) plan(r *Running) (p *planned, err error) {
	call, o := r.Call, &r.Options
	if call.Op.Pairwise() {
		return nil, nil
	}
	key := planKey{
		algorithm: o.Algorithm, op: call.Op, mean: call.mean(), order: o.Order,
		element: uint8(partialType(call, o).Bytes()), count: r.Count,
	}
	if call.Op.Rooted() {
		key.root = call.Root
	}
	if call.Counts != nil {
		key.counts = fingerprint.HashInts(fingerprint.Seed, call.Counts)
	}
	p = x.plans[key]
	if p == nil || !slices.Equal(p.plan.Problem.Counts, call.Counts) {
		if p, err = x.make(call, key); err != nil {
			return nil, err
		}
		if x.steps += p.plan.Steps(); len(x.plans) >= plansMax || x.steps > stepsMax {
			clear(x.plans)
			x.steps = p.plan.Steps()
		}
		if x.plans == nil {
			x.plans = map[planKey]*planned{}
		}
		x.plans[key] = p
	}
	return p, nil
}

// partialType returns the type of a call's partial sums.
func partialType(call *Call, o *Options) DType {
	if o.Accumulate == AccumulateFloat32 && call.Op.Reduces() && call.Type.IsFloat() && call.Type.Bytes() == 2 {
		return tensor.Float32
	}
	return call.Type
}

// make chooses an algorithm for a call and makes its plan.
func (x *planner) make(call *Call, key planKey) (*planned, error) {
	s := x.site
	p := Problem{
		Op: call.Op, Reduce: Sum, Size: x.size, Count: key.count, Counts: slices.Clone(call.Counts), Root: key.root,
		Places: s.places, Order: key.order,
	}
	if key.mean {
		p.Reduce = Mean
	}
	if key.element > 0 {
		p.Stage = s.stageBytes / int(key.element)
	}
	where := s.where
	where.ElementBytes = int(key.element)
	// Each of several domains decides for itself whether it is private, so the algorithm must support both.
	p.Private = s.spread()
	row, err := x.choose(p, where, key.algorithm)
	if err != nil {
		return nil, err
	}
	p.Private = false
	made := &planned{key: key, row: row, plan: executor.NewPlan(row, p, x.rank, s.domain)}
	hash := fingerprint.HashString(fingerprint.Seed, row.Name)
	for range made.plan.Interleaved {
		hash = fingerprint.HashString(hash, " in turns") // its frames have a different order
	}
	made.hash = uint32(hash)
	return made, nil
}

// choose returns the algorithm for a problem: the one that the call names, else the one that the
// configuration names, else the chooser's.
func (x *planner) choose(p Problem, w chooser.Where, named string) (plan.Algorithm, error) {
	if named != "" {
		return chooser.Named(named, p, w)
	}
	return x.prefer.choose(x.table, p, w)
}

// private returns the plan of the last collective for a domain whose ranks cannot access all memories that its
// plan needs.
func (x *planner) private() (*executor.Plan, error) {
	p := x.last
	if p.private != nil {
		return p.private, nil
	}
	private, row := p.plan.Problem, p.row
	private.Private = true
	if err := row.Fits(private); err != nil {
		if x.site.spread() {
			return nil, fmt.Errorf("algorithm %s: %w", row.Name, err)
		}
		where := x.site.where
		where.ElementBytes = int(p.key.element)
		if row, err = x.choose(private, where, p.key.algorithm); err != nil {
			return nil, err
		}
	}
	p.private = executor.NewPlan(row, private, x.rank, x.site.domain)
	return p.private, nil
}
