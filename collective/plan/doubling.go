package plan

import (
	"fmt"
	"math/bits"
	"time"
)

// recursiveDoubling exchanges whole vectors by frames, in the least possible number of steps, for short
// vectors. It works over any transport and for any size, and no step relies on buffering.
//
// All-reduce, if the size is a power of two: in round k a rank exchanges its vector with the rank whose
// number differs in bit k, and both combine the two, with the lower rank's operand on the left. After round k
// every rank holds the sum of its block of 2^(k+1) ranks, which is a node of the canonical tree; after the
// last round, the whole sum.
//
// For other sizes the blocks at the right end are incomplete. Call the ranks from n - n mod 2^k the tail of
// round k. It is never folded into the others first, since that would be another tree; it joins at its own
// level: if bit k of n is 0, the tail has no neighbour in this round, and the ranks of the tail that hold its
// sum send it to as many that do not. If bit k is 1, the complete block of 2^k ranks left of the tail joins
// it: as many ranks of that block as the tail has holders exchange with them, and both hold the sum of the
// longer tail; the others of the block keep their vector, which is no longer used.
//
// After the last round the tail is all ranks, and the holders double until every rank is one.
//
// Broadcast, Gather and Scatter are binomial trees; Reduce is the canonical tree itself, towards the root.
// AllGather is Bruck's algorithm. Barrier is dissemination: in round k every rank notifies the rank 2^k above
// it, modulo the size, and after the last round it has information from all ranks.
var recursiveDoubling = Algorithm{
	Name:  "recursive_doubling",
	Fits:  doublingFits,
	Steps: generator(doublingSteps),
	Cost:  doublingCost,
}

func doublingFits(p Problem) error {
	if err := p.Validate(); err != nil {
		return err
	}
	switch p.Op {
	case ReduceScatter, AllToAll, Send:
		return fmt.Errorf("recursive_doubling has no plan for %v", p.Op)
	}
	return nil
}

func doublingSteps(p Problem, rank int, w *writer) {
	switch p.Op {
	case AllReduce:
		doublingAllReduce(p, rank, w)
	case Broadcast:
		p.broadcastBy(rank, w, func(g *group) { g.broadcast(w, p.Root) })
	case Gather:
		binomialGather(p, rank, w)
	case Scatter:
		binomialScatter(p, rank, w)
	case Reduce:
		treeReduce(p, rank, w)
	case AllGather:
		g := p.gatherParts(rank, w)
		g.bruck(w)
	case Barrier:
		g := p.everyone(rank, Work)
		g.disseminate(w)
	}
}

func doublingAllReduce(p Problem, rank int, w *writer) {
	work := p.all(Work)
	w.put(duplicate(p.all(Src), work))
	g := p.everyone(rank, Work)
	s := &sums{size: p.Size, home: work, at: map[Ranks]Span{{rank, rank + 1}: work}}
	s.double(w, &g, func(lo, hi int) Ranks { return Ranks{lo, hi} })
	if p.Reduce == Mean {
		w.put(scale(work))
	}
	w.put(duplicate(work, p.all(Dst)))
}

// tail follows the incomplete blocks at the right end through the rounds. The tail of round k is the ranks
// that are not in complete blocks of 2^k: the last size mod 2^k. Its ranks are ordered such that those that
// hold the tail's sum come first; a rank's place is its position in that order. The tail needs no memory per
// rank: places are computed from the bits of size.
type tail struct {
	size    int
	holders [bits.UintSize + 1]int // by round: how many of the tail's ranks hold its sum before the round
}

func tailOf(size int) tail {
	t := tail{size: size}
	for k := range bits.Len(uint(size)) {
		length, holders := t.length(k), t.holders[k]
		switch {
		case size>>k&1 == 0:
			t.holders[k+1] = min(length, 2*holders)
		case length == 0:
			t.holders[k+1] = 1 << k
		default:
			t.holders[k+1] = 2 * holders
		}
	}
	return t
}

// length returns the number of ranks in the tail of round k.
func (t *tail) length(k int) int { return t.size & (1<<k - 1) }

// join returns the peer of a rank in the round in which the block left of the tail joins it, or -1: the
// block's first ranks exchange with the tail's holders.
func (t *tail) join(k, rank int) int {
	first := t.size - t.length(k+1)
	if rank < t.size-t.length(k) {
		if place := rank - first; place < t.holders[k] {
			return t.rank(k, place)
		}
	} else if place := t.place(k, rank); place < t.holders[k] {
		return first + place
	}
	return -1
}

// place returns the place of a rank among the tail of round k, of which it must be a member. When a block
// joined a tail of h holders, the order became: h of the block, the h holders, the rest of the block, the
// rest of the tail.
func (t *tail) place(k, rank int) int {
	place := -1 // not yet in the tail
	for j := range k {
		block, holders := 1<<j, t.holders[j]
		if t.size&block == 0 {
			continue
		}
		first := t.size - t.length(j+1)
		switch {
		case place < 0 && rank < first: // joins later
		case place < 0 && (rank-first < holders || t.length(j) == 0):
			place = rank - first
		case place < 0:
			place = rank - first + holders
		case place < holders:
			place += holders
		default:
			place += block
		}
	}
	return place
}

// rank returns the rank at a place of the tail of round k; it is the inverse of place.
func (t *tail) rank(k, place int) int {
	for j := k - 1; ; j-- {
		block, holders := 1<<j, t.holders[j]
		if t.size&block == 0 {
			continue
		}
		first := t.size - t.length(j+1)
		switch {
		case t.length(j) == 0 || place < holders:
			return first + place
		case place < 2*holders:
			place -= holders
		case place < holders+block:
			return first + place - holders
		default:
			place -= block
		}
	}
}

// doublingCost: one vector each way per round, and every round but the spreading ones reads two vectors to
// combine them. Gathered or scattered data doubles, or halves, from round to round.
func doublingCost(p Problem, l Links) time.Duration {
	c, g := l.of(p), p.everyone(0, Work)
	switch p.Op {
	case AllReduce:
		rounds := bits.Len(uint(p.Size - 1))
		t := c.copying(p.Count) + time.Duration(rounds)*c.combining(2*p.Count)
		for k := range rounds {
			t += c.over(c.slowest(g, func(rank int) int { return rank ^ 1<<k }), p.Count)
		}
		if p.Size&(p.Size-1) != 0 {
			tail := tailOf(p.Size)
			for holders := tail.holders[rounds]; holders < p.Size; holders *= 2 {
				t += c.frame(p.Count)
			}
		}
		return t
	case Reduce:
		return treeReduceCost(p, c)
	case Broadcast, Scatter:
		return binomialDown(p, c)
	case Gather:
		return binomialUp(p, c)
	case AllGather:
		return c.copying(p.longestPart()) + c.copying(p.Count) + c.gathering(g, p.longestPart(), p.Count)
	}
	return c.gathering(g, 0, 0)
}
