package transporttest

import (
	"bytes"
	"errors"
	"math"
	"slices"
	"strings"
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

var memoryTests = []test{
	{"staging buffers", []int{2, 4, 5}, memory, staging},
	{"data beside the slots", []int{2, 4, 5}, memory, inline},
	{"slots", []int{2, 4}, memory, slots},
	{"reachable", []int{2}, memory, reachable},
	{"buffers", []int{2, 4}, memory, buffers},
	{"buffers given back", []int{2}, memory, buffersGivenBack},
	{"buffers of wrong size", []int{2}, memory, buffersWrong},
}

// staging: all ranks of a domain access the staging buffer of every rank, and no other rank does.
func staging(g *group) {
	length := -1
	for _, domain := range g.domains() {
		for _, m := range domain {
			for _, p := range domain {
				s := m.Memory().StagingBuffer(p.Rank())
				if length < 0 {
					length = len(s)
				}
				if len(s) != length || length == 0 || length%2 != 0 || uintptr(unsafe.Pointer(unsafe.SliceData(s)))%64 != 0 {
					g.Errorf("rank %d: the staging buffer of rank %d has %d bytes at %p, "+
						"want %d as all others have, an even number, and aligned to 64",
						m.Rank(), p.Rank(), len(s), unsafe.SliceData(s), length)
				}
			}
		}
	}
	g.each(func(m transport.Endpoint) {
		pattern(m.Memory().StagingBuffer(m.Rank()), m.Rank(), m.Rank(), 0)
		if err := start(m, 0, tensor.Memory{}); err != nil {
			g.Errorf("rank %d: %v", m.Rank(), err)
			return
		}
		for _, r := range domainOf(m) {
			if !bytes.Equal(m.Memory().StagingBuffer(r), pattern(make([]byte, length), r, r, 0)) {
				g.Errorf("rank %d sees other bytes in the staging buffer of rank %d than that wrote", m.Rank(), r)
			}
		}
		// Each writes a byte into all staging buffers.
		if err := pass(m, 1); err != nil {
			g.Errorf("rank %d: %v", m.Rank(), err)
			return
		}
		for _, r := range domainOf(m) {
			m.Memory().StagingBuffer(r)[length-1-m.Rank()] = byte(100 + m.Rank())
		}
		if err := pass(m, 2); err != nil {
			g.Errorf("rank %d: %v", m.Rank(), err)
			return
		}
		for _, r := range domainOf(m) {
			if got := m.Memory().StagingBuffer(m.Rank())[length-1-r]; got != byte(100+r) {
				g.Errorf("rank %d does not find in its staging buffer what rank %d wrote, but %d", m.Rank(), r, got)
			}
		}
	})
}

// inline: the data beside a slot arrives with flag 0, in every call, and is not that of another call or rank. The next
// call of a peer does not change it before this rank is in that call, too.
func inline(g *group) {
	together(g.shared(), func(m transport.Endpoint) {
		length := m.Capabilities().InlineBytes
		for seq := range 200 {
			m.Memory().Publish(&transport.Slot{Header: transport.Header{Seq: uint64(seq)}})
			own := m.Memory().Inline(m.Rank())
			if len(own) != length || length > 0 && uintptr(unsafe.Pointer(unsafe.SliceData(own)))%8 != 0 {
				g.Errorf("rank %d: %d bytes at %p beside its slot, want %d, aligned to 8", m.Rank(), len(own),
					unsafe.SliceData(own), length)
				return
			}
			pattern(own, m.Rank(), seq, 0)
			if err := errors.Join(m.Memory().Signal(0), m.Memory().Await(ctx, -1, 0)); err != nil {
				g.Errorf("rank %d: %v", m.Rank(), err)
				return
			}
			for _, r := range domainOf(m) {
				if got := m.Memory().Inline(r); !bytes.Equal(got, pattern(make([]byte, length), r, seq, 0)) {
					g.Errorf("call %d: rank %d reads %x beside the slot of rank %d", seq, m.Rank(), got, r)
				}
				if got := m.Memory().Peer(r).Seq; got != uint64(seq) {
					g.Errorf("call %d: rank %d finds call %d in the slot of rank %d", seq, m.Rank(), got, r)
				}
			}
		}
	})
}

// slots: all fields arrive, memory as the reader reaches it; and the slot of the previous call stays readable.
func slots(g *group) {
	domain := g.shared()
	together(domain, func(m transport.Endpoint) {
		src, dst := g.buffer(m, 64), g.buffer(m, 32)
		for seq := range 4 {
			// Unreachable memory has a length for peers, but no pointer.
			ordinary := tensor.HostMemory(make([]byte, 48))
			pattern(src.HostBytes(), m.Rank(), seq, 0)
			own := slotOf(m.Rank(), seq)
			own.Src, own.Dst = src, dst
			if seq == 3 {
				own.Dst = ordinary
			}
			m.Memory().Publish(&own)
			if err := errors.Join(m.Memory().Signal(0), m.Memory().Await(ctx, -1, 0)); err != nil {
				g.Errorf("rank %d: %v", m.Rank(), err)
				return
			}
			for _, r := range domainOf(m) {
				want, got := slotOf(r, seq), m.Memory().Peer(r)
				if got.Header != want.Header || got.Sum != want.Sum || got.Name != want.Name ||
					!slices.Equal(got.Shape, want.Shape) || got.Algorithm != want.Algorithm {
					g.Errorf("rank %d sees of rank %d %+v, want %+v", m.Rank(), r, *got, want)
				}
				if !bytes.Equal(got.Src.HostBytes(), pattern(make([]byte, 64), r, seq, 0)) {
					g.Errorf("rank %d reads other bytes in Src of rank %d", m.Rank(), r)
				}
				switch {
				case seq < 3:
					got.Dst.HostBytes()[m.Rank()] = byte(seq*50 + m.Rank())
				case got.Dst.Bytes != 48 || (got.Dst.Ptr != nil) != m.Memory().Reachable(ordinary) && r != m.Rank():
					g.Errorf("rank %d sees ordinary memory of rank %d as %+v, though Reachable says %v", m.Rank(), r, got.Dst,
						m.Memory().Reachable(ordinary))
				}
			}
			if err := pass(m, 1); err != nil {
				g.Errorf("rank %d: %v", m.Rank(), err)
				return
			}
			for _, r := range domainOf(m) {
				if seq < 3 && dst.HostBytes()[r] != byte(seq*50+r) {
					g.Errorf("rank %d does not find in Dst what rank %d wrote", m.Rank(), r)
				}
			}
		}
		// A slot without memory, and an empty one.
		m.Memory().Publish(&transport.Slot{})
		if err := errors.Join(m.Memory().Signal(0), m.Memory().Await(ctx, -1, 0)); err != nil {
			g.Errorf("rank %d: %v", m.Rank(), err)
			return
		}
		for _, r := range domainOf(m) {
			s := m.Memory().Peer(r)
			if s.Header != (transport.Header{}) || s.Name != "" || len(s.Shape) != 0 || s.Algorithm != "" ||
				s.Src.Bytes != 0 || s.Dst.Ptr != nil {
				g.Errorf("rank %d sees an empty slot of rank %d as %+v", m.Rank(), r, *s)
			}
		}
	})
}

func slotOf(rank, seq int) transport.Slot {
	s := transport.Slot{
		Header: transport.Header{
			Epoch: 1, Comm: 1 << 60, Seq: uint64(seq), Count: 1<<40 + 5, Names: 1<<63 + uint64(rank), Root: -1, Plan: 1 << 31,
			Op: 255, Reduce: 254, Type: 253, Order: 252,
		},
		Name:      strings.Repeat("weights/", 1+seq*rank) + "kernel",
		Algorithm: "recursive_doubling",
	}
	for d := range (seq + rank) % 5 {
		s.Shape = append(s.Shape, 1000*d+rank)
	}
	s.Sum = s.Header.Sum()
	return s
}

// reachable: the result for ordinary memory is that of the transport's description; its buffers are reachable.
func reachable(g *group) {
	m := g.shared()[0]
	ordinary := tensor.HostMemory(make([]byte, 64))
	if got := m.Memory().Reachable(ordinary); got == g.Processes {
		g.Errorf("Reachable says %v of ordinary memory", got)
	}
	if !m.Memory().Reachable(tensor.Memory{}) {
		g.Error("Reachable says no of memory without bytes")
	}
	mem, err := m.Memory().NewBuffer(1000)
	if err != nil {
		g.Fatal(err)
	}
	if !m.Memory().Reachable(mem) || !m.Memory().Reachable(mem.Slice(500, 1000)) {
		g.Error("Reachable returns false for the transport's own buffer, or a part of it")
	}
}

// buffers: zeroed, aligned, disjoint, and reachable by all of the domain.
func buffers(g *group) {
	domain := g.shared()
	together(domain, func(m transport.Endpoint) {
		var mems []tensor.Memory
		for _, size := range []int{1, 64, 65, 4096, 100_001, 3 << 20} {
			mem, err := m.Memory().NewBuffer(size)
			if err != nil {
				g.Errorf("rank %d: NewBuffer(%d): %v", m.Rank(), size, err)
				return
			}
			if mem.Bytes != size || uintptr(mem.Ptr)%64 != 0 || mem.Kind == tensor.Device {
				g.Errorf("NewBuffer(%d) returned %+v, want memory aligned to 64", size, mem)
			}
			if !bytes.Equal(mem.HostBytes(), make([]byte, size)) {
				g.Errorf("NewBuffer(%d) is not zeroed", size)
			}
			pattern(mem.HostBytes(), m.Rank(), size, 0)
			mems = append(mems, mem)
		}
		for _, mem := range mems {
			if !bytes.Equal(mem.HostBytes(), pattern(make([]byte, mem.Bytes), m.Rank(), mem.Bytes, 0)) {
				g.Errorf("rank %d: a buffer of %d bytes was changed by another", m.Rank(), mem.Bytes)
			}
		}
		for seq, mem := range mems {
			if err := start(m, seq, mem.Slice(mem.Bytes/3, mem.Bytes)); err != nil {
				g.Errorf("rank %d: %v", m.Rank(), err)
				return
			}
			for _, r := range domainOf(m) {
				want := pattern(make([]byte, mem.Bytes), r, mem.Bytes, 0)[mem.Bytes/3:]
				if got := m.Memory().Peer(r).Src.HostBytes(); !bytes.Equal(got, want) {
					g.Errorf("rank %d sees other bytes in a buffer of rank %d", m.Rank(), r)
				}
			}
			if err := pass(m, 1); err != nil {
				g.Errorf("rank %d: %v", m.Rank(), err)
				return
			}
			release(mem)
		}
	})
}

func release(mem tensor.Memory) {
	if mem.Owner != nil {
		mem.Owner.Release()
	}
}

// buffersGivenBack: released memory may be reused, zeroed; retired memory is not, while the group is open.
func buffersGivenBack(g *group) {
	a := g.shared()[0]
	const size = 1 << 20
	mem, err := a.Memory().NewBuffer(size)
	if err != nil {
		g.Fatal(err)
	}
	if mem.Owner != nil { // a second reference keeps it
		mem.Owner.Retain()
		mem.Owner.Release()
	}
	pattern(mem.HostBytes(), 1, 2, 3)
	held := unsafe.Pointer(mem.Ptr)
	a.Memory().Retire(mem)
	release(mem)
	for range 100 { // more than would fit if nothing were given back
		next, err := a.Memory().NewBuffer(size)
		if err != nil {
			g.Fatalf("after others were released: %v", err)
		}
		b := next.HostBytes()
		if b[0] != 0 || b[size-1] != 0 || bytes.Count(b, []byte{0}) != size {
			g.Fatal("memory given out again is not zeroed")
		}
		if lo := uintptr(next.Ptr); next.Owner != nil && lo < uintptr(held)+size && uintptr(held) < lo+size {
			g.Fatal("memory that was retired was given out again")
		}
		pattern(b, 1, 2, 3)
		release(next)
	}
}

func buffersWrong(g *group) {
	a := g.shared()[0]
	if _, err := a.Memory().NewBuffer(-1); err == nil {
		g.Error("NewBuffer(-1): no error")
	}
	if mem, err := a.Memory().NewBuffer(0); err != nil || mem.Bytes != 0 {
		g.Errorf("NewBuffer(0): %+v, %v", mem, err)
	}
	if _, err := a.Memory().NewBuffer(math.MaxInt); err == nil {
		g.Error("NewBuffer of more than half an address space: no error")
	}
	a.Close()
	if _, err := a.Memory().NewBuffer(64); !errors.Is(err, transport.ErrClosed) {
		g.Errorf("NewBuffer after Close: %v, want %v", err, transport.ErrClosed)
	}
}
