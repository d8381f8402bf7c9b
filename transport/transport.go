// Package transport moves bytes between the ranks of a group, and says when a peer is gone. It knows ranks, frames
// and memory, and nothing of what the bytes mean.
//
// An [Endpoint] is one rank's end of a group. With every peer it can exchange frames ([Endpoint.Exchange]). Where the
// peer's memory can be read and written too (same process, shared memory), the two also see each other's published
// slots ([Endpoint.Publish], [Endpoint.Peer]). The ranks that reach each other so are a domain: those of one process, or of
// one host. An endpoint that has such peers is a [Marker], whose marks order the accesses. Every frame and every slot
// carries a [Header], which the receiver holds against its own current call before it touches the data.
//
// # Waiting
//
// A transport may spin for a short while, and then blocks through the context it was given: a context that is a
// [Parker] does the blocking itself, so the caller decides what ends a wait (a deadline, a failure elsewhere) without a
// goroutine or a timer per call. With any other context a wait ends when the context does.
//
// # Writing a transport
//
// Package transporttest has the conformance suite that every transport passes.
package transport

import (
	"context"
	"errors"
	"fmt"
	"math/bits"

	"github.com/lockstep-ml/lockstep/tensor"
)

// The ways in which a wait or a call can end early. [PeerDown] is the third.
var (
	ErrClosed      = errors.New("transport: endpoint closed")     // used after this rank's Close
	ErrInterrupted = errors.New("transport: group interrupted")   // Marker.Interrupt was called, or a peer withdrew
	ErrSize        = errors.New("transport: frame of wrong size") // the frame does not fill the receiver's buffer exactly
	ErrCorrupt     = errors.New("transport: corrupt frame")       // a frame was damaged on its way: the reason of a PeerDown of its sender
)

// Reach says how a peer is reached.
type Reach uint8

// The reaches.
const (
	Messages Reach = iota + 1 // by frames only
	Memory                    // its published memory can be read and written as well
)

// String returns "messages" or "memory".
func (r Reach) String() string {
	switch r {
	case Messages:
		return "messages"
	case Memory:
		return "memory"
	}
	return fmt.Sprintf("Reach(%d)", uint8(r))
}

// Header says which call of which communicator a frame or a slot belongs to. All fields but Frame must be equal on all
// ranks of a call. The transport carries it and never looks inside.
type Header struct {
	Epoch  uint32 // membership of the job
	Frame  uint32 // frames: number of the frame from its sender to its receiver, in the communicator, from 0
	Comm   uint64 // communicator
	Seq    uint64 // number of the call in the communicator, from 0
	Count  uint64 // elements
	Names  uint64 // hash of names and shapes
	Root   int32  // rooted operations: the root
	Plan   uint32 // hash of the algorithm's name
	Op     uint8  // operation
	Reduce uint8  // reduction
	Type   uint8  // dtype
	Order  uint8  // order of the reduction, and its accumulation type
}

// Sum returns a hash of the header. That of two different headers is the same once in 2^64, if nobody is out for it. It goes up
// by [SumStep] with Seq, so that a rank which makes the same call again need not hash it again.
func (h *Header) Sum() uint64 {
	fold := func(a, b uint64) uint64 { // as wyhash does
		hi, lo := bits.Mul64(a, b)
		return hi ^ lo
	}
	what := uint64(h.Op)<<24 | uint64(h.Reduce)<<16 | uint64(h.Type)<<8 | uint64(h.Order)
	// Any numbers without a pattern: digits of the roots of 2, 5, 7, 11, 13, 17, 19 and 23.
	sum := fold(h.Comm^0x6a09e667f3bcc909, what^0xcbbb9d5dc1059ed8) ^ fold(h.Count^0x3c6ef372fe94f82b, h.Names^0xa54ff53a5f1d36f1) ^
		fold(uint64(h.Epoch)<<32|uint64(h.Frame)^0x510e527fade682d1, uint64(uint32(h.Root))<<32|uint64(h.Plan)^0x9b05688c2b3e6c1f)
	return fold(sum^0x1f83d9abfb41bd6b, 0x5be0cd19137e2179) + h.Seq*SumStep
}

// SumStep is by how much the sums of two headers differ that differ by 1 in Seq, and in nothing else.
const SumStep = 0xbb67ae8584caa73b

// Frame is what one rank sends another in one exchange.
type Frame struct {
	Header
	Data []byte // the sender's memory: read in place, or copied, before Exchange returns
}

// Slot is what a rank shows those that reach its memory: its part in the current call. The memory belongs to all ranks
// from mark 0 until this rank has awaited the call's last mark.
//
// What peers look at in every call comes first and together: Sum, and where Src and Dst begin.
type Slot struct {
	Sum      uint64        // Header.Sum(): peers compare it, and look at the Header only if it differs
	Src, Dst tensor.Memory // as this rank reaches them: of all other fields only Bytes tells; Ptr is nil where it cannot
	Header
	Name      string // text behind Header.Names
	Shape     []int  // text behind Header.Names; must not change before the next but one Publish
	Algorithm string // text behind Header.Plan
}

// PeerDown says that a rank has left the group, and why. It is also the error of a wait that needed that rank.
type PeerDown struct {
	Rank int
	Err  error // ErrClosed: in good order
}

// Error says which rank is down, and why.
func (d *PeerDown) Error() string {
	if errors.Is(d.Err, ErrClosed) {
		return fmt.Sprintf("rank %d has closed its end", d.Rank)
	}
	return fmt.Sprintf("rank %d is down: %v", d.Rank, d.Err)
}

// Unwrap returns the reason.
func (d *PeerDown) Unwrap() error { return d.Err }

// Endpoint is one rank's end of a group. One goroutine at a time uses it; only Close may be called at any time.
type Endpoint interface {
	// Rank returns this end's number in the group, from 0 to Size()-1.
	Rank() int
	// Size returns the number of ranks in the group.
	Size() int
	// Transport returns the transport's name: "mem".
	Transport() string
	// Reach says how peer is reached. It is the same in both directions and never changes.
	Reach(peer int) Reach
	// Exchange sends out to rank to, and receives a frame from rank from into in, both at once; a negative rank leaves out
	// that half. It returns when in is filled and out.Data may be changed. Nothing relies on buffering: a transport may hold
	// the sender until the receiver has the whole frame.
	//
	// The arriving frame's header goes to the function given to Inspect before its data is touched; that function's error
	// refuses the frame and is returned. So do the headers of frames that other peers offer meanwhile, before a wait blocks:
	// two ranks that send to each other while neither receives are found out. A frame that does not fill in exactly is
	// refused with ErrSize.
	//
	// When Exchange returns, with an error or without, nobody reads out.Data or writes in any more: a frame that was
	// offered is taken back, or its copy is awaited. After an error in is undefined, and the group is good for nothing
	// but Close.
	Exchange(ctx context.Context, to int, out Frame, from int, in []byte) error
	// Publish shows slot to the peers that reach this rank's memory: it begins this rank's next call. The slot of the call
	// before stays readable to peers that are still in it. The endpoint keeps a copy.
	Publish(slot Slot)
	// Peer returns what the peer published for the call that this rank published last. It may be read after mark 0 of
	// that call was awaited, until this rank's next Publish; nil if the peer's memory is not reached.
	Peer(peer int) *Slot
	// Inspect sets the function that judges every header that arrives: that of a frame that is received once, just before
	// its data, those of others that wait any number of times. It is called on the goroutine that is in Exchange, and must
	// be set before the first.
	Inspect(judge func(peer int, h Header) error)
	// Down delivers the ranks that have left the group, each once: those that closed their end, are lost, or called Fail, with
	// the first reason, which waits that need them end with as well. It delivers them also to a rank that does not wait. It is
	// never closed.
	Down() <-chan PeerDown
	// Fail tells every peer, as far as it can be reached, that this rank's group has failed, and why: a peer's waits that need
	// this rank, now or later, end with a PeerDown whose Err is a *[Failure] with that reason, cut to [ReasonMax] bytes. It
	// does not wait for the peers. Only the first call counts, and none after Close; it may be called at any time, by any
	// goroutine. A rank that has failed may still be in its peers' memory, until it raises its last mark or closes.
	Fail(reason []byte)
	// Retire says that the memory, named in a frame or slot of a call that failed, is not used any more by this rank,
	// while a peer out of reach may still do so: the transport must not map it to anything else before Close.
	Retire(tensor.Memory)
	// Close leaves the group. Peers that wait for this rank, or later need it, get a PeerDown. What this rank has sent before
	// still arrives. The caller has ended its own Exchange and Await first. Closing again does nothing.
	Close() error
}

// ReasonMax bounds the reason of a failure, in bytes.
const ReasonMax = 4096

// Failure is why a peer's group has failed, in the peer's words. The transport does not look inside.
type Failure struct{ Reason []byte }

// Error says that it failed.
func (f *Failure) Error() string { return "its group has failed" }

// Marker is an endpoint that reaches some peers by memory: those of its domain. The domain is the same for all of them,
// and never changes. Marks order the accesses: a rank raises marks 0, 1, 2, … of the call it published, each once and in that
// order, and awaits those of others. What it wrote before it raised a mark is seen by every rank that awaited it. All ranks
// of the domain raise equally many marks in a call, as many as they like, and each awaits mark 0 of all others before it
// publishes its next call.
//
// Mark 0 is special: a call starts, in the domain, at the moment when the domain's last rank raises it. A rank that cannot
// wait any longer may withdraw from a call that has not started, and then it never starts; once it has started, all ranks of
// the domain are in it. One atomic decides which of the two it is.
type Marker interface {
	Endpoint
	// Domain returns the ranks of the domain, this one among them, in order. The caller must not change it.
	Domain() []int
	// Reachable reports whether the ranks of the domain can reach this memory of this rank.
	Reachable(tensor.Memory) bool
	// Stage returns the memory that the transport keeps for a rank of the domain and that all of the domain reach, aligned to
	// 64 bytes: its length is the same for all, and even. It may be called before the first Publish.
	Stage(rank int) []byte
	// Signal raises this rank's mark. For mark 0 it returns ErrInterrupted, without raising it, if the domain was
	// interrupted before.
	Signal(mark int) error
	// Await blocks until the rank, or with rank -1 every rank of the domain, has raised the mark in the current call. It
	// returns nil for a mark that has been raised, whatever else has happened; ErrInterrupted for a mark 0 if the call can
	// never start; a PeerDown if a rank that has not raised it is gone, or has failed; else what ended the wait.
	Await(ctx context.Context, rank, mark int) error
	// Behind appends to ranks those of the domain that have not raised the mark of the current call, and returns the result.
	Behind(mark int, ranks []int) []int
	// Withdraw takes this rank out of its current call and reports true, if the call has not started: then no call of this
	// domain ever starts any more. It reports false if the call has started. Nobody is woken.
	Withdraw() bool
	// Interrupt keeps every call from starting that has not started, and wakes all ranks of the domain. It may be called at
	// any time, by any goroutine.
	Interrupt()
}

// Poster is an endpoint on which the next exchange can be under way while the caller works on the data of the last.
type Poster interface {
	Endpoint
	// Post begins what Exchange does, and returns without waiting for a peer. At most [PostsMax] are under way; each is
	// ended by its Complete, in order. Until then out.Data and in belong to the transport. Peers may meet a posted frame with an
	// Exchange, and the other way round; Exchange itself is called only while nothing is under way.
	Post(to int, out Frame, from int, in []byte) error
	// Complete ends the oldest exchange that was posted, as Exchange returns. After one that failed those posted later fail
	// too; each still needs its Complete.
	Complete(ctx context.Context) error
}

// PostsMax is how many exchanges may be under way: with segments of 256 KiB what the buffers of a socket hold, so that a rank that is
// not running just now holds up its peer late.
const PostsMax = 8

// Allocator is an endpoint that has memory which the ranks of its domain reach in place.
type Allocator interface {
	Endpoint
	// NewBuffer returns zeroed memory of so many bytes, aligned to 64, of one reference; it is given back when the last is
	// released, or with Close. Memory that was retired is not given out again. Memory between processes that the system cannot
	// provide is an error here, not when it is written.
	NewBuffer(bytes int) (tensor.Memory, error)
}

// Encrypter is an endpoint that may encrypt what it sends.
type Encrypter interface {
	Endpoint
	// Encrypts reports whether it does so to a peer.
	Encrypts(peer int) bool
}

// Asker is an endpoint that can ask its peers what they do: only when something has failed, or takes long. An answer is as a rule the
// text behind the header of a call.
type Asker interface {
	Endpoint
	// Answer sets the function that gives the text behind the header of this rank's call seq, or of its latest if it does not
	// know that one, at most [ReasonMax] bytes; nil: it has made none. It is called by any goroutine, at any time. To be set
	// before the first Exchange.
	Answer(text func(seq uint64) []byte)
	// Ask returns what the peer's function answers, or nil if no answer comes within a second at most. It is called by the
	// goroutine that uses the endpoint, also while that waits in a [Parker], but not by the function given to Inspect.
	Ask(peer int, seq uint64) []byte
}

// Placer is an endpoint that knows where the ranks of its group are. Without it a [Marker] whose domain is the whole group
// is taken for one process, and of any other endpoint each rank for a host of its own.
type Placer interface {
	Endpoint
	// Places returns where each rank is, by rank: the same on every rank of the group. The caller must not change it.
	Places() []Place
}

// Place says where a rank is: in which process, with which other ranks it reaches memory (see [Marker]), and on which host.
// Ranks of one worker are in one domain, and those of a domain on one host. The numbers tell the places of one group
// apart, and say nothing else.
type Place struct{ Worker, Domain, Host int }

// Splitter is an endpoint that can make groups of some of its ranks.
type Splitter interface {
	Endpoint
	// Split returns this rank's end of a new group of the ranks listed, whose numbers there are their indices in the list.
	// Each rank listed, this one among them, calls Split once with the same id and list; the id must not have been used
	// for another group. It does not wait for the others. The groups are closed one by one, and what happens in one (Close,
	// Fail, Interrupt) says nothing to the others; different groups may be used at the same time.
	Split(id uint64, ranks []int) (Endpoint, error)
}

// Parker is a context that blocks for the transport. One goroutine uses it at a time.
type Parker interface {
	context.Context
	// Park blocks until it has received from ready, and returns nil, or until the wait must end, and returns why, having
	// received nothing.
	Park(ready <-chan struct{}) error
}

// Park blocks until it has received from ready and returns nil, or until ctx ends the wait and returns why. It is what
// transports call to block: it hands over to a [Parker].
func Park(ctx context.Context, ready <-chan struct{}) error {
	if p, ok := ctx.(Parker); ok {
		return p.Park(ready)
	}
	done := ctx.Done()
	if done == nil {
		<-ready
		return nil
	}
	select {
	case <-ready:
		return nil
	case <-done:
		return context.Cause(ctx)
	}
}
