package plan

// sharing states which of a rank's buffers are the same memory.
type sharing struct {
	name      string
	workInDst bool
	dstInSrc  bool
	oddOnly   bool // only of the ranks with an odd number; those of the others are separate
	rounds    bool // Src and Dst have a different type than the partial sums
}

// sharings lists the distinct ways in which the buffers of a call can be the same memory.
func sharings(p Problem, plans [][]Step) []sharing {
	one := solved{p, plans}
	all := []sharing{{name: "src, dst and work apart", rounds: p.Op.Reduces()}}
	whole, inPlace := true, true // Dst has Count elements on some rank; Src and Dst may be the same
	switch p.Op {
	case ReduceScatter, Scatter:
		whole = false
	case AllToAll, Send:
		inPlace = false
	case Barrier:
		return all
	}
	work := whole && one.uses(Work)
	if work {
		all = append(all, sharing{name: "work in dst", workInDst: true})
	}
	if inPlace {
		all = append(all, sharing{name: "dst in src", dstInSrc: true, rounds: p.Op.Reduces()})
	}
	if inPlace && work {
		all = append(all, sharing{name: "dst and work in src", workInDst: true, dstInSrc: true})
		if p.Size <= 8 {
			all = append(all, sharing{name: "dst and work of odd ranks in src", workInDst: true, dstInSrc: true, oddOnly: true})
		}
	}
	return all
}

// view is the location of a buffer.
type view struct{ memory, at, length int }

// The memories of a rank. Where Src and Dst share one memory, it is the vector, and each is located at its
// part of the vector.
const (
	sourceMemory = iota
	resultMemory
	workMemory
	scratchMemory
	stageMemory
)

// layout returns how many elements a rank contributes, and where in the vector Src and Dst begin.
func (p *Problem) layout(rank int) (src, srcAt, dstAt int) {
	src, _ = p.Lengths(rank)
	if p.Op.Parted() {
		at, _ := p.Part(rank)
		role := p.Op.Role(true)
		srcAt, dstAt = role.Gives.Of(0, at), role.Gets.Of(0, at)
	}
	return src, srcAt, dstAt
}

// layOut gives a rank its buffers for a call that it has just entered. Stage keeps its contents from call to
// call; every second call has the same half.
func (x *proof) layOut(rank int, p *Problem) {
	r := &x.ranks[rank]
	s := x.sharing
	if s.oddOnly && rank%2 == 0 {
		s = sharing{}
	}
	src, srcAt, dstAt := p.layout(rank)
	_, dst := p.Lengths(rank)
	r.views = [5]view{
		Src:     {sourceMemory, 0, src},
		Dst:     {resultMemory, 0, dst},
		Work:    {workMemory, 0, p.Count},
		Scratch: {scratchMemory, 0, r.scratch()},
		Stage:   {stageMemory, r.call % 2 * p.Stage, p.Stage},
	}
	lengths := [5]int{src, dst, p.Count, r.views[Scratch].length, 2 * p.Stage}
	if s.dstInSrc {
		r.views[Src].at = srcAt
		r.views[Dst] = view{sourceMemory, dstAt, dst}
		lengths[sourceMemory] = max(srcAt+src, dstAt+dst)
	}
	if s.workInDst && dst == p.Count {
		r.views[Work] = r.views[Dst]
	}
	for m, length := range lengths[:stageMemory] {
		r.memory[m].reset(length, x.event(rank))
	}
	if r.call == 0 {
		r.memory[stageMemory].reset(2*p.Stage, event{})
	}
}

// view returns where a rank finds a buffer of the owner, which may already be in another call.
func (x *proof) view(rank, owner int, b Buffer) view {
	if b == Stage {
		return x.ranks[rank].views[Stage]
	}
	return x.ranks[owner].views[b]
}

// scratch returns how many elements of Scratch a rank's plan needs.
func (r *prover) scratch() int {
	length := 0
	for i := range r.plan {
		for _, span := range r.plan[i].spans() {
			if span.Buffer == Scratch {
				length = max(length, span.Hi)
			}
		}
	}
	return length
}

// mayWrite reports whether elements of a memory may be written: elements of Src may be written only where
// they are also part of Dst.
func (r *prover) mayWrite(memory, lo, hi int) bool {
	if dst := r.views[Dst]; memory == sourceMemory {
		return dst.memory == sourceMemory && lo >= dst.at && hi <= dst.at+dst.length
	}
	return true
}

// same reports whether two spans of a rank are the same elements.
func (x *proof) same(rank int, a, b Span) bool {
	v, w := x.ranks[rank].views[a.Buffer], x.ranks[rank].views[b.Buffer]
	return v.memory == w.memory && v.at+a.Lo == w.at+b.Lo && a.length() == b.length()
}

// overlap reports whether two spans of a rank have elements in common.
func (x *proof) overlap(rank int, a, b Span) bool {
	v, w := x.ranks[rank].views[a.Buffer], x.ranks[rank].views[b.Buffer]
	return v.memory == w.memory && max(v.at+a.Lo, w.at+b.Lo) < min(v.at+a.Hi, w.at+b.Hi)
}
