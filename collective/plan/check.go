package plan

import (
	"fmt"
	"slices"
	"strings"
)

// Check proves that an algorithm's plans for all ranks solve the problem together, and returns a [*Fault] where they do
// not, or the reason why the algorithm does not fit the problem.
//
// It carries out the plans on symbols instead of numbers: a rank's source holds the symbol of that rank, and combining
// two values makes a node over them. What it proves:
//   - Every send meets its receive over the same elements, and nobody waits for ever, although a send ends only when
//     it is received (no buffering), and every mark that is awaited is raised.
//   - Every rank ends with what the operation promises: the root's vector; the reduction with every rank's contribution
//     exactly once, along exactly the canonical tree (in any tree for Order: Any), divided once for Mean; from a
//     barrier, the knowledge that every rank has entered.
//   - Two accesses to the same element of a buffer, one of them a write, are always ordered by frames or marks. That
//     includes the caller's: nobody touches a rank's memory before it entered the call or after it left.
//   - Nothing is read that was not written before, and a source that is not also the destination is never written.
//
// All this is proven for each way in which the buffers of a call can be the same memory.
func Check(a Algorithm, p Problem) error {
	if err := a.Fits(p); err != nil {
		return err
	}
	plans := make([][]Step, p.Size)
	for rank := range plans {
		plans[rank] = slices.Collect(a.Steps(p, rank))
	}
	for _, m := range sharings {
		if f := newProof(p, plans, m).run(); f != nil {
			f.Algorithm, f.Problem, f.Sharing = a.Name, p, m.name
			return f
		}
	}
	return nil
}

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

// sharing maps each buffer to the memory that it is.
type sharing struct {
	name   string
	memory [3]int // by Buffer
}

var sharings = []sharing{
	{"src, dst and work apart", [3]int{Src: 0, Dst: 1, Work: 2}},
	{"work in dst", [3]int{Src: 0, Dst: 1, Work: 1}},
	{"dst in src", [3]int{Src: 0, Dst: 0, Work: 2}},
	{"dst and work in src", [3]int{Src: 0, Dst: 0, Work: 0}},
}

// proof is one symbolic run of the plans of all ranks.
type proof struct {
	problem  Problem
	sharing  sharing
	edges    []int // where cells begin; every span of the plans is a run of whole cells
	ranks    []prover
	terms    terms
	want     term                             // what every rank has to end with
	marks    [][]bool                         // by mark: which ranks raised it
	joined   []clock                          // by mark: what whoever awaited it knows
	progress int                              // counts everything that happened
	watch    func(rank, index int, held term) // if not nil: told what each step left in the span that it wrote; 0: several values
}

// prover is the state of one rank.
type prover struct {
	plan    []Step
	next    int // the step to take
	memory  [3][]cell
	now     clock
	meeting meeting // of the Exchange at next
}

// cell is a run of elements that no step tells apart.
type cell struct {
	holds  term
	writer event   // the last write, or the owner's entry
	reads  []event // since then
}

// meeting is how far a rank is with its current Exchange.
type meeting struct {
	entered        bool
	sent, received bool
	out            []term // what Out held before the step
	entry          clock
}

func newProof(p Problem, plans [][]Step, m sharing) *proof {
	x := &proof{problem: p, sharing: m, edges: []int{0, p.Count}, ranks: make([]prover, p.Size)}
	for _, plan := range plans {
		for _, s := range plan {
			for _, span := range []Span{s.In, s.Out} {
				x.edges = append(x.edges, span.Lo, span.Hi)
			}
		}
	}
	slices.Sort(x.edges)
	x.edges = slices.Compact(x.edges)
	for rank := range x.ranks {
		r := &x.ranks[rank]
		r.plan, r.now = plans[rank], make(clock, p.Size)
		r.now[rank] = 1
		for i := range r.memory {
			r.memory[i] = make([]cell, len(x.edges)-1)
			for c := range r.memory[i] {
				r.memory[i][c].writer = event{rank, 1}
			}
		}
		for c := range r.memory[m.memory[Src]] {
			r.memory[m.memory[Src]][c].holds = x.terms.leaf(rank)
		}
	}
	switch p.Op {
	case Broadcast:
		x.want = x.terms.leaf(p.Root)
	case AllReduce:
		x.want = x.reduce(canonical(0, p.Size, x.terms.leaf, x.terms.node))
	}
	return x
}

// run takes steps until every plan has ended, and returns the first fault.
func (x *proof) run() *Fault {
	for rank := range x.ranks {
		for index, s := range x.ranks[rank].plan {
			if reason, span := x.malformed(rank, s); reason != "" {
				return &Fault{Rank: rank, Index: index, Step: s, Span: span, Reason: reason}
			}
		}
	}
	for before := -1; before != x.progress; {
		before = x.progress
		for rank := range x.ranks {
			if f := x.advance(rank); f != nil {
				return f
			}
		}
	}
	if f := x.stuck(); f != nil {
		return f
	}
	for rank := range x.ranks {
		if f := x.ending(rank); f != nil {
			return f
		}
	}
	return nil
}

// advance takes a rank's steps until one has to wait.
func (x *proof) advance(rank int) *Fault {
	r := &x.ranks[rank]
	for r.next < len(r.plan) {
		index := r.next
		if f := x.step(rank, r.plan[index]); f != nil || r.next == index {
			return f
		}
	}
	return nil
}

// malformed returns what is wrong with a step by itself.
func (x *proof) malformed(rank int, s Step) (string, Span) {
	for _, span := range []Span{s.In, s.Out} {
		if span.Buffer > Work || span.Lo < 0 || span.Hi < span.Lo || span.Hi > x.problem.Count {
			return fmt.Sprintf("no span of %d elements", x.problem.Count), span
		}
	}
	peer := func(r int) bool { return r >= 0 && r < x.problem.Size && r != rank }
	same := s.In.Lo == s.Out.Lo && s.In.Hi == s.Out.Hi
	switch s.Kind {
	case Exchange:
		switch {
		case s.To < 0 && s.From < 0 || s.To >= 0 && !peer(s.To) || s.From >= 0 && !peer(s.From):
			return "no peer to meet", s.Out
		case s.Side > Right:
			return "no side", s.In
		case s.To >= 0 && s.From >= 0 && x.overlap(s.In, s.Out) && !(same && s.Side != Replace):
			return "receives over what it sends at the same time", s.In
		}
	case Combine, Copy:
		if !same {
			return fmt.Sprintf("moves elements to other places: in is %v", s.In), s.Out
		}
	case Pull:
		if !same {
			return fmt.Sprintf("moves elements to other places: in is %v", s.In), s.Out
		}
		if !peer(s.From) {
			return "no peer to read from", s.In
		}
	case Signal, Await:
		if s.Mark < 0 {
			return "no mark", s.Out
		}
	case Scale:
	default:
		return "no kind of step", s.Out
	}
	return "", Span{}
}

func (x *proof) overlap(a, b Span) bool {
	return x.sharing.memory[a.Buffer] == x.sharing.memory[b.Buffer] && max(a.Lo, b.Lo) < min(a.Hi, b.Hi)
}

// step takes a rank's next step if it can.
func (x *proof) step(rank int, s Step) *Fault {
	r := &x.ranks[rank]
	var f *Fault
	switch s.Kind {
	case Exchange:
		return x.exchange(rank, s)
	case Signal:
		f = x.signal(rank, s.Mark)
	case Await:
		if !x.raised(s.Mark) {
			return nil
		}
		r.now.join(x.joined[s.Mark])
	case Combine:
		f = x.combine(rank, s)
	case Pull:
		f = x.copy(rank, s.From, s)
	case Copy:
		if x.sharing.memory[s.In.Buffer] != x.sharing.memory[s.Out.Buffer] {
			f = x.copy(rank, rank, s)
		}
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
		x.watch(rank, r.next, x.held(rank, r.plan[r.next]))
	}
	r.next++
	r.meeting = meeting{}
	x.progress++
}

// exchange lets a rank enter its Exchange, and receive if its sender stands ready.
func (x *proof) exchange(rank int, s Step) *Fault {
	r := &x.ranks[rank]
	if !r.meeting.entered {
		if f := x.enter(rank, s); f != nil {
			return f
		}
	}
	if !r.meeting.received {
		q := &x.ranks[s.From]
		if !q.meeting.entered || q.meeting.sent || q.plan[q.next].To != rank {
			return nil
		}
		if f := x.receive(rank, s, q); f != nil {
			return f
		}
		if q.meeting.received {
			x.end(s.From)
		}
	}
	if r.meeting.sent {
		x.end(rank)
	}
	return nil
}

// enter keeps what the rank sends as it is now: what it receives in the same step comes later.
func (x *proof) enter(rank int, s Step) *Fault {
	r := &x.ranks[rank]
	r.meeting = meeting{entered: true, sent: s.To < 0, received: s.From < 0, entry: slices.Clone(r.now)}
	if s.To >= 0 {
		for c := range x.cells(s.Out) {
			held, f := x.read(rank, rank, s.Out, c)
			if f != nil {
				return f
			}
			r.meeting.out = append(r.meeting.out, held)
		}
	}
	r.now[rank]++
	x.progress++
	return nil
}

// receive takes over what the sender q holds ready.
func (x *proof) receive(rank int, s Step, q *prover) *Fault {
	if out := q.plan[q.next].Out; out.Lo != s.In.Lo || out.Hi != s.In.Hi {
		return x.fault(rank, s.In, "rank %d sends %v", s.From, out)
	}
	r := &x.ranks[rank]
	r.now.join(q.meeting.entry)
	first := x.cell(s.In.Lo)
	for c := range x.cells(s.In) {
		part := q.meeting.out[c-first]
		if s.Side != Replace {
			own, f := x.read(rank, rank, s.In, c)
			if f != nil {
				return f
			}
			if s.Side == Left {
				part = x.terms.node(part, own)
			} else {
				part = x.terms.node(own, part)
			}
		}
		if f := x.write(rank, rank, s.In, c, part); f != nil {
			return f
		}
	}
	r.meeting.received, q.meeting.sent = true, true
	x.progress++
	return nil
}

func (x *proof) signal(rank, mark int) *Fault {
	for len(x.marks) <= mark {
		x.marks = append(x.marks, make([]bool, x.problem.Size))
		x.joined = append(x.joined, make(clock, x.problem.Size))
	}
	r := &x.ranks[rank]
	if x.marks[mark][rank] {
		return x.fault(rank, Span{}, "raises mark %d twice", mark)
	}
	if mark > 0 && !x.marks[mark-1][rank] {
		return x.fault(rank, Span{}, "raises mark %d before mark %d", mark, mark-1)
	}
	x.marks[mark][rank] = true
	x.joined[mark].join(r.now)
	r.now[rank]++
	return nil
}

func (x *proof) raised(mark int) bool {
	return mark < len(x.marks) && !slices.Contains(x.marks[mark], false)
}

func (x *proof) combine(rank int, s Step) *Fault {
	operands := make([]term, x.problem.Size)
	for c := range x.cells(s.In) {
		for owner := range operands {
			held, f := x.read(rank, owner, s.In, c)
			if f != nil {
				return f
			}
			operands[owner] = held
		}
		result := x.reduce(canonical(0, x.problem.Size, func(i int) term { return operands[i] }, x.terms.node))
		for owner := range operands {
			if f := x.write(rank, owner, s.Out, c, result); f != nil {
				return f
			}
		}
	}
	return nil
}

// reduce is what becomes of a whole sum: Mean divides it.
func (x *proof) reduce(sum term) term {
	if x.problem.Reduce == Mean {
		return x.terms.divided(sum)
	}
	return sum
}

func (x *proof) copy(rank, from int, s Step) *Fault {
	for c := range x.cells(s.In) {
		held, f := x.read(rank, from, s.In, c)
		if f == nil {
			f = x.write(rank, rank, s.Out, c, held)
		}
		if f != nil {
			return f
		}
	}
	return nil
}

func (x *proof) scale(rank int, s Step) *Fault {
	for c := range x.cells(s.Out) {
		held, f := x.read(rank, rank, s.Out, c)
		if f == nil {
			f = x.write(rank, rank, s.Out, c, x.terms.divided(held))
		}
		if f != nil {
			return f
		}
	}
	return nil
}

// read returns what a cell of the owner's buffer holds, to be used by rank now.
func (x *proof) read(rank, owner int, s Span, index int) (term, *Fault) {
	c := x.at(owner, s.Buffer, index)
	now := x.ranks[rank].now
	if !now.after(c.writer) {
		return 0, x.race(rank, owner, s, "reads", "writes", c.writer)
	}
	if c.holds == 0 {
		return 0, x.fault(rank, s, "reads what nobody wrote, of rank %d", owner)
	}
	c.reads = append(slices.DeleteFunc(c.reads, now.after), event{rank, now[rank]})
	return c.holds, nil
}

// write sets what a cell of the owner's buffer holds, by rank now.
func (x *proof) write(rank, owner int, s Span, index int, value term) *Fault {
	memory := x.sharing.memory
	if memory[s.Buffer] == memory[Src] && memory[Src] != memory[Dst] {
		return x.fault(rank, s, "overwrites the source of rank %d", owner)
	}
	c := x.at(owner, s.Buffer, index)
	now := x.ranks[rank].now
	if !now.after(c.writer) {
		return x.race(rank, owner, s, "writes", "writes", c.writer)
	}
	for _, e := range c.reads {
		if !now.after(e) {
			return x.race(rank, owner, s, "writes", "reads", e)
		}
	}
	c.holds, c.writer, c.reads = value, event{rank, now[rank]}, c.reads[:0]
	return nil
}

func (x *proof) race(rank, owner int, s Span, does, other string, e event) *Fault {
	if e == (event{owner, 1}) && other == "writes" {
		return x.fault(rank, s, "%s memory of rank %d, of which it does not know that it has entered", does, owner)
	}
	return x.fault(rank, s, "%s memory of rank %d that rank %d %s at the same time", does, owner, e.rank, other)
}

func (x *proof) fault(rank int, s Span, format string, args ...any) *Fault {
	f := &Fault{Rank: rank, Index: x.ranks[rank].next, Span: s, Reason: fmt.Sprintf(format, args...)}
	if plan := x.ranks[rank].plan; f.Index < len(plan) {
		f.Step = plan[f.Index]
	}
	return f
}

// stuck returns a fault if a rank can never take its next step: one that waits for a rank whose plan has ended, if there
// is such a rank, for there the plans came apart.
func (x *proof) stuck() *Fault {
	var found *Fault
	for rank := range x.ranks {
		r := &x.ranks[rank]
		if r.next == len(r.plan) {
			continue
		}
		s := r.plan[r.next]
		ended := false
		waits := func(format string, peer, arg int) string {
			q := x.ranks[peer]
			if q.next == len(q.plan) {
				ended = true
				return fmt.Sprintf(format+", which has ended", arg, peer)
			}
			return fmt.Sprintf(format+", which is at step %d (%v)", arg, peer, q.next, q.plan[q.next])
		}
		var why []string
		span := s.Out
		if s.Kind == Await {
			for peer := range x.ranks {
				if s.Mark >= len(x.marks) || !x.marks[s.Mark][peer] {
					why = append(why, waits("for mark %d of rank %d", peer, s.Mark))
					break
				}
			}
		} else {
			if !r.meeting.received {
				span = s.In
				why = append(why, waits("to receive %d elements from rank %d", s.From, s.In.Hi-s.In.Lo))
			}
			if !r.meeting.sent {
				why = append(why, waits("to send %d elements to rank %d", s.To, s.Out.Hi-s.Out.Lo))
			}
		}
		if found == nil || ended {
			found = x.fault(rank, span, "waits for ever %s", strings.Join(why, ", and "))
		}
		if ended {
			break
		}
	}
	return found
}

// ending returns what is wrong with a rank's memory and knowledge when its plan has ended.
func (x *proof) ending(rank int) *Fault {
	r := &x.ranks[rank]
	for b := Src; b <= Work; b++ {
		for index := range r.memory[x.sharing.memory[b]] {
			c, span := x.at(rank, b, index), Span{b, x.edges[index], x.edges[index+1]}
			for _, e := range append(c.reads, c.writer) {
				if !r.now.after(e) {
					return x.fault(rank, span, "leaves while rank %d may still use this memory", e.rank)
				}
			}
			if b == Dst && x.want != 0 {
				if reason := x.wrong(c.holds); reason != "" {
					return x.fault(rank, span, "%s", reason)
				}
			}
		}
	}
	if x.problem.Op == Barrier {
		for peer, at := range r.now {
			if at == 0 {
				return x.fault(rank, Span{}, "leaves without knowing that rank %d has entered", peer)
			}
		}
	}
	return nil
}

// wrong returns how what a destination holds differs from what it should hold.
func (x *proof) wrong(got term) string {
	if got == x.want {
		return ""
	}
	if got == 0 {
		return "ends with what nobody wrote"
	}
	if x.problem.Op == Broadcast {
		return fmt.Sprintf("ends with %s, want %s", x.terms.format(got), x.terms.format(x.want))
	}
	count := make([]int, x.problem.Size)
	x.terms.count(got, count)
	for rank, n := range count {
		switch {
		case n == 0:
			return fmt.Sprintf("ends without the contribution of rank %d: %s", rank, x.terms.format(got))
		case n > 1:
			return fmt.Sprintf("ends with the contribution of rank %d %d times: %s", rank, n, x.terms.format(got))
		}
	}
	if x.problem.Order == Any && x.terms.divisions(got) == x.terms.divisions(x.want) {
		return ""
	}
	return fmt.Sprintf("ends with another tree: %s, want %s", x.terms.format(got), x.terms.format(x.want))
}

// held returns what the span holds that a step wrote: 0 for no value, several values or no span.
func (x *proof) held(rank int, s Step) term {
	span := s.Out
	if s.Kind == Exchange {
		span = s.In
	}
	if span.Lo == span.Hi || s.Kind == Signal || s.Kind == Await || s.Kind == Exchange && s.From < 0 {
		return 0
	}
	first := x.at(rank, span.Buffer, x.cell(span.Lo)).holds
	for c := range x.cells(span) {
		if x.at(rank, span.Buffer, c).holds != first {
			return 0
		}
	}
	return first
}

func (x *proof) at(owner int, b Buffer, index int) *cell {
	return &x.ranks[owner].memory[x.sharing.memory[b]][index]
}

// cell returns the index of the cell that begins at an element.
func (x *proof) cell(element int) int {
	i, _ := slices.BinarySearch(x.edges, element)
	return i
}

// cells ranges over the indices of the cells of a span.
func (x *proof) cells(s Span) func(func(int) bool) {
	return func(yield func(int) bool) {
		for c, end := x.cell(s.Lo), x.cell(s.Hi); c < end; c++ {
			if !yield(c) {
				return
			}
		}
	}
}
