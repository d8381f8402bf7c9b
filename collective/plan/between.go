package plan

import "math/bits"

// The lanes' work between the domains: each lane has one rank in each domain, and exchanges frames only
// within itself.

// between returns the group of a lane's ranks, numbered by their domains, whose parts are the parts of the
// lane, one for each domain.
func (h *hierarchy) between(number int) group {
	g := group{
		size: len(h.domains), self: h.mine,
		rank: func(i int) int { return h.domains[i].Lo + number },
	}
	if h.p.Op == Barrier {
		return g
	}
	l := h.lane(number)
	start := h.home(0, 0)
	g.buffer = start.Buffer
	if len(l.pieces) == len(h.domains) && h.offsets != nil {
		g.edge = func(i int) int {
			if i == len(l.pieces) {
				return start.Lo + l.length()
			}
			return start.Lo + l.pieces[i].at
		}
	} else {
		g.edge = func(i int) int { lo, _ := slice(l.length(), len(h.domains), i); return start.Lo + lo }
	}
	if g.buffer == Scratch {
		g.scratch = l.length()
	}
	return g
}

// broadcastBetween sends the lane from the root's domain to the other domains.
func (h *hierarchy) broadcastBetween() {
	g := h.between(h.local)
	root := 0
	for h.domains[root].Hi <= h.p.Root {
		root++
	}
	if !h.long {
		g.broadcast(h.writer, root)
		return
	}
	g.scatter(h.writer, root)
	g.full = root + 1
	g.allGather(h.writer)
}

// reduceBetween reduces the sums of all domains, and leaves each rank with what its domain receives.
func (h *hierarchy) reduceBetween(s *sums) {
	g := h.between(h.local)
	if !h.long {
		s.double(h.writer, &g, h.ranks)
		lo, hi := 0, h.lane(h.local).length()
		if h.p.Op == ReduceScatter {
			lo, hi = h.piece(h.lane(h.local))
		}
		if d := h.domain(); h.p.Reduce == Mean && (h.p.Op != Reduce || d.Lo <= h.p.Root && h.p.Root < d.Hi) {
			h.put(scale(h.home(lo, hi-lo)))
		}
		return
	}
	own, place := h.mine, func(i int) int { return i }
	if h.regular {
		v := halvingOf(g)
		v.reduceScatter(h.writer)
		own, place = v.place(h.mine), v.place
		g = v.placed()
	} else {
		h.pairwise(g, s)
	}
	if h.p.Reduce == Mean {
		h.put(scale(g.span(own, own+1)))
	}
	switch h.p.Op {
	case AllReduce:
		g.allGather(h.writer)
	case Reduce:
		root := 0
		for h.domains[root].Hi <= h.p.Root {
			root++
		}
		g.gather(h.writer, place(root))
	}
}

// pairwise is the reduce-scatter for domains that are not a tree: in n - 1 rounds every member sends to each
// other one that member's part of all its sums, and combines what it receives for its part.
func (h *hierarchy) pairwise(g group, s *sums) {
	all := s.nodes(h.domain())
	own := s.cut(g.edge(g.self)-s.home.Lo, g.edge(g.self+1)-s.home.Lo)
	for k := 1; k < g.size; k++ {
		to, from := (g.self+k)%g.size, (g.self-k+g.size)%g.size
		lo, hi := g.edge(to)-s.home.Lo, g.edge(to+1)-s.home.Lo
		var out []Span
		for _, node := range all {
			out = append(out, Span{s.at[node].Buffer, s.at[node].Lo + lo, s.at[node].Lo + hi})
		}
		theirs := s.nodes(h.domains[from])
		in := own.room(len(theirs))
		h.swap(g.rank(to), out, g.rank(from), in)
		for i, node := range theirs {
			own.add(h.writer, node, in[i])
		}
	}
	own.settle(h.writer)
}

// sums is a rank's sums of nodes of the canonical tree, over the elements of one span.
type sums struct {
	size int // of the tree
	home Span
	at   map[Ranks]Span
	free []Span
	next int // the first element of Scratch that was never used
}

// newSums has room for the sums of the nodes in this rank's domain: home is for the sum that includes the
// rank's own contribution.
func newSums(h *hierarchy) *sums {
	s := &sums{size: h.p.Size, at: map[Ranks]Span{}}
	if !h.leads() {
		return s
	}
	s.home = h.home(0, h.lane(h.local).length())
	for _, node := range s.nodes(h.domain()) {
		if node.Lo <= h.rank && h.rank < node.Hi {
			s.at[node] = s.home
		} else {
			s.at[node] = s.room(1)[0]
		}
	}
	return s
}

// double is recursive doubling over the members of a group, which have sums of consecutive ranks: those of members
// [lo, hi) are of ranks(lo, hi). The members that do not fill a power of two at the end form a tail, as in
// recursiveDoubling. Two members exchange the sums of the largest nodes in the ranks that each covers.
func (s *sums) double(w *writer, g *group, ranks func(lo, hi int) Ranks) {
	t := tailOf(g.size)
	rounds := bits.Len(uint(g.size - 1))
	exchangeWith := func(peer, lo, hi, from, to int) {
		s.exchange(w, g.rank(peer), s.nodes(ranks(lo, hi)), s.nodes(ranks(from, to)))
	}
	spread := func(k, holders int) {
		if t.length(k) == 0 || g.self < g.size-t.length(k) {
			return
		}
		nodes := s.nodes(ranks(g.size-t.length(k), g.size))
		switch place := t.place(k, g.self); {
		case place < holders && holders+place < t.length(k):
			s.send(w, g.rank(t.rank(k, holders+place)), nodes)
		case place >= holders && place < 2*holders:
			s.take(w, g.rank(t.rank(k, place-holders)), nodes)
		}
	}
	for k := range rounds {
		block := 1 << k
		// where the incomplete blocks of this round and of the next begin
		whole, tail := g.size&^(2*block-1), g.size-t.length(k)
		switch {
		case g.self < whole:
			lo, from := g.self&^(block-1), (g.self^block)&^(block-1)
			exchangeWith(g.self^block, lo, lo+block, from, from+block)
		case g.size&block == 0:
			spread(k, t.holders[k])
		default:
			peer := t.join(k, g.self)
			switch {
			case peer < 0:
			case g.self < tail:
				exchangeWith(peer, whole, tail, tail, g.size)
			default:
				exchangeWith(peer, tail, g.size, whole, tail)
			}
		}
	}
	if g.size&(g.size-1) != 0 {
		for holders := t.holders[rounds]; holders < g.size; holders *= 2 {
			spread(rounds, holders)
		}
	}
	s.settle(w)
}

// nodes returns the largest nodes of the tree within a range of ranks, in order.
func (s *sums) nodes(r Ranks) (all []Ranks) {
	for lo := r.Lo; lo < r.Hi; {
		n := 1
		for lo%(2*n) == 0 && min(lo+2*n, s.size) <= r.Hi && min(lo+n, s.size) < s.size {
			n *= 2
		}
		all = append(all, Ranks{lo, min(lo+n, s.size)})
		lo += n
	}
	return all
}

// combine combines the operands of the domain's ranks in a span, this rank's in own, into the sums of the
// nodes, from element at on. The node that includes this rank comes first, because home and own may overlap.
func (s *sums) combine(h *hierarchy, in, own Span, at int) {
	nodes := s.nodes(h.domain())
	for first := range 2 {
		for _, node := range nodes {
			mine := node.Lo <= h.rank && h.rank < node.Hi
			if mine != (first == 0) {
				continue
			}
			out := s.at[node]
			out = Span{out.Buffer, out.Lo + at, out.Lo + at + in.length()}
			if mine && node.Hi-node.Lo == 1 {
				h.put(duplicate(own, out))
				continue
			}
			c := combine(node, in, h.rank, out)
			if mine && own != in {
				c.Own = own
			}
			h.put(c)
		}
	}
}

// room returns unused spans.
func (s *sums) room(n int) []Span {
	var all []Span
	for len(all) < n {
		if last := len(s.free) - 1; last >= 0 {
			all = append(all, s.free[last])
			s.free = s.free[:last]
			continue
		}
		all = append(all, Span{Scratch, s.next, s.next + s.home.length()})
		s.next += s.home.length()
	}
	return all
}

// add adds a sum, and combines neighbours as long as there are any.
func (s *sums) add(w *writer, node Ranks, here Span) {
	for {
		other, parent, ok := sibling(s.size, node)
		there, have := s.at[other]
		if !ok || !have {
			break
		}
		in, out, side := there, here, sideOf(other, node)
		if there == s.home {
			in, out, side = here, there, sideOf(node, other)
		}
		if out.length() > 0 {
			w.put(fold(in, out, side))
		}
		delete(s.at, other)
		s.free = append(s.free, in)
		node, here = parent, out
	}
	s.at[node] = here
}

// exchange exchanges sums with a rank: the rank has theirs, this one has mine. If each has one sum, and the two are
// neighbours in the tree, they are combined in place.
func (s *sums) exchange(w *writer, peer int, mine, theirs []Ranks) {
	if len(mine) == 1 && len(theirs) == 1 {
		if other, parent, ok := sibling(s.size, mine[0]); ok && other == theirs[0] {
			here := s.at[mine[0]]
			step := exchange(peer, here, peer, here)
			step.Side = sideOf(other, mine[0])
			w.put(step)
			delete(s.at, mine[0])
			s.add(w, parent, here)
			return
		}
	}
	in := s.room(len(theirs))
	w.swap(peer, s.spans(mine), peer, in)
	for i, node := range theirs {
		s.add(w, node, in[i])
	}
}

func (s *sums) spans(nodes []Ranks) []Span {
	var all []Span
	for _, node := range nodes {
		all = append(all, s.at[node])
	}
	return all
}

// send sends sums to a rank.
func (s *sums) send(w *writer, to int, nodes []Ranks) { w.swap(to, s.spans(nodes), -1, nil) }

// take receives sums from a rank, which replace all sums here.
func (s *sums) take(w *writer, from int, nodes []Ranks) {
	clear(s.at)
	s.free, s.next = []Span{s.home}, 0
	in := s.room(len(nodes))
	w.swap(-1, nil, from, in)
	for i, node := range nodes {
		s.at[node] = in[i]
	}
}

// cut returns the sums of some elements only. They are combined in place.
func (s *sums) cut(lo, hi int) *sums {
	part := func(whole Span) Span { return Span{whole.Buffer, whole.Lo + lo, whole.Lo + hi} }
	c := &sums{size: s.size, home: part(s.home), at: map[Ranks]Span{}, next: s.next}
	for node, whole := range s.at {
		c.at[node] = part(whole)
	}
	return c
}

// settle moves the complete reduction to home.
func (s *sums) settle(w *writer) {
	if whole := s.at[Ranks{0, s.size}]; whole != s.home {
		w.put(duplicate(whole, s.home))
	}
}
