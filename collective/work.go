package collective

import (
	"fmt"
	"slices"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/transport"
)

// work is one call on its way through its plan.
type work struct {
	x     *executor
	call  *Call
	count int
	acc   DType // of the elements of Work
	mean  bool

	inMemory bool           // the plan works in the peers' memory
	dst      unsafe.Pointer // else: where Dst lies, or the stage in its place
	work     unsafe.Pointer // and where Work lies
}

// assign finds the places of Dst and Work for a plan that exchanges frames. Dst is written only at the end if other local
// ranks may have the same: they cannot tell in advance. Work lies in Dst unless its elements are wider.
func (w *work) assign() {
	m := w.x.m
	w.dst = w.call.Dst.Ptr
	if m.team.local > 1 {
		w.dst = w.x.stage.of(w.call.Dst.Bytes)
		if w.call.Op == Broadcast && m.rank == w.call.Root && w.call.Src.Ptr == w.call.Dst.Ptr {
			// The others must not write to it: it is read until the end.
			m.team.writeOnce(m.local, w.x.header.Seq, w.call.Dst.Ptr, nil)
		}
	}
	w.work = w.dst
	if w.acc != w.call.Type {
		w.work = w.x.wide.of(w.count * w.acc.Bytes())
	}
}

// deliver brings the result to Dst if it does not lie there yet.
func (w *work) deliver() {
	dst := w.call.Dst
	if w.dst == dst.Ptr || dst.Bytes == 0 {
		return
	}
	m := w.x.m
	m.team.writeOnce(m.local, w.x.header.Seq, dst.Ptr, func() {
		copy(dst.HostBytes(), unsafe.Slice((*byte)(w.dst), dst.Bytes))
	})
}

// place returns where the first element of a span lies, and its type.
func (w *work) place(s plan.Span) (unsafe.Pointer, DType) {
	base, t := w.work, w.acc
	switch s.Buffer {
	case plan.Src:
		base, t = w.call.Src.Ptr, w.call.Type
	case plan.Dst:
		base, t = w.dst, w.call.Type
	}
	return advance(base, s.Lo*t.Bytes()), t
}

func advance(p unsafe.Pointer, bytes int) unsafe.Pointer {
	if p == nil {
		return nil
	}
	return unsafe.Add(p, bytes)
}

// step carries out one step.
func (w *work) step(s *plan.Step) error {
	x := w.x
	switch s.Kind {
	case plan.Signal:
		if s.Mark > 0 {
			return x.signal(s.Mark) // meet has done the first
		}
	case plan.Await:
		if s.Mark > 0 {
			return x.await(s.Mark)
		}
	case plan.Combine:
		w.combine(s)
	case plan.Pull:
		w.pull(s)
	case plan.Copy:
		w.copy(s)
	case plan.Scale:
		w.scale(s)
	case plan.Exchange:
		return w.exchange(s)
	default:
		panic(fmt.Sprintf("collective: no step of kind %d", s.Kind))
	}
	return nil
}

// stop reports whether the communicator has failed, so that what is left of a call in memory is left out. Nothing is left
// out if some ranks are of another team, which would not learn of it.
func (w *work) stop() bool {
	t := w.x.m.team
	if t.fate.Load() == sound || t.local < t.size {
		return false
	}
	t.torn.Store(true)
	return true
}

func (w *work) combine(s *plan.Step) {
	x := w.x
	x.src, x.dst = x.src[:0], x.dst[:0]
	for r := range x.m.team.size {
		slot := x.m.marker.Peer(r)
		x.src = append(x.src, slot.Src.Ptr)
		if !slices.Contains(x.dst, slot.Dst.Ptr) {
			x.dst = append(x.dst, slot.Dst.Ptr)
		}
	}
	tree := kernel.Tree{Op: kernelOp(w.call.Reduce), Type: w.call.Type, Float32: w.acc != w.call.Type}
	if w.mean {
		tree.Divide = x.m.team.size
	}
	segment := segmentBytes / w.call.Type.Bytes()
	for lo := s.In.Lo; lo < s.In.Hi && !w.stop(); lo += segment {
		tree.Reduce(x.scratch, x.dst, x.src, lo, min(lo+segment, s.In.Hi))
	}
}

// pull copies from a peer. Of the ranks that share a destination the lowest does it.
func (w *work) pull(s *plan.Step) {
	m := w.x.m
	own := w.call.Dst.Ptr
	for r := range m.rank {
		if m.marker.Peer(r).Dst.Ptr == own {
			return
		}
	}
	from := m.marker.Peer(s.From)
	w.move(own, from.Src.Ptr, s.Out.Lo, s.In.Lo, s.In.Hi)
}

// move copies elements of the call's type, in segments.
func (w *work) move(dst, src unsafe.Pointer, at, lo, hi int) {
	size := w.call.Type.Bytes()
	if advance(dst, at*size) == advance(src, lo*size) {
		return
	}
	for n := segmentBytes / size; lo < hi && !w.stop(); {
		n = min(n, hi-lo)
		kernel.Convert(w.call.Type, w.call.Type, advance(dst, at*size), advance(src, lo*size), n)
		lo, at = lo+n, at+n
	}
}

// copy copies within the rank. Of the ranks that share a destination in memory the lowest writes it, as in pull.
func (w *work) copy(s *plan.Step) {
	if w.inMemory {
		m := w.x.m
		for r := range m.rank {
			if m.marker.Peer(r).Dst.Ptr == w.call.Dst.Ptr {
				return
			}
		}
		w.move(w.call.Dst.Ptr, w.call.Src.Ptr, s.Out.Lo, s.In.Lo, s.In.Hi)
		return
	}
	dst, to := w.place(s.Out)
	src, from := w.place(s.In)
	if n := s.In.Hi - s.In.Lo; n > 0 && dst != src {
		w.each(n, max(to.Bytes(), from.Bytes()), func(lo, hi int) {
			kernel.Convert(to, from, advance(dst, lo*to.Bytes()), advance(src, lo*from.Bytes()), hi-lo)
		})
	}
}

func (w *work) scale(s *plan.Step) {
	if !w.mean || w.x.m.team.size == 1 { // the tree over one rank leaves it as it is, signalling NaNs included
		return
	}
	p, t := w.place(s.Out)
	w.each(s.Out.Hi-s.Out.Lo, t.Bytes(), func(lo, hi int) {
		at := advance(p, lo*t.Bytes())
		kernel.Scale(t, at, at, hi-lo, w.x.m.team.size)
	})
}

// each calls f for the segments of n elements of some bytes.
func (w *work) each(n, bytes int, f func(lo, hi int)) {
	for lo, segment := 0, segmentBytes/bytes; lo < n; lo += segment {
		f(lo, min(lo+segment, n))
	}
}

// exchange sends a span and receives one, segment by segment. Both ends name the same elements, so they cut them alike.
func (w *work) exchange(s *plan.Step) error {
	x := w.x
	m := x.m
	out, outType := w.place(s.Out)
	in, inType := w.place(s.In)
	length := s.In.Hi - s.In.Lo
	size := inType.Bytes()
	if s.From < 0 {
		length, size = s.Out.Hi-s.Out.Lo, outType.Bytes()
	}
	if size == 0 { // a barrier moves nothing
		size = 1
	}
	for lo, segment := 0, segmentBytes/size; lo < length || lo == 0; lo += segment {
		n := min(segment, length-lo)
		if m.marker == nil && m.team.fate.Load() != sound {
			return errFailed
		}
		var frame transport.Frame
		var buf []byte
		if s.To >= 0 {
			frame.Header = x.header
			frame.Frame = x.sent[s.To]
			x.sent[s.To]++
			frame.Data = bytesAt(out, lo*size, n*size)
		}
		if s.From >= 0 {
			buf = bytesAt(in, lo*size, n*size)
			if s.Side != plan.Replace {
				buf = bytesAt(x.received.of(segmentBytes), 0, n*size)
			}
		}
		x.wait.to, x.wait.from = s.To, s.From
		if err := m.end.Exchange(&x.wait, s.To, frame, s.From, buf); err != nil {
			return err
		}
		if s.From >= 0 && s.Side != plan.Replace && n > 0 {
			op, own, other := kernelOp(w.call.Reduce), advance(in, lo*size), unsafe.Pointer(&buf[0])
			if s.Side == plan.Left {
				kernel.Reduce(op, inType, own, other, own, n)
			} else {
				kernel.Reduce(op, inType, own, own, other, n)
			}
		}
		if length == 0 {
			break
		}
	}
	x.wait.to, x.wait.from = -1, -1
	return nil
}

// judge holds the header of a frame that arrives against the current call.
func (x *executor) judge(peer int, h transport.Header) error {
	own := x.header
	own.Frame = x.got[peer]
	m := x.m
	if h == own && peer == m.wait.from {
		x.got[peer]++
		m.wait.from = -1 // it is here
		return nil
	}
	if h == own || peer != m.wait.from && h.Seq > own.Seq && h.Comm == own.Comm && h.Epoch == own.Epoch {
		return nil // of this call, or of a later one that this rank has yet to come to
	}
	return m.mismatched(peer, &h, m.team.label(peer, h.Seq))
}

// mismatched says how a peer's call differs from this rank's; theirs is nil if the text behind its header is not known.
func (m *member) mismatched(peer int, h *transport.Header, theirs *label) error {
	own := m.header
	own.Frame = m.got[peer]
	mine := &m.labels[own.Seq&1]
	err := m.failure(ErrMismatch, fmt.Errorf("rank %d calls %s, rank %d calls %s: %s",
		peer, describe(h, theirs), m.rank, describe(&own, mine), differ(&own, h, mine, theirs)))
	err.Peers = []int{peer}
	return err
}

// label returns what a local rank's current call is called, or nil if the rank is another process's. The rank waits for
// its frame to be taken meanwhile, so the label stays what it is.
func (t *team) label(rank int, seq uint64) *label {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, m := range t.members {
		if m.rank == rank {
			return &m.labels[seq&1]
		}
	}
	return nil
}

// bytesAt returns n bytes that lie some bytes after p.
func bytesAt(p unsafe.Pointer, at, n int) []byte {
	if n == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Add(p, at)), n)
}

// buffer is memory that grows with the calls and is kept.
type buffer struct{ words []uint64 }

// of returns the first of at least so many bytes.
func (b *buffer) of(bytes int) unsafe.Pointer {
	if n := (bytes + 7) / 8; n > len(b.words) {
		b.words = make([]uint64, n)
	}
	return unsafe.Pointer(unsafe.SliceData(b.words))
}

func kernelOp(r ReduceOp) kernel.Op {
	switch r {
	case Min:
		return kernel.Min
	case Max:
		return kernel.Max
	case Prod:
		return kernel.Prod
	}
	return kernel.Sum
}
