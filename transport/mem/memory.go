package mem

import (
	"context"
	"fmt"
	"math"
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// sharer is the endpoint of a rank that accesses the memory of others.
//
// Each rank counts the flags that it has set since the beginning, in a word of the slot of its current call: others
// wait for that word, and find the rest of the slot on the same cache line. Since all ranks set equally many flags in a
// call, a rank derives from its count before the call which count of another rank means which flag.
//
// The words also have a stop bit. A rank sets flag 0 by a compare-and-swap that fails if the bit is set; it sets all
// other flags in any case. So a call starts when the last word reaches its flag 0, and it never starts once a word that
// has not reached it is stopped: both are compare-and-swaps on that one word, and one of them is first. Withdraw stops
// the word of one rank that is behind, and then that rank's other word; Interrupt stops those of all.
type sharer struct{ *endpoint }

// stopBit in a rank's word prevents a further flag 0.
const stopBit = 1 << 63

// count returns the number of flags that the rank has set, up to the last call of an odd or even number.
func (e *endpoint) count(parity uint64) uint64 { return e.slots[parity].flags.Load() &^ stopBit }

func (s *sharer) Capabilities() transport.Capabilities {
	return transport.Capabilities{
		Places: s.hub.places, Memory: true, StagingBytes: stagingBytes, InlineBytes: inlineBytes, Posts: true,
	}
}

func (s *sharer) Reachable(tensor.Memory) bool { return true }

func (s *sharer) StagingBuffer(rank int) []byte { return s.hub.stagingBuffer(rank) }

func (s *sharer) Inline(rank int) []byte { return s.hub.ends[rank].slots[s.calls&1].inline() }

// Retire does nothing: memory of this process is not reused while anything refers to it.
func (s *sharer) Retire(tensor.Memory) {}

// Publish writes the slot of this call. Two slots are enough: a rank can begin the call after next only when all ranks
// have begun the next one, and so have read the slots of this one.
func (s *sharer) Publish(slot *transport.Slot) {
	s.calls++
	s.base = s.set
	s.slots[s.calls&1].Repeat(slot)
}

func (s *sharer) Peer(peer int) *transport.Slot {
	return &s.hub.ends[peer].slots[s.calls&1].Slot
}

func (s *sharer) Signal(flag int) error {
	if s.set != s.base+uint64(flag) {
		panic(fmt.Sprintf("mem: flag %d is set as number %d of its call", flag, s.set-s.base))
	}
	// A compare-and-swap from the known count costs a quarter of an addition here: it takes the cache line from the
	// peers that poll it once, without reading it first. It fails only if the stop bit is set, which stays set.
	word := &s.slots[s.calls&1].flags
	was := s.set
	if flag == 0 {
		was = word.Load() &^ stopBit // of the call before the last one; only this rank changes it
	}
	if !word.CompareAndSwap(was, s.set+1) {
		if flag == 0 {
			return transport.ErrInterrupted
		}
		word.Store(s.set + 1 | stopBit)
	}
	s.set++
	s.wakeWaiters()
	return nil
}

func (s *sharer) Await(ctx context.Context, rank, flag int) error {
	v := flagWait{parity: s.calls & 1, rank: rank, target: s.base + uint64(flag) + 1, start: flag == 0}
	if v.behind(s.endpoint) < 0 {
		return nil
	}
	return s.waitFlags(ctx, &v)
}

func (s *sharer) Behind(flag int, ranks []int) []int {
	for r := range s.hub.ends {
		if s.hub.ends[r].count(s.calls&1) < s.base+uint64(flag)+1 {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

func (s *sharer) Withdraw() bool {
	for r := range s.hub.ends {
		if e := &s.hub.ends[r]; e.stopBefore(s.calls&1, s.base+1) {
			e.slots[^s.calls&1].flags.Or(stopBit)
			return true
		}
	}
	return false
}

// stopBefore stops the rank unless it has set that many flags, and reports whether it is stopped before that.
func (e *endpoint) stopBefore(parity, target uint64) bool {
	for word := &e.slots[parity].flags; ; {
		was := word.Load()
		switch {
		case was&^stopBit >= target:
			return false
		case was&stopBit != 0 || word.CompareAndSwap(was, was|stopBit):
			return true
		}
	}
}

func (s *sharer) Interrupt() {
	for r := range s.hub.ends {
		for i := range s.hub.ends[r].slots {
			s.hub.ends[r].slots[i].flags.Or(stopBit)
		}
	}
	for r := range s.hub.ends {
		s.hub.ends[r].unpark()
	}
}

// bufferMax bounds buffers: no machine has more.
const bufferMax = min(math.MaxInt-64, math.MaxInt64>>16)

// hugePage is the size and alignment of huge pages: one address translation replaces 512, and hardware prefetching
// continues across small pages.
const hugePage = 2 << 20

// NewBuffer returns memory of the garbage collector, without an owner to release it. Large buffers use huge pages, if
// the system provides them.
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
