// Package transport defines how bytes move between the ranks of a group, and how the failure of a peer is reported. It
// knows ranks, frames and memory, but not the meaning of the bytes.
//
// An [Endpoint] is one rank's end of a group. It exchanges frames with every peer ([Endpoint.Exchange]). If two ranks
// can access each other's memory (same process, shared memory), they also read each other's published slots
// ([Endpoint.Publish], [Endpoint.Peer]). Such ranks are a domain: those of one process, or of one host. The domain is
// the same for all its ranks and never changes. Every frame and every slot carries a [Header]. The receiver compares it
// with its current call before it reads the data. [Capabilities] declares what an endpoint supports.
//
// # Flags
//
// Synchronization flags order the memory accesses of a domain. In the call that it published, a rank sets flags 0, 1,
// 2, …, each once and in that order ([Endpoint.Signal]), and awaits the flags of others ([Endpoint.Await]). A rank that
// awaited a flag sees everything that the other rank wrote before it set that flag. All ranks of the domain set the
// same number of flags in a call; the number is not limited. Each rank awaits flag 0 of all others before it publishes
// its next call.
//
// Flag 0 is special: a call starts, in the domain, when the last rank of the domain sets it. A rank that cannot wait
// any longer may withdraw from a call that has not started; then the call never starts. After the start, all ranks of
// the domain take part in it. One atomic variable decides between the two.
//
// # Waiting
//
// A transport may spin for a short time. Then it blocks through the context of the call. A context that implements
// [Parker] does the blocking, so the caller decides what ends a wait (a deadline, a failure elsewhere) without a
// goroutine or a timer per call. With any other context a wait ends when the context does.
//
// # Writing a transport
//
// A transport implements [Endpoint]. One that only exchanges frames embeds [NoMemory], one without non-blocking
// exchanges [NoPosts]; Capabilities declares both. Package internal/transport/transporttest has the conformance suite
// that every transport must pass: it verifies the contracts of all methods that the capabilities declare, and that the
// others fail.
package transport

import (
	"context"
	"errors"
	"fmt"
	"math/bits"

	"github.com/lockstep-ml/lockstep/tensor"
)

// The errors of waits and calls that end early. Another one is [PeerDown].
var (
	ErrClosed      = errors.New("transport: endpoint closed")   // call after Close of this endpoint
	ErrInterrupted = errors.New("transport: group interrupted") // Interrupt was called, or a peer withdrew
	// the frame does not fill the receiver's buffer exactly
	ErrSize = errors.New("transport: frame of wrong size")
	// a received frame is damaged: the Err of its sender's PeerDown
	ErrCorrupt     = errors.New("transport: corrupt frame")
	ErrUnsupported = errors.New("transport: unsupported operation") // the Capabilities of the endpoint exclude the method
)

// Header identifies the call and the communicator of a frame or a slot. All fields except Frame must be equal on all
// ranks of a call. Transports pass it on unchanged and do not interpret it.
type Header struct {
	Epoch  uint32 // epoch of the job
	Frame  uint32 // frames: number of the frame from its sender to its receiver, in the communicator, from 0
	Comm   uint64 // id of the communicator
	Seq    uint64 // number of the call in the communicator, from 0
	Count  uint64 // number of elements
	Names  uint64 // hash of names and shapes
	Root   int32  // rooted operations: the root
	Plan   uint32 // hash of the algorithm's name
	Op     uint8  // operation
	Reduce uint8  // reduction
	Type   uint8  // dtype
	Order  uint8  // order of the reduction, and accumulation type
}

// Sum returns a hash of the header. Two different headers collide with probability 2^-64, unless they are chosen to
// collide. It grows by [SumStep] with Seq, so a rank that repeats a call need not hash the header again.
func (h *Header) Sum() uint64 {
	fold := func(a, b uint64) uint64 { // as wyhash does
		hi, lo := bits.Mul64(a, b)
		return hi ^ lo
	}
	what := uint64(h.Op)<<24 | uint64(h.Reduce)<<16 | uint64(h.Type)<<8 | uint64(h.Order)
	// Any numbers without a pattern: digits of the roots of 2, 5, 7, 11, 13, 17, 19 and 23.
	sum := fold(h.Comm^0x6a09e667f3bcc909, what^0xcbbb9d5dc1059ed8) ^ fold(h.Count^0x3c6ef372fe94f82b,
		h.Names^0xa54ff53a5f1d36f1) ^
		fold(uint64(h.Epoch)<<32|uint64(h.Frame)^0x510e527fade682d1,
			uint64(uint32(h.Root))<<32|uint64(h.Plan)^0x9b05688c2b3e6c1f)
	return fold(sum^0x1f83d9abfb41bd6b, 0x5be0cd19137e2179) + h.Seq*SumStep
}

// SumStep is the difference of the sums of two headers whose Seq differ by 1 and whose other fields are equal.
const SumStep = 0xbb67ae8584caa73b

// Frame is the data that one rank sends to another in one exchange.
type Frame struct {
	Header
	Data []byte // the sender's memory, not used after Exchange returns
}

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

// NotConnected is the error of a group that could not be opened because of other ranks: they did not connect in time,
// or refused the connection.
type NotConnected struct {
	Ranks []int // nil: unknown
	Err   error
}

// Error describes the ranks and the reason.
func (e *NotConnected) Error() string { return e.Err.Error() }

// Unwrap returns the reason.
func (e *NotConnected) Unwrap() error { return e.Err }

// PeerDown reports that a rank has left the group, and why. It is also the error of a wait that needed that rank.
type PeerDown struct {
	Rank int
	Err  error // ErrClosed after a regular Close
}

// Error names the rank and the reason.
func (d *PeerDown) Error() string {
	switch {
	case d.Err == ErrClosed:
		return fmt.Sprintf("rank %d has closed its end", d.Rank)
	case errors.Is(d.Err, ErrClosed):
		return fmt.Sprintf("rank %d has closed its end: %v", d.Rank, d.Err)
	}
	return fmt.Sprintf("rank %d is down: %v", d.Rank, d.Err)
}

// Unwrap returns the reason.
func (d *PeerDown) Unwrap() error { return d.Err }

// Endpoint is one rank's end of a group. One goroutine at a time may use it; Close, Fail and Interrupt may be called at
// any time, by any goroutine. [Endpoint.Capabilities] declares which of its methods work: an endpoint that lacks memory
// or non-blocking exchanges embeds [NoMemory] or [NoPosts].
type Endpoint interface {
	// Rank returns the number of this rank in the group, from 0 to Size()-1.
	Rank() int
	// Size returns the number of ranks in the group.
	Size() int
	// Transport returns the name of the transport: "mem".
	Transport() string
	// Capabilities returns where the ranks are and what this endpoint supports. It never changes.
	Capabilities() Capabilities

	// Exchange sends out to rank to and, at the same time, receives a frame from rank from into in; a negative rank
	// omits that half. It returns when in is filled and out.Data may be changed. Callers must not rely on buffering: a
	// transport may block the sender until the receiver has the whole frame.
	//
	// Exchange passes the header of the received frame to the function of Inspect before it touches the data; an error
	// of that function refuses the frame, and Exchange returns it. Before a wait blocks, it also passes the headers of
	// frames that other peers offer. This detects two ranks that send to each other while neither receives. A frame
	// that does not fill in exactly is refused with ErrSize.
	//
	// After Exchange has returned, with or without an error, the transport uses neither out.Data nor in: it cancels an
	// offered frame, or waits until it is copied. After an error the content of in is undefined, and the group can only
	// be closed.
	Exchange(ctx context.Context, to int, out Frame, from int, in []byte) error
	// Inspect sets the function that verifies received headers: once that of a received frame, before its data; any
	// number of times those of frames that other peers offer. It is called on the goroutine that is in Exchange.
	// Inspect must be called before the first Exchange.
	Inspect(inspect func(peer int, h Header) error)
	// Post starts an exchange as Exchange does, and returns without waiting for a peer: the next exchange can be in
	// progress while the caller uses the data of the last. At most [PostsMax] may be in progress. Each Complete ends
	// the oldest one. Until then out.Data and in belong to the transport. A peer may receive a posted frame with
	// Exchange, and vice versa. Exchange may be called only while no posted exchange is in progress. Post needs
	// Capabilities.Posts.
	Post(to int, out Frame, from int, in []byte) error
	// Complete waits for the end of the oldest posted exchange, and returns its error as Exchange does. After a failure
	// the later ones fail too; each still needs a Complete.
	Complete(ctx context.Context) error

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

	// Answer sets the function that answers the queries of peers about this rank. It returns the text behind the header
	// of this rank's call seq, or of its latest call if seq is unknown, at most [ReasonMax] bytes; nil if the rank has
	// made no call. Any goroutine may call it, at any time. Answer must be called before the first Exchange.
	Answer(text func(seq uint64) []byte)
	// Ask queries a peer, when a call has failed or takes long. It returns the result of the peer's function, usually
	// the text behind the header of a call, or nil if there is no answer within at most a second. The goroutine that
	// uses the endpoint may call it, also inside a [Parker], but not inside the function of Inspect.
	Ask(peer int, seq uint64) []byte
	// Split creates this rank's endpoint of a new group of the listed ranks. A rank's number in the new group is its
	// index in the list. Each listed rank, this one included, calls Split once with the same id and list; the id must
	// be new. Split does not wait for the other ranks. The caller closes each group separately. Close, Fail and
	// Interrupt of one group do not affect the others. Different groups may be used concurrently.
	Split(id uint64, ranks []int) (Endpoint, error)

	// Down returns a channel that delivers each rank that has left the group, once: one that closed its end, is lost,
	// or called Fail. It has the first reason, which is also the error of waits that need that rank. Delivery does not
	// depend on a wait, with two exceptions: a transport may report a rank that closed its end, or that called Fail when
	// it knew that another rank had failed, only to ranks that exchange frames with it, now or later. The channel is
	// never closed.
	Down() <-chan PeerDown
	// Fail reports to every reachable peer that the group has failed at this rank, and why. A peer's waits that need
	// this rank, now or later, end with a PeerDown whose Err is a *[Failure] with that reason, truncated to [ReasonMax]
	// bytes. Fail does not wait for the peers. Calls after the first, and after Close, do nothing. A rank that has
	// failed may still access its peers' memory until it sets its last flag or closes. Of several ranks that fail at the
	// same time, a peer may be notified of one.
	Fail(reason []byte)
	// Close leaves the group. Peers that wait for this rank, now or later, get a PeerDown. Data that this rank sent
	// before still arrives. The caller must end its Exchange and Await first. Closing again does nothing.
	Close() error
}

// Capabilities declares where the ranks of a group are, and which methods of an [Endpoint] work. The conformance suite
// verifies the declaration. The caller must not change the slices.
type Capabilities struct {
	// Places holds the location of each rank, by rank. It is the same on every rank of the group.
	Places []Place
	// Memory reports that the endpoint supports memory: the methods Publish, Peer, Reachable, StagingBuffer, Inline,
	// NewBuffer, Signal, Await, Behind, Withdraw and Interrupt. Without it every rank is in a separate domain.
	Memory bool
	// StagingBytes is the length of every rank's staging buffer, which is even and the same for all ranks; 0 without
	// Memory.
	StagingBytes int
	// InlineBytes is the length of the memory beside every rank's slot, the same for all ranks; 0: there is none.
	InlineBytes int
	// Posts reports that the endpoint supports non-blocking exchanges: Post and Complete.
	Posts bool
	// SharedReceives reports that posted exchanges may receive into the same memory: it is written only by the Complete
	// that ends an exchange, and the caller may use it until the next Complete.
	SharedReceives bool
	// Encrypted reports, by rank, whether the connections with that rank are encrypted. nil: none is.
	Encrypted []bool
	// Processors is the number of processors that the ranks of a host share, the same on all ranks: that of the host with
	// the fewest; 0: unknown.
	Processors int
}

// Domain returns the ranks of the domain of a rank, that one included, in increasing order.
func (c *Capabilities) Domain(rank int) []int {
	var domain []int
	for r, p := range c.Places {
		if p.Domain == c.Places[rank].Domain {
			domain = append(domain, r)
		}
	}
	return domain
}

// Place is the location of a rank: its process, its domain (see the package comment), and its host. The ranks of one
// worker are in one domain, and the ranks of a domain are on one host. The numbers distinguish the places of one group;
// they have no other meaning.
type Place struct{ Worker, Domain, Host int }

// PostsMax is the maximum number of exchanges in progress. With segments of 256 KiB it fills the buffers of a socket,
// so that a rank that is not scheduled delays its peer as late as possible.
const PostsMax = 8

// ReasonMax bounds the reason of a failure, in bytes.
const ReasonMax = 4096

// Failure is the error of a group that a peer has failed ([Endpoint.Fail]). Transports do not interpret Reason.
type Failure struct{ Reason []byte }

// Error returns a fixed text without Reason.
func (f *Failure) Error() string { return "its group has failed" }

// Parker is a context that does the blocking of a transport. One goroutine at a time may use it.
type Parker interface {
	context.Context
	// Park blocks until it receives from ready, and returns nil. If the wait must end first, it receives nothing and
	// returns the reason.
	Park(ready <-chan struct{}) error
}

// Park blocks until it receives from ready, and returns nil, or until ctx ends, and returns the cause. Transports call
// it to block. If ctx is a [Parker], it calls ctx.Park.
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
