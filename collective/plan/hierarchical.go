package plan

import (
	"fmt"
	"time"
)

// hierarchical works in shared memory inside a domain and by frames between domains. As many ranks of each
// domain as the smallest domain has take part in the frames, each with a separate slice of the vector, its
// lane: if the domains are equal all ranks do, else as many leaders.
//
// An all-reduce: in each domain each lane's rank combines its slice of all ranks' sources. Between the
// domains the lanes reduce their slices independently. Then each lane's rank writes its slice to all ranks of
// its domain.
//
// In a domain that is not a node of the canonical tree a lane has several sums, one for each of the largest
// nodes within the domain, at most 2·log2(n), and sends them all. Between the domains two of them are
// combined as soon as they are neighbours in the tree. Where every domain is a node, each lane has one sum.
//
// Between domains, hierarchical is recursive doubling, with whole slices in the least number of steps: for
// short vectors. hierarchicalLong is for long ones: Rabenseifner's reduce-scatter where the domains form a
// canonical tree themselves, else each domain receives a part of every sum of the others; and then an
// all-gather.
//
// Where peers cannot access the sources and destinations (Private), data inside the domain passes through the
// staging buffers, in windows, with two halves. The frames are the same, so each domain may choose.
var hierarchical = Algorithm{
	Name: "hierarchical",
	Fits: func(p Problem) error {
		return hierarchicalFits(p, "hierarchical", AllReduce, Reduce, ReduceScatter, Broadcast, AllGather, Barrier)
	},
	Steps: generator(func(p Problem, rank int, w *writer) { hierarchicalSteps(p, rank, false, w) }),
	Cost:  func(p Problem, l Links) time.Duration { return hierarchicalCost(p, l, false) },
}

var hierarchicalLong = Algorithm{
	Name: "hierarchical_long",
	Fits: func(p Problem) error {
		return hierarchicalFits(p, "hierarchical_long", AllReduce, Reduce, ReduceScatter, Broadcast)
	},
	Steps: generator(func(p Problem, rank int, w *writer) { hierarchicalSteps(p, rank, true, w) }),
	Cost:  func(p Problem, l Links) time.Duration { return hierarchicalCost(p, l, true) },
}

func hierarchicalFits(p Problem, name string, ops ...Op) error {
	if err := fitsOps(name, p, ops...); err != nil {
		return err
	}
	domains, err := p.contiguous(name)
	if err != nil {
		return err
	}
	if len(domains) == 1 {
		return fmt.Errorf("%s needs several domains: all ranks are in one", name)
	}
	lanes, largest := p.Size, 0
	for _, d := range domains {
		lanes, largest = min(lanes, d.Hi-d.Lo), max(largest, d.Hi-d.Lo)
	}
	if largest == 1 {
		return fmt.Errorf("%s needs a domain of several ranks: each has one rank", name)
	}
	if least := stageHalves * sliceElements * lanes; p.Private && p.Stage < least && p.Op != Barrier {
		return fmt.Errorf("%s needs a staging buffer of %d elements at least, it has %d", name, least, p.Stage)
	}
	return nil
}

// hierarchy is one rank's part in a plan over several domains.
type hierarchy struct {
	*writer
	p       Problem
	rank    int
	long    bool
	domains []Ranks
	mine    int // the index of this rank's domain
	local   int // this rank's number in its domain
	lanes   int
	regular bool  // the canonical tree over the domains is part of the one over the ranks
	order   []int // the order of the domains' parts in a lane
	offsets []int // of the ranks' parts, where the operation has parts
	half    int   // elements of a half of the staging buffer
	windows int   // that have passed through the staging buffer
	flags   int   // flags that were set
}

// stageHalves is how many windows a staging buffer has room for: one may still be read while the next is
// filled.
const stageHalves = 2

func newHierarchy(p Problem, rank int, long bool) *hierarchy {
	h := &hierarchy{
		p: p, rank: rank, long: long, lanes: p.Size,
		half: p.Stage / stageHalves / sliceElements * sliceElements,
	}
	h.domains, _ = p.contiguous("")
	for i, d := range h.domains {
		if d.Lo <= rank && rank < d.Hi {
			h.mine, h.local = i, rank-d.Lo
		}
		h.lanes = min(h.lanes, d.Hi-d.Lo)
		h.order = append(h.order, i)
	}
	h.regular = h.tree()
	if p.Op == ReduceScatter || p.Op == AllGather {
		h.offsets = p.offsets()
	}
	if p.Op == ReduceScatter && long && h.regular {
		order := halvingOf(group{size: len(h.domains)})
		for i := range h.order {
			h.order[i] = order.owner(i)
		}
	}
	return h
}

// tree reports whether every node of the canonical tree over the domains is also one over the ranks.
func (h *hierarchy) tree() bool {
	for n := 1; n < 2*len(h.domains); n *= 2 {
		for lo := 0; lo < len(h.domains); lo += n {
			if !isNode(h.p.Size, h.ranks(lo, min(lo+n, len(h.domains)))) {
				return false
			}
		}
	}
	return true
}

// ranks returns the ranks of the domains [lo, hi).
func (h *hierarchy) ranks(lo, hi int) Ranks { return Ranks{h.domains[lo].Lo, h.domains[hi-1].Hi} }

func (h *hierarchy) domain() Ranks { return h.domains[h.mine] }

// neighbours returns the number of ranks of this rank's domain.
func (h *hierarchy) neighbours() int { return h.domain().Hi - h.domain().Lo }

// leads reports whether this rank takes part in the frames.
func (h *hierarchy) leads() bool { return h.local < h.lanes }

func hierarchicalSteps(p Problem, rank int, long bool, w *writer) {
	h := newHierarchy(p, rank, long)
	h.writer = w
	switch p.Op {
	case Barrier:
		h.barrier()
	case Broadcast:
		h.broadcast()
	case AllGather:
		h.gatherParts()
		if h.leads() {
			g := h.between(h.local)
			g.allGather(w)
		}
		h.deliver()
	default:
		sums := h.combineInside()
		if h.leads() {
			h.reduceBetween(sums)
		}
		h.deliver()
	}
}

// barrier: the first rank of a domain knows that its domain has entered, exchanges frames with the other
// domains, and notifies its own.
func (h *hierarchy) barrier() {
	first := h.domain().Lo
	together := h.neighbours() > 1
	if together {
		h.sync()
	}
	if h.rank != first {
		h.put(signal(1))
		h.put(awaitRank(first, 1))
		return
	}
	g := h.between(0)
	g.disseminate(h.writer)
	if together {
		h.put(signal(1))
	}
}

// enter waits until all ranks of the domain have entered, where they access each other's memory.
func (h *hierarchy) enter() {
	if h.neighbours() > 1 && !h.p.Private {
		h.sync()
	}
}

// sync sets the next flag and awaits it from all ranks.
func (h *hierarchy) sync() {
	h.writer.sync(h.flags)
	h.flags++
}

// pass moves elements [0, total) through the staging buffers in windows: in fills the staging buffer,
// starting at element at, with elements [lo, hi); out reads it. There is at least one window.
//
// A window is filled where the window two before it was. No rank reads that any more, because all have set
// the previous window's flag since.
func (h *hierarchy) pass(total, width int, in, out func(lo, hi, at int)) {
	for lo := 0; lo == 0 || lo < total; lo += width {
		hi, at := min(lo+width, total), h.windows%stageHalves*h.half
		h.windows++
		in(lo, hi, at)
		h.sync()
		out(lo, hi, at)
	}
}

// lane is one lane's share of the vector: consecutive pieces.
type lane struct{ pieces []extent }

// extent is a range of elements of the vector, and its position in the lane.
type extent struct{ vector, at, length int }

// lane returns the pieces of a lane: a slice of the vector or, for an operation with parts, a slice of each
// domain's parts, in order. Where the domains are equal that is the part of one rank.
func (h *hierarchy) lane(number int) lane {
	if h.offsets == nil {
		lo, hi := slice(h.p.Count, h.lanes, number)
		return lane{[]extent{{lo, 0, hi - lo}}}
	}
	l, at := lane{make([]extent, 0, len(h.domains))}, 0
	for _, i := range h.order {
		d := h.domains[i]
		lo, hi := h.offsets[d.Lo], h.offsets[d.Hi]
		if h.exact() {
			lo, hi = h.offsets[d.Lo+number], h.offsets[d.Lo+number+1]
		} else {
			a, b := slice(hi-lo, h.lanes, number)
			lo, hi = lo+a, lo+b
		}
		l.pieces = append(l.pieces, extent{lo, at, hi - lo})
		at += hi - lo
	}
	return l
}

// exact reports whether each rank's part is its lane's piece of its domain.
func (h *hierarchy) exact() bool { return h.lanes*len(h.domains) == h.p.Size }

func (l lane) length() int {
	last := l.pieces[len(l.pieces)-1]
	return last.at + last.length
}

// part returns the intersection of elements [lo, hi) of the lane with elements [from, to) of the vector.
func (l lane) part(lo, hi, from, to int, f func(e extent)) {
	for _, e := range l.pieces {
		begin := max(lo, e.at, e.at+from-e.vector)
		end := min(hi, e.at+e.length, e.at+to-e.vector)
		if begin < end {
			f(extent{e.vector + begin - e.at, begin, end - begin})
		}
	}
}

// home is where elements of this rank's lane are in its memory.
func (h *hierarchy) home(at, length int) Span {
	s := Span{Work, at, at + length}
	switch h.p.Op {
	case AllGather:
		s.Buffer = Scratch
	case ReduceScatter: // at the beginning of Work
	default:
		lo, _ := slice(h.p.Count, h.lanes, h.local)
		s.Lo, s.Hi = s.Lo+lo, s.Hi+lo
		if h.p.Op == Broadcast {
			s.Buffer = Dst
		}
	}
	return s
}

// piece returns where in a lane the part of this rank's domain is.
func (h *hierarchy) piece(l lane) (lo, hi int) {
	for i, e := range l.pieces {
		if h.order[i] == h.mine {
			return e.at, e.at + e.length
		}
	}
	return 0, l.length() // all of it, for operations without parts
}

// combineInside leaves each lane's rank with the sums of the nodes of the tree within its domain.
func (h *hierarchy) combineInside() *sums {
	s := newSums(h)
	h.enter()
	if h.neighbours() == 1 || !h.p.Private {
		if h.leads() {
			h.lane(h.local).part(0, h.p.Count, 0, h.p.Count, func(e extent) {
				in := Span{Src, e.vector, e.vector + e.length}
				s.combine(h, in, in, e.at)
			})
		}
		return s
	}
	total := 0
	all := make([]lane, h.lanes)
	for number := range all {
		all[number] = h.lane(number)
		total = max(total, all[number].length())
	}
	width := h.half / h.lanes / sliceElements * sliceElements
	h.pass(total, width, func(lo, hi, at int) {
		for number, l := range all {
			if number == h.local {
				continue
			}
			l.part(lo, hi, 0, h.p.Count, func(e extent) {
				to := at + number*width + e.at - lo
				h.put(duplicate(Span{Src, e.vector, e.vector + e.length}, Span{Stage, to, to + e.length}))
			})
		}
	}, func(lo, hi, at int) {
		if !h.leads() {
			return
		}
		all[h.local].part(lo, hi, 0, h.p.Count, func(e extent) {
			from := at + h.local*width + e.at - lo
			s.combine(h, Span{Stage, from, from + e.length}, Span{Src, e.vector, e.vector + e.length}, e.at)
		})
	})
	return s
}

// gatherParts collects at each lane's rank its piece of its domain's parts.
func (h *hierarchy) gatherParts() {
	h.enter()
	if h.exact() {
		lo, hi := h.piece(h.lane(h.local))
		h.put(duplicate(first(Src, hi-lo), h.home(lo, hi-lo)))
		return
	}
	// take copies elements [lo, hi) of this rank's lane from a rank: from its source, or from element at of
	// its staging buffer.
	take := func(rank, lo, hi, at int) {
		h.lane(h.local).part(lo, hi, h.offsets[rank], h.offsets[rank+1], func(e extent) {
			in := Span{Src, e.vector - h.offsets[rank], e.vector - h.offsets[rank] + e.length}
			switch {
			case rank == h.rank:
				h.put(duplicate(in, h.home(e.at, e.length)))
			case h.p.Private:
				h.put(pull(rank, Span{Stage, at + e.at - lo, at + e.at - lo + e.length}, h.home(e.at, e.length)))
			default:
				h.put(pull(rank, in, h.home(e.at, e.length)))
			}
		})
	}
	d := h.domain()
	own := h.lane(min(h.local, h.lanes-1))
	begin, end := h.piece(own)
	if !h.p.Private || h.neighbours() == 1 {
		for k := range h.neighbours() {
			if h.leads() {
				take(d.Lo+(h.local+k)%h.neighbours(), begin, end, 0)
			}
		}
		return
	}
	total, width := 0, h.half/h.lanes/sliceElements*sliceElements
	for number := range h.lanes {
		lo, hi := h.piece(h.lane(number))
		total = max(total, hi-lo)
	}
	h.pass(total, width, func(lo, hi, at int) {
		for number := range h.lanes {
			l := h.lane(number)
			from, to := h.piece(l)
			if number == h.local {
				continue
			}
			l.part(from+lo, min(from+hi, to), h.offsets[h.rank], h.offsets[h.rank+1], func(e extent) {
				in := first(Src, e.length).from(e.vector - h.offsets[h.rank])
				h.put(duplicate(in, Span{Stage, 0, e.length}.from(at+number*width+e.at-from-lo)))
			})
		}
	}, func(lo, hi, at int) {
		for k := range h.neighbours() {
			if h.leads() {
				take(d.Lo+(h.local+k)%h.neighbours(), begin+lo, min(begin+hi, end), at+h.local*width)
			}
		}
	})
}

// from shifts a span.
func (s Span) from(at int) Span { return Span{s.Buffer, s.Lo + at, s.Hi + at} }

// wants returns which elements of the vector a rank receives.
func (h *hierarchy) wants(rank int) (lo, hi int) {
	switch {
	case h.p.Op == ReduceScatter:
		return h.offsets[rank], h.offsets[rank+1]
	case h.p.Op == Reduce && rank != h.p.Root:
		return 0, 0
	}
	return 0, h.p.Count
}

// deliver transfers results from each lane's rank to all ranks of its domain that receive them.
func (h *hierarchy) deliver() {
	d := h.domain()
	lo, hi := h.wants(h.rank)
	if h.leads() {
		h.lane(h.local).part(0, h.p.Count, lo, hi, func(e extent) {
			if h.p.Op != Broadcast { // for other operations it is in Dst
				h.put(duplicate(h.home(e.at, e.length), Span{Dst, e.vector - lo, e.vector - lo + e.length}))
			}
		})
	}
	if h.neighbours() == 1 {
		return
	}
	if !h.p.Private {
		for k := 1; k < h.neighbours() && h.leads(); k++ {
			rank := d.Lo + (h.local+k)%h.neighbours()
			from, to := h.wants(rank)
			h.lane(h.local).part(0, h.p.Count, from, to, func(e extent) {
				h.put(push(rank, h.home(e.at, e.length), Span{Dst, e.vector - from, e.vector - from + e.length}))
			})
		}
		h.sync()
		return
	}
	if h.p.Op == ReduceScatter && h.exact() || h.p.Op == Reduce && (h.p.Root < d.Lo || h.p.Root >= d.Hi) {
		return // no rank receives anything from another
	}
	h.passOut(lo, hi)
}

// passOut is deliver through the staging buffers; this rank receives elements [lo, hi) of the vector.
func (h *hierarchy) passOut(lo, hi int) {
	total := 0
	all := make([]lane, h.lanes)
	for number := range all {
		all[number] = h.lane(number)
		begin, end := h.leaving(all[number])
		total = max(total, end-begin)
	}
	h.pass(total, h.half, func(from, to, at int) {
		if h.leads() {
			begin, end := h.leaving(all[h.local])
			if n := min(begin+to, end) - (begin + from); n > 0 {
				h.put(duplicate(h.home(begin+from, n), Span{Stage, at, at + n}))
			}
		}
	}, func(from, to, at int) {
		for k := range h.neighbours() {
			number := (h.local + k) % h.neighbours()
			if number >= h.lanes || k == 0 {
				continue
			}
			begin, end := h.leaving(all[number])
			all[number].part(begin+from, min(begin+to, end), lo, hi, func(e extent) {
				in := Span{Stage, at + e.at - begin - from, at + e.at - begin - from + e.length}
				h.put(pull(h.domain().Lo+number, in, Span{Dst, e.vector - lo, e.vector - lo + e.length}))
			})
		}
	})
}

// leaving returns which elements of a lane any rank of the domain may receive.
func (h *hierarchy) leaving(l lane) (lo, hi int) {
	if h.p.Op == ReduceScatter {
		return h.piece(l)
	}
	return 0, l.length()
}

// broadcast: in the root's domain the lanes' ranks read their slices from the root, send them to the other
// domains, and all ranks read the rest; in the other domains the lanes deliver.
func (h *hierarchy) broadcast() {
	d := h.domain()
	if h.p.Root < d.Lo || h.p.Root >= d.Hi {
		h.enter()
		if h.leads() {
			h.broadcastBetween()
		}
		h.deliver()
		return
	}
	// copy reads elements from the root's source.
	copy := func(lo, hi int) {
		in, out := Span{Src, lo, hi}, Span{Dst, lo, hi}
		switch {
		case lo == hi:
		case h.rank == h.p.Root:
			h.put(duplicate(in, out))
		default:
			h.put(pull(h.p.Root, in, out))
		}
	}
	if h.p.Private && h.neighbours() > 1 {
		h.pass(h.p.Count, h.half, func(lo, hi, at int) {
			if h.rank == h.p.Root && lo < hi {
				h.put(duplicate(Span{Src, lo, hi}, Span{Stage, at, at + hi - lo}))
			}
		}, func(lo, hi, at int) {
			if h.rank != h.p.Root && lo < hi {
				h.put(pull(h.p.Root, Span{Stage, at, at + hi - lo}, Span{Dst, lo, hi}))
			}
		})
		if h.rank == h.p.Root {
			copy(0, h.p.Count)
		}
		if h.leads() {
			h.broadcastBetween()
		}
		return
	}
	h.enter()
	lo, hi := 0, 0
	if h.leads() {
		lo, hi = slice(h.p.Count, h.lanes, h.local)
		copy(lo, hi)
		h.broadcastBetween()
	}
	copy(0, lo)
	copy(hi, h.p.Count)
	if h.neighbours() > 1 {
		h.sync()
	}
}
