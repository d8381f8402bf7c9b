package plan

import (
	"fmt"
	"iter"
	"math/bits"
	"slices"
)

// writer yields the steps of a plan until the consumer stops.
type writer struct {
	yield func(Step) bool
	ended bool
}

// generator returns the Steps of an algorithm that writes the plan of a rank.
func generator(write func(p Problem, rank int, w *writer)) func(p Problem, rank int) iter.Seq[Step] {
	return func(p Problem, rank int) iter.Seq[Step] {
		return func(yield func(Step) bool) { write(p, rank, &writer{yield: yield}) }
	}
}

func (w *writer) put(s Step) {
	w.ended = w.ended || !w.yield(s)
}

// sync sets a flag and awaits it from all ranks of the domain.
func (w *writer) sync(flag int) {
	w.put(signal(flag))
	w.put(await(flag))
}

// swap sends some spans to one rank and receives some from another, one by one, in as few steps as possible.
func (w *writer) swap(to int, out []Span, from int, in []Span) {
	for i := range max(len(out), len(in)) {
		s := Step{Kind: Exchange, To: -1, From: -1}
		if i < len(out) {
			s.To, s.Out = to, out[i]
		}
		if i < len(in) {
			s.From, s.In = from, in[i]
		}
		w.put(s)
	}
}

// group is ranks that exchange parts of one region, numbered from 0 to size-1. The region is cut into size
// consecutive parts; part i belongs to member i.
type group struct {
	size, self int
	rank       func(member int) int // the rank of a member
	buffer     Buffer
	edge       func(part int) int // where a part begins; edge(size): where the region ends
	scratch    int                // the first free element of Scratch
	full       int                // 1 + the member that already has all parts, or 0
}

// span is the parts [lo, hi).
func (g *group) span(lo, hi int) Span { return Span{g.buffer, g.edge(lo), g.edge(hi)} }

// around is n parts starting with one, modulo the size: one span or two. Empty ones are left out, unless both
// are empty.
func (g *group) around(from, n int) []Span {
	from %= g.size
	if from+n <= g.size {
		return []Span{g.span(from, from+n)}
	}
	a, b := g.span(from, g.size), g.span(0, from+n-g.size)
	switch {
	case a.length() == 0:
		return []Span{b}
	case b.length() == 0:
		return []Span{a}
	}
	return []Span{a, b}
}

// above returns the rank of the member at this distance above this one, modulo the size.
func (g *group) above(distance int) int { return g.rank((g.self + distance + g.size) % g.size) }

// allGather distributes the parts of all members, each of which has its own part, to all members.
//
// If the size is a power of two, it is recursive doubling: in round k a member exchanges the 2^k parts that
// it has with the member whose number differs in bit k. For other sizes it is Bruck's all-gather, with as
// many rounds and no more bytes.
func (g *group) allGather(w *writer) {
	if g.size&(g.size-1) != 0 {
		g.bruck(w)
		return
	}
	for n := 1; n < g.size; n *= 2 {
		mine, peer := g.self&^(n-1), g.self^n
		theirs := peer &^ (n - 1)
		g.trade(w, peer, g.span(mine, mine+n), peer, g.span(theirs, theirs+n))
	}
}

// bruck is Bruck's all-gather: in round k a member sends the first 2^k parts that it has, starting with its own,
// to the member 2^k below, and receives as many from the member 2^k above. They are stored in Scratch in that
// order, so that each round is one frame, and are rotated into place at the end.
func (g *group) bruck(w *writer) {
	length := func(from, n int) (sum int) {
		for _, s := range g.around(from, n) {
			sum += s.length()
		}
		return sum
	}
	have := Span{Scratch, g.scratch, g.scratch}
	bring := func(from, n int, in bool) { // copies parts between the region and the end of what is in Scratch
		for _, s := range g.around(from, n) {
			have.Lo, have.Hi = have.Hi, have.Hi+s.length()
			if in {
				w.put(duplicate(s, have))
			} else {
				w.put(duplicate(have, s))
			}
		}
	}
	first := 1
	if g.full == g.self+1 {
		first = g.size / 2 // it sends no more than these
	}
	bring(g.self, first, true)
	for reach := 1; reach < g.size; reach *= 2 {
		n := min(reach, g.size-reach)
		at := g.scratch + length(g.self, reach)
		out := Span{Scratch, g.scratch, g.scratch + length(g.self, n)}
		in := Span{Scratch, at, at + length(g.self+reach, n)}
		g.trade(w, (g.self-reach+g.size)%g.size, out, (g.self+reach)%g.size, in)
	}
	if g.full != g.self+1 {
		bring(g.self+1, g.size-1, false)
	}
}

// trade sends to one member and receives from another, but skips what a member already has.
func (g *group) trade(w *writer, to int, out Span, from int, in Span) {
	s := exchange(g.rank(to), out, g.rank(from), in)
	if g.full == to+1 {
		s.To, s.Out = -1, Span{}
	}
	if g.full == g.self+1 {
		s.From, s.In = -1, Span{}
	}
	if s.To >= 0 || s.From >= 0 {
		w.put(s)
	}
}

// below returns a member's number in the binomial tree over the members that starts at root, and how many
// parts, its own first, its subtree has.
func (g *group) below(root int) (number, parts int) {
	number = (g.self - root + g.size) % g.size
	if number == 0 {
		return 0, g.size
	}
	return number, min(number&-number, g.size-number)
}

// gather collects the parts of all members at the root, along a binomial tree.
func (g *group) gather(w *writer, root int) {
	number, parts := g.below(root)
	for reach := 1; reach < parts; reach *= 2 {
		w.swap(-1, nil, g.above(reach), g.around(g.self+reach, min(reach, parts-reach)))
	}
	if number > 0 {
		w.swap(g.above(-(number & -number)), g.around(g.self, parts), -1, nil)
	}
}

// scatter is gather in reverse: the root has all parts; each member receives its own part and those that it
// forwards.
func (g *group) scatter(w *writer, root int) {
	number, parts := g.below(root)
	if number > 0 {
		w.swap(-1, nil, g.above(-(number & -number)), g.around(g.self, parts))
	}
	reach := 1
	for 2*reach < parts {
		reach *= 2
	}
	for ; reach > 0 && parts > 1; reach /= 2 {
		w.swap(g.above(reach), g.around(g.self+reach, min(reach, parts-reach)), -1, nil)
	}
}

// broadcast sends the whole region from the root to all members, along a binomial tree.
func (g *group) broadcast(w *writer, root int) {
	number, _ := g.below(root)
	all, reach := g.span(0, g.size), 1<<bits.Len(uint(g.size-1))
	if number > 0 {
		reach = number & -number
		w.put(receive(g.above(-reach), all))
	}
	for reach /= 2; reach > 0; reach /= 2 {
		if number+reach < g.size {
			w.put(send(g.above(reach), all))
		}
	}
}

// disseminate is a barrier: in round k every member notifies the member 2^k above it, and after the last round it
// has information from all members.
func (g *group) disseminate(w *writer) {
	for reach := 1; reach < g.size; reach *= 2 {
		w.put(exchange(g.above(reach), Span{}, g.above(-reach), Span{}))
	}
}

// everyone is the group of all ranks with equal slices of the vector.
func (p Problem) everyone(rank int, b Buffer) group {
	return group{
		size: p.Size, self: rank, rank: func(member int) int { return member }, buffer: b,
		edge: func(i int) int { lo, _ := slice(p.Count, p.Size, i); return lo },
	}
}

// gatherParts begins an all-gather: it copies the rank's part to its place in Dst, and returns the group of all
// ranks with their parts.
func (p Problem) gatherParts(rank int, w *writer) group {
	g := p.everyone(rank, Dst)
	g.edge = p.partEdge()
	own := g.span(rank, rank+1)
	w.put(duplicate(first(Src, own.length()), own))
	return g
}

// broadcastBy broadcasts the vector by a function that sends the region of a group from the root to all members.
func (p Problem) broadcastBy(rank int, w *writer, distribute func(g *group)) {
	g := p.everyone(rank, Dst)
	if rank == p.Root {
		g.buffer = Src
	}
	distribute(&g)
	if rank == p.Root {
		w.put(duplicate(p.all(Src), p.all(Dst)))
	}
}

// partEdge returns where the parts of the ranks begin.
func (p Problem) partEdge() func(rank int) int {
	if p.Counts == nil {
		return func(rank int) int { return p.Count / p.Size * rank }
	}
	at := p.offsets()
	return func(rank int) int { return at[rank] }
}

// fitsOps returns an error if the problem's operation is not one of those that the algorithm supports.
func fitsOps(name string, p Problem, ops ...Op) error {
	if err := p.Validate(); err != nil {
		return err
	}
	if !slices.Contains(ops, p.Op) {
		return fmt.Errorf("%s has no plan for %v", name, p.Op)
	}
	return nil
}
