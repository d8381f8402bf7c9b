package executor

import (
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/internal/affinity"
	"github.com/lockstep-ml/lockstep/internal/kernel"
)

// segmentBytes is how much is transferred or combined at once: between two segments a rank checks whether the
// communicator has failed, and the garbage collector can run even if the loops are assembly.
const segmentBytes = 256 << 10

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

// stop checks whether the communicator has failed. Then a call that this rank has not entered yet ends with an
// error. If all ranks are in one process and one group, the rest of the call is skipped up to its last flag; a
// call of several processes ends with an error. If all ranks are in one process but in several groups, or past
// the last flag, the call continues: the others would not learn of the failure.
func (x *Executor) stop() (skip bool, err error) {
	switch {
	case !x.Caller.Failed():
		return false, nil
	case !x.OneProcess:
		return true, ErrFailed
	case x.Group.local < x.size || x.committed:
		return false, nil
	case !x.entered:
		return true, ErrFailed // the call is not torn: the others may still be in the previous call
	}
	x.Group.torn.Store(true)
	return true, nil
}

// streamBytes returns how much a domain of so many ranks reads and writes in a call for which results are written by
// non-temporal (streaming) stores, since the caches would not keep them until they are read: three quarters of the
// last-level caches that the ranks can have, 24 MiB with one of 32 MiB.
func streamBytes(cache affinity.Cache, ranks int) int {
	return cache.Bytes / 4 * 3 * min(cache.Count, ranks)
}

// streams reports whether an output is written by such stores.
func (x *Executor) streams(out *plan.Span) bool {
	return out.Buffer == plan.Dst && (x.call.Src.Bytes+x.call.Dst.Bytes)*len(x.Domain) >= x.streamBytes
}

// copy copies the elements of a step, and converts them if their types differ.
func (x *Executor) copy(s *plan.Step, to, from vector) error {
	if to.p == from.p {
		return nil
	}
	streams := to.t == from.t && x.streams(&s.Out)
	n := s.In.Hi - s.In.Lo
	segment := n
	if each := max(to.t.Bytes(), from.t.Bytes()); n*each > segmentBytes {
		segment = segmentBytes / each
	}
	for lo := 0; lo < n; lo += segment { // as segments does, without a closure: small calls are copies
		if skip, err := x.stop(); skip {
			return err
		}
		if streams {
			kernel.Stream(to.at(lo), from.at(lo), min(segment, n-lo)*to.t.Bytes())
		} else {
			kernel.Convert(to.t, from.t, to.at(lo), from.at(lo), min(segment, n-lo))
		}
	}
	return nil
}

// reduce combines this rank's operand with another one on the given side.
func (x *Executor) reduce(side plan.Side, to vector, own, other unsafe.Pointer, n int) {
	if side == plan.Left {
		own, other = other, own
	}
	kernel.Reduce(x.op, to.t, to.p, own, other, n)
}
