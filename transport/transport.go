// Package transport defines how bytes move between the ranks of a group, and how the failure of a peer is reported. It
// knows ranks, frames and memory, but not the meaning of the bytes.
//
// An [Endpoint] is one rank's end of a group. It exchanges frames with every peer ([Endpoint.Exchange]). If two ranks
// can access each other's memory (same process, shared memory), they also read each other's published slots, by
// [SharedMemory]. Such ranks are a domain: those of one process, or of one host. The domain is the same for all its
// ranks and never changes. Every frame and every slot carries a [Header]. The receiver compares it with its current
// call before it reads the data. [Capabilities] declares where the ranks are.
//
// # Flags
//
// Synchronization flags order the memory accesses of a domain. In the call that it published, a rank sets flags 0, 1,
// 2, …, each once and in that order ([SharedMemory.Signal]), and awaits the flags of others ([SharedMemory.Await]). A
// rank that awaited a flag sees everything that the other rank wrote before it set that flag. All ranks of the domain
// set the same number of flags in a call; the number is not limited. Each rank awaits flag 0 of all others before it
// publishes its next call.
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
// A transport implements [Endpoint]. Two parts are optional: [SharedMemory] and [Poster]. Package
// internal/transport/transporttest has the conformance suite that every transport must pass: it verifies the contracts
// of all that the endpoints have.
package transport

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"slices"
)

// The errors of waits and calls that end early. Another one is [PeerDown].
var (
	ErrClosed      = errors.New("transport: endpoint closed")   // call after Close of this endpoint
	ErrInterrupted = errors.New("transport: group interrupted") // Interrupt was called, or a peer withdrew
	// the frame does not fill the receiver's buffer exactly
	ErrSize = errors.New("transport: frame of wrong size")
	// a received frame is damaged: the Err of its sender's PeerDown
	ErrCorrupt = errors.New("transport: corrupt frame")
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

// Endpoint is one rank's end of a group. One goroutine at a time may use it, with its Poster and its SharedMemory;
// Close, Fail and Interrupt may be called at any time, by any goroutine.
type Endpoint interface {
	// Rank returns the number of this rank in the group, from 0 to Size()-1.
	Rank() int
	// Size returns the number of ranks in the group.
	Size() int
	// Transport returns the name of the transport: "mem".
	Transport() string
	// Capabilities returns where the ranks are, and properties of the endpoint. It never changes.
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
	// Posts returns the non-blocking exchanges of the rank, or nil if the transport has none. It is the same at every
	// call.
	Posts() Poster
	// Memory returns how the rank shares memory with others, or nil if it shares none: then every rank is in a separate
	// domain. It is the same at every call.
	Memory() SharedMemory

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

// Capabilities declares where the ranks of a group are, and properties of an [Endpoint]. The conformance suite verifies
// the declaration. The caller must not change the slices.
type Capabilities struct {
	// Places holds the location of each rank, by rank. It is the same on every rank of the group.
	Places []Place
	// StagingBytes is the length of every rank's staging buffer, which is even and the same for all ranks; 0 without
	// SharedMemory.
	StagingBytes int
	// InlineBytes is the length of the memory beside every rank's slot, the same for all ranks; 0: there is none.
	InlineBytes int
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

// Poster is the non-blocking exchanges of an [Endpoint]: the next exchange can be in progress while the caller uses the
// data of the last.
type Poster interface {
	// Post starts an exchange as Exchange does, and returns without waiting for a peer. At most [PostsMax] may be in
	// progress. Each Complete ends the oldest one. Until then out.Data and in belong to the transport. A peer may receive
	// a posted frame with Exchange, and vice versa. Exchange may be called only while no posted exchange is in progress.
	Post(to int, out Frame, from int, in []byte) error
	// Complete waits for the end of the oldest posted exchange, and returns its error as Exchange does. After a failure
	// the later ones fail too; each still needs a Complete.
	Complete(ctx context.Context) error
}

// PostsMax is the maximum number of exchanges in progress. With segments of 256 KiB it fills the buffers of a socket,
// so that a rank that is not scheduled delays its peer as late as possible.
const PostsMax = 8

// ReasonMax bounds the reason of a failure, in bytes.
const ReasonMax = 4096

// Failure is the error of a group that a peer has failed ([Endpoint.Fail]). Transports do not interpret Reason.
type Failure struct{ Reason []byte }

// Error returns a fixed text without Reason.
func (f *Failure) Error() string { return "its group has failed" }

// RankIn returns the number of a rank in the group that [Endpoint.Split] makes of the listed ranks of a group of size.
// It fails if the list lacks the rank, or is not one of different ranks.
func RankIn(ranks []int, rank, size int) (int, error) {
	seen := make([]bool, size)
	for _, r := range ranks {
		if r < 0 || r >= size || seen[r] {
			return 0, fmt.Errorf("a group of ranks %v of %d: want different numbers from 0 to %d", ranks, size, size-1)
		}
		seen[r] = true
	}
	at := slices.Index(ranks, rank)
	if at < 0 {
		return 0, fmt.Errorf("rank %d is not among the ranks %v of the group", rank, ranks)
	}
	return at, nil
}

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
