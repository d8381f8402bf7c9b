package plan

import (
	"math/bits"
	"time"
)

// tiers adds up the time of a hierarchical plan: inside the domains, where the largest one counts; between
// them, where the longest lane counts; and inside again.
type tiers struct {
	costs
	*hierarchy
	members group // of the first lane
	longest int   // elements of the longest lane
	piece   int   // of the longest part of a lane for one domain
	largest int   // ranks of the largest domain
}

func hierarchicalCost(p Problem, l Links, long bool) time.Duration {
	h := newHierarchy(p, 0, long)
	t := &tiers{costs: l.of(p), hierarchy: h}
	t.members = group{size: len(h.domains), rank: func(i int) int { return h.domains[i].Lo }}
	if p.Op != Barrier {
		for number := range h.lanes {
			l := h.lane(number)
			t.longest = max(t.longest, l.length())
			t.piece = max(t.piece, l.length()/len(h.domains))
			for _, e := range l.pieces {
				if h.offsets != nil {
					t.piece = max(t.piece, e.length)
				}
			}
		}
	}
	for _, d := range h.domains {
		if p.Op != Broadcast || p.Root < d.Lo || p.Root >= d.Hi { // in the root's domain no rank delivers
			t.largest = max(t.largest, d.Hi-d.Lo)
		}
	}
	switch p.Op {
	case Barrier:
		return t.syncs(2) + t.gathering(t.members, 0, 0)
	case Broadcast:
		return t.broadcasting()
	case AllGather:
		return t.collectingParts() + t.allGathering(t.members, t.piece, t.longest) + t.delivering()
	}
	return t.combiningInside() + t.reducing() + t.delivering()
}

// passing returns the time of the synchronisations for windows of this width.
func (t *tiers) passing(total, width int) time.Duration {
	if !t.p.Private {
		return t.syncs(1)
	}
	return t.syncs(max(1, (total+width-1)/width))
}

// combiningInside: each lane's rank reads its slice of all sources of the domain; where sources pass through
// the staging buffers, all ranks copy in what is not in their own lane.
func (t *tiers) combiningInside() time.Duration {
	took := t.passing(t.longest, t.half/t.lanes) + t.combining(t.largest*t.longest)
	if t.p.Private {
		took += t.copying(t.p.Count - t.longest)
	}
	return took
}

func (t *tiers) collectingParts() time.Duration {
	if t.exact() {
		return t.syncs(1) + t.copying(t.piece)
	}
	took := t.passing(t.piece, t.half/t.lanes) + t.reading(t.piece)
	if t.p.Private {
		took += t.copying(t.p.longestPart())
	}
	return took
}

// delivering: each lane's rank writes its lane to all of the domain, or to the root; or all read it from the
// staging buffers.
func (t *tiers) delivering() time.Duration {
	others := t.largest - 1
	each := t.longest
	switch t.p.Op {
	case Reduce:
		others = 1
	case ReduceScatter:
		each = t.piece
		if others = 1; t.exact() {
			others = 0
		}
	}
	if !t.p.Private {
		return t.syncs(1) + t.copying(each) + t.reading(others*each)
	}
	if others == 0 {
		return t.copying(each)
	}
	read := t.p.Count - t.longest
	if t.p.Op == ReduceScatter {
		read = t.p.longestPart()
	}
	return t.passing(each, t.half) + 2*t.copying(each) + t.reading(read)
}

// broadcasting: the root's domain reads from the root; the others wait for the frames, then deliver.
func (t *tiers) broadcasting() time.Duration {
	between := t.gathering(t.members, t.longest, t.longest)
	if t.long {
		between = t.gathering(t.members, t.piece, t.longest) + t.allGathering(t.members, t.piece, t.longest)
	}
	if t.p.Private {
		return t.passing(t.p.Count, t.half) + 2*t.copying(t.p.Count) + between + t.delivering()
	}
	return t.syncs(1) + t.reading(t.longest) + between + max(t.reading(t.p.Count-t.longest), t.delivering())
}

// reducing returns the time between the domains.
func (t *tiers) reducing() time.Duration {
	m := len(t.domains)
	if !t.long {
		return t.exchanging()
	}
	var took time.Duration
	after := t.members
	if t.regular {
		v := halvingOf(t.members)
		// between even parts and all as long as the longest
		took, after = t.halving(v, (t.longest+m*t.piece)/2), v.placed()
	} else {
		s, nodes := &sums{size: t.p.Size}, 0
		for _, d := range t.domains {
			nodes = max(nodes, len(s.nodes(d)))
		}
		took = time.Duration((m-1)*nodes) * (t.over(t.slowest(t.members, func(i int) int { return (i + 1) % m }),
			t.piece) + t.combining(2*t.piece))
	}
	switch t.p.Op {
	case AllReduce:
		took += t.allGathering(after, t.piece, t.longest)
	case Reduce:
		took += t.gathering(after, t.piece, t.longest)
	}
	return took
}

// exchanging returns the time of recursive doubling with the sums of the largest nodes.
func (t *tiers) exchanging() (took time.Duration) {
	m, s := len(t.domains), &sums{size: t.p.Size}
	rounds := bits.Len(uint(m - 1))
	tail := tailOf(m)
	whole := t.over(t.slowest(t.members, func(i int) int { return (i + m/2) % m }), t.longest)
	for k := range rounds {
		most := 0
		for lo := 0; lo < m; lo += 1 << k {
			most = max(most, len(s.nodes(t.ranks(lo, min(lo+1<<k, m)))))
		}
		link := t.slowest(t.members, func(i int) int { return i ^ 1<<k })
		took += time.Duration(most) * (t.over(link, t.longest) + t.combining(2*t.longest))
	}
	if m&(m-1) != 0 {
		for holders := tail.holders[rounds]; holders < m; holders *= 2 {
			took += whole
		}
	}
	return took
}
