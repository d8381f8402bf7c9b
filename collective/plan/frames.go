package plan

import (
	"iter"
	"math/bits"
	"time"
)

// directFrames is direct over frames: it works over any transport, for any size, any placement and every
// operation, and is the fallback where nothing better fits.
//
// In a reduction every rank owns a slice: in n - 1 rounds every rank sends the slices of its source to their
// owners, which combine received slices along the canonical tree as soon as two neighbours are available.
// Then the owners send the results, to all ranks in n - 1 more rounds, or to the root. In round k a rank
// sends to the rank k above it and receives from the rank k below, modulo the size, so all ranks are busy in
// both directions.
//
// In a broadcast the root sends each rank a slice, which that rank sends to all. Data that is not combined is
// sent directly to its destination.
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

// rounds calls f with the ranks that a rank sends to and receives from, round by round.
func rounds(p Problem, rank int, f func(to, from int) bool) bool {
	for k := 1; k < p.Size; k++ {
		if !f((rank+k)%p.Size, (rank-k+p.Size)%p.Size) {
			return false
		}
	}
	return true
}

// owned returns the elements of the vector that a rank owns: for a ReduceScatter those that it receives.
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

// reduceToOwners sends the slices of a rank's source to their owners, and combines in home what the others
// send for that slice. What cannot be combined yet waits in Scratch, after home if that is also there. A
// rank combines at most once per round, so that it does not delay the others for long, and the rest at the
// end.
func reduceToOwners(p Problem, rank int, home Span, yield func(Step) bool) bool {
	f := folder{size: p.Size, home: home, at: map[Ranks]Span{{rank, rank + 1}: home}, yield: yield}
	if home.Buffer == Scratch {
		f.scratch = home.length()
	}
	return yield(duplicate(p.ownedIn(Src, rank), home)) &&
		rounds(p, rank, func(to, from int) bool {
			step := exchange(to, p.ownedIn(Src, to), from, Span{})
			combined := f.receive(&step)
			return yield(step) && (combined || f.fold())
		}) && f.rest()
}

// folder keeps the canonical tree's nodes that a rank has of its slice.
type folder struct {
	size    int
	home    Span           // where the result must be stored
	at      map[Ranks]Span // where the nodes are
	fresh   []Ranks        // nodes that may have a sibling
	free    []Span         // parts of Scratch
	scratch int            // the first element of Scratch that was not used yet
	yield   func(Step) bool
}

// receive sets where the step stores a rank's part. If its sibling is present, it is received into the
// sibling, and so combined segment by segment as it arrives; receive reports whether that is so.
func (f *folder) receive(step *Step) (combined bool) {
	node := Ranks{step.From, step.From + 1}
	other, parent, _ := sibling(f.size, node)
	if there, ok := f.at[other]; ok {
		step.In, step.Side = there, sideOf(node, other)
		delete(f.at, other)
		f.put(parent, there)
		return true
	}
	if n := len(f.free); n > 0 {
		step.In, f.free = f.free[n-1], f.free[:n-1]
	} else {
		step.In = Span{Scratch, f.scratch, f.scratch + f.home.length()}
		f.scratch += f.home.length()
	}
	f.put(node, step.In)
	return false
}

func (f *folder) put(node Ranks, at Span) {
	f.at[node] = at
	f.fresh = append(f.fresh, node)
}

// fold combines two siblings, if two are present.
func (f *folder) fold() bool {
	for len(f.fresh) > 0 {
		node := f.fresh[0]
		f.fresh = f.fresh[1:]
		other, parent, _ := sibling(f.size, node)
		here, have := f.at[node]
		there, both := f.at[other]
		if !have || !both {
			continue
		}
		if here == f.home {
			node, other, here, there = other, node, there, here
		}
		delete(f.at, node)
		delete(f.at, other)
		f.free = append(f.free, here)
		f.put(parent, there)
		return f.home.length() == 0 || f.yield(fold(here, there, sideOf(node, other)))
	}
	return true
}

// rest combines the remaining nodes.
func (f *folder) rest() bool {
	for len(f.fresh) > 0 {
		if !f.fold() {
			return false
		}
	}
	return true
}

// sideOf returns on which side of another node a node is.
func sideOf(node, other Ranks) Side {
	if node.Lo < other.Lo {
		return Left
	}
	return Right
}

// framesBroadcast: the root sends every other rank its slice, then all ranks exchange their slices; the root
// has all.
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

// framesSwap exchanges parts or blocks with all ranks.
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

// framesCost: n - 1 frames of a slice, and for a reduction as many operands of it and what is left to combine
// at the end, then n - 1 frames more.
func framesCost(p Problem, l Links) time.Duration {
	c := l.of(p)
	others := time.Duration(p.Size - 1)
	own := longestSlice(p.Count, p.Size)
	if p.Op == ReduceScatter {
		own = p.longestPart()
	}
	left := time.Duration(max(0, bits.Len(uint(p.Size-1))-1))
	combining := (others + left) * c.combining(2*own)
	switch p.Op {
	case AllReduce, Reduce:
		return c.copying(own) + 2*others*c.frame(own) + combining
	case ReduceScatter:
		return 2*c.copying(own) + others*c.frame(own) + combining
	case Broadcast:
		return 2*others*c.frame(own) + c.copying(p.Count)
	case Gather, Scatter:
		t := c.copying(p.longestPart())
		for rank := range p.Size {
			if rank != p.Root {
				t += c.over(c.link(rank, p.Root), p.longestPart())
			}
		}
		return t
	case Send:
		return c.over(c.link(p.Root, p.Peer), p.Count)
	case Barrier:
		return others * c.frame(0)
	}
	own = p.longestPart()
	return c.copying(own) + others*c.frame(own)
}
