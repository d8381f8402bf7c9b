package plan

import (
	"fmt"
	"slices"
)

// Check proves that an algorithm's plans for all ranks solve the problem together, and returns a [*Fault] where they do
// not, or the reason why the algorithm does not fit the problem.
//
// It carries out the plans on symbols instead of numbers: a rank's source holds the symbol of that rank, element by element, and
// combining two values makes a node over them. What it proves:
//   - Every send meets its receive of the same length, and nobody waits for ever, although a send ends only when it is
//     received (no buffering), one half of an Exchange may hold up the other, and every mark that is awaited is raised.
//   - Every rank ends with what the operation promises, each element in its place: what a rank gave; the reduction with every
//     rank's contribution exactly once, along exactly the canonical tree (in any tree for Order: Any), divided once for
//     Mean, and rounded once; from a barrier, the knowledge that every rank has entered.
//   - Two accesses to the same element of a buffer, one of them a write, are always ordered by frames or marks. That
//     includes the caller's: nobody touches a rank's Src or Dst before it entered the call or after it left, nor Stage in
//     the next call but one, which has the same half of it.
//   - Nothing is read that was not written before, a source that is not also the destination is never written, and peers
//     reach only what they can: each other's Src and Dst, or for Private only Stage, in their own domain.
//
// All this is proven for each way in which the buffers of a call can be the same memory, and for the plans as they are written and as they are
// carried out ([Fuse], [Turns]).
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

// ways returns the plans as they are written, and, where that is something else, as they are carried out: with copies and exchanges made
// one, and exchanges in turns, in few segments and in many.
func ways(a Algorithm, p Problem) []solved {
	out := []solved{solve(a, p)}
	lengths := []int{p.Count/3 + 1, p.Count/25 + 1}
	if p.Size != 2 { // nothing is in turns
		lengths = lengths[:1]
	}
	for _, length := range lengths {
		c := solved{p, make([][]Step, p.Size)}
		for rank, steps := range out[0].plans {
			c.plans[rank] = carried(p, slices.Clone(steps), length, TurnsLead)
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

// inARow is up to how many ranks Check carries out three calls after each other. It shows what holds for all: what a rank
// did with Stage in a call lies before its begin of the next, of which all ranks of the domain know when they end that one.
const inARow = 9

// Fault is what [Check] found wrong with a plan.
type Fault struct {
	Algorithm string
	Problem   Problem
	Sharing   string // which of the rank's buffers are the same memory
	Rank      int    // whose plan
	Index     int    // of the step in that plan; the plan's length: at its end
	Step      Step   // the step; zero at the end
	Span      Span   // the elements concerned
	Reason    string
}

// Error says which plan is wrong, where, and why.
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

// proof is one symbolic run of the plans of all ranks, for one call or several after each other.
type proof struct {
	calls    []solved
	sharing  sharing
	ranks    []prover
	domains  []domain
	domainOf []int // by rank: index in domains
	terms    *terms
	pieces   [][]piece // of Combine, by operand: kept between steps
	progress bool
	wholes   []term                              // by call: the reduction of all contributions
	watch    func(rank, index int, held []piece) // if not nil: told what each step left in the span that it wrote
}

// prover is the state of one rank.
type prover struct {
	call, next int // the step to take
	plan       []Step
	views      [5]view // by Buffer
	memory     [5]memory
	now        clock
	entries    []int32   // by call: the moment of entry
	marks      [][]clock // by call and mark: what this rank knew when it raised it
	meeting    meeting   // of the Exchange at next
}

// domain is ranks that reach each other's memory, and the marks that they raised.
type domain struct {
	ranks []int
	marks [][]mark // by call
}

type mark struct {
	raised int   // by how many ranks
	joined clock // what whoever awaited it knows
}

// meeting is how far a rank is with its current Exchange. Ranks that may hold each other up are a party; one of them, its
// head, counts for all how many halves are without a peer.
type meeting struct {
	entered bool
	out     []piece // what Out held before the step
	entry   clock
	head    int
	next    int // the next one of the party, around
	lonely  int // of the head
}

// arena is what proofs use one after the other.
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
	x := &proof{calls: calls, sharing: s, ranks: room.ranks, domainOf: make([]int, p.Size), terms: &room.terms, pieces: room.pieces}
	for i, ranks := range p.domains() {
		x.domains = append(x.domains, domain{ranks: ranks, marks: make([][]mark, len(calls))})
		for _, rank := range ranks {
			x.domainOf[rank] = i
		}
	}
	for rank := range x.ranks {
		r := &x.ranks[rank]
		*r = prover{memory: r.memory, now: make(clock, p.Size), meeting: meeting{out: r.meeting.out, entry: r.meeting.entry}}
		x.begin(rank, 0)
	}
	return x
}

func (x *proof) problem(rank int) *Problem { return &x.calls[x.ranks[rank].call].problem }

// begin lets a rank enter a call, with its source in place.
func (x *proof) begin(rank, call int) {
	r := &x.ranks[rank]
	p := &x.calls[call].problem
	r.call, r.next, r.plan = call, 0, x.calls[call].plans[rank]
	r.now[rank]++
	r.entries, r.marks = append(r.entries, r.now[rank]), append(r.marks, nil)
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

// run takes steps until every plan has ended, and returns the first fault.
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

// advance takes a rank's steps until one has to wait.
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

// step takes a rank's next step if it can.
func (x *proof) step(rank int, s *Step) *Fault {
	r := &x.ranks[rank]
	var f *Fault
	switch s.Kind {
	case Exchange:
		if r.meeting.entered {
			return nil
		}
		return x.enter(rank, s)
	case Signal:
		f = x.signal(rank, s.Mark)
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
		if !x.meets(rank, s.In, s.Out) {
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
	r.meeting.entered = false
	x.progress = true
}

// enter lets a rank enter its Exchange, keeps what it sends as it is now, and ends the step, and those of its whole party, if no half
// of it is without a peer any more.
func (x *proof) enter(rank int, s *Step) *Fault {
	r := &x.ranks[rank]
	m := &r.meeting
	*m = meeting{entered: true, entry: append(m.entry[:0], r.now...), out: m.out[:0], head: rank, next: rank}
	if s.To >= 0 {
		var f *Fault
		if m.out, f = x.read(rank, rank, s.Out, m.out); f != nil {
			return f
		}
		m.lonely++
	}
	if s.From >= 0 {
		m.lonely++
	}
	r.now[rank]++
	x.progress = true
	if s.To >= 0 {
		if q := &x.ranks[s.To]; q.at(r.call) && q.plan[q.next].From == rank {
			x.unite(rank, s.To)
		}
	}
	if s.From >= 0 {
		if q := &x.ranks[s.From]; q.at(r.call) && q.plan[q.next].To == rank {
			x.unite(rank, s.From)
		}
	}
	if x.ranks[x.head(rank)].meeting.lonely > 0 {
		return nil
	}
	return x.exchange(rank)
}

// at reports whether a rank stands in an Exchange of the call.
func (r *prover) at(call int) bool { return r.call == call && r.meeting.entered }

// unite makes two parties one, of which two halves have met.
func (x *proof) unite(a, b int) {
	a, b = x.head(a), x.head(b)
	m, n := &x.ranks[a].meeting, &x.ranks[b].meeting
	if a != b {
		n.head = a
		m.lonely += n.lonely
		m.next, n.next = n.next, m.next
	}
	m.lonely -= 2
}

func (x *proof) head(rank int) int {
	for m := &x.ranks[rank].meeting; m.head != rank; m = &x.ranks[rank].meeting {
		m.head = x.ranks[m.head].meeting.head
		rank = m.head
	}
	return rank
}

// exchange lets all of a party receive, and ends their steps.
func (x *proof) exchange(rank int) *Fault {
	for member, first := rank, true; first || member != rank; member, first = x.ranks[member].meeting.next, false {
		if f := x.receive(member, &x.ranks[member].plan[x.ranks[member].next]); f != nil {
			return f
		}
	}
	for member := rank; ; {
		next := x.ranks[member].meeting.next
		x.end(member)
		if member = next; member == rank {
			return nil
		}
	}
}

// receive takes over what the sender holds ready.
func (x *proof) receive(rank int, s *Step) *Fault {
	if s.From < 0 {
		return nil
	}
	q := &x.ranks[s.From]
	if out := q.plan[q.next].Out; out.length() != s.In.length() {
		return x.fault(rank, s.In, "rank %d sends %d elements: %v", s.From, out.length(), out)
	}
	r := &x.ranks[rank]
	r.now.join(q.meeting.entry)
	parts := q.meeting.out
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

// pair combines what was received, or read, with what the rank holds.
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
	marks := &d.marks[r.call]
	switch own := len(r.marks[r.call]); {
	case number < own:
		return x.fault(rank, Span{}, "raises mark %d twice", number)
	case number > own:
		return x.fault(rank, Span{}, "raises mark %d before mark %d", number, number-1)
	case number == len(*marks):
		*marks = append(*marks, mark{joined: make(clock, len(x.ranks))})
	}
	m := &(*marks)[number]
	m.raised++
	m.joined.join(r.now)
	r.marks[r.call] = append(r.marks[r.call], slices.Clone(r.now))
	r.now[rank]++
	return nil
}

// await waits for a mark of one rank or of all, and reports whether it was raised.
func (x *proof) await(rank int, s *Step) bool {
	r := &x.ranks[rank]
	if s.From >= 0 {
		raised := x.raised(s.From, r.call)
		if s.Mark >= len(raised) {
			return false
		}
		r.now.join(raised[s.Mark])
		return true
	}
	d := &x.domains[x.domainOf[rank]]
	marks := d.marks[r.call]
	if s.Mark >= len(marks) || marks[s.Mark].raised < len(d.ranks) {
		return false
	}
	r.now.join(marks[s.Mark].joined)
	return true
}

// raised returns the marks that a rank has raised in a call.
func (x *proof) raised(rank, call int) []clock {
	if r := &x.ranks[rank]; call < len(r.marks) {
		return r.marks[call]
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

// written returns whom a Combine or Push writes to.
func (x *proof) written(rank int, s *Step) []int {
	if s.To < 0 {
		return x.domains[x.domainOf[rank]].ranks
	}
	return []int{s.To}
}

// reduced combines operands, one for each of some ranks, along the tree; if they are the whole, Mean divides it.
func (x *proof) reduced(rank int, s Span, operands [][]piece, ranks Ranks, whole bool) ([]piece, *Fault) {
	var result []piece
	index, taken := make([]int, len(operands)), make([]int, len(operands)) // where each operand stands
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

// read appends what a span of the owner's holds, to be used by rank now.
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

// write sets what a span of the owner's holds, by rank now.
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

// held returns what the span holds that a step wrote in this rank's memory.
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
