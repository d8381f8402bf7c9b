package plan

import (
	"math/bits"
	"sort"
	"time"
)

// rabenseifner is for long vectors over frames: a reduce-scatter by recursive halving, then an all-gather by
// recursive doubling (R. Rabenseifner, 2004), in about 2·log2(n) steps instead of the 2(n-1) of
// direct_frames.
//
// Reduce-scatter, if the size is a power of two: in round k a rank and the rank whose number differs in bit k
// split what they hold. Each sends the half that belongs to the other and combines what it receives with the
// half that it keeps, the lower rank's operand on the left. Near ranks exchange first, with the longest
// halves; so after round k a rank has a 2^(k+1)th of the sum of its block of 2^(k+1) ranks, which is a node
// of the canonical tree. At the end each rank has a slice of the whole, in the order of the reversed bits of
// its number.
//
// For other sizes the ranks are blocks of powers of two, the largest first, according to the bits of n. Each
// block reduces within itself; then the smallest joins the next larger one on its left, that one the next,
// each at its own level of the tree and as its right operand. When a block joins one that is 2^g times as
// large, each of its ranks scatters what it has over the 2^g ranks that have the same slice cut finer, by a
// binomial tree: first one half, then a quarter, and so on.
//
// Then the first block has the whole sum, a slice on each rank. If there is a rank 2^k above beyond the
// block, it receives the upper part of the slice, so that all n ranks have a part. The parts are then
// distributed to all ranks (allGather), sent to the root, or kept.
//
// Bytes: an all-gather moves S(n-1)/n. So does the reduce-scatter if the size is a power of two. A block of
// 2^b that joins adds S/2^b to the longest path: up to S where n is odd, and almost nothing where only high
// bits of n are set.
var rabenseifner = Algorithm{
	Name: "rabenseifner",
	Fits: func(p Problem) error {
		return fitsOps("rabenseifner", p, AllReduce, Reduce, ReduceScatter, AllGather, Broadcast)
	},
	Steps: generator(rabenseifnerSteps),
	Cost:  rabenseifnerCost,
}

func rabenseifnerSteps(p Problem, rank int, w *writer) {
	switch p.Op {
	case AllGather:
		g := p.gatherParts(rank, w)
		g.allGather(w)
	case Broadcast:
		p.broadcastBy(rank, w, func(g *group) {
			g.scatter(w, p.Root)
			g.full = p.Root + 1
			g.allGather(w)
		})
	default:
		halvingReduce(p, rank, w)
	}
}

func halvingReduce(p Problem, rank int, w *writer) {
	g := p.everyone(rank, Work)
	h := halvingOf(g)
	if p.Op == ReduceScatter {
		h.edge = h.permuted(p)
		at := p.partEdge()
		for i := range p.Size {
			owner := h.owner(i)
			w.put(duplicate(Span{Src, at(owner), at(owner + 1)}, h.span(i, i+1)))
		}
	} else {
		h.source = true
	}
	h.reduceScatter(w)
	own := h.span(h.place(rank), h.place(rank)+1)
	if p.Reduce == Mean {
		w.put(scale(own))
	}
	switch p.Op {
	case ReduceScatter:
		w.put(duplicate(own, first(Dst, own.length())))
		return
	case Reduce:
		after := h.placed()
		after.gather(w, h.place(p.Root))
		if rank != p.Root {
			return
		}
	default:
		after := h.placed()
		after.allGather(w)
	}
	w.put(duplicate(p.all(Work), p.all(Dst)))
}

// halving is the reduce-scatter of a group by recursive halving. The largest block of 2^levels members,
// starting at 0, cuts the region into 2^levels slices; slice s belongs to the member with the reversed bits
// of s. The group's parts are also in that order: a slice is one part, or two parts where there is a member
// 2^levels above the owner. The number of a part in this order is its owner's place.
type halving struct {
	group  // edge is by place
	levels int
	source bool // the members' operands are still in Src, at the same place
}

func halvingOf(g group) *halving {
	return &halving{group: g, levels: bits.Len(uint(g.size)) - 1}
}

// reversed returns the owner of a slice, and the slice of an owner.
func (h *halving) reversed(s int) int {
	return int(bits.Reverse64(uint64(s)) >> (64 - h.levels))
}

// pairs returns how many slices before slice s have two parts: those whose owner is below beyond.
func (h *halving) pairs(s int) int {
	beyond, count, prefix := h.size-1<<h.levels, 0, 0
	if beyond == 0 || s == 1<<h.levels {
		return beyond
	}
	for j := range h.levels { // bit j of the owner is the slice's bit levels-1-j
		if s>>(h.levels-1-j)&1 == 1 {
			// Owners below s that agree with it before this bit and have a 0 here, where s has a 1.
			count += max(0, (beyond-prefix+2<<j-1)>>(j+1))
			prefix |= 1 << j
		}
	}
	return count
}

// cut returns the place at which slice s begins.
func (h *halving) cut(s int) int { return s + h.pairs(s) }

// place returns the place of a member's part, and owner the member of a place.
func (h *halving) place(member int) int {
	if whole := 1 << h.levels; member >= whole {
		return h.cut(h.reversed(member-whole)) + 1
	}
	return h.cut(h.reversed(member))
}

func (h *halving) owner(place int) int {
	if h.size == 1<<h.levels {
		return h.reversed(place)
	}
	s := sort.Search(1<<h.levels, func(s int) bool { return h.cut(s+1) > place })
	return h.reversed(s) + (place-h.cut(s))<<h.levels
}

// placed is the group with the members in the order of their places.
func (h *halving) placed() group {
	g := h.group
	g.self = h.place(h.self)
	g.rank = func(place int) int { return h.rank(h.owner(place)) }
	return g
}

// permuted returns where the parts of a ReduceScatter begin in the order of places.
func (h *halving) permuted(p Problem) func(place int) int {
	at := p.partEdge()
	edges := make([]int, h.size+1)
	for i := range h.size {
		owner := h.owner(i)
		edges[i+1] = edges[i] + at(owner+1) - at(owner)
	}
	return func(place int) int { return edges[place] }
}

// slices returns the span of slices [lo, hi).
func (h *halving) slices(lo, hi int) Span { return h.span(h.cut(lo), h.cut(hi)) }

// block returns the block of a member: its first member, and the logarithm of its size.
func (h *halving) block(member int) (first, level int) {
	for level = h.levels; ; level-- {
		if h.size>>level&1 == 1 {
			if member < first+1<<level {
				return first, level
			}
			first += 1 << level
		}
	}
}

// reduceScatter leaves each member with its part of the reduction.
func (h *halving) reduceScatter(w *writer) {
	first, level := h.block(h.self)
	lo, hi := 0, 1<<h.levels // the slices that this member still has
	if h.source && h.size == 1 {
		w.put(duplicate(h.slices(lo, hi).in(Src), h.slices(lo, hi)))
	}
	for k := range level {
		middle := (lo + hi) / 2
		keep, give := h.slices(lo, middle), h.slices(middle, hi)
		side := Right
		if h.self>>k&1 == 1 {
			keep, give = give, keep
			lo, side = middle, Left
		} else {
			hi = middle
		}
		if h.source && k == 0 {
			w.put(duplicate(keep.in(Src), keep))
			give = give.in(Src)
		}
		peer := h.rank(h.self ^ 1<<k)
		w.put(Step{Kind: Exchange, To: peer, From: peer, Out: give, In: keep, Side: side})
	}
	if rest := h.size & (1<<level - 1); rest > 0 {
		h.takeIn(w, first, level, bits.Len(uint(rest))-1, lo, hi)
	}
	if level < h.levels {
		h.join(w, first, level, lo, hi)
	}
	h.share(w)
}

// join scatters what a member of a smaller block has, slices [lo, hi), over the members of the next larger
// block whose numbers in it have the same low bits: the upper half of the rest to the member with the next
// bit set, until one slice of that block is left.
func (h *halving) join(w *writer, first, level, lo, hi int) {
	next := level + 1
	for h.size>>next&1 == 0 {
		next++
	}
	same := first - 1<<next + (h.self - first) // the member of the larger block with this member's number
	out := func(lo, hi int) Span {
		if h.source && level == 0 { // it has received nothing
			return h.slices(lo, hi).in(Src)
		}
		return h.slices(lo, hi)
	}
	for k := level; k < next; k++ {
		middle := (lo + hi) / 2
		w.put(send(h.rank(same+1<<k), out(middle, hi)))
		hi = middle
	}
	w.put(send(h.rank(same), out(lo, hi)))
}

// in returns the same elements in another buffer.
func (s Span) in(b Buffer) Span { return Span{b, s.Lo, s.Hi} }

// takeIn is the other end of join: a member of a larger block, which has slices [lo, hi), receives them from
// the right, forwards those that are for other members, and combines.
func (h *halving) takeIn(w *writer, first, level, smaller, lo, hi int) {
	own, number := h.slices(lo, hi), h.self-first
	// The members that one member of the smaller block serves differ in these bits of their numbers. A member
	// receives its slices, and those of all members that have more bits set above its highest, from the
	// member without its highest bit; the member without any receives its own, last of all, from the server.
	differ := number >> smaller
	reach := smaller + bits.Len(uint(differ))
	lower := differ &^ (1 << bits.Len(uint(differ)) / 2)
	ending := number & (1<<smaller - 1)
	from := first + 1<<level + ending
	if lower > 0 {
		from = first + lower<<smaller + ending
	}
	if differ == 0 || reach == level {
		s := receive(h.rank(from), own)
		s.Side = Right
		w.put(s)
		return
	}
	at := func(lo, hi int) Span {
		s := h.slices(lo, hi)
		return Span{Scratch, s.Lo - own.Lo, s.Hi - own.Lo}
	}
	hi = lo + 1<<(h.levels-reach) // its own slices are the first of these: the bits above are 0 in its number
	w.put(receive(h.rank(from), at(lo, hi)))
	for k := reach; k < level; k++ {
		middle := (lo + hi) / 2
		w.put(send(h.rank(h.self+1<<k), at(middle, hi)))
		hi = middle
	}
	if own.length() > 0 {
		w.put(fold(at(lo, hi), own, Right))
	}
}

// share sends the upper part of a slice to the member 2^levels above its owner.
func (h *halving) share(w *writer) {
	whole := 1 << h.levels
	switch {
	case h.self >= whole:
		at := h.place(h.self)
		w.put(receive(h.rank(h.self-whole), h.span(at, at+1)))
	case h.self+whole < h.size:
		at := h.place(h.self) + 1
		w.put(send(h.rank(h.self+whole), h.span(at, at+1)))
	}
}

// rabenseifnerCost follows the longest path: a block is ready when it has reduced within itself and the
// smaller blocks have joined.
func rabenseifnerCost(p Problem, l Links) time.Duration {
	c := l.of(p)
	g := p.everyone(0, Work)
	part := longestSlice(p.Count, p.Size)
	switch p.Op {
	case AllGather:
		return c.copying(p.longestPart()) + c.allGathering(g, p.longestPart(), p.Count)
	case Broadcast:
		// the root's, at the end
		return c.gathering(g, part, p.Count) + c.allGathering(g, part, p.Count) + c.copying(p.Count)
	}
	h := halvingOf(g)
	t := c.copying((p.Count+1)/2) + c.halving(h, p.Count)
	switch after := h.placed(); p.Op {
	case ReduceScatter:
		t += c.copying(p.Count/2 + p.longestPart())
	case Reduce:
		t += c.gathering(after, part, p.Count)
	default:
		t += c.allGathering(after, part, p.Count)
	}
	return t
}

// slowest returns the slowest link of a round in which members have the peers given, as far as those are members.
func (c costs) slowest(g group, peer func(member int) int) Link {
	for i := range g.size {
		if other := peer(i); other >= 0 && other < g.size && c.link(g.rank(i), g.rank(other)) == c.Network {
			return c.Network
		}
	}
	return c.Host
}

// halving returns the time of a reduce-scatter of this many elements by recursive halving.
func (c costs) halving(h *halving, elements int) time.Duration {
	var ready time.Duration
	smaller := -1
	for level := range h.levels + 1 {
		if h.size>>level&1 == 0 {
			continue
		}
		block := func(member int) bool { _, l := h.block(member); return l == level }
		var within time.Duration
		for k := range level {
			link := c.slowest(h.group, func(i int) int {
				if !block(i) {
					return -1
				}
				return i ^ 1<<k
			})
			half := elements >> (k + 1)
			within += c.over(link, half) + c.combining(2*half)
		}
		ready = max(ready, within)
		if smaller >= 0 {
			for k := smaller; k < level; k++ {
				ready += c.over(c.joining(h, smaller, level, k), elements>>(k+1))
			}
			ready += c.over(c.joining(h, smaller, level, -1), elements>>level) + c.combining(2*(elements>>level))
		}
		smaller = level
	}
	if whole := 1 << h.levels; h.size > whole {
		ready += c.over(c.slowest(h.group, func(i int) int { return i + whole }), elements/h.size)
	}
	return ready
}

// joining returns the slowest link over which the members of a smaller block send to the larger one in the
// step for bit k, or with -1 in the last.
func (c costs) joining(h *halving, smaller, level, k int) Link {
	return c.slowest(h.group, func(i int) int {
		first, l := h.block(i)
		if l != smaller {
			return -1
		}
		to := first - 1<<level + (i - first)
		if k >= 0 {
			to += 1 << k
		}
		return to
	})
}

// allGathering returns the time of an all-gather of parts of this length, with this many elements in total.
func (c costs) allGathering(g group, part, elements int) time.Duration {
	if g.size&(g.size-1) != 0 {
		return c.copying(part+elements) + c.gathering(g, part, elements)
	}
	var t time.Duration
	for n := 1; n < g.size; n *= 2 {
		t += c.over(c.slowest(g, func(i int) int { return i ^ n }), min(elements, part*n))
	}
	return t
}

// gathering returns the time of a gather or scatter along a binomial tree, and of Bruck's all-gather.
func (c costs) gathering(g group, part, elements int) time.Duration {
	var t time.Duration
	for n := 1; n < g.size; n *= 2 {
		t += c.over(c.slowest(g, func(i int) int { return (i + n) % g.size }), min(elements, part*min(n, g.size-n)))
	}
	return t
}
