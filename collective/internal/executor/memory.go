package executor

import (
	"bytes"
	"fmt"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// memories is the memory that an executor owns.
type memories struct {
	result   buffer // where other local ranks have the same Dst
	work     buffer // Work where it is not Dst
	scratch  buffer // Scratch
	received [transport.PostsMax]buffer
	sent     [transport.PostsMax]buffer // frames whose type differs from that of their memory
	blocks   buffer                     // elements converted to another type
}

// buffer is memory that grows with the calls and is reused.
type buffer struct{ words []uint64 }

// of returns at least this many bytes.
func (b *buffer) of(bytes int) unsafe.Pointer {
	if n := (bytes + 7) / 8; n > len(b.words) {
		b.words = make([]uint64, n)
	}
	return unsafe.Pointer(unsafe.SliceData(b.words))
}

// assign determines the memory of Dst, Work and Scratch. If other local ranks may have the same Dst, it is
// written only at the end.
func (x *Executor) assign(privateDst bool) {
	call, p := x.call, &x.plan.Problem
	src, dst := call.Src, call.Dst
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

// deliver copies the result to Dst if it is not there yet.
func (x *Executor) deliver() {
	if !x.privateDst {
		return
	}
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

// vector is the address of elements, and their type.
type vector struct {
	p unsafe.Pointer
	t tensor.DType
}

// at returns the address of the element at an index.
func (v vector) at(index int) unsafe.Pointer { return advance(v.p, index*v.t.Bytes()) }

// own returns a span of this rank.
func (x *Executor) own(s plan.Span) vector {
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
func (x *Executor) of(rank int, s plan.Span) vector {
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

// first returns a span of the buffer at base. An empty span may be at the buffer's end, where no pointer may
// point: nothing is read there, so the start is returned instead.
func first(base unsafe.Pointer, t tensor.DType, s plan.Span) vector {
	if s.Lo == s.Hi {
		return vector{base, t}
	}
	return vector{advance(base, s.Lo*t.Bytes()), t}
}

// stage returns the half of a rank's staging buffer that belongs to this call.
func (x *Executor) stage(rank int) unsafe.Pointer {
	buffer := x.End.StagingBuffer(rank)
	return advance(unsafe.Pointer(unsafe.SliceData(buffer)), x.half*len(buffer)/2)
}

func advance(p unsafe.Pointer, bytes int) unsafe.Pointer {
	if p == nil || bytes == 0 {
		return p
	}
	return unsafe.Add(p, bytes)
}

// bytesAt returns n bytes at p.
func bytesAt(p unsafe.Pointer, n int) []byte {
	if n == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(p), n)
}
