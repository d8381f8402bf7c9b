package plan

import (
	"iter"
	"time"
)

// reduceBroadcast reduces to rank 0 along the canonical tree, and broadcasts from there along a binomial
// tree: 2·log2(n) steps of the whole vector, so twice the steps of recursive_doubling if n is a power of two,
// and about as many for other sizes. But it sends 2(n-1) frames in total instead of n·log2(n): where many
// ranks share a link, or the processors of a host, that decides. A barrier is the same with empty frames.
var reduceBroadcast = Algorithm{
	Name:  "reduce_broadcast",
	Fits:  func(p Problem) error { return fitsOps("reduce_broadcast", p, AllReduce, Barrier) },
	Steps: reduceBroadcastSteps,
	Cost:  reduceBroadcastCost,
}

func reduceBroadcastSteps(p Problem, rank int) iter.Seq[Step] {
	p.Root = 0
	return write(func(w *writer) {
		number, reach := p.numberOf(rank)
		if p.Op == Barrier {
			for below := 1; below < reach; below *= 2 {
				if number+below < p.Size {
					w.put(receive(rank+below, Span{}))
				}
			}
			if number > 0 {
				w.put(send(rank-reach, Span{}))
			}
		} else {
			treeReduce(p, rank, func(s Step) bool { w.put(s); return !w.ended })
		}
		result := p.all(Dst)
		if number > 0 {
			w.put(receive(rank-reach, result))
		}
		for reach /= 2; reach > 0; reach /= 2 {
			if number+reach < p.Size {
				w.put(send(rank+reach, result))
			}
		}
	})
}

// reduceBroadcastCost: up, then down; rank 0 has the result in its destination.
func reduceBroadcastCost(p Problem, l Links) time.Duration {
	c := l.of(p)
	p.Root = 0
	down := p
	down.Op = Broadcast
	return treeReduceCost(p, c) + binomialDown(down, c) - c.copying(p.Count)
}
