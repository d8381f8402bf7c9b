package plan

import (
	"fmt"
	"iter"
	"time"
)

// direct works where every rank can reach every other rank's memory, as between the replicas of one process. For an
// all-reduce each rank owns a slice of the vector: it reads that slice of all n sources and writes the result to that
// slice of all n destinations. Two synchronisations, the least traffic there can be, and the canonical tree is kept
// because one rank sees all operands of an element at once.
var direct = Algorithm{
	Name:  "direct",
	Fits:  directFits,
	Steps: directSteps,
	Cost:  directCost,
}

func directFits(p Problem) error {
	if err := p.Validate(); err != nil {
		return err
	}
	for rank, place := range p.Places {
		if place.Worker != p.Places[0].Worker {
			return fmt.Errorf("direct needs every rank in one process: rank %d is in worker %d, rank 0 in worker %d",
				rank, place.Worker, p.Places[0].Worker)
		}
	}
	return nil
}

func directSteps(p Problem, rank int) iter.Seq[Step] {
	return func(yield func(Step) bool) {
		if !yield(signal(0)) || !yield(await(0)) || p.Op == Barrier {
			return
		}
		var step Step
		switch {
		case p.Op == AllReduce:
			lo, hi := slice(p.Count, p.Size, rank)
			step = combine(Ranks{0, p.Size}, Span{Src, lo, hi}, -1, Span{Dst, lo, hi})
		case rank == p.Root:
			step = duplicate(p.all(Src), p.all(Dst))
		default:
			step = pull(p.Root, p.all(Src), p.all(Dst))
		}
		if !yield(step) || !yield(signal(1)) {
			return
		}
		yield(await(1))
	}
}

// directCost: two synchronisations; the owner of the largest slice reads it from every rank, a broadcast reads the whole
// from one. Writing is as much, and is part of the measured rate.
func directCost(p Problem, l Links) time.Duration {
	if p.Op == Barrier {
		return l.Memory.Latency
	}
	read := p.Count
	if p.Op == AllReduce {
		read = min(p.Count, (granules(p.Count)+p.Size-1)/p.Size*sliceElements) * p.Size
	}
	return 2*l.Memory.Latency + l.combining(read)
}

// sliceElements is the granule of slices: 64 elements are whole cache lines for every element type, so that two owners
// never write to one line of a vector that starts on a line.
const sliceElements = 64

// slice returns the elements that a rank owns of count: whole granules, as evenly as they go, in the order of ranks.
func slice(count, size, rank int) (lo, hi int) {
	edge := func(rank int) int { return min(count, granules(count)*rank/size*sliceElements) }
	return edge(rank), edge(rank + 1)
}

func granules(count int) int { return (count + sliceElements - 1) / sliceElements }
