package executor

import (
	"bytes"
	"fmt"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/tensor"
)

// assign determines the memory of Dst, Work and Scratch. If other local ranks may have the same Dst, it is
// written only at the end.
func (x *Executor) assign(privateDst bool) {
	call, p := x.call, &x.plan.Problem
	src, dst := &call.Src, &call.Dst // copies would cost more than the rest of a small call's preparation
	x.dstAt, x.privateDst = dst.Ptr, privateDst && dst.Bytes > 0
	if x.privateDst {
		x.dstAt, x.dstRegions = x.memory.result.of(dst.Bytes), nil
		if p.Op == plan.Broadcast && x.rank == p.Root && src.Ptr == dst.Ptr {
			// The others must not write to it: it is read until the end.
			x.Group.writeOnce(x.local, call.Slot.Seq, dst.Ptr, nil)
		}
	}
	x.workAt, x.workRegions = x.dstAt, x.dstRegions
	if x.plan.usesWork && (call.Partial != call.Type || dst.Bytes != p.Count*call.Type.Bytes()) {
		x.workAt, x.workRegions = x.memory.work.of(p.Count*call.Partial.Bytes()), nil
	}
	if x.plan.scratch > 0 {
		x.scratchAt = x.memory.scratch.of(x.plan.scratch * call.Partial.Bytes())
	}
}

// deliver copies the result from private memory to Dst.
func (x *Executor) deliver() {
	dst := x.call.Dst
	x.Group.writeOnce(x.local, x.call.Slot.Seq, dst.Ptr, func() {
		result, p := unsafe.Slice((*byte)(x.dstAt), dst.Bytes), &x.plan.Problem
		to := view{vector: vector{dst.Ptr, tensor.Uint8}}
		if x.dstLayout.cut() {
			to.t, to.regions = x.call.Type, &x.dstLayout
		}
		if p.Op != plan.AllGather {
			to.deliver(result, 0, len(result)/to.t.Bytes(), false)
			return
		}
		// The contribution of a rank that is in place is there already, and may be read until that rank leaves.
		for r := range x.size {
			lo, hi := p.Part(r)
			unit := x.call.Type.Bytes() / to.t.Bytes()
			to.deliver(result, lo*unit, hi*unit, true)
		}
	})
}

// deliver copies elements [lo, hi) of a result to their place. If skip is set, it omits pieces that are there already.
func (v *view) deliver(result []byte, lo, hi int, skip bool) {
	for size := v.t.Bytes(); lo < hi; {
		p, n := v.piece(lo, hi-lo)
		if to, from := bytesAt(p, n*size), result[lo*size:(lo+n)*size]; !skip || !bytes.Equal(to, from) {
			copy(to, from)
		}
		lo += n
	}
}

// own returns a span of this rank, which must lie in one region.
func (x *Executor) own(s *plan.Span) vector {
	base, t := x.workAt, x.call.Partial
	switch s.Buffer {
	case plan.Src:
		base, t = x.call.Src.Ptr, x.call.Type
	case plan.Dst:
		base, t = x.dstAt, x.call.Type
	case plan.Scratch:
		base = x.scratchAt
	case plan.Stage:
		base = x.stage(x.rank)
	}
	return x.locate(x.rank, base, t, s)
}

// locate returns a span of a rank's buffer, which begins at base unless it lies in several regions.
func (x *Executor) locate(rank int, base unsafe.Pointer, t tensor.DType, s *plan.Span) vector {
	if x.inRegions && s.Lo < s.Hi {
		if r := x.regionsOf(rank, s.Buffer); r.cut() {
			p, _ := r.find(s.Lo, t.Bytes())
			return vector{p, t}
		}
	}
	return first(base, t, s)
}

// of returns a span of a rank of the domain, which must lie in one region.
func (x *Executor) of(rank int, s *plan.Span) vector {
	if rank == x.rank {
		return x.own(s)
	}
	switch s.Buffer {
	case plan.Src:
		return x.locate(rank, x.shared.Peer(rank).Src.Ptr, x.call.Type, s)
	case plan.Dst:
		return x.locate(rank, x.shared.Peer(rank).Dst.Ptr, x.call.Type, s)
	case plan.Stage:
		return first(x.stage(rank), x.call.Partial, s)
	}
	panic(fmt.Sprintf("executor: a plan reads %v of another rank", s.Buffer))
}

// stage returns where a rank's contribution to this call is: in its half of the staging buffer, or beside its slot.
func (x *Executor) stage(rank int) unsafe.Pointer {
	if x.inline {
		return unsafe.Pointer(unsafe.SliceData(x.shared.Inline(rank)))
	}
	if x.shared == nil {
		return nil // only spans without elements are there
	}
	buffer := x.shared.StagingBuffer(rank)
	return advance(unsafe.Pointer(unsafe.SliceData(buffer)), x.half*len(buffer)/2)
}
