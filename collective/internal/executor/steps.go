package executor

import (
	"fmt"
	"unsafe"

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
		if n > 1 {
			err = x.interleaved(steps[:n])
		} else {
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
			return x.End.Signal(flag)
		}
	case plan.Await:
		if flag := s.Flag + x.flagOffset; flag > 0 && x.sharesMemory {
			return x.await(s.From, flag)
		}
	case plan.Combine:
		return x.combine(s)
	case plan.Pull:
		if !x.writtenByAnother(s.Out.Buffer) {
			return x.copy(s, x.own(s.Out), x.of(s.From, s.In))
		}
	case plan.Push:
		return x.copy(s, x.of(s.To, s.Out), x.own(s.In))
	case plan.Copy:
		if !x.writtenByAnother(s.Out.Buffer) {
			return x.copy(s, x.own(s.Out), x.own(s.In))
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

// writtenByAnother reports whether the buffer is a Dst that a lower rank also has, and so writes.
func (x *Executor) writtenByAnother(b plan.Buffer) bool {
	if !x.sharedDst || b != plan.Dst {
		return false
	}
	for _, r := range x.Domain {
		if r == x.rank {
			return false
		}
		if x.End.Peer(r).Dst.Ptr == x.call.Dst.Ptr {
			return true
		}
	}
	return false
}

// streamBytes is how much a domain reads and writes in a call for which results are written by non-temporal
// (streaming) stores: the caches would not keep them until they are read.
const streamBytes = 24 << 20

// streams reports whether an output is written by such stores.
func (x *Executor) streams(out plan.Span) bool {
	return out.Buffer == plan.Dst && (x.call.Src.Bytes+x.call.Dst.Bytes)*len(x.Domain) >= streamBytes
}

// copy copies the elements of a step, and converts them if their types differ.
func (x *Executor) copy(s *plan.Step, to, from vector) error {
	if to.p == from.p {
		return nil
	}
	streams := to.t == from.t && x.streams(s.Out)
	return x.segments(s.In.Hi-s.In.Lo, max(to.t.Bytes(), from.t.Bytes()), func(lo, hi int) {
		if streams {
			kernel.Stream(to.at(lo), from.at(lo), (hi-lo)*to.t.Bytes())
		} else {
			kernel.Convert(to.t, from.t, to.at(lo), from.at(lo), hi-lo)
		}
	})
}

// segments calls f for the segments of n elements of at most this many bytes, unless the communicator has failed.
func (x *Executor) segments(n, bytes int, f func(lo, hi int)) error {
	if n == 0 {
		return nil
	}
	for lo, segment := 0, segmentBytes/bytes; lo < n; lo += segment {
		if skip, err := x.stop(); skip {
			return err
		}
		f(lo, min(lo+segment, n))
	}
	return nil
}

// fold combines two spans of this rank.
func (x *Executor) fold(s *plan.Step) error {
	out, in := x.own(s.Out), x.own(s.In)
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

// reduce combines this rank's operand with another one on the given side.
func (x *Executor) reduce(side plan.Side, to vector, own, other unsafe.Pointer, n int) {
	if side == plan.Left {
		own, other = other, own
	}
	kernel.Reduce(x.op, to.t, to.p, own, other, n)
}

// scale divides a span by the size.
func (x *Executor) scale(s *plan.Step) error {
	if !x.mean || x.size == 1 { // the tree over one rank leaves it unchanged, including signalling NaNs
		return nil
	}
	out := x.own(s.Out)
	return x.segments(s.Out.Hi-s.Out.Lo, out.t.Bytes(), func(lo, hi int) {
		kernel.Scale(out.t, out.at(lo), out.at(lo), hi-lo, x.size)
	})
}

func kernelOp(r plan.ReduceOp) kernel.Op {
	switch r {
	case plan.Min:
		return kernel.Min
	case plan.Max:
		return kernel.Max
	case plan.Prod:
		return kernel.Prod
	}
	return kernel.Sum
}
