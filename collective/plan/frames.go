package plan

import (
	"iter"
	"time"
)

// directFrames is direct by frames: it works over any transport, for any size, any placement and every operation, and is
// what is left where nothing better fits.
//
// A reduction is a slice for each rank: in n - 1 rounds every rank sends the slices of its source to their owners, who combine
// what they have got along the canonical tree, as soon as two neighbours are there. Then the owners send the results, to all
// in n - 1 rounds more, or to the root. In round k a rank sends to the one k above it and receives from the one k below,
// around the end, so all are busy in both directions.
//
// A broadcast sends each rank a slice, which they pass to all. What is only moved goes straight to where it belongs.
var directFrames = Algorithm{
	Name:  "direct_frames",
	Fits:  func(p Problem) error { return p.Validate() },
	Steps: framesSteps,
	Cost:  framesCost,
}

func framesSteps(p Problem, rank int) iter.Seq[Step] {
	return func(yield func(Step) bool) {
		switch p.Op {
		case AllReduce, Reduce, ReduceScatter:
			framesReduce(p, rank, yield)
		case Broadcast:
			framesBroadcast(p, rank, yield)
		case AllGather, AllToAll:
			framesSwap(p, rank, yield)
		case Gather:
			framesGather(p, rank, yield)
		case Scatter:
			framesScatter(p, rank, yield)
		case Send:
			framesSend(p, rank, yield)
		case Barrier:
			rounds(p, rank, func(to, from int) bool { return yield(exchange(to, Span{}, from, Span{})) })
		}
	}
}

// rounds calls f with whom a rank sends to and receives from, round by round.
func rounds(p Problem, rank int, f func(to, from int) bool) bool {
	for k := 1; k < p.Size; k++ {
		if !f((rank+k)%p.Size, (rank-k+p.Size)%p.Size) {
			return false
		}
	}
	return true
}

// owned returns the elements of the vector that a rank owns: for a ReduceScatter those that it gets.
func (p Problem) owned(rank int) (lo, hi int) {
	if p.Op == ReduceScatter {
		return p.Part(rank)
	}
	return slice(p.Count, p.Size, rank)
}

func (p Problem) ownedIn(b Buffer, rank int) Span {
	lo, hi := p.owned(rank)
	return Span{b, lo, hi}
}

func framesReduce(p Problem, rank int, yield func(Step) bool) bool {
	home := p.ownedIn(Work, rank)
	_, dst := p.Lengths(rank)
	if dst < p.Count || p.Op == ReduceScatter {
		home = first(Scratch, home.length()) // the rank needs no whole vector
	}
	if !reduceToOwners(p, rank, home, yield) || p.Reduce == Mean && !yield(scale(home)) {
		return false
	}
	switch p.Op {
	case ReduceScatter:
		return yield(duplicate(home, first(Dst, dst)))
	case Reduce:
		if rank != p.Root {
			return yield(send(p.Root, home))
		}
		return rounds(p, rank, func(_, from int) bool { return yield(receive(from, p.ownedIn(Work, from))) }) &&
			yield(duplicate(p.all(Work), p.all(Dst)))
	}
	return rounds(p, rank, func(to, from int) bool { return yield(exchange(to, home, from, p.ownedIn(Work, from))) }) &&
		yield(duplicate(p.all(Work), p.all(Dst)))
}

// reduceToOwners sends the slices of a rank's source to their owners, and combines in home what the others send of its own.
// What cannot be combined yet waits in Scratch, behind home if that is there too.
func reduceToOwners(p Problem, rank int, home Span, yield func(Step) bool) bool {
	length := home.length()
	own := Ranks{rank, rank + 1}
	at := map[Ranks]Span{own: home} // where the nodes of the tree are that this rank has
	var free []Span
	next := 0 // where Scratch has not been used yet
	if home.Buffer == Scratch {
		next = length
	}
	if !yield(duplicate(p.ownedIn(Src, rank), home)) {
		return false
	}
	return rounds(p, rank, func(to, from int) bool {
		step := exchange(to, p.ownedIn(Src, to), from, Span{})
		node := Ranks{from, from + 1}
		other, parent, _ := sibling(p.Size, node)
		if there, ok := at[other]; ok { // combined segment by segment as it comes
			step.In, step.Side = there, sideOf(node, other)
			delete(at, other)
			node = parent
		} else if n := len(free); n > 0 {
			step.In, free = free[n-1], free[:n-1]
		} else {
			step.In = Span{Scratch, next, next + length}
			next += length
		}
		if !yield(step) {
			return false
		}
		here := step.In
		for {
			other, parent, ok := sibling(p.Size, node)
			there, have := at[other]
			if !ok || !have {
				break
			}
			in, out, side := there, here, sideOf(other, node)
			if there == home {
				in, out, side = here, there, sideOf(node, other)
			}
			if length > 0 && !yield(fold(in, out, side)) {
				return false
			}
			delete(at, other)
			free = append(free, in)
			node, here = parent, out
		}
		at[node] = here
		return true
	})
}

// sideOf says on which side of another node a node stands.
func sideOf(node, other Ranks) Side {
	if node.Lo < other.Lo {
		return Left
	}
	return Right
}

// framesBroadcast: the root sends every other rank its slice, then all pass theirs around; the root has all.
func framesBroadcast(p Problem, rank int, yield func(Step) bool) bool {
	mine := p.ownedIn(Dst, rank)
	if rank == p.Root {
		mine.Buffer = Src
		if !rounds(p, rank, func(to, _ int) bool { return yield(send(to, p.ownedIn(Src, to))) }) {
			return false
		}
	} else if !yield(receive(p.Root, mine)) {
		return false
	}
	passed := rounds(p, rank, func(to, from int) bool {
		step := exchange(to, mine, from, p.ownedIn(Dst, from))
		if to == p.Root {
			step.To, step.Out = -1, Span{}
		}
		if rank == p.Root {
			step.From, step.In = -1, Span{}
		}
		return step.To < 0 && step.From < 0 || yield(step)
	})
	return passed && (rank != p.Root || yield(duplicate(p.all(Src), p.all(Dst))))
}

// framesSwap exchanges parts or blocks with everybody.
func framesSwap(p Problem, rank int, yield func(Step) bool) bool {
	at := p.offsets()
	part := func(b Buffer, rank int) Span { return Span{b, at[rank], at[rank+1]} }
	out := func(int) Span { return first(Src, at[rank+1]-at[rank]) }
	if p.Op == AllToAll {
		out = func(to int) Span { return part(Src, to) }
	}
	return yield(duplicate(out(rank), part(Dst, rank))) &&
		rounds(p, rank, func(to, from int) bool { return yield(exchange(to, out(to), from, part(Dst, from))) })
}

func framesGather(p Problem, rank int, yield func(Step) bool) bool {
	src, _ := p.Lengths(rank)
	if rank != p.Root {
		return yield(send(p.Root, first(Src, src)))
	}
	at := p.offsets()
	part := func(rank int) Span { return Span{Dst, at[rank], at[rank+1]} }
	return yield(duplicate(first(Src, src), part(rank))) &&
		rounds(p, rank, func(_, from int) bool { return yield(receive(from, part(from))) })
}

func framesScatter(p Problem, rank int, yield func(Step) bool) bool {
	_, dst := p.Lengths(rank)
	if rank != p.Root {
		return yield(receive(p.Root, first(Dst, dst)))
	}
	at := p.offsets()
	part := func(rank int) Span { return Span{Src, at[rank], at[rank+1]} }
	return rounds(p, rank, func(to, _ int) bool { return yield(send(to, part(to))) }) &&
		yield(duplicate(part(rank), first(Dst, dst)))
}

func framesSend(p Problem, rank int, yield func(Step) bool) bool {
	switch rank {
	case p.Root:
		return yield(send(p.Peer, p.all(Src)))
	case p.Peer:
		return yield(receive(p.Root, p.all(Dst)))
	}
	return true
}

// framesCost: n - 1 frames of a slice, and for a reduction as many operands of it, then n - 1 frames more.
func framesCost(p Problem, l Links) time.Duration {
	c := l.of(p)
	others := time.Duration(p.Size - 1)
	own := longestSlice(p.Count, p.Size)
	switch p.Op {
	case AllReduce, Reduce:
		return c.copying(own) + 2*others*c.frame(own) + others*c.combining(2*own)
	case ReduceScatter:
		own = p.longestPart()
		return 2*c.copying(own) + others*(c.frame(own)+c.combining(2*own))
	case Broadcast:
		return max(2*others*c.frame(own), c.copying(p.Count))
	case Send:
		return c.frame(p.Count)
	case Barrier:
		return others * c.frame(0)
	}
	own = p.longestPart()
	return c.copying(own) + others*c.frame(own)
}
