package transport

import (
	"context"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Slot describes a rank's part in the current call, for the ranks of its domain. All of them may use its memory from
// flag 0 until this rank has awaited the call's last flag.
//
// The fields that peers read in every call are first, next to each other: Sum, and the pointers of Src and Dst.
type Slot struct {
	Sum      uint64        // Header.Sum(): peers compare it, and read the Header only if it differs
	Src, Dst tensor.Memory // as the reading rank reaches them: only Ptr and Bytes are valid; Ptr is nil where it cannot
	Header
	Name      string // text behind Header.Names
	Shape     []int  // text behind Header.Names; must not change until the second Publish after this one
	Algorithm string // text behind Header.Plan
}

// Repeat makes s a copy of slot, except for the kind and the owner of Src and Dst. It is fast if slot differs from s
// only in the number of the call and its memories.
func (s *Slot) Repeat(slot *Slot) {
	if slot.Sum == 0 || s.Sum-s.Seq*SumStep != slot.Sum-slot.Seq*SumStep || s.Name != slot.Name ||
		s.Algorithm != slot.Algorithm || len(s.Shape) != len(slot.Shape) ||
		len(s.Shape) > 0 && &s.Shape[0] != &slot.Shape[0] {
		s.Header, s.Name, s.Shape, s.Algorithm = slot.Header, slot.Name, slot.Shape, slot.Algorithm
	}
	s.Sum, s.Seq = slot.Sum, slot.Seq
	if s.Src.Ptr != slot.Src.Ptr || s.Src.Bytes != slot.Src.Bytes { // a pointer in memory costs more than a comparison
		s.Src = tensor.Memory{Ptr: slot.Src.Ptr, Bytes: slot.Src.Bytes}
	}
	if s.Dst.Ptr != slot.Dst.Ptr || s.Dst.Bytes != slot.Dst.Bytes {
		s.Dst = tensor.Memory{Ptr: slot.Dst.Ptr, Bytes: slot.Dst.Bytes}
	}
}

// SharedMemory is how a rank shares memory with the other ranks of its domain: slots, flags and buffers. One goroutine
// at a time may use it; Interrupt may be called at any time, by any goroutine.
type SharedMemory interface {
	// Publish publishes slot to the peers of the domain, and starts this rank's next call. Peers that are still in the
	// previous call can still read its slot. The endpoint copies slot, but not Shape.
	Publish(slot *Slot)
	// Peer returns the slot that the peer published for this rank's latest call, or nil if the peer is in another
	// domain. The slot may be read after this rank has awaited flag 0 of that call, until its next Publish.
	Peer(peer int) *Slot
	// Reachable reports whether the ranks of the domain can reach this memory of this rank.
	Reachable(tensor.Memory) bool
	// StagingBuffer returns the staging buffer of a rank of the domain: memory of the transport that all ranks of the
	// domain reach. It is aligned to 64 bytes, and has Capabilities.StagingBytes. It may be called before the first
	// Publish.
	StagingBuffer(rank int) []byte
	// Inline returns memory beside the slot of a rank of the domain in the current call, which a peer that waits for
	// flag 0 receives together with the flag: for the data of small calls. It has Capabilities.InlineBytes and is
	// aligned to 8 bytes. The rank may write it between Publish and Signal(0), and its peers may read it as long as the
	// slot.
	Inline(rank int) []byte
	// NewBuffer allocates zeroed memory that the ranks of the domain can access in place, of the given size, aligned to
	// 64 bytes, with one reference. It is freed when its last reference is released, or by Close. Retired memory is not
	// reused. If the system cannot provide shared memory, NewBuffer returns an error; a later write does not fail.
	NewBuffer(bytes int) (tensor.Memory, error)
	// Retire declares that this rank no longer uses a memory from a frame or slot of a failed call, but that a peer may
	// still use it. The transport must not reuse that memory before Close.
	Retire(tensor.Memory)
	// Signal sets a flag of this rank. For flag 0 it returns ErrInterrupted, and does not set it, if the domain was
	// interrupted before.
	Signal(flag int) error
	// Await blocks until a rank, or with rank -1 every rank of the domain, has set the flag in the current call. For a
	// flag that is set it returns nil, even after a failure. It returns ErrInterrupted for flag 0 if the call can never
	// start, a PeerDown if a rank that has not set the flag is down or has failed, and otherwise the error that ended
	// the wait.
	Await(ctx context.Context, rank, flag int) error
	// Behind appends to ranks the ranks of the domain that have not set the flag in the current call, and returns the
	// result.
	Behind(flag int, ranks []int) []int
	// Withdraw removes this rank from its current call and returns true if the call has not started; afterwards no call
	// of this domain can start. It returns false if the call has started. It wakes no rank.
	Withdraw() bool
	// Interrupt prevents the start of every call that has not started, and wakes all ranks of the domain.
	Interrupt()
}
