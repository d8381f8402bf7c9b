package executor

import (
	"fmt"

	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/internal/kernel"
)

// steps executes steps of the plan.
func (x *Executor) steps(steps []plan.Step) error {
	for len(steps) > 0 {
		n, err := 1, error(nil)
		if steps[0].Kind == plan.Exchange {
			n = max(1, plan.InTurns(x.size, steps))
		}
		switch {
		case n > 1:
			err = x.interleaved(steps[:n])
		case x.inRegions && steps[0].Kind != plan.Exchange:
			err = x.inPieces(&steps[0])
		default:
			err = x.step(&steps[0])
		}
		if err != nil {
			return err
		}
		steps = steps[n:]
	}
	return nil
}

func (x *Executor) step(s *plan.Step) error {
	switch s.Kind {
	case plan.Signal:
		if flag := s.Flag + x.flagOffset; flag > 0 && x.sharesMemory { // enter has set the first flag
			return x.shared.Signal(flag)
		}
	case plan.Await:
		if flag := s.Flag + x.flagOffset; flag > 0 && x.sharesMemory {
			return x.await(s.From, flag)
		}
	case plan.Combine:
		return x.combine(s)
	case plan.Pull:
		if !x.sharedDst || !x.writtenByAnother(s.Out.Buffer) {
			return x.copy(s, x.own(&s.Out), x.of(s.From, &s.In))
		}
	case plan.Push:
		return x.copy(s, x.of(s.To, &s.Out), x.own(&s.In))
	case plan.Copy:
		if !x.sharedDst || !x.writtenByAnother(s.Out.Buffer) {
			return x.copy(s, x.own(&s.Out), x.own(&s.In))
		}
	case plan.Fold:
		return x.fold(s)
	case plan.Scale:
		return x.scale(s)
	case plan.Exchange:
		return x.exchange(s)
	default:
		panic(fmt.Sprintf("executor: no step of kind %d", s.Kind))
	}
	return nil
}

// writtenByAnother reports whether the buffer is a Dst, which ranks may share, that a lower rank also has, and so
// writes.
func (x *Executor) writtenByAnother(b plan.Buffer) bool {
	if b != plan.Dst {
		return false
	}
	for _, r := range x.Domain {
		if r == x.rank {
			return false
		}
		if x.shared.Peer(r).Dst.Ptr == x.call.Dst.Ptr {
			return true
		}
	}
	return false
}

// fold combines two spans of this rank.
func (x *Executor) fold(s *plan.Step) error {
	out, in := x.own(&s.Out), x.own(&s.In)
	return x.segments(s.Out.Hi-s.Out.Lo, max(out.t.Bytes(), in.t.Bytes()), func(lo, hi int) {
		other := in.at(lo)
		if in.t != out.t {
			other = x.memory.received[0].of(segmentBytes)
			kernel.Convert(out.t, in.t, other, in.at(lo), hi-lo)
		}
		at := vector{out.at(lo), out.t}
		x.reduce(s.Side, at, at.p, other, hi-lo)
	})
}

// scale divides a span by the size.
func (x *Executor) scale(s *plan.Step) error {
	if !x.mean || x.size == 1 { // the tree over one rank leaves it unchanged, including signalling NaNs
		return nil
	}
	out := x.own(&s.Out)
	return x.segments(s.Out.Hi-s.Out.Lo, out.t.Bytes(), func(lo, hi int) {
		kernel.Scale(out.t, out.at(lo), out.at(lo), hi-lo, x.size)
	})
}
