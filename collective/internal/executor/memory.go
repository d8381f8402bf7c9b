package executor

import (
	"bytes"
	"fmt"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective/plan"
)

// assign determines the memory of Dst, Work and Scratch. If other local ranks may have the same Dst, it is
// written only at the end.
func (x *Executor) assign(privateDst bool) {
	call, p := x.call, &x.plan.Problem
	src, dst := &call.Src, &call.Dst // copies would cost more than the rest of a small call's preparation
	x.dstAt, x.privateDst = dst.Ptr, privateDst && dst.Bytes > 0
	if x.privateDst {
		x.dstAt = x.memory.result.of(dst.Bytes)
		if p.Op == plan.Broadcast && x.rank == p.Root && src.Ptr == dst.Ptr {
			// The others must not write to it: it is read until the end.
			x.Group.writeOnce(x.local, call.Slot.Seq, dst.Ptr, nil)
		}
	}
	x.workAt = x.dstAt
	if x.plan.usesWork && (call.Partial != call.Type || dst.Bytes != p.Count*call.Type.Bytes()) {
		x.workAt = x.memory.work.of(p.Count * call.Partial.Bytes())
	}
	if x.plan.scratch > 0 {
		x.scratchAt = x.memory.scratch.of(x.plan.scratch * call.Partial.Bytes())
	}
}

// deliver copies the result from private memory to Dst.
func (x *Executor) deliver() {
	dst := x.call.Dst
	x.Group.writeOnce(x.local, x.call.Slot.Seq, dst.Ptr, func() {
		result := unsafe.Slice((*byte)(x.dstAt), dst.Bytes)
		p := &x.plan.Problem
		if p.Op != plan.AllGather {
			copy(dst.HostBytes(), result)
			return
		}
		// The contribution of a rank that is in place is there already, and may be read until that rank leaves.
		for r := range x.size {
			lo, hi := p.Part(r)
			lo, hi = lo*x.call.Type.Bytes(), hi*x.call.Type.Bytes()
			if to := dst.HostBytes()[lo:hi]; !bytes.Equal(to, result[lo:hi]) {
				copy(to, result[lo:hi])
			}
		}
	})
}

// own returns a span of this rank.
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
	return first(base, t, s)
}

// of returns a span of a rank of the domain.
func (x *Executor) of(rank int, s *plan.Span) vector {
	if rank == x.rank {
		return x.own(s)
	}
	switch s.Buffer {
	case plan.Src:
		return first(x.End.Peer(rank).Src.Ptr, x.call.Type, s)
	case plan.Dst:
		return first(x.End.Peer(rank).Dst.Ptr, x.call.Type, s)
	case plan.Stage:
		return first(x.stage(rank), x.call.Partial, s)
	}
	panic(fmt.Sprintf("executor: a plan reads %v of another rank", s.Buffer))
}

// stage returns the half of a rank's staging buffer that belongs to this call.
func (x *Executor) stage(rank int) unsafe.Pointer {
	buffer := x.End.StagingBuffer(rank)
	return advance(unsafe.Pointer(unsafe.SliceData(buffer)), x.half*len(buffer)/2)
}
