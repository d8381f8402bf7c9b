package plan

import (
	"fmt"
	"slices"
)

// Check proves that an algorithm's plans for all ranks together solve the problem. If they do not, it returns
// a [*Fault]; if the algorithm does not fit the problem, it returns the reason.
//
// It executes the plans on symbols instead of numbers: a rank's source holds the symbol of that rank, element
// by element, and combining two values makes a node over them. It proves:
//   - Every send is matched by a receive of the same length, and no rank waits forever, although a send ends only when
//     it is received (no buffering) and one half of an Exchange may block the other. Every flag that is awaited is set.
//   - Every rank ends with the result of the operation, each element in its place: what a rank contributed; the
//     reduction with every rank's contribution exactly once, along exactly the canonical tree (any tree for Order:
//     Any), divided once for Mean, and rounded once; for a barrier, the knowledge that every rank has entered.
//   - Two accesses to the same element of a buffer, one of them a write, are always ordered by frames or flags. That
//     includes the caller's: no rank accesses another's Src or Dst before the owner entered the call or after it left,
//     nor the Stage of the next call but one, which uses the same half of it.
//   - Only elements that were written before are read, a source that is not also the destination is never written, and
//     peers access only what they can: each other's Src and Dst, or for Private only Stage, in their own domain.
//
// All this is proven for each way in which the buffers of a call can be the same memory, and for the plans
// both as they are written and as they are executed ([Fuse], [Turns]).
func Check(a Algorithm, p Problem) error {
	_, err := checkAll(a, p)
	return err
}

// checkAll is Check, and returns the number of symbolic executions that the proof took.
func checkAll(a Algorithm, p Problem) (executions int, err error) {
	if err := a.Fits(p); err != nil {
		return 0, err
	}
	room := &arena{}
	for _, one := range ways(a, p) {
		calls := []solved{one}
		for i, s := range sharings(p, one.plans) {
			if i == 0 && p.Size <= inARow && one.uses(Stage) {
				calls = []solved{one, one, one}
			}
			executions++
			if f := newProof(calls, s, room).run(); f != nil {
				f.Algorithm, f.Problem, f.Sharing = a.Name, p, s.name
				return executions, f
			}
			calls = calls[:1]
		}
	}
	return executions, nil
}

// ways returns the plans as they are written and, where that differs, as they are executed: with copies fused
// into exchanges, and with interleaved exchanges, in few segments and in many.
func ways(a Algorithm, p Problem) []solved {
	out := []solved{solve(a, p)}
	lengths := []int{p.Count/3 + 1, p.Count/25 + 1}
	if p.Size != 2 { // no exchanges are interleaved
		lengths = lengths[:1]
	}
	for _, length := range lengths {
		c := solved{p, make([][]Step, p.Size)}
		for rank, steps := range out[0].plans {
			c.plans[rank] = executed(p, slices.Clone(steps), length, TurnsLead)
		}
		if !slices.ContainsFunc(out, c.equal) {
			out = append(out, c)
		}
	}
	return out
}

func (s *solved) equal(other solved) bool {
	return slices.EqualFunc(s.plans, other.plans, func(a, b []Step) bool { return slices.Equal(a, b) })
}

// inARow is the largest number of ranks for which Check executes three consecutive calls. That proves it for
// all sizes: what a rank did with Stage in a call precedes its begin of the next call, and all ranks of the
// domain know of that begin when they end that next call.
const inARow = 9

// Fault is the error that [Check] found in a plan.
type Fault struct {
	Algorithm string
	Problem   Problem
	Sharing   string // which of the rank's buffers are the same memory
	Rank      int    // the rank of the plan
	Index     int    // of the step in that plan; the plan's length: at its end
	Step      Step   // the step; zero at the end
	Span      Span   // the elements concerned
	Reason    string
}

// Error returns which plan is wrong, where, and why.
func (f *Fault) Error() string {
	where := "at the end"
	if f.Step.Kind != 0 {
		where = fmt.Sprintf("step %d (%v)", f.Index, f.Step)
	}
	return fmt.Sprintf("collective: %s does not solve %v with %s: rank %d, %s, %v: %s",
		f.Algorithm, f.Problem, f.Sharing, f.Rank, where, f.Span, f.Reason)
}

// solved is a problem and the plans of all ranks.
type solved struct {
	problem Problem
	plans   [][]Step
}

func solve(a Algorithm, p Problem) solved {
	s := solved{p, make([][]Step, p.Size)}
	for rank := range s.plans {
		s.plans[rank] = slices.Collect(a.Steps(p, rank))
	}
	return s
}

// uses reports whether a step names elements of the buffer.
func (s *solved) uses(b Buffer) bool {
	for _, plan := range s.plans {
		for i := range plan {
			for _, span := range plan[i].spans() {
				if span.Buffer == b && span.Lo < span.Hi {
					return true
				}
			}
		}
	}
	return false
}

func (s *Step) spans() [4]Span { return [4]Span{s.In, s.Out, s.Own, s.Keep} }

// proof is one symbolic execution of the plans of all ranks, for one call or several consecutive calls.
type proof struct {
	calls    []solved
	sharing  sharing
	ranks    []prover
	domains  []domain
	domainOf []int // by rank: index in domains
	terms    *terms
	pieces   [][]piece // of Combine, by operand: reused between steps
	progress bool
	wholes   []term // by call: the reduction of all contributions
	// if not nil, called with what each step left in the span that it wrote
	watch func(rank, index int, held []piece)
}

// prover is the state of one rank.
type prover struct {
	call, next int // the next step
	plan       []Step
	views      [5]view // by Buffer
	memory     [5]memory
	now        clock
	entries    []int32   // by call: the time of entry
	flags      [][]clock // by call and flag: what this rank knew when it set the flag
	pending    pending   // of the Exchange at next
}

// domain is ranks that access each other's memory, and the flags that they set.
type domain struct {
	ranks []int
	flags [][]syncFlag // by call
}

type syncFlag struct {
	set    int   // by how many ranks it was set
	joined clock // what a rank knows that has awaited it
}

// pending is a rank's progress in its current Exchange. Ranks that may block each other form a set (union-find,
// with a list of its members). Its root counts the halves of all members' exchanges that have no peer yet.
type pending struct {
	entered   bool
	out       []piece // what Out held before the step
	entry     clock
	parent    int
	next      int // the next one of the set, in a cycle
	unmatched int // of the root: halves without a peer
}

// arena is memory that successive proofs reuse.
type arena struct {
	terms  terms
	ranks  []prover
	pieces [][]piece
}

func newProof(calls []solved, s sharing, room *arena) *proof {
	p := calls[0].problem
	if room.ranks == nil {
		room.ranks, room.pieces = make([]prover, p.Size), make([][]piece, p.Size)
	}
	x := &proof{
		calls: calls, sharing: s, ranks: room.ranks, domainOf: make([]int, p.Size), terms: &room.terms,
		pieces: room.pieces,
	}
	for i, ranks := range p.domains() {
		x.domains = append(x.domains, domain{ranks: ranks, flags: make([][]syncFlag, len(calls))})
		for _, rank := range ranks {
			x.domainOf[rank] = i
		}
	}
	for rank := range x.ranks {
		r := &x.ranks[rank]
		*r = prover{memory: r.memory, now: make(clock, p.Size), pending: pending{out: r.pending.out, entry: r.pending.entry}}
		x.begin(rank, 0)
	}
	return x
}

func (x *proof) problem(rank int) *Problem { return &x.calls[x.ranks[rank].call].problem }

// begin makes a rank enter a call, with its source in place.
func (x *proof) begin(rank, call int) {
	r := &x.ranks[rank]
	p := &x.calls[call].problem
	r.call, r.next, r.plan = call, 0, x.calls[call].plans[rank]
	r.now[rank]++
	r.entries, r.flags = append(r.entries, r.now[rank]), append(r.flags, nil)
	x.layOut(rank, p)
	src, at, _ := p.layout(rank)
	if src > 0 {
		v := r.views[Src]
		m := &r.memory[v.memory]
		first := m.cut(v.at)
		m.put(first, m.cut(v.at+src), v.at, []piece{{src, value{x.terms.leaf(rank), at}}}, x.event(rank))
	}
}

func (x *proof) event(rank int) event { return event{int32(rank), x.ranks[rank].now[rank]} }

// run executes steps until every plan has ended, and returns the first fault.
func (x *proof) run() *Fault {
	if f := x.malformed(); f != nil {
		return f
	}
	for x.progress = true; x.progress; {
		x.progress = false
		for rank := range x.ranks {
			if f := x.advance(rank); f != nil {
				return f
			}
		}
	}
	return x.stuck()
}

// advance executes a rank's steps until one has to wait.
func (x *proof) advance(rank int) *Fault {
	r := &x.ranks[rank]
	for {
		for r.next < len(r.plan) {
			index, call := r.next, r.call
			if f := x.step(rank, &r.plan[index]); f != nil || r.next == index && r.call == call {
				return f
			}
		}
		if r.call+1 > len(x.calls)-1 {
			return nil
		}
		if f := x.ending(rank); f != nil {
			return f
		}
		x.begin(rank, r.call+1)
		x.progress = true
	}
}

// step executes a rank's next step if it can.
func (x *proof) step(rank int, s *Step) *Fault {
	r := &x.ranks[rank]
	var f *Fault
	switch s.Kind {
	case Exchange:
		if r.pending.entered {
			return nil
		}
		return x.enter(rank, s)
	case Signal:
		f = x.signal(rank, s.Flag)
	case Await:
		if !x.await(rank, s) {
			return nil
		}
	case Combine:
		f = x.combine(rank, s)
	case Pull:
		f = x.move(rank, s.From, s.In, rank, s.Out)
	case Push:
		f = x.move(rank, rank, s.In, s.To, s.Out)
	case Copy:
		if !x.overlap(rank, s.In, s.Out) {
			f = x.move(rank, rank, s.In, rank, s.Out)
		}
	case Fold:
		f = x.fold(rank, s)
	case Scale:
		f = x.scale(rank, s)
	}
	if f == nil {
		x.end(rank)
	}
	return f
}

// end finishes a rank's current step.
func (x *proof) end(rank int) {
	r := &x.ranks[rank]
	if x.watch != nil {
		x.watch(rank, r.next, x.held(rank, &r.plan[r.next]))
	}
	r.next++
	r.pending.entered = false
	x.progress = true
}

// enter makes a rank enter its Exchange and saves the current values of what it sends. If no half in its
// set is without a peer any more, it ends the step of every member of the set.
func (x *proof) enter(rank int, s *Step) *Fault {
	r := &x.ranks[rank]
	m := &r.pending
	*m = pending{entered: true, entry: append(m.entry[:0], r.now...), out: m.out[:0], parent: rank, next: rank}
	if s.To >= 0 {
		var f *Fault
		if m.out, f = x.read(rank, rank, s.Out, m.out); f != nil {
			return f
		}
		m.unmatched++
	}
	if s.From >= 0 {
		m.unmatched++
	}
	r.now[rank]++
	x.progress = true
	if s.To >= 0 {
		if q := &x.ranks[s.To]; q.at(r.call) && q.plan[q.next].From == rank {
			x.union(rank, s.To)
		}
	}
	if s.From >= 0 {
		if q := &x.ranks[s.From]; q.at(r.call) && q.plan[q.next].To == rank {
			x.union(rank, s.From)
		}
	}
	if x.ranks[x.find(rank)].pending.unmatched > 0 {
		return nil
	}
	return x.exchange(rank)
}

// at reports whether a rank is in an Exchange of the call.
func (r *prover) at(call int) bool { return r.call == call && r.pending.entered }

// union merges the sets of two ranks, of which two halves have been matched.
func (x *proof) union(a, b int) {
	a, b = x.find(a), x.find(b)
	m, n := &x.ranks[a].pending, &x.ranks[b].pending
	if a != b {
		n.parent = a
		m.unmatched += n.unmatched
		m.next, n.next = n.next, m.next
	}
	m.unmatched -= 2
}

// find returns the root of a rank's set, and shortens the path to it.
func (x *proof) find(rank int) int {
	for m := &x.ranks[rank].pending; m.parent != rank; m = &x.ranks[rank].pending {
		m.parent = x.ranks[m.parent].pending.parent
		rank = m.parent
	}
	return rank
}

// exchange lets all members of a set receive, and ends their steps.
func (x *proof) exchange(rank int) *Fault {
	for member, first := rank, true; first || member != rank; member, first = x.ranks[member].pending.next, false {
		if f := x.receive(member, &x.ranks[member].plan[x.ranks[member].next]); f != nil {
			return f
		}
	}
	for member := rank; ; {
		next := x.ranks[member].pending.next
		x.end(member)
		if member = next; member == rank {
			return nil
		}
	}
}

// receive stores what the sender has saved.
func (x *proof) receive(rank int, s *Step) *Fault {
	if s.From < 0 {
		return nil
	}
	q := &x.ranks[s.From]
	if out := q.plan[q.next].Out; out.length() != s.In.length() {
		return x.fault(rank, s.In, "rank %d sends %d elements: %v", s.From, out.length(), out)
	}
	r := &x.ranks[rank]
	r.now.join(q.pending.entry)
	parts := q.pending.out
	if s.Side != Replace {
		at := s.In
		if s.Own.length() > 0 {
			at = s.Own
		}
		own, f := x.read(rank, rank, at, x.pieces[0][:0])
		if f != nil {
			return f
		}
		x.pieces[0] = own
		if parts, f = x.pair(rank, s.Side, parts, own, s.In); f != nil {
			return f
		}
	}
	return x.write(rank, rank, s.In, parts)
}

// pair combines received or read operands with the rank's own.
func (x *proof) pair(rank int, side Side, other, own []piece, at Span) ([]piece, *Fault) {
	operands := [][]piece{own, other}
	if side == Left {
		operands = [][]piece{other, own}
	}
	return x.reduced(rank, at, operands, Ranks{0, 2}, false)
}

func (x *proof) signal(rank, number int) *Fault {
	r := &x.ranks[rank]
	d := &x.domains[x.domainOf[rank]]
	flags := &d.flags[r.call]
	switch own := len(r.flags[r.call]); {
	case number < own:
		return x.fault(rank, Span{}, "sets flag %d twice", number)
	case number > own:
		return x.fault(rank, Span{}, "sets flag %d before flag %d", number, number-1)
	case number == len(*flags):
		*flags = append(*flags, syncFlag{joined: make(clock, len(x.ranks))})
	}
	m := &(*flags)[number]
	m.set++
	m.joined.join(r.now)
	r.flags[r.call] = append(r.flags[r.call], slices.Clone(r.now))
	r.now[rank]++
	return nil
}

// await waits for a flag of one rank or of all, and reports whether it was set.
func (x *proof) await(rank int, s *Step) bool {
	r := &x.ranks[rank]
	if s.From >= 0 {
		set := x.set(s.From, r.call)
		if s.Flag >= len(set) {
			return false
		}
		r.now.join(set[s.Flag])
		return true
	}
	d := &x.domains[x.domainOf[rank]]
	flags := d.flags[r.call]
	if s.Flag >= len(flags) || flags[s.Flag].set < len(d.ranks) {
		return false
	}
	r.now.join(flags[s.Flag].joined)
	return true
}

// set returns the flags that a rank has set in a call.
func (x *proof) set(rank, call int) []clock {
	if r := &x.ranks[rank]; call < len(r.flags) {
		return r.flags[call]
	}
	return nil
}

func (x *proof) combine(rank int, s *Step) *Fault {
	operands := x.pieces[:s.Ranks.Hi-s.Ranks.Lo]
	for i := range operands {
		owner, span := s.Ranks.Lo+i, s.In
		if owner == rank && s.Own.length() > 0 {
			span = s.Own
		}
		var f *Fault
		if operands[i], f = x.read(rank, owner, span, operands[i][:0]); f != nil {
			return f
		}
	}
	result, f := x.reduced(rank, s.In, operands, s.Ranks, s.Ranks == Ranks{0, len(x.ranks)})
	if f != nil {
		return f
	}
	for _, owner := range x.written(rank, s) {
		if f := x.write(rank, owner, s.Out, result); f != nil {
			return f
		}
	}
	return x.write(rank, rank, s.Keep, result)
}

// written returns the ranks that a Combine or Push writes to.
func (x *proof) written(rank int, s *Step) []int {
	if s.To < 0 {
		return x.domains[x.domainOf[rank]].ranks
	}
	return []int{s.To}
}

// reduced combines operands, one for each of some ranks, along the tree; if they are all ranks, Mean divides
// the result.
func (x *proof) reduced(rank int, s Span, operands [][]piece, ranks Ranks, whole bool) ([]piece, *Fault) {
	var result []piece
	index, taken := make([]int, len(operands)), make([]int, len(operands)) // the position in each operand
	for done := 0; done < s.length(); {
		length := s.length() - done
		for i, list := range operands {
			length = min(length, list[index[i]].length-taken[i])
		}
		var f *Fault
		place := operands[0][index[0]].at + taken[0]
		sum := canonical(0, ranks.Hi-ranks.Lo, func(i int) term {
			p := operands[i][index[i]]
			if at := p.at + taken[i]; at != place && f == nil {
				f = x.fault(rank, s, "combines element %d of %s with element %d of %s",
					place, x.terms.format(operands[0][index[0]].term), at, x.terms.format(p.term))
			}
			if x.terms.isRounded(p.term) && f == nil {
				f = x.fault(rank, s, "combines %s, which was rounded", x.terms.format(p.term))
			}
			return p.term
		}, x.terms.node)
		if f != nil {
			return nil, f
		}
		if whole && x.problem(rank).Reduce == Mean {
			sum = x.terms.divided(sum)
		}
		result = join(result, piece{length, value{sum, place}})
		for i := range operands {
			if taken[i] += length; taken[i] == operands[i][index[i]].length {
				index[i], taken[i] = index[i]+1, 0
			}
		}
		done += length
	}
	return result, nil
}

func (x *proof) move(rank, from int, in Span, to int, out Span) *Fault {
	parts, f := x.read(rank, from, in, x.pieces[0][:0])
	if f != nil {
		return f
	}
	x.pieces[0] = parts
	return x.write(rank, to, out, parts)
}

func (x *proof) fold(rank int, s *Step) *Fault {
	other, f := x.read(rank, rank, s.In, nil)
	if f != nil {
		return f
	}
	own, f := x.read(rank, rank, s.Out, nil)
	if f != nil {
		return f
	}
	parts, f := x.pair(rank, s.Side, other, own, s.Out)
	if f != nil {
		return f
	}
	return x.write(rank, rank, s.Out, parts)
}

func (x *proof) scale(rank int, s *Step) *Fault {
	parts, f := x.read(rank, rank, s.Out, nil)
	if f != nil {
		return f
	}
	for i := range parts {
		if x.terms.isRounded(parts[i].term) {
			return x.fault(rank, s.Out, "divides %s, which was rounded", x.terms.format(parts[i].term))
		}
		parts[i].term = x.terms.divided(parts[i].term)
	}
	return x.write(rank, rank, s.Out, parts)
}

// read appends the contents of a span of the owner, as read by rank now.
func (x *proof) read(rank, owner int, s Span, into []piece) ([]piece, *Fault) {
	if s.length() == 0 {
		return into, nil
	}
	v := x.view(rank, owner, s.Buffer)
	m := &x.ranks[owner].memory[v.memory]
	now, event := x.ranks[rank].now, x.event(rank)
	first := m.cut(v.at + s.Lo)
	last := m.cut(v.at + s.Hi)
	for i := first; i < last; i++ {
		c := &m.runs[i]
		span := Span{s.Buffer, c.lo - v.at, m.end(i) - v.at}
		if !now.after(c.writer) {
			return nil, x.race(rank, owner, span, "reads", "writes", c.writer)
		}
		if c.term == 0 {
			return nil, x.fault(rank, span, "reads memory of rank %d that was never written", owner)
		}
		c.seen(event, now)
		into = join(into, piece{span.length(), c.value})
	}
	return into, nil
}

// write sets the contents of a span of the owner, as written by rank now.
func (x *proof) write(rank, owner int, s Span, values []piece) *Fault {
	if s.length() == 0 {
		return nil
	}
	o := &x.ranks[owner]
	v := x.view(rank, owner, s.Buffer)
	m := &o.memory[v.memory]
	if !o.mayWrite(v.memory, v.at+s.Lo, v.at+s.Hi) {
		return x.fault(rank, s, "overwrites the source of rank %d", owner)
	}
	now := x.ranks[rank].now
	first := m.cut(v.at + s.Lo)
	last := m.cut(v.at + s.Hi)
	for i := first; i < last; i++ {
		c := &m.runs[i]
		span := Span{s.Buffer, c.lo - v.at, m.end(i) - v.at}
		if does, e := c.unseen(now); does != "" {
			return x.race(rank, owner, span, "writes", does, e)
		}
	}
	if (s.Buffer == Src || s.Buffer == Dst) && x.sharing.rounds {
		values = slices.Clone(values)
		for i := range values {
			values[i].term = x.terms.rounded(values[i].term)
		}
	}
	m.put(first, last, v.at+s.Lo, values, x.event(rank))
	return nil
}

func (x *proof) race(rank, owner int, s Span, does, other string, e event) *Fault {
	if int(e.rank) == owner && !x.knows(rank, owner) {
		return x.fault(rank, s, "%s memory of rank %d, of which it does not know that it has entered", does, owner)
	}
	return x.fault(rank, s, "%s memory of rank %d that rank %d %s at the same time", does, owner, e.rank, other)
}

// knows reports whether a rank knows that a peer has entered its call.
func (x *proof) knows(rank, peer int) bool {
	r, q := &x.ranks[rank], &x.ranks[peer]
	return r.call < len(q.entries) && r.now[peer] >= q.entries[r.call]
}

func (x *proof) fault(rank int, s Span, format string, args ...any) *Fault {
	f := &Fault{Rank: rank, Index: x.ranks[rank].next, Span: s, Reason: fmt.Sprintf(format, args...)}
	if plan := x.ranks[rank].plan; f.Index < len(plan) {
		f.Step = plan[f.Index]
	}
	return f
}

// held returns the contents of the span that a step wrote in this rank's memory.
func (x *proof) held(rank int, s *Step) []piece {
	span := s.Out
	switch {
	case s.Kind == Signal, s.Kind == Await, s.Kind == Push, s.Kind == Exchange && s.From < 0:
		return nil
	case s.Kind == Exchange:
		span = s.In
	case s.Kind == Combine && s.To >= 0 && s.To != rank:
		span = s.Keep
	}
	v := x.ranks[rank].views[span.Buffer]
	m := &x.ranks[rank].memory[v.memory]
	var list []piece
	if span.length() > 0 {
		first := m.cut(v.at + span.Lo)
		for i, last := first, m.cut(v.at+span.Hi); i < last; i++ {
			list = join(list, piece{m.end(i) - m.runs[i].lo, m.runs[i].value})
		}
	}
	return list
}

func (s Span) length() int { return s.Hi - s.Lo }
