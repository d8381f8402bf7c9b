package executor

import (
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

// vector is the address of elements, and their type.
type vector struct {
	p unsafe.Pointer
	t tensor.DType
}

// at returns the address of the element at an index.
func (v vector) at(index int) unsafe.Pointer { return advance(v.p, index*v.t.Bytes()) }

// first returns a span of the buffer at base. An empty span may be at the buffer's end, where no pointer may
// point: nothing is read there, so the start is returned instead.
func first(base unsafe.Pointer, t tensor.DType, s *plan.Span) vector {
	if s.Lo == s.Hi {
		return vector{base, t}
	}
	return vector{advance(base, s.Lo*t.Bytes()), t}
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
