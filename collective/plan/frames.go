package plan

import (
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
	Steps: generator(framesSteps),
	Cost:  framesCost,
}

func framesSteps(p Problem, rank int, w *writer) {
	switch p.Op {
	case AllReduce, Reduce, ReduceScatter:
		framesReduce(p, rank, w)
	case Broadcast:
		framesBroadcast(p, rank, w)
	case AllGather, AllToAll:
		framesSwap(p, rank, w)
	case Gather:
		framesGather(p, rank, w)
	case Scatter:
		framesScatter(p, rank, w)
	case Send:
		framesSend(p, rank, w)
	case Barrier:
		rounds(p, rank, func(to, from int) { w.put(exchange(to, Span{}, from, Span{})) })
	}
}

// rounds calls f with the ranks that a rank sends to and receives from, round by round.
func rounds(p Problem, rank int, f func(to, from int)) {
	for k := 1; k < p.Size; k++ {
		f((rank+k)%p.Size, (rank-k+p.Size)%p.Size)
	}
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

func framesReduce(p Problem, rank int, w *writer) {
	home := p.ownedIn(Work, rank)
	_, dst := p.Lengths(rank)
	if dst < p.Count || p.Op == ReduceScatter {
		home = first(Scratch, home.length()) // the rank needs no whole vector
	}
	reduceToOwners(p, rank, home, w)
	if p.Reduce == Mean {
		w.put(scale(home))
	}
	switch {
	case p.Op == ReduceScatter:
		w.put(duplicate(home, first(Dst, dst)))
		return
	case p.Op == Reduce && rank != p.Root:
		w.put(send(p.Root, home))
		return
	case p.Op == Reduce:
		rounds(p, rank, func(_, from int) { w.put(receive(from, p.ownedIn(Work, from))) })
	default:
		rounds(p, rank, func(to, from int) { w.put(exchange(to, home, from, p.ownedIn(Work, from))) })
	}
	w.put(duplicate(p.all(Work), p.all(Dst)))
}

// reduceToOwners sends the slices of a rank's source to their owners, and combines in home what the others
// send for that slice. What cannot be combined yet waits in Scratch, after home if that is also there. A
// rank combines at most once per round, so that it does not delay the others for long, and the rest at the
// end.
func reduceToOwners(p Problem, rank int, home Span, w *writer) {
	f := folder{writer: w, size: p.Size, home: home, at: map[Ranks]Span{{rank, rank + 1}: home}}
	if home.Buffer == Scratch {
		f.scratch = home.length()
	}
	w.put(duplicate(p.ownedIn(Src, rank), home))
	rounds(p, rank, func(to, from int) {
		step := exchange(to, p.ownedIn(Src, to), from, Span{})
		combined := f.receive(&step)
		w.put(step)
		if !combined {
			f.fold()
		}
	})
	for len(f.fresh) > 0 {
		f.fold()
	}
}

// folder keeps the canonical tree's nodes that a rank has of its slice.
type folder struct {
	*writer
	size    int
	home    Span           // where the result must be stored
	at      map[Ranks]Span // where the nodes are
	fresh   []Ranks        // nodes that may have a sibling
	free    []Span         // parts of Scratch
	scratch int            // the first element of Scratch that was not used yet
}

// receive sets where the step stores a rank's part. If its sibling is present, it is received into the
// sibling, and so combined segment by segment as it arrives; receive reports whether that is so.
func (f *folder) receive(step *Step) (combined bool) {
	node := Ranks{step.From, step.From + 1}
	other, parent, _ := sibling(f.size, node)
	if there, ok := f.at[other]; ok {
		step.In, step.Side = there, sideOf(node, other)
		delete(f.at, other)
		f.keep(parent, there)
		return true
	}
	if n := len(f.free); n > 0 {
		step.In, f.free = f.free[n-1], f.free[:n-1]
	} else {
		step.In = Span{Scratch, f.scratch, f.scratch + f.home.length()}
		f.scratch += f.home.length()
	}
	f.keep(node, step.In)
	return false
}

func (f *folder) keep(node Ranks, at Span) {
	f.at[node] = at
	f.fresh = append(f.fresh, node)
}

// fold combines two siblings, if two are present.
func (f *folder) fold() {
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
		f.keep(parent, there)
		if f.home.length() > 0 {
			f.put(fold(here, there, sideOf(node, other)))
		}
		return
	}
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
func framesBroadcast(p Problem, rank int, w *writer) {
	mine := p.ownedIn(Dst, rank)
	if rank == p.Root {
		mine.Buffer = Src
		rounds(p, rank, func(to, _ int) { w.put(send(to, p.ownedIn(Src, to))) })
	} else {
		w.put(receive(p.Root, mine))
	}
	rounds(p, rank, func(to, from int) {
		step := exchange(to, mine, from, p.ownedIn(Dst, from))
		if to == p.Root {
			step.To, step.Out = -1, Span{}
		}
		if rank == p.Root {
			step.From, step.In = -1, Span{}
		}
		if step.To >= 0 || step.From >= 0 {
			w.put(step)
		}
	})
	if rank == p.Root {
		w.put(duplicate(p.all(Src), p.all(Dst)))
	}
}

// framesSwap exchanges parts or blocks with all ranks.
func framesSwap(p Problem, rank int, w *writer) {
	at := p.offsets()
	part := func(b Buffer, rank int) Span { return Span{b, at[rank], at[rank+1]} }
	out := func(int) Span { return first(Src, at[rank+1]-at[rank]) }
	if p.Op == AllToAll {
		out = func(to int) Span { return part(Src, to) }
	}
	w.put(duplicate(out(rank), part(Dst, rank)))
	rounds(p, rank, func(to, from int) { w.put(exchange(to, out(to), from, part(Dst, from))) })
}

func framesGather(p Problem, rank int, w *writer) {
	src, _ := p.Lengths(rank)
	if rank != p.Root {
		w.put(send(p.Root, first(Src, src)))
		return
	}
	at := p.offsets()
	part := func(rank int) Span { return Span{Dst, at[rank], at[rank+1]} }
	w.put(duplicate(first(Src, src), part(rank)))
	rounds(p, rank, func(_, from int) { w.put(receive(from, part(from))) })
}

func framesScatter(p Problem, rank int, w *writer) {
	_, dst := p.Lengths(rank)
	if rank != p.Root {
		w.put(receive(p.Root, first(Dst, dst)))
		return
	}
	at := p.offsets()
	part := func(rank int) Span { return Span{Src, at[rank], at[rank+1]} }
	rounds(p, rank, func(to, _ int) { w.put(send(to, part(to))) })
	w.put(duplicate(part(rank), first(Dst, dst)))
}

func framesSend(p Problem, rank int, w *writer) {
	switch rank {
	case p.Root:
		w.put(send(p.Peer, p.all(Src)))
	case p.Peer:
		w.put(receive(p.Root, p.all(Dst)))
	}
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
