package collective

import (
	"bytes"
	"fmt"
	"slices"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// work is the state of one call while its plan is executed.
type work struct {
	x     *executor
	call  *Call
	count int
	acc   DType // of the elements of Work, Scratch and Stage
	wire  DType // of the elements of frames
	mean  bool

	src, dst tensor.Memory // those that the call uses
	half     int           // of the staging buffers
	// past the plan's last Await: the rest is executed in any case, because the other ranks may have finished
	committed  bool
	offset     int  // added to the numbers of the plan's flags
	sharedDst  bool // ranks may share one Dst: the lowest of them writes results that are the same for all
	privateDst bool // other local ranks have the same Dst: the result is kept in private memory until the end

	to      unsafe.Pointer // where Dst is for this rank
	work    unsafe.Pointer // and Work
	scratch unsafe.Pointer // and Scratch
}

// assign determines the memory of Dst, Work and Scratch. If other local ranks may have the same Dst, it is
// written only at the end.
func (w *work) assign(s *script, privateDst bool) {
	x := w.x
	w.to, w.privateDst = w.dst.Ptr, privateDst && w.dst.Bytes > 0
	if w.privateDst {
		w.to = x.shadow.of(w.dst.Bytes)
		if w.call.Op == Broadcast && x.m.rank == w.call.Root && w.src.Ptr == w.dst.Ptr {
			// The others must not write to it: it is read until the end.
			x.m.team.writeOnce(x.m.local, x.header.Seq, w.dst.Ptr, nil)
		}
	}
	w.work = w.to
	if s.work && (w.acc != w.call.Type || w.dst.Bytes != w.count*w.call.Type.Bytes()) {
		w.work = x.own.of(w.count * w.acc.Bytes())
	}
	if s.scratch > 0 {
		w.scratch = x.private.of(s.scratch * w.acc.Bytes())
	}
}

// deliver copies the result to Dst if it is not there yet.
func (w *work) deliver() {
	if !w.privateDst {
		return
	}
	m := w.x.m
	m.team.writeOnce(m.local, w.x.header.Seq, w.dst.Ptr, func() {
		result := unsafe.Slice((*byte)(w.to), w.dst.Bytes)
		if w.call.Op != AllGather {
			copy(w.dst.HostBytes(), result)
			return
		}
		// The contribution of a rank that is in place is there already, and may be read until that rank
		// leaves.
		for r := range m.team.size {
			lo, hi := w.call.part(r, m.team.size, w.count)
			lo, hi = lo*w.call.Type.Bytes(), hi*w.call.Type.Bytes()
			if to := w.dst.HostBytes()[lo:hi]; !bytes.Equal(to, result[lo:hi]) {
				copy(to, result[lo:hi])
			}
		}
	})
}

// place returns the address of the first element of a span of this rank, and its type.
func (w *work) place(s plan.Span) (unsafe.Pointer, DType) {
	base, t := w.work, w.acc
	switch s.Buffer {
	case plan.Src:
		base, t = w.src.Ptr, w.call.Type
	case plan.Dst:
		base, t = w.to, w.call.Type
	case plan.Scratch:
		base = w.scratch
	case plan.Stage:
		base = w.stage(w.x.m.rank)
	}
	return advance(base, offset(s, t)), t
}

// offset returns the distance in bytes of a span from its buffer's start. An empty span may be at the
// buffer's end, where no pointer may point: nothing is read there, so the start is returned instead.
func offset(s plan.Span, t DType) int {
	if s.Lo == s.Hi {
		return 0
	}
	return s.Lo * t.Bytes()
}

// placeOf returns the address and the type for a rank of the domain.
func (w *work) placeOf(rank int, s plan.Span) (unsafe.Pointer, DType) {
	if rank == w.x.m.rank {
		return w.place(s)
	}
	switch s.Buffer {
	case plan.Src:
		return advance(w.x.m.site.marker.Peer(rank).Src.Ptr, offset(s, w.call.Type)), w.call.Type
	case plan.Dst:
		return advance(w.x.m.site.marker.Peer(rank).Dst.Ptr, offset(s, w.call.Type)), w.call.Type
	case plan.Stage:
		return advance(w.stage(rank), offset(s, w.acc)), w.acc
	}
	panic(fmt.Sprintf("collective: a plan reads %v of another rank", s.Buffer))
}

// stage returns the half of a rank's staging buffer that belongs to this call.
func (w *work) stage(rank int) unsafe.Pointer {
	s := &w.x.m.site
	return advance(unsafe.Pointer(unsafe.SliceData(s.marker.StagingBuffer(rank))), w.half*len(s.marker.StagingBuffer(rank))/2)
}

func advance(p unsafe.Pointer, bytes int) unsafe.Pointer {
	if p == nil || bytes == 0 {
		return p
	}
	return unsafe.Add(p, bytes)
}

// steps executes steps of the plan.
func (w *work) steps(steps []plan.Step) error {
	for len(steps) > 0 {
		n, err := 1, error(nil)
		if steps[0].Kind == plan.Exchange {
			n = max(1, plan.InTurns(w.x.m.team.size, steps))
		}
		if n > 1 {
			err = w.inTurns(steps[:n])
		} else {
			err = w.step(&steps[0])
		}
		if err != nil {
			return err
		}
		steps = steps[n:]
	}
	return nil
}

func (w *work) step(s *plan.Step) error {
	switch s.Kind {
	case plan.Signal:
		if s.Mark+w.offset > 0 && w.x.m.site.marker != nil {
			return w.x.signal(s.Mark + w.offset) // meet has set the first flag
		}
	case plan.Await:
		if s.Mark+w.offset > 0 && w.x.m.site.marker != nil {
			return w.x.await(s.From, s.Mark+w.offset)
		}
	case plan.Combine:
		return w.combine(s)
	case plan.Pull:
		from, t := w.placeOf(s.From, s.In)
		if to, own := w.place(s.Out); !w.anothers(s.Out.Buffer) {
			return w.move(s, to, own, from, t)
		}
	case plan.Push:
		from, t := w.place(s.In)
		to, other := w.placeOf(s.To, s.Out)
		return w.move(s, to, other, from, t)
	case plan.Copy:
		from, t := w.place(s.In)
		if to, own := w.place(s.Out); !w.anothers(s.Out.Buffer) {
			return w.move(s, to, own, from, t)
		}
	case plan.Fold:
		return w.fold(s)
	case plan.Scale:
		return w.scale(s)
	case plan.Exchange:
		return w.exchange(s)
	default:
		panic(fmt.Sprintf("collective: no step of kind %d", s.Kind))
	}
	return nil
}

// anothers reports whether a lower rank has the same Dst, and so writes to it.
func (w *work) anothers(b plan.Buffer) bool {
	if !w.sharedDst || b != plan.Dst {
		return false
	}
	m := w.x.m
	for _, r := range m.site.domain {
		if r == m.rank {
			return false
		}
		if m.site.marker.Peer(r).Dst.Ptr == w.dst.Ptr {
			return true
		}
	}
	return false
}

// stop checks whether the communicator has failed. Then a call that this rank has not entered yet ends with
// an error. If all ranks are in one process and one team, the rest of the call is skipped (skip) up to its
// last flag; a call of several processes ends with an error. If all ranks are in one process but in several
// teams, or past the last flag, the call continues: the others would not learn of the failure.
func (w *work) stop() (skip bool, err error) {
	t := w.x.m.team
	switch {
	case !w.x.m.front.Failing():
		return false, nil
	case !w.x.m.site.whole:
		return true, errFailed
	case t.local < t.size || w.committed:
		return false, nil
	case !w.x.wait.firm:
		return true, errFailed // the call is not torn: the others may still be in the previous call
	}
	t.torn.Store(true)
	return true, nil
}

// each calls f for the segments of n elements, unless the communicator has failed.
func (w *work) each(n, bytes int, f func(lo, hi int)) error {
	for lo, segment := 0, segmentBytes/bytes; lo < n; lo += segment {
		if skip, err := w.stop(); skip {
			return err
		}
		f(lo, min(lo+segment, n))
	}
	return nil
}

// streamBytes is how much a domain reads and writes in a call for which results are written by non-temporal
// (streaming) stores: the caches would not keep them until they are read.
const streamBytes = 24 << 20

// large reports whether the call moves at least that much.
func (w *work) large() bool {
	return (w.src.Bytes+w.dst.Bytes)*len(w.x.m.site.domain) >= streamBytes
}

// move copies the elements of a step, converting them if their types differ.
func (w *work) move(s *plan.Step, to unsafe.Pointer, toType DType, from unsafe.Pointer, fromType DType) error {
	if to == from {
		return nil
	}
	streams := toType == fromType && s.Out.Buffer == plan.Dst && w.large()
	n := s.In.Hi - s.In.Lo
	for segment := segmentBytes / max(toType.Bytes(), fromType.Bytes()); n > 0; n -= segment {
		if skip, err := w.stop(); skip {
			return err
		}
		if streams {
			kernel.Stream(to, from, min(segment, n)*toType.Bytes())
		} else {
			kernel.Convert(toType, fromType, to, from, min(segment, n))
		}
		to, from = step(to, segment*toType.Bytes(), n > segment), step(from, segment*fromType.Bytes(), n > segment)
	}
	return nil
}

// step advances a pointer if more memory follows.
func step(p unsafe.Pointer, bytes int, more bool) unsafe.Pointer {
	if more {
		return unsafe.Add(p, bytes)
	}
	return p
}

// combine combines the operands of some ranks of the domain.
func (w *work) combine(s *plan.Step) error {
	x := w.x
	n := s.In.Hi - s.In.Lo
	if n == 0 {
		return nil
	}
	x.in, x.out = x.in[:0], x.out[:0]
	for r := s.Ranks.Lo; r < s.Ranks.Hi; r++ {
		p, t := w.placeOf(r, s.In)
		if r == x.m.rank && s.Own.Hi > s.Own.Lo {
			p, t = w.place(s.Own)
		}
		x.in = append(x.in, vector{p, t})
	}
	if s.To >= 0 {
		p, t := w.placeOf(s.To, s.Out)
		x.out = append(x.out, vector{p, t})
	} else {
		for _, r := range x.m.site.domain {
			p, t := w.placeOf(r, s.Out)
			if v := (vector{p, t}); !slices.Contains(x.out, v) {
				x.out = append(x.out, v)
			}
		}
	}
	if s.Keep.Hi > s.Keep.Lo {
		p, t := w.place(s.Keep)
		x.out = append(x.out, vector{p, t})
	}
	tree := kernel.Tree{Op: kernelOp(w.call.Reduce), Type: x.in[0].t}
	if w.mean && s.Ranks.Lo == 0 && s.Ranks.Hi == x.m.team.size {
		tree.Divide = x.m.team.size
	}
	other := func(v vector) bool { return v.t != tree.Type }
	var err error
	if slices.ContainsFunc(x.in, other) || slices.ContainsFunc(x.out, other) {
		tree.Type = w.acc
		err = w.wide(tree, n)
	} else {
		tree.Float32 = w.acc != tree.Type
		tree.Stream = s.Out.Buffer == plan.Dst && w.large()
		err = w.trees(tree, n)
	}
	clear(x.in)
	clear(x.out)
	return err
}

// vector is the address of elements, and their type.
type vector struct {
	p unsafe.Pointer
	t DType
}

// trees reduces n elements of one type, segment by segment.
func (w *work) trees(tree kernel.Tree, n int) error {
	x := w.x
	x.src, x.dst = x.src[:0], x.dst[:0]
	for _, v := range x.in {
		x.src = append(x.src, v.p)
	}
	for _, v := range x.out {
		x.dst = append(x.dst, v.p)
	}
	defer clear(x.src)
	defer clear(x.dst)
	segment := segmentBytes / tree.Type.Bytes()
	for lo := 0; lo < n; lo += segment {
		if skip, err := w.stop(); skip {
			return err
		}
		tree.Reduce(x.scratch, x.dst, x.src, lo, min(lo+segment, n))
	}
	return nil
}

// wideElements is how many elements of each rank are widened at once.
const wideElements = 1024

// wide reduces n elements that do not all have the type of the partial sums: block by block they are widened,
// reduced and narrowed.
func (w *work) wide(tree kernel.Tree, n int) error {
	x := w.x
	size := w.acc.Bytes()
	block := wideElements * size
	base := x.wide.of((len(x.in) + 1) * block)
	x.src, x.dst = x.src[:0], append(x.dst[:0], base)
	for i := range x.in {
		x.src = append(x.src, unsafe.Add(base, (i+1)*block))
	}
	for lo := 0; lo < n; lo += wideElements {
		if lo%(segmentBytes/size) == 0 {
			if skip, err := w.stop(); skip {
				return err
			}
		}
		count := min(wideElements, n-lo)
		for i, v := range x.in {
			kernel.Convert(w.acc, v.t, x.src[i], unsafe.Add(v.p, lo*v.t.Bytes()), count)
		}
		tree.Reduce(x.scratch, x.dst, x.src, 0, count)
		for _, v := range x.out {
			kernel.Convert(v.t, w.acc, unsafe.Add(v.p, lo*v.t.Bytes()), base, count)
		}
	}
	return nil
}

// fold combines two spans of this rank.
func (w *work) fold(s *plan.Step) error {
	out, outType := w.place(s.Out)
	in, inType := w.place(s.In)
	return w.each(s.Out.Hi-s.Out.Lo, max(outType.Bytes(), inType.Bytes()), func(lo, hi int) {
		other := advance(in, lo*inType.Bytes())
		if inType != outType {
			other = w.x.received[0].of(segmentBytes)
			kernel.Convert(outType, inType, other, advance(in, lo*inType.Bytes()), hi-lo)
		}
		at := advance(out, lo*outType.Bytes())
		w.meet(s.Side, outType, at, at, other, hi-lo)
	})
}

// meet combines this rank's operand with another one on the given side.
func (w *work) meet(side plan.Side, t DType, to, own, other unsafe.Pointer, n int) {
	if side == plan.Left {
		kernel.Reduce(kernelOp(w.call.Reduce), t, to, other, own, n)
	} else {
		kernel.Reduce(kernelOp(w.call.Reduce), t, to, own, other, n)
	}
}

func (w *work) scale(s *plan.Step) error {
	if !w.mean || w.x.m.team.size == 1 { // the tree over one rank leaves it unchanged, including signalling NaNs
		return nil
	}
	p, t := w.place(s.Out)
	return w.each(s.Out.Hi-s.Out.Lo, t.Bytes(), func(lo, hi int) {
		at := advance(p, lo*t.Bytes())
		kernel.Scale(t, at, at, hi-lo, w.x.m.team.size)
	})
}

// exchange executes one step that sends a span and receives one, concurrently, segment by segment. Both ends
// cut a span in the same way; an empty span is also one frame.
func (w *work) exchange(s *plan.Step) error {
	e, err := w.begin(s)
	if err != nil {
		return err
	}
	return e.run(max(e.sends, e.gets))
}

// inTurns executes two interleaved exchanges, as found by [plan.InTurns].
func (w *work) inTurns(steps []plan.Step) error {
	e, err := w.begin(&steps[0])
	if err != nil {
		return err
	}
	gather := &w.x.gather
	if *gather, err = w.begin(&steps[len(steps)-1]); err != nil {
		return err
	}
	defer func() { *gather = exchange{} }()
	e.scales = len(steps) > 2 && w.mean
	e.gather, e.turns.Each = gather, max(e.sends, e.gets)
	e.turns.Lead = min(e.turns.Each, plan.TurnsLead)
	return e.run(2 * e.turns.Each)
}

// begin prepares the exchange of a step. If it would read its operand from memory that may hold other local
// ranks' results, the operand is copied first: one of them may finish, and write its result, while this rank
// still adds.
func (w *work) begin(s *plan.Step) (exchange, error) {
	e := exchange{work: w, Step: s, segment: segmentBytes / max(1, w.wire.Bytes())} // a barrier transfers nothing
	e.out, e.outType = w.place(s.Out)
	e.in, e.inType = w.place(s.In)
	e.own, e.ownType = e.in, e.inType
	if s.Own.Lo < s.Own.Hi {
		own, t := w.place(s.Own)
		switch {
		case !w.privateDst && !w.sharedDst:
			e.own, e.ownType = own, t
		default:
			if err := w.move(&plan.Step{In: s.Own, Out: s.In}, e.in, e.inType, own, t); err != nil {
				return e, err
			}
			if s.Out == s.Own {
				e.out, e.outType = e.in, e.inType
			}
		}
	}
	if s.To >= 0 {
		e.sends = max(1, (s.Out.Hi-s.Out.Lo+e.segment-1)/e.segment)
	}
	if s.From >= 0 {
		e.gets = max(1, (s.In.Hi-s.In.Lo+e.segment-1)/e.segment)
	}
	return e, nil
}

// run executes an exchange.
func (e *exchange) run(segments int) (err error) {
	x := e.x
	x.wait.frames, x.seen = 0, false
	if segments > 1 && x.poster != nil {
		err = e.overlapped(segments)
	} else {
		err = e.oneByOne(segments)
	}
	if err == nil {
		x.wait.to, x.wait.from = -1, -1
	}
	return err
}

// exchange is the state of such a step while it is executed.
type exchange struct {
	*work
	*plan.Step
	// own: the operand that is combined with received data, usually where the result goes
	out, in, own             unsafe.Pointer
	outType, inType, ownType DType
	segment                  int // elements
	sends, gets              int // segments

	// For a reduce-scatter that is interleaved with the all-gather after it:
	gather *exchange
	turns  plan.Turns
	scales bool // the result is divided
}

// at returns the exchange and the segment at a position of the order, which is the same on both ranks.
func (e *exchange) at(place int) (*exchange, int) {
	if e.gather == nil {
		return e, place
	}
	gather, segment := e.turns.At(place)
	if gather {
		return e.gather, segment
	}
	return e, segment
}

// ready reports whether the segment at a position can be sent once this many are done: a segment of the
// all-gather must be combined first.
func (e *exchange) ready(place, done int) bool {
	return e.gather == nil || e.turns.Ready(place, done)
}

func (e *exchange) oneByOne(segments int) error {
	x := e.x
	for i := range segments {
		if skip, err := e.stop(); skip && err != nil {
			return err
		}
		at, segment := e.at(i)
		to, frame, from, buf := at.offer(segment, 0)
		if err := x.m.end.Exchange(&x.wait, to, frame, from, buf); err != nil {
			return err
		}
		if err := at.take(segment, buf); err != nil {
			return err
		}
	}
	return nil
}

// overlapped keeps several segments in flight, so that some are transferred while another is combined.
func (e *exchange) overlapped(segments int) error {
	x := e.x
	var bufs [transport.PostsMax][]byte
	posted := 0
	for done := range segments {
		for ; posted < min(segments, done+transport.PostsMax) && e.ready(posted, done); posted++ {
			if skip, err := e.stop(); skip && err != nil {
				return e.drain(posted-done, err)
			}
			at, segment := e.at(posted)
			to, frame, from, buf := at.offer(segment, posted%transport.PostsMax)
			bufs[posted%transport.PostsMax] = buf
			if err := x.poster.Post(to, frame, from, buf); err != nil {
				return e.drain(posted-done, err)
			}
		}
		err := x.poster.Complete(&x.wait)
		if err == nil {
			at, segment := e.at(done)
			err = at.take(segment, bufs[done%transport.PostsMax])
		}
		if err != nil {
			return e.drain(posted-done-1, err)
		}
	}
	return nil
}

// drain waits for the exchanges that are still in progress after one has failed: no rank may read or write
// their memory any more. They end at once, because the endpoint has failed.
func (e *exchange) drain(posted int, err error) error {
	for range posted {
		e.x.poster.Complete(endedContext{&e.x.wait})
	}
	return err
}

// endedContext is the context of a wait whose result is not needed any more.
type endedContext struct{ *waiter }

// Park implements [transport.Parker].
func (c endedContext) Park(ready <-chan struct{}) error {
	select {
	case <-ready:
		return nil
	default:
		return errFailed
	}
}

// offer returns segment i in the form of Exchange: the frame and its receiver, and the sender and the buffer
// of the frame to receive. Elements of another type than the wire's are converted in buffers number b.
func (e *exchange) offer(i, b int) (to int, frame transport.Frame, from int, buf []byte) {
	x := e.x
	to, from = -1, -1
	lo := i * e.segment
	if i < e.sends {
		to = e.To
		frame.Header = x.header
		frame.Frame = x.sent[to]
		x.sent[to]++
		n := min(e.segment, e.Out.Hi-e.Out.Lo-lo)
		data := advance(e.out, lo*e.outType.Bytes())
		if n > 0 && e.outType != e.wire {
			data = x.given[b].of(segmentBytes)
			kernel.Convert(e.wire, e.outType, data, advance(e.out, lo*e.outType.Bytes()), n)
		}
		frame.Data = bytesAt(data, 0, n*e.wire.Bytes())
	}
	if i < e.gets {
		from = e.From
		x.wait.frames++
		into := advance(e.in, lo*e.inType.Bytes())
		if e.Side != plan.Replace || e.inType != e.wire {
			into = x.received[b].of(segmentBytes)
		}
		buf = bytesAt(into, 0, min(e.segment, e.In.Hi-e.In.Lo-lo)*e.wire.Bytes())
	}
	x.wait.to, x.wait.from = e.To, -1
	if x.wait.frames > 0 {
		x.wait.from = e.From
	}
	return to, frame, from, buf
}

// take stores segment i, if one was received.
func (e *exchange) take(i int, buf []byte) error {
	if i >= e.gets {
		return nil
	}
	if err := e.x.arrived(e.From); err != nil || len(buf) == 0 {
		return err
	}
	lo := i * e.segment
	n := len(buf) / e.wire.Bytes()
	to, came := advance(e.in, lo*e.inType.Bytes()), unsafe.Pointer(&buf[0])
	switch {
	case to == came:
		return nil
	case e.Side == plan.Replace:
		kernel.Convert(e.inType, e.wire, to, came, n)
		return nil
	case e.inType != e.wire:
		narrow := e.x.wide.of(segmentBytes)
		kernel.Convert(e.inType, e.wire, narrow, came, n)
		came = narrow
	}
	own := advance(e.own, lo*e.ownType.Bytes())
	if e.ownType != e.inType {
		kernel.Convert(e.inType, e.ownType, to, own, n)
		own = to
	}
	e.meet(e.Side, e.inType, to, own, came, n)
	if e.scales {
		kernel.Scale(e.inType, to, to, n, e.x.m.team.size)
	}
	return nil
}

// pair executes this rank's half of a call of two ranks: one frame, in segments.
func (x *executor) pair(call *Call, count int) error {
	if err := x.down(); err != nil {
		return err
	}
	w := &x.work
	*w = work{x: x, call: call, count: count, acc: call.Type, wire: call.Type}
	w.src, w.dst = call.sides(x.m.rank)
	w.to = w.dst.Ptr
	s := &x.half
	*s = plan.Step{Kind: plan.Exchange, To: -1, From: -1}
	if call.Op == Send {
		s.To, s.Out = call.Peer, plan.Span{Buffer: plan.Src, Hi: count}
	} else {
		s.From, s.In = call.Peer, plan.Span{Buffer: plan.Dst, Hi: count}
	}
	return w.exchange(s)
}

// bytesAt returns n bytes at an offset from p.
func bytesAt(p unsafe.Pointer, at, n int) []byte {
	if n == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Add(p, at)), n)
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
