package plan

import "time"

// reduceBroadcast reduces to rank 0 along the canonical tree, and broadcasts from there along a binomial
// tree: 2·log2(n) steps of the whole vector, so twice the steps of recursive_doubling if n is a power of two,
// and about as many for other sizes. But it sends 2(n-1) frames in total instead of n·log2(n): where many
// ranks share a link, or the processors of a host, that decides. A barrier is the same with empty frames.
var reduceBroadcast = Algorithm{
	Name:  "reduce_broadcast",
	Fits:  func(p Problem) error { return fitsOps("reduce_broadcast", p, AllReduce, Barrier) },
	Steps: generator(reduceBroadcastSteps),
	Cost:  reduceBroadcastCost,
}

func reduceBroadcastSteps(p Problem, rank int, w *writer) {
	p.Root = 0
	g := p.everyone(rank, Dst)
	if p.Op == Barrier {
		g.gather(w, 0)
	} else {
		treeReduce(p, rank, w)
	}
	g.broadcast(w, 0)
}

// reduceBroadcastCost: up, then down; rank 0 has the result in its destination.
func reduceBroadcastCost(p Problem, l Links) time.Duration {
	c := l.of(p)
	p.Root = 0
	down := p
	down.Op = Broadcast
	return treeReduceCost(p, c) + binomialDown(down, c) - c.copying(p.Count)
}
