package mem

import (
	"context"
	"fmt"
	"math"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// Memory, flags and slots of the ranks of a hub with memory.
//
// Each rank counts the flags that it has set since the beginning, in a word of the slot of its current call: others
// wait for that word, and find the rest of the slot on the same cache line. Since all ranks set equally many flags in a
// call, a rank derives from its count before the call which count of another rank means which flag.
//
// The words also have a stop bit. A rank sets flag 0 by a compare-and-swap that fails if the bit is set; it sets all
// other flags in any case. So a call starts when the last word reaches its flag 0, and it never starts once a word that
// has not reached it is stopped: both are compare-and-swaps on that one word, and one of them is first. Withdraw stops
// the word of one rank that is behind, and then that rank's other word; Interrupt stops those of all.

// stopBit in a rank's word prevents a further flag 0.
const stopBit = 1 << 63

// count returns the number of flags that the rank has set, up to the last call of an odd or even number.
func (e *endpoint) count(parity uint64) uint64 { return e.slots[parity].flags.Load() &^ stopBit }

func (e *endpoint) Reachable(tensor.Memory) bool { return true }

func (e *endpoint) StagingBuffer(rank int) []byte { return e.hub.stagingBuffer(rank) }

func (e *endpoint) Inline(rank int) []byte { return e.hub.ends[rank].slots[e.calls&1].inline() }

// Retire does nothing: memory of this process is not reused while anything refers to it.
func (e *endpoint) Retire(tensor.Memory) {}

// Publish writes the slot of this call. Two slots are enough: a rank can begin the call after next only when all ranks
// have begun the next one, and so have read the slots of this one.
func (e *endpoint) Publish(slot *transport.Slot) {
	e.calls++
	e.base = e.set
	e.slots[e.calls&1].Repeat(slot)
}

func (e *endpoint) Peer(peer int) *transport.Slot {
	return &e.hub.ends[peer].slots[e.calls&1].Slot
}

func (e *endpoint) Signal(flag int) error {
	if e.set != e.base+uint64(flag) {
		panic(fmt.Sprintf("mem: flag %d is set as number %d of its call", flag, e.set-e.base))
	}
	// A compare-and-swap from the known count costs a quarter of an addition here: it takes the cache line from the
	// peers that poll it once, without reading it first. It fails only if the stop bit is set, which stays set.
	word := &e.slots[e.calls&1].flags
	was := e.set
	if flag == 0 {
		was = word.Load() &^ stopBit // of the call before the last one; only this rank changes it
	}
	if !word.CompareAndSwap(was, e.set+1) {
		if flag == 0 {
			return transport.ErrInterrupted
		}
		word.Store(e.set + 1 | stopBit)
	}
	e.set++
	e.wakeWaiters()
	return nil
}

func (e *endpoint) Await(ctx context.Context, rank, flag int) error {
	v := &e.flags
	*v = flagWait{e: e, parity: e.calls & 1, rank: rank, target: e.base + uint64(flag) + 1, start: flag == 0}
	if v.Poll() {
		return nil
	}
	return e.waiter.Wait(ctx, v)
}

func (e *endpoint) Behind(flag int, ranks []int) []int {
	for r := range e.hub.ends {
		if e.hub.ends[r].count(e.calls&1) < e.base+uint64(flag)+1 {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

func (e *endpoint) Withdraw() bool {
	for r := range e.hub.ends {
		if other := &e.hub.ends[r]; other.stopBefore(e.calls&1, e.base+1) {
			other.slots[^e.calls&1].flags.Or(stopBit)
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

func (e *endpoint) Interrupt() {
	for r := range e.hub.ends {
		for i := range e.hub.ends[r].slots {
			e.hub.ends[r].slots[i].flags.Or(stopBit)
		}
	}
	for r := range e.hub.ends {
		e.hub.ends[r].unpark()
	}
}

// bufferMax bounds buffers: no machine has more.
const bufferMax = min(math.MaxInt-64, math.MaxInt64>>16)

// hugePage is the size and alignment of huge pages: one address translation replaces 512, and hardware prefetching
// continues across small pages.
const hugePage = 2 << 20

// NewBuffer returns memory of the garbage collector, without an owner to release it. Large buffers use huge pages, if
// the system provides them.
func (e *endpoint) NewBuffer(bytes int) (tensor.Memory, error) {
	switch {
	case e.closed.Load():
		return tensor.Memory{}, transport.ErrClosed
	case bytes < 0 || bytes > bufferMax:
		return tensor.Memory{}, fmt.Errorf("mem: a buffer of %d bytes", bytes)
	}
	align := tensor.CacheLine
	if bytes >= hugePage {
		align = hugePage
	}
	b := tensor.AlignedBytes(bytes, align)
	if whole := bytes / hugePage * hugePage; whole > 0 {
		preferHuge(b[:whole])
	}
	return tensor.HostMemory(b), nil
}
