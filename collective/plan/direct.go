package plan

import (
	"errors"
	"time"
)

// direct works where every rank can access every other rank's source and destination, as between the replicas
// of one process. In a reduction each rank owns a slice of the vector: it reads that slice of all n sources
// and writes the result to that slice of the destinations, all n for an all-reduce. That takes two
// synchronisations and the least possible traffic, and the canonical tree is kept because one rank reads all
// operands of an element.
var direct = Algorithm{
	Name:  "direct",
	Fits:  directFits,
	Steps: generator(directSteps),
	Cost:  directCost,
}

func directFits(p Problem) error {
	if err := fitsMemory("direct", p); err != nil {
		return err
	}
	if p.Private {
		return errors.New("direct needs access to every rank's source and destination, and some are private")
	}
	return nil
}

func directSteps(p Problem, rank int, w *writer) {
	w.sync(0)
	if p.Op != Barrier {
		directWork(p, rank, w)
		w.sync(1)
	}
}

// directWork is a rank's share of the work between the synchronisations.
func directWork(p Problem, rank int, w *writer) {
	lo, hi := slice(p.Count, p.Size, rank)
	switch p.Op {
	case AllReduce:
		w.put(combine(Ranks{0, p.Size}, Span{Src, lo, hi}, -1, Span{Dst, lo, hi}))
	case Reduce:
		w.put(combine(Ranks{0, p.Size}, Span{Src, lo, hi}, p.Root, Span{Dst, lo, hi}))
	case Gather:
		in := first(Src, p.part(Src, rank).length())
		if rank == p.Root {
			w.put(duplicate(in, p.part(Dst, rank)))
		} else {
			w.put(push(p.Root, in, p.part(Dst, rank)))
		}
	default:
		collect(p, rank, Src, w)
	}
}

// directCost: two synchronisations; the owner of the largest slice reads it from every rank, the others copy
// as much as one rank needs. Writes move as many bytes, and are part of the measured rates.
func directCost(p Problem, l Links) time.Duration {
	c := l.of(p)
	switch p.Op {
	case Barrier:
		return c.syncs(1)
	case AllReduce, Reduce:
		return c.syncs(2) + c.combining(longestSlice(p.Count, p.Size)*p.Size)
	case Gather:
		return c.syncs(2) + max(c.reading(p.longestPart()), c.copying(p.longestPart()))
	}
	return c.syncs(2) + c.collecting(p)
}

// sliceElements is the unit of slices: 64 elements are whole cache lines for every element type, so that two
// owners never write to the same line of a vector that is aligned to a line.
const sliceElements = 64

// slice returns the elements of count that a rank owns: whole units, balanced, in the order of ranks.
func slice(count, size, rank int) (lo, hi int) {
	edge := func(rank int) int { return min(count, granules(count)*rank/size*sliceElements) }
	return edge(rank), edge(rank + 1)
}

// longestSlice returns the number of elements of the largest slice.
func longestSlice(count, size int) int {
	return min(count, (granules(count)+size-1)/size*sliceElements)
}

func granules(count int) int { return (count + sliceElements - 1) / sliceElements }
