package plan

import (
	"math/bits"
	"time"
)

// Binomial trees number the ranks from the root on. The one above a rank is the one whose number lacks its lowest bit; below
// it hang those that lie a smaller power of two above it, each with the numbers up to the next.

// numberOf returns a rank's number, and the lowest bit of it: how many numbers hang from it at most. For the root that
// is the power of two that all numbers are below.
func (p Problem) numberOf(rank int) (number, reach int) {
	if number = (rank - p.Root + p.Size) % p.Size; number > 0 {
		return number, number & -number
	}
	return 0, 1 << bits.Len(uint(p.Size-1))
}

// binomialBroadcast: a rank receives from the one above it, then sends to those below, the farthest first: it has the
// largest tree below it.
func binomialBroadcast(p Problem, rank int, yield func(Step) bool) bool {
	number, reach := p.numberOf(rank)
	have := p.all(Src)
	if number > 0 {
		have = p.all(Dst)
		if !yield(receive((rank-reach+p.Size)%p.Size, have)) {
			return false
		}
	}
	for reach /= 2; reach > 0; reach /= 2 {
		if number+reach < p.Size && !yield(send((rank+reach)%p.Size, have)) {
			return false
		}
	}
	return number > 0 || yield(duplicate(have, p.all(Dst)))
}

// binomialGather: a rank receives what hangs below it, the nearest first, and sends all to the one above. What a rank holds for
// others lies in Scratch, in the order of their numbers; at the root, in Dst, which has the order of the ranks.
func binomialGather(p Problem, rank int, yield func(Step) bool) bool {
	t := blocksOf(p, rank)
	have := first(Src, t.length(0, 1))
	switch {
	case t.number == 0:
		if !yield(duplicate(have, p.part(Dst, rank))) {
			return false
		}
	case t.numbers > 1:
		own := have
		have = first(Scratch, t.length(0, t.numbers))
		if !yield(duplicate(own, first(Scratch, own.length()))) {
			return false
		}
	}
	for reach := 1; reach < t.numbers; reach *= 2 {
		block := t.block(reach, min(2*reach, t.numbers))
		in := block.span
		if t.number == 0 && !block.wraps {
			in = block.ranks(Dst)
		}
		if !yield(receive((rank+reach)%p.Size, in)) {
			return false
		}
		if t.number == 0 && block.wraps && !(yield(duplicate(block.before(), block.high(Dst))) && yield(duplicate(block.after(), block.low(Dst)))) {
			return false
		}
	}
	return t.number == 0 || yield(send((rank-t.reach+p.Size)%p.Size, have))
}

// binomialScatter is binomialGather backwards.
func binomialScatter(p Problem, rank int, yield func(Step) bool) bool {
	t := blocksOf(p, rank)
	_, dst := p.Lengths(rank)
	have := first(Scratch, t.length(0, t.numbers))
	if t.number > 0 {
		if t.numbers == 1 {
			have = first(Dst, dst)
		}
		if !yield(receive((rank-t.reach+p.Size)%p.Size, have)) {
			return false
		}
	}
	for reach := 1 << bits.Len(uint(t.numbers-1)) / 2; reach > 0; reach /= 2 {
		block := t.block(reach, min(2*reach, t.numbers))
		out := block.span
		if t.number == 0 && !block.wraps {
			out = block.ranks(Src)
		}
		if t.number == 0 && block.wraps && !(yield(duplicate(block.high(Src), block.before())) && yield(duplicate(block.low(Src), block.after()))) {
			return false
		}
		if !yield(send((rank+reach)%p.Size, out)) {
			return false
		}
	}
	switch {
	case t.number == 0:
		return yield(duplicate(p.part(Src, rank), first(Dst, dst)))
	case t.numbers > 1:
		return yield(duplicate(first(Scratch, dst), first(Dst, dst)))
	}
	return true
}

// blocks is what a rank of a binomial tree holds for those below it.
type blocks struct {
	p             Problem
	rank          int
	number, reach int
	numbers       int   // how many numbers hang from it, with itself
	offsets       []int // of the parts, by rank
}

func blocksOf(p Problem, rank int) *blocks {
	b := &blocks{p: p, rank: rank, offsets: p.offsets()}
	b.number, b.reach = p.numberOf(rank)
	b.numbers = min(b.reach, p.Size-b.number)
	return b
}

// length returns how many elements the parts of the ranks from lo above this one to hi have, around the end.
func (b *blocks) length(lo, hi int) int {
	n := 0
	if at := b.rank + lo; at < b.p.Size {
		n = b.offsets[min(b.rank+hi, b.p.Size)] - b.offsets[at]
		lo = min(hi, b.p.Size-b.rank)
	}
	if lo < hi {
		n += b.offsets[b.rank+hi-b.p.Size] - b.offsets[b.rank+lo-b.p.Size]
	}
	return n
}

// block is the parts of the ranks from lo above this one to hi.
type block struct {
	b      *blocks
	lo, hi int
	span   Span // where it lies in Scratch
	wraps  bool // it has parts of the last rank and of the first
}

func (b *blocks) block(lo, hi int) block {
	at := b.length(0, lo)
	wraps := b.rank+lo < b.p.Size && b.rank+hi > b.p.Size
	return block{b, lo, hi, Span{Scratch, at, at + b.length(lo, hi)}, wraps}
}

// ranks is where a block that does not wrap lies in the vector.
func (k block) ranks(b Buffer) Span {
	lo := k.b.offsets[(k.b.rank+k.lo)%k.b.p.Size]
	return Span{b, lo, lo + k.span.length()}
}

// high and low are where the two halves of a block that wraps lie in the vector; before and after, where in Scratch.
func (k block) high(b Buffer) Span {
	return Span{b, k.b.offsets[k.b.rank+k.lo], k.b.p.Count}
}

func (k block) low(b Buffer) Span { return Span{b, 0, k.span.length() - k.high(b).length()} }

func (k block) before() Span { return Span{Scratch, k.span.Lo, k.span.Lo + k.high(Dst).length()} }

func (k block) after() Span { return Span{Scratch, k.before().Hi, k.span.Hi} }

// treeReduce goes up the canonical tree. The sum of a node is at the root if that is one of its ranks, else at the first of them;
// of two neighbours the one that is to have their parent's sum receives the other's.
func treeReduce(p Problem, rank int, yield func(Step) bool) bool {
	have := p.all(Src)
	node := Ranks{rank, rank + 1}
	for {
		other, parent, ok := sibling(p.Size, node)
		if ok && p.keeper(parent) != rank {
			return yield(send(p.keeper(parent), have))
		}
		if have.Buffer == Src { // the first time
			have = p.all(Work)
			if !yield(duplicate(p.all(Src), have)) {
				return false
			}
		}
		if !ok {
			break
		}
		s := receive(p.keeper(other), have)
		s.Side = sideOf(other, node)
		if !yield(s) {
			return false
		}
		node = parent
	}
	return (p.Reduce != Mean || yield(scale(have))) && yield(duplicate(have, p.all(Dst)))
}

// keeper returns which rank of a node has its sum.
func (p Problem) keeper(node Ranks) int {
	if node.Lo <= p.Root && p.Root < node.Hi {
		return p.Root
	}
	return node.Lo
}

// bruckAllGather collects blocks of ranks that follow each other: in round k a rank sends the first 2^k parts that it has, its own
// first, to the one 2^k below it and receives as many from the one 2^k above. They lie in Scratch in that order, and are
// turned round into Dst at the end.
func bruckAllGather(p Problem, rank int, yield func(Step) bool) bool {
	b := &blocks{p: p, rank: rank, numbers: p.Size, offsets: p.offsets()}
	own := b.length(0, 1)
	if !yield(duplicate(first(Src, own), first(Scratch, own))) {
		return false
	}
	for reach := 1; reach < p.Size; reach *= 2 {
		n := min(reach, p.Size-reach)
		to, from := (rank-reach+p.Size)%p.Size, (rank+reach)%p.Size
		if !yield(exchange(to, first(Scratch, b.length(0, n)), from, b.block(reach, reach+n).span)) {
			return false
		}
	}
	high := Span{Dst, b.offsets[rank], p.Count}
	return yield(duplicate(first(Scratch, high.length()), high)) &&
		(rank == 0 || yield(duplicate(Span{Scratch, high.length(), p.Count}, Span{Dst, 0, high.Lo})))
}

// below returns how many numbers hang from a number at a distance, of size numbers.
func below(size, number, reach int) int { return min(reach, size-number-reach) }

// moved returns how many elements a frame for so many ranks has.
func (p Problem) moved(ranks int) int {
	if p.Op == Broadcast {
		return p.Count
	}
	return min(p.Count, p.longestPart()*ranks)
}

// binomialDown is the time of a binomial tree away from the root: a rank sends to those below one after the other.
func binomialDown(p Problem, c costs) time.Duration {
	have := make([]time.Duration, p.Size) // by number: when the rank has received
	if p.Op == Scatter && p.Root > 0 {
		have[0] = c.turning(p)
	}
	slowest := time.Duration(0)
	for number, now := range have {
		rank := (number + p.Root) % p.Size
		_, reach := p.numberOf(rank)
		for reach /= 2; reach > 0; reach /= 2 {
			if n := below(p.Size, number, reach); n > 0 {
				now += c.over(c.link(rank, (rank+reach)%p.Size), p.moved(n))
				have[number+reach] = now
			}
		}
		if number == 0 || p.Op == Scatter {
			now += c.copying(p.moved(1))
		}
		slowest = max(slowest, now)
	}
	return slowest
}

// binomialUp is the time of a gather: a rank receives from those below one after the other, then is received from.
func binomialUp(p Problem, c costs) time.Duration {
	ready := make([]time.Duration, p.Size) // by number
	for number := p.Size - 1; number >= 0; number-- {
		rank := (number + p.Root) % p.Size
		_, most := p.numberOf(rank)
		ready[number] = c.copying(p.moved(1))
		for reach := 1; reach < most; reach *= 2 {
			if n := below(p.Size, number, reach); n > 0 {
				ready[number] = max(ready[number], ready[number+reach]) + c.over(c.link(rank, (rank+reach)%p.Size), p.moved(n))
			}
		}
	}
	if p.Root > 0 {
		ready[0] += c.turning(p)
	}
	return ready[0]
}

// turning is the time in which the root copies the block that goes around the end, of the ranks after the last and those
// before.
func (c costs) turning(p Problem) time.Duration {
	for reach := 1; reach < p.Size; reach *= 2 {
		if p.Root+2*reach > p.Size && p.Root+reach < p.Size {
			return c.copying(p.moved(below(p.Size, 0, reach)))
		}
	}
	return 0
}

// treeReduceCost is the time of the canonical tree, where the two ranks of a node meet as soon as both are there.
func treeReduceCost(p Problem, c costs) time.Duration {
	type sum struct {
		node Ranks
		at   time.Duration
	}
	leaf := func(rank int) sum { return sum{Ranks{rank, rank + 1}, c.copying(p.Count)} }
	return canonical(0, p.Size, leaf, func(l, r sum) sum {
		met := max(l.at, r.at) + c.over(c.link(p.keeper(l.node), p.keeper(r.node)), p.Count) + c.combining(2*p.Count)
		return sum{Ranks{l.node.Lo, r.node.Hi}, met}
	}).at
}
