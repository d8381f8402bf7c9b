package executor

import (
	"slices"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
)

// regions is a vector that lies in several memories, one after the other. Nil or empty: it is contiguous.
type regions struct {
	starts []int            // of each region: its first element; the regions are not empty
	at     []unsafe.Pointer // where it lies
	count  int              // elements of the vector
}

// set makes r the vector of the memories of a list, whose elements have this size, and returns its first address and
// its bytes as one memory. If only one memory is not empty, r is contiguous.
func (r *regions) set(list []tensor.Memory, size int) (all tensor.Memory) {
	r.starts, r.at, r.count = r.starts[:0], r.at[:0], 0
	for i := range list {
		m := &list[i]
		if m.Bytes == 0 {
			continue
		}
		r.starts, r.at = append(r.starts, r.count), append(r.at, m.Ptr)
		r.count += m.Bytes / size
	}
	all.Bytes = r.count * size
	if len(r.at) > 0 {
		all.Ptr = r.at[0]
	}
	if len(r.at) == 1 {
		r.clear()
	}
	return all
}

// clear makes r contiguous, and keeps no memory alive.
func (r *regions) clear() {
	clear(r.at)
	r.starts, r.at = r.starts[:0], r.at[:0]
}

// cut reports whether r consists of several regions.
func (r *regions) cut() bool { return r != nil && len(r.at) > 0 }

// find returns the address of an element, and how many elements the region has from there on.
func (r *regions) find(element, size int) (p unsafe.Pointer, n int) {
	lo, hi := 0, len(r.starts) // the region is in [lo, hi)
	for hi-lo > 1 {
		if mid := (lo + hi) / 2; r.starts[mid] <= element {
			lo = mid
		} else {
			hi = mid
		}
	}
	end := r.count
	if hi < len(r.starts) {
		end = r.starts[hi]
	}
	return advance(r.at[lo], (element-r.starts[lo])*size), end - element
}

// layOut sets the regions of the call's Src and Dst, before any peer can read them. It is called if this call or the
// previous one has lists.
func (x *Executor) layOut(call *Call) {
	x.lists = call.SrcList != nil || call.DstList != nil
	x.srcLayout.clear()
	x.dstLayout.clear()
	if call.SrcList != nil {
		call.Src = x.srcLayout.set(call.SrcList, call.Type.Bytes())
	}
	if call.DstList != nil {
		call.Dst = x.dstLayout.set(call.DstList, call.Type.Bytes())
	}
	x.inRegions = x.srcLayout.cut() || x.dstLayout.cut()
	x.dstRegions = &x.dstLayout
}

// reachable reports whether all ranks of the domain reach the memories of a list: they must also see the list, so they
// must be in this process.
func (x *Executor) reachable(list []tensor.Memory) bool {
	ranks := x.Group.Ranks()
	for _, r := range x.Domain {
		if !slices.ContainsFunc(ranks, func(l *Executor) bool { return l.rank == r }) {
			return false
		}
	}
	return !slices.ContainsFunc(list, func(m tensor.Memory) bool { return m.Bytes > 0 && !x.shared.Reachable(m) })
}

// peerRegions notes whether ranks of the domain have a Src or a Dst in several regions, which this rank accesses.
func (x *Executor) peerRegions() {
	for _, l := range x.Group.Ranks() {
		x.inRegions = x.inRegions || l.cut[x.half].Load() && slices.Contains(x.Domain, l.rank)
	}
}

// regionsOf returns the regions of a rank's buffer.
func (x *Executor) regionsOf(rank int, b plan.Buffer) *regions {
	if rank == x.rank {
		switch b {
		case plan.Src:
			return &x.srcLayout
		case plan.Dst:
			return x.dstRegions
		case plan.Work:
			return x.workRegions
		}
		return nil
	}
	if !published(plan.Span{Buffer: b}) {
		return nil
	}
	for _, l := range x.Group.Ranks() {
		switch {
		case l.rank != rank:
		case b == plan.Src:
			return &l.srcLayout
		default:
			return &l.dstLayout
		}
	}
	return nil
}

// inPieces executes a step whose spans may lie in several regions each: piece by piece.
func (x *Executor) inPieces(s *plan.Step) error {
	n := max(s.In.Hi-s.In.Lo, s.Out.Hi-s.Out.Lo)
	if n == 0 {
		return x.step(s)
	}
	p := &x.piece
	for *p = *s; n > 0; {
		length := x.contiguous(p, n)
		spans := [...]*plan.Span{&p.In, &p.Out, &p.Own, &p.Keep}
		for _, span := range spans {
			if span.Hi > span.Lo {
				span.Hi = span.Lo + length
			}
		}
		if err := x.step(p); err != nil {
			return err
		}
		n -= length
		for _, span := range spans {
			if span.Hi > span.Lo {
				span.Lo, span.Hi = span.Hi, span.Hi+n
			}
		}
	}
	return nil
}

// contiguous returns how many of the first n elements of a step lie in one region, in each of its spans.
func (x *Executor) contiguous(s *plan.Step, n int) int {
	reads, writes := x.rank, x.rank
	switch s.Kind {
	case plan.Pull:
		reads = s.From
	case plan.Push:
		writes = s.To
	case plan.Combine:
		for r := s.Ranks.Lo; r < s.Ranks.Hi; r++ {
			n = x.inRegion(r, s.In, n)
		}
		if s.To >= 0 {
			writes = s.To
			break
		}
		for _, r := range x.Domain {
			n = x.inRegion(r, s.Out, n)
		}
	}
	n = x.inRegion(writes, s.Out, x.inRegion(reads, s.In, n))
	return x.inRegion(x.rank, s.Own, x.inRegion(x.rank, s.Keep, n))
}

// inRegion returns how many of the first n elements of a rank's span lie in one region.
func (x *Executor) inRegion(rank int, s plan.Span, n int) int {
	if r := x.regionsOf(rank, s.Buffer); s.Hi > s.Lo && r.cut() {
		_, most := r.find(s.Lo, 0)
		n = min(n, most)
	}
	return n
}

// view is a span of this rank, whose elements may lie in several regions.
type view struct {
	vector
	regions *regions // nil: contiguous
	first   int      // the index in regions of the span's first element
}

// view returns a span of this rank.
func (x *Executor) view(s plan.Span) view {
	v := view{vector: x.own(&s)}
	if r := x.regionsOf(x.rank, s.Buffer); r.cut() && s.Hi > s.Lo {
		if _, most := r.find(s.Lo, 0); most < s.Hi-s.Lo {
			v.regions, v.first = r, s.Lo
		}
	}
	return v
}

// piece returns the address of element i of the view, and how many of the n elements from there on are contiguous.
func (v *view) piece(i, n int) (unsafe.Pointer, int) {
	if v.regions == nil || n == 0 {
		return v.at(i), n
	}
	p, most := v.regions.find(v.first+i, v.t.Bytes())
	return p, min(n, most)
}

// read copies n elements from index i on, converted to a type.
func (v *view) read(to unsafe.Pointer, t tensor.DType, i, n int) {
	for at := 0; at < n; {
		p, m := v.piece(i+at, n-at)
		kernel.Convert(t, v.t, advance(to, at*t.Bytes()), p, m)
		at += m
	}
}

// write stores n elements of a type from index i on.
func (v *view) write(from unsafe.Pointer, t tensor.DType, i, n int) {
	for at := 0; at < n; {
		p, m := v.piece(i+at, n-at)
		kernel.Convert(v.t, t, p, advance(from, at*t.Bytes()), m)
		at += m
	}
}
