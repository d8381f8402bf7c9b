package executor

import (
	"context"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/transport"
)

// exchange is the state of a step that sends a span and receives one, concurrently, segment by segment. Both ends
// cut a span in the same way; an empty span is also one frame.
type exchange struct {
	*Executor
	*plan.Step
	out, in view
	// operand is what is combined with received data, usually where the result is stored
	operand     view
	segment     int // elements
	sends, gets int // segments

	// For a reduce-scatter that is interleaved with the all-gather after it:
	gather *exchange
	turns  plan.Turns
	scales bool // the result is divided
}

// exchange executes a step that sends and receives.
func (x *Executor) exchange(s *plan.Step) error {
	e, err := x.newExchange(s)
	if err != nil {
		return err
	}
	return e.run(max(e.sends, e.gets))
}

// interleaved executes two interleaved exchanges, as found by [plan.InTurns].
func (x *Executor) interleaved(steps []plan.Step) error {
	e, err := x.newExchange(&steps[0])
	if err != nil {
		return err
	}
	if x.gather, err = x.newExchange(&steps[len(steps)-1]); err != nil {
		return err
	}
	defer func() { x.gather = exchange{} }()
	e.scales = len(steps) > 2 && x.mean
	e.gather, e.turns.Each = &x.gather, max(e.sends, e.gets)
	e.turns.Lead = min(e.turns.Each, plan.TurnsLead)
	return e.run(2 * e.turns.Each)
}

// newExchange prepares the exchange of a step. If it would read its operand from memory that may hold other local
// ranks' results, the operand is copied first: one of them may finish, and write its result, while this rank
// still combines.
func (x *Executor) newExchange(s *plan.Step) (exchange, error) {
	// A barrier transfers nothing: its elements have no size.
	e := exchange{Executor: x, Step: s, segment: segmentBytes / max(1, x.call.Partial.Bytes())}
	e.out, e.in = x.view(s.Out), x.view(s.In)
	e.operand = e.in
	if s.Own.Lo < s.Own.Hi {
		if x.privateDst || x.sharedDst {
			if err := x.copyOperand(s); err != nil {
				return e, err
			}
			if s.Out == s.Own {
				e.out = e.in
			}
		} else {
			e.operand = x.view(s.Own)
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

// copyOperand copies the operand of an exchange to where the result is stored.
func (x *Executor) copyOperand(s *plan.Step) error {
	own, in := s.Own, s.In
	for own.Lo < own.Hi {
		n := x.inRegion(x.rank, own, x.inRegion(x.rank, in, own.Hi-own.Lo))
		piece := plan.Step{In: plan.Span{Buffer: own.Buffer, Lo: own.Lo, Hi: own.Lo + n}, Out: in}
		if err := x.copy(&piece, x.own(&in), x.own(&piece.In)); err != nil {
			return err
		}
		own.Lo, in.Lo = own.Lo+n, in.Lo+n
	}
	return nil
}

// run executes an exchange.
func (e *exchange) run(segments int) (err error) {
	e.wait.frames, e.verified = 0, false
	if segments > 1 && e.posts != nil {
		err = e.overlapped(segments)
	} else {
		err = e.oneByOne(segments)
	}
	if err == nil {
		e.wait.to, e.wait.from = -1, -1
	}
	return err
}

// at returns the exchange and the segment at a position of the order, which is the same on both ranks.
func (e *exchange) at(position int) (*exchange, int) {
	if e.gather == nil {
		return e, position
	}
	gather, segment := e.turns.At(position)
	if gather {
		return e.gather, segment
	}
	return e, segment
}

// ready reports whether the segment at a position can be sent once this many are done: a segment of the
// all-gather must be combined first.
func (e *exchange) ready(position, done int) bool {
	return e.gather == nil || e.turns.Ready(position, done)
}

// oneByOne transfers one segment at a time.
func (e *exchange) oneByOne(segments int) error {
	for i := range segments {
		if skip, err := e.stop(); skip && err != nil {
			return err
		}
		at, segment := e.at(i)
		to, frame, from, buf := at.offer(segment, 0)
		if err := e.End.Exchange(e.ctx, to, frame, from, buf); err != nil {
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
			if err := e.posts.Post(to, frame, from, buf); err != nil {
				return e.drain(posted-done, err)
			}
		}
		err := e.posts.Complete(e.ctx)
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

// drain waits for the exchanges that are still in progress after one has failed: no rank may read or write their
// memory any more. They end at once, because the endpoint has failed.
func (e *exchange) drain(posted int, err error) error {
	for range posted {
		e.posts.Complete(endedContext{e.ctx})
	}
	return err
}

// endedContext is the context of a wait whose result is not needed any more.
type endedContext struct{ context.Context }

// Park implements [transport.Parker].
func (endedContext) Park(ready <-chan struct{}) error {
	select {
	case <-ready:
		return nil
	default:
		return ErrFailed
	}
}

// offer returns segment i in the form of Exchange: the frame and its receiver, and the sender and the buffer of
// the frame to receive. Elements of another type than the frames' are converted in buffers number b.
func (e *exchange) offer(i, b int) (to int, frame transport.Frame, from int, buf []byte) {
	to, from = -1, -1
	lo, wire := i*e.segment, e.call.Partial
	if i < e.sends {
		to = e.To
		frame.Header = e.nextHeader(to)
		n := min(e.segment, e.Out.Hi-e.Out.Lo-lo)
		data, contiguous := e.out.piece(lo, n)
		if n > 0 && (e.out.t != wire || contiguous < n) {
			data = e.memory.sent[b].of(segmentBytes)
			e.out.read(data, wire, lo, n)
		}
		frame.Data = bytesAt(data, n*wire.Bytes())
	}
	if i < e.gets {
		from = e.From
		e.wait.frames++
		n := min(e.segment, e.In.Hi-e.In.Lo-lo)
		into, contiguous := e.in.piece(lo, n)
		if e.Side != plan.Replace || e.in.t != wire || contiguous < n {
			if e.oneReceive {
				b = 0 // it stays in the caches
			}
			into = e.memory.received[b].of(segmentBytes)
		}
		buf = bytesAt(into, n*wire.Bytes())
	}
	e.wait.to, e.wait.from = e.To, -1
	if e.wait.frames > 0 {
		e.wait.from = e.From
	}
	return to, frame, from, buf
}

// take stores segment i, if one was received.
func (e *exchange) take(i int, buf []byte) error {
	if i >= e.gets {
		return nil
	}
	if err := e.count(e.From); err != nil || len(buf) == 0 {
		return err
	}
	lo, wire := i*e.segment, e.call.Partial
	n := len(buf) / wire.Bytes()
	received, t := unsafe.Pointer(&buf[0]), e.in.t
	if first, _ := e.in.piece(lo, n); first == received {
		return nil
	}
	if e.Side == plan.Replace {
		e.in.write(received, wire, lo, n)
		return nil
	}
	if t != wire {
		converted := e.memory.blocks.of(segmentBytes)
		kernel.Convert(t, wire, converted, received, n)
		received = converted
	}
	for at := 0; at < n; {
		to, m := e.in.piece(lo+at, n-at)
		operand, m := e.operand.piece(lo+at, m)
		if e.operand.t != t {
			kernel.Convert(t, e.operand.t, to, operand, m)
			operand = to
		}
		e.reduce(e.Side, vector{to, t}, operand, advance(received, at*t.Bytes()), m)
		if e.scales {
			kernel.Scale(t, to, to, m, e.size)
		}
		at += m
	}
	return nil
}
