package plan

import (
	"math/bits"
	"time"
)

// Binomial trees number the ranks from the root. The parent of a rank is the rank whose number lacks its
// lowest bit. The children of a rank are the ranks a smaller power of two above it, each with a subtree of
// the numbers up to the next child.

// numberOf returns a rank's number and its lowest bit, which is the largest possible size of its subtree. For
// the root it is the smallest power of two that is not below the size.
func (p Problem) numberOf(rank int) (number, reach int) {
	if number = (rank - p.Root + p.Size) % p.Size; number > 0 {
		return number, number & -number
	}
	return 0, 1 << bits.Len(uint(p.Size-1))
}

// binomialGather: a rank receives its children's subtrees, the nearest first, and sends all to its parent.
// What a rank holds for others is in Scratch, in the order of their numbers; at the root it is in Dst, in the
// order of the ranks.
func binomialGather(p Problem, rank int, w *writer) {
	t := blocksOf(p, rank)
	have := first(Src, t.length(0, 1))
	switch {
	case t.number == 0:
		w.put(duplicate(have, p.part(Dst, rank)))
	case t.numbers > 1:
		w.put(duplicate(have, first(Scratch, have.length())))
		have = first(Scratch, t.length(0, t.numbers))
	}
	for reach := 1; reach < t.numbers; reach *= 2 {
		block := t.block(reach, min(2*reach, t.numbers))
		in := block.span
		if t.number == 0 && !block.wraps {
			in = block.ranks(Dst)
		}
		w.put(receive((rank+reach)%p.Size, in))
		if t.number == 0 && block.wraps {
			w.put(duplicate(block.before(), block.high(Dst)))
			w.put(duplicate(block.after(), block.low(Dst)))
		}
	}
	if t.number > 0 {
		w.put(send((rank-t.reach+p.Size)%p.Size, have))
	}
}

// binomialScatter is binomialGather in reverse.
func binomialScatter(p Problem, rank int, w *writer) {
	t := blocksOf(p, rank)
	_, dst := p.Lengths(rank)
	have := first(Scratch, t.length(0, t.numbers))
	if t.number > 0 {
		if t.numbers == 1 {
			have = first(Dst, dst)
		}
		w.put(receive((rank-t.reach+p.Size)%p.Size, have))
	}
	for reach := 1 << bits.Len(uint(t.numbers-1)) / 2; reach > 0; reach /= 2 {
		block := t.block(reach, min(2*reach, t.numbers))
		out := block.span
		switch {
		case t.number == 0 && !block.wraps:
			out = block.ranks(Src)
		case t.number == 0:
			w.put(duplicate(block.high(Src), block.before()))
			w.put(duplicate(block.low(Src), block.after()))
		}
		w.put(send((rank+reach)%p.Size, out))
	}
	switch {
	case t.number == 0:
		w.put(duplicate(p.part(Src, rank), first(Dst, dst)))
	case t.numbers > 1:
		w.put(duplicate(first(Scratch, dst), first(Dst, dst)))
	}
}

// blocks is what a rank of a binomial tree holds for its subtree.
type blocks struct {
	p             Problem
	rank          int
	number, reach int
	numbers       int   // the size of its subtree, including itself
	offsets       []int // of the parts, by rank
}

func blocksOf(p Problem, rank int) *blocks {
	b := &blocks{p: p, rank: rank, offsets: p.offsets()}
	b.number, b.reach = p.numberOf(rank)
	b.numbers = min(b.reach, p.Size-b.number)
	return b
}

// length returns the number of elements in the parts of the ranks from lo above this one to hi, modulo the
// size.
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
	span   Span // where it is in Scratch
	wraps  bool // it has parts of both the last rank and the first
}

func (b *blocks) block(lo, hi int) block {
	at := b.length(0, lo)
	wraps := b.rank+lo < b.p.Size && b.rank+hi > b.p.Size
	return block{b, lo, hi, Span{Scratch, at, at + b.length(lo, hi)}, wraps}
}

// ranks is where a block that does not wrap is in the vector.
func (k block) ranks(b Buffer) Span {
	lo := k.b.offsets[(k.b.rank+k.lo)%k.b.p.Size]
	return Span{b, lo, lo + k.span.length()}
}

// high and low are where the two halves of a block that wraps are in the vector; before and after are where
// they are in Scratch.
func (k block) high(b Buffer) Span {
	return Span{b, k.b.offsets[k.b.rank+k.lo], k.b.p.Count}
}

func (k block) low(b Buffer) Span { return Span{b, 0, k.span.length() - k.high(b).length()} }

func (k block) before() Span { return Span{Scratch, k.span.Lo, k.span.Lo + k.high(Dst).length()} }

func (k block) after() Span { return Span{Scratch, k.before().Hi, k.span.Hi} }

// treeReduce reduces along the canonical tree. The sum of a node is stored at the root if that is one of the
// node's ranks, else at the first of them; of two neighbours, the one that is to hold their parent's sum
// receives the other's.
func treeReduce(p Problem, rank int, w *writer) {
	have := p.all(Src)
	node := Ranks{rank, rank + 1}
	for {
		other, parent, ok := sibling(p.Size, node)
		if ok && p.keeper(parent) != rank {
			w.put(send(p.keeper(parent), have))
			return
		}
		if have.Buffer == Src { // the first time
			have = p.all(Work)
			w.put(duplicate(p.all(Src), have))
		}
		if !ok {
			break
		}
		s := receive(p.keeper(other), have)
		s.Side = sideOf(other, node)
		w.put(s)
		node = parent
	}
	if p.Reduce == Mean {
		w.put(scale(have))
	}
	w.put(duplicate(have, p.all(Dst)))
}

// keeper returns which rank of a node holds its sum.
func (p Problem) keeper(node Ranks) int {
	if node.Lo <= p.Root && p.Root < node.Hi {
		return p.Root
	}
	return node.Lo
}

// below returns the size of the subtree of a number at a distance, for this size.
func below(size, number, reach int) int { return min(reach, size-number-reach) }

// moved returns how many elements a frame for this many ranks has.
func (p Problem) moved(ranks int) int {
	if p.Op == Broadcast {
		return p.Count
	}
	return min(p.Count, p.longestPart()*ranks)
}

// binomialDown returns the time of a binomial tree away from the root: a rank sends to its children one after
// the other.
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

// binomialUp returns the time of a gather: a rank receives from its children one after the other, then its
// parent receives from it.
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

// turning returns the time in which the root copies the block that wraps around: the parts of the last ranks
// and of the first.
func (c costs) turning(p Problem) time.Duration {
	for reach := 1; reach < p.Size; reach *= 2 {
		if p.Root+2*reach > p.Size && p.Root+reach < p.Size {
			return c.copying(p.moved(below(p.Size, 0, reach)))
		}
	}
	return 0
}

// treeReduceCost returns the time of the canonical tree, where the two ranks of a node exchange as soon as
// both are ready.
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
