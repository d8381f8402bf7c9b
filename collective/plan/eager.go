package plan

import (
	"fmt"
	"time"
)

// eager is for short vectors in shared memory: every rank copies its source to its staging buffer and sets a
// flag; as soon as all ranks have, each reads what it needs from the staging buffers. That takes a single
// synchronisation, because the next call uses the other half of the staging buffer. Every rank reads
// everything that it needs by itself: for an all-reduce, size times the vector, where direct shares that
// work.
var eager = Algorithm{
	Name:  "eager",
	Fits:  eagerFits,
	Steps: generator(eagerSteps),
	Cost:  eagerCost,
}

func eagerFits(p Problem) error {
	if err := fitsMemory("eager", p); err != nil {
		return err
	}
	if most := p.longestSource(); most > p.Stage {
		return fmt.Errorf("eager needs every source to fit in the staging buffer: %d elements, the staging buffer has %d",
			most, p.Stage)
	}
	return nil
}

// fitsMemory returns an error if an algorithm for ranks of one domain cannot solve the problem.
func fitsMemory(name string, p Problem) error {
	if err := p.Validate(); err != nil {
		return err
	}
	if p.Op == Send && p.Size > 2 {
		return fmt.Errorf("%s needs every rank to take part: %d others have none in a send", name, p.Size-2)
	}
	return p.together(name)
}

// longestSource returns the number of elements of the longest Src.
func (p Problem) longestSource() int {
	return p.Op.Role(true).Gives.Of(p.Count, p.longestPart())
}

func (p Problem) longestPart() int {
	if p.Counts == nil {
		return p.Count / p.Size
	}
	most := 0
	for _, n := range p.Counts {
		most = max(most, n)
	}
	return most
}

func eagerSteps(p Problem, rank int, w *writer) {
	if src, _ := p.Lengths(rank); src > 0 {
		w.put(duplicate(first(Src, src), first(Stage, src)))
	}
	w.sync(0)
	collect(p, rank, Stage, w)
}

// collect reads what a rank needs from a buffer of all ranks that holds the contents of their Src.
func collect(p Problem, rank int, from Buffer, w *writer) {
	_, dst := p.Lengths(rank)
	switch op, whole, ranks := p.Op, p.all(from), (Ranks{0, p.Size}); {
	case op == ReduceScatter:
		w.put(combine(ranks, p.part(from, rank), rank, first(Dst, dst)))
	case op == Scatter && rank == p.Root:
		w.put(duplicate(p.part(Src, rank), first(Dst, dst)))
	case op == Scatter:
		w.put(pull(p.Root, p.part(from, rank), first(Dst, dst)))
	case dst == 0: // it receives nothing
	case op == AllReduce, op == Reduce:
		w.put(combine(ranks, whole, rank, p.all(Dst)))
	case rank == p.Root && op == Broadcast:
		w.put(duplicate(p.all(Src), p.all(Dst)))
	case op == Broadcast, op == Send:
		w.put(pull(p.Root, whole, p.all(Dst)))
	default:
		collectParts(p, rank, from, w)
	}
}

// collectParts reads a part from every rank, its own first, then from the ranks above it, modulo the size: so
// the ranks begin with different peers.
func collectParts(p Problem, rank int, from Buffer, w *writer) {
	at := p.offsets()
	for k := range p.Size {
		owner := (rank + k) % p.Size
		in, out := Span{from, 0, at[owner+1] - at[owner]}, Span{Dst, at[owner], at[owner+1]}
		if p.Op == AllToAll {
			in.Lo, in.Hi = at[rank], at[rank+1]
		}
		if owner == rank {
			in.Buffer = Src
			w.put(duplicate(in, out))
		} else {
			w.put(pull(owner, in, out))
		}
	}
}

// eagerCost: each rank copies its source, all synchronise once, and the rank that needs most reads it by
// itself.
func eagerCost(p Problem, l Links) time.Duration {
	c := l.of(p)
	return c.syncs(1) + c.copying(p.longestSource()) + c.collecting(p)
}

// collecting returns the time of the rank that collects most.
func (c costs) collecting(p Problem) time.Duration {
	switch p.Op {
	case AllReduce, Reduce:
		return c.combining(p.Size * p.Count)
	case ReduceScatter:
		return c.combining(p.Size * p.longestPart())
	case Scatter:
		return max(c.reading(p.longestPart()), c.copying(p.longestPart()))
	case AllGather, Gather, AllToAll:
		own := p.Count / p.Size
		return c.copying(own) + c.reading(p.Count-own)
	}
	return max(c.reading(p.Count), c.copying(p.Count))
}
