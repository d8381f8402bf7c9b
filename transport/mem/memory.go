package mem

import (
	"context"
	"fmt"
	"math"
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// sharer is the end of a rank that reaches the memory of others.
//
// Each rank counts the marks that it has raised since the beginning, in a word of its own, on a cache line of its own:
// that word is all that others wait for. Since all ranks of the domain raise equally many marks in a call, a rank knows
// from its own count before the call which count of another's stands for which mark.
//
// The word has a stop bit as well. A rank raises mark 0 by an exchange that fails if the bit stands; all other marks it
// raises in any case. So a call starts when the last word of the domain reaches its mark 0, and it never starts once a
// word that has not reached it is stopped: the two are exchanges on that one word, and one of them comes first. To
// withdraw is to stop the word of one rank that is behind, to interrupt to stop all.
type sharer struct{ *endpoint }

// stopBit in a rank's word says that it cannot raise a mark 0 any more.
const stopBit = 1 << 63

// count returns how many marks the rank has raised.
func (e *endpoint) count() uint64 { return e.marks.Load() &^ stopBit }

func (s *sharer) Capabilities() transport.Capabilities {
	return transport.Capabilities{Places: s.hub.places, Memory: true, StagingBytes: stagingBytes, Posts: true}
}

func (s *sharer) Reachable(tensor.Memory) bool { return true }

func (s *sharer) StagingBuffer(rank int) []byte { return s.hub.stagingBuffer(rank) }

// Retire does nothing: memory of this process is not reused while anything refers to it.
func (s *sharer) Retire(tensor.Memory) {}

// Publish writes the slot of this call. Two slots are enough: a rank can begin the call after next only when all ranks
// have begun the next one, and so have read the slots of this one.
func (s *sharer) Publish(slot transport.Slot) {
	s.calls++
	s.base = s.raised
	s.slots[s.calls&1].Slot = slot
}

func (s *sharer) Peer(peer int) *transport.Slot {
	if !s.shares(peer) {
		return nil
	}
	return &s.hub.ends[peer].slots[s.calls&1].Slot
}

func (s *sharer) Signal(mark int) error {
	if s.raised != s.base+uint64(mark) {
		panic(fmt.Sprintf("mem: mark %d is raised as number %d of its call", mark, s.raised-s.base))
	}
	// An exchange from the count that it knows costs a quarter of an addition here: the line is taken from the peers
	// that look at it once, not read first. It fails only if the stop bit has come, which stays.
	if !s.marks.CompareAndSwap(s.raised, s.raised+1) {
		if mark == 0 {
			return transport.ErrInterrupted
		}
		s.marks.Store(s.raised + 1 | stopBit)
	}
	s.raised++
	s.rouseWaiters()
	return nil
}

func (s *sharer) Await(ctx context.Context, rank, mark int) error {
	v := raising{rank: rank, target: s.base + uint64(mark) + 1, start: mark == 0}
	if v.behind(s.endpoint) < 0 {
		return nil
	}
	return s.waitMarks(ctx, &v)
}

func (s *sharer) Behind(mark int, ranks []int) []int {
	for _, r := range s.domain {
		if s.hub.ends[r].count() < s.base+uint64(mark)+1 {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

func (s *sharer) Withdraw() bool {
	for _, r := range s.domain {
		if s.hub.ends[r].stopBefore(s.base + 1) {
			return true
		}
	}
	return false
}

// stopBefore stops the rank unless it has raised so many marks, and reports whether it is stopped before that.
func (e *endpoint) stopBefore(target uint64) bool {
	for {
		was := e.marks.Load()
		switch {
		case was&^stopBit >= target:
			return false
		case was&stopBit != 0 || e.marks.CompareAndSwap(was, was|stopBit):
			return true
		}
	}
}

func (s *sharer) Interrupt() {
	for _, r := range s.domain {
		s.hub.ends[r].marks.Or(stopBit)
	}
	for _, r := range s.domain {
		s.hub.ends[r].unpark()
	}
}

// bufferMax bounds buffers: no machine has more.
const bufferMax = min(math.MaxInt-64, math.MaxInt64>>16)

// hugePage is how large and how aligned memory is that can be in a page of its own kind: then the processor looks up
// one address where it would look up 512, and prefetching goes on.
const hugePage = 2 << 20

// NewBuffer returns memory that the garbage collector keeps: it has no owner to release it. Large buffers are in huge
// pages if the system has some.
func (s *sharer) NewBuffer(bytes int) (tensor.Memory, error) {
	switch {
	case s.closed.Load():
		return tensor.Memory{}, transport.ErrClosed
	case bytes < 0 || bytes > bufferMax:
		return tensor.Memory{}, fmt.Errorf("mem: a buffer of %d bytes", bytes)
	case bytes == 0:
		return tensor.Memory{}, nil
	}
	align := 64
	if bytes >= hugePage {
		align = hugePage
	}
	b := alignedTo(bytes, align)
	if whole := bytes / hugePage * hugePage; whole > 0 {
		preferHuge(b[:whole])
	}
	return tensor.Memory{Ptr: unsafe.Pointer(unsafe.SliceData(b)), Bytes: bytes}, nil
}
