package plan

import (
	"errors"
	"time"
)

// ring sends only to the next rank and receives only from the previous one, modulo the size: the slices of a
// vector move around the ring and collect the contributions (P. Patarasuk, X. Yuan, 2009). It moves the least
// possible data, S(n-1)/n for each half of an all-reduce, in n - 1 steps each, and all links carry the same
// load, whatever the network.
//
// But a slice is added in the order of the ring, starting at a different rank for each slice, and not along
// the canonical tree. So reductions use it only for Order: Any.
//
// Broadcast is a pipelined chain: the vector is sent in segments from the root around to the rank before it.
var ring = Algorithm{
	Name:  "ring",
	Fits:  ringFits,
	Steps: generator(ringSteps),
	Cost:  ringCost,
}

func ringFits(p Problem) error {
	if err := fitsOps("ring", p, AllReduce, ReduceScatter, AllGather, Broadcast); err != nil {
		return err
	}
	if p.Op.Reduces() && p.Order != Any {
		return errors.New("ring adds in the order of the ranks around the ring, starting at another rank for each slice, " +
			"and not along the canonical tree: it needs Order: Any")
	}
	return nil
}

func ringSteps(p Problem, rank int, w *writer) {
	switch p.Op {
	case Broadcast:
		p.broadcastBy(rank, w, func(g *group) { g.chain(w, p) })
	case AllGather:
		g := p.gatherParts(rank, w)
		g.goAround(w, 0, Replace)
	default:
		ringReduce(p, rank, w)
	}
}

func ringReduce(p Problem, rank int, w *writer) {
	g := p.everyone(rank, Work)
	if p.Op == ReduceScatter {
		g.edge = p.partEdge()
	}
	w.put(duplicate(p.all(Src), p.all(Work)))
	g.goAround(w, p.Size-1, Left)
	own := g.span(rank, rank+1)
	if p.Reduce == Mean {
		w.put(scale(own))
	}
	if p.Op == ReduceScatter {
		w.put(duplicate(own, first(Dst, own.length())))
		return
	}
	g.goAround(w, 0, Replace)
	w.put(duplicate(p.all(Work), p.all(Dst)))
}

// goAround sends every part around the ring, except for one step, starting at the member this distance above
// its owner.
func (g *group) goAround(w *writer, first int, side Side) {
	for k := range g.size - 1 {
		out := (g.self - k + first) % g.size
		if out < 0 {
			out += g.size
		}
		in := (out + g.size - 1) % g.size
		s := exchange(g.above(1), g.span(out, out+1), g.above(-1), g.span(in, in+1))
		s.Side = side
		w.put(s)
	}
}

// chain forwards segments of the region, which has the root's vector, each while the next one arrives.
func (g *group) chain(w *writer, p Problem) {
	number, _ := g.below(p.Root)
	segments := segmentsOf(p.Count, p.Size)
	at := func(i int) Span {
		lo, hi := slice(p.Count, segments, i)
		return Span{g.buffer, lo, hi}
	}
	last := number == p.Size-1
	if number > 0 {
		w.put(receive(g.above(-1), at(0)))
	}
	for i := range segments {
		switch more := number > 0 && i+1 < segments; {
		case more && last:
			w.put(receive(g.above(-1), at(i+1)))
		case more:
			w.put(exchange(g.above(1), at(i), g.above(-1), at(i+1)))
		case !last:
			w.put(send(g.above(1), at(i)))
		}
	}
}

// frameElements is the number of elements for which a frame takes about as long as its latency, on typical
// links: 25 KB for 20 µs at 10 Gb/s, or for 2 µs at 100 Gb/s. A plan cannot know the links, and the optimum
// is flat.
const frameElements = 6400

// segmentsOf returns the number of segments for a pipeline with this number of stages: with a latency of a
// per segment, and b per element, (stages + segments)(a + b·count/segments) is least at
// sqrt(stages·count·b/a).
func segmentsOf(count, stages int) int {
	n := 1
	for want := stages * (count / frameElements); n*n < want && n < segmentsMax; n++ {
	}
	return n
}

// segmentsMax bounds the steps of a plan.
const segmentsMax = 1024

// ringCost: n - 1 frames of the longest slice around, once for each half; a chain is filled, then delivers.
func ringCost(p Problem, l Links) time.Duration {
	c := l.of(p)
	steps, part := time.Duration(p.Size-1), longestSlice(p.Count, p.Size)
	switch p.Op {
	case AllGather:
		part = p.longestPart()
		return c.copying(part) + steps*c.frame(part)
	case ReduceScatter:
		part = p.longestPart()
		return c.copying(p.Count+part) + steps*(c.frame(part)+c.combining(2*part))
	case Broadcast:
		segments := segmentsOf(p.Count, p.Size)
		frame := c.frame(longestSlice(p.Count, segments))
		return max(time.Duration(p.Size-2+segments)*frame, time.Duration(segments)*frame+c.copying(p.Count))
	}
	return c.copying(p.Count) + steps*(2*c.frame(part)+c.combining(2*part))
}
