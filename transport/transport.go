// Package transport moves bytes between the ranks of a group, and says when a peer is gone. It knows ranks, frames
// and memory, and nothing of what the bytes mean.
//
// An [Endpoint] is one rank's end of a group. With every peer it can exchange frames ([Endpoint.Exchange]). Where the
// peer's memory can be read and written too (same process, shared memory), the two also see each other's published
// slots ([Endpoint.Publish], [Endpoint.Peer]); an endpoint that reaches all its peers so is a [Marker], whose marks order
// the accesses. Every frame and every slot carries a [Header], which the receiver holds against its own current call
// before it touches the data.
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

	"github.com/lockstep-ml/lockstep/tensor"
)

// The ways in which a wait or a call can end early. [PeerDown] is the third.
var (
	ErrClosed      = errors.New("transport: endpoint closed")     // used after this rank's Close
	ErrInterrupted = errors.New("transport: group interrupted")   // Marker.Interrupt was called, or a peer withdrew
	ErrSize        = errors.New("transport: frame of wrong size") // the frame does not fill the receiver's buffer exactly
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

// Frame is what one rank sends another in one exchange.
type Frame struct {
	Header
	Data []byte // the sender's memory: read in place, or copied, before Exchange returns
}

// Slot is what a rank shows those that reach its memory: its part in the current call. The memory belongs to all ranks
// from mark 0 until this rank has awaited the call's last mark.
type Slot struct {
	Header
	Src, Dst  tensor.Memory
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
	// that half. Nothing is buffered: it returns when the receiver has the whole frame and in is filled.
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
	// Down delivers the ranks that have left the group, each once. It is never closed.
	Down() <-chan PeerDown
	// Retire says that the memory, named in a frame or slot of a call that failed, is not used any more by this rank,
	// while a peer out of reach may still do so: the transport must not map it to anything else before Close.
	Retire(tensor.Memory)
	// Close leaves the group. Peers that wait for this rank, or later need it, get a PeerDown. The caller has ended its
	// own Exchange and Await first. Closing again does nothing.
	Close() error
}

// Marker is an endpoint that reaches all its peers by memory. Marks order the accesses to it: a rank raises marks 0, 1,
// … of the call it published, each once and in that order, and awaits those of all ranks. What a rank wrote before it
// raised a mark is seen by every rank that awaited it.
//
// Mark 0 is special: a call starts at the moment when the last rank raises it. A rank that cannot wait any longer may
// withdraw from a call that has not started, and then it never starts; once it has started, all ranks are in it and it
// runs to its last mark on all of them. One atomic decides which of the two it is.
type Marker interface {
	Endpoint
	// Signal raises this rank's mark. For mark 0 it returns ErrInterrupted, without raising it, if the group was
	// interrupted before. Marks are below [MarksMax].
	Signal(mark int) error
	// Await blocks until every rank has raised the mark in the current call. It returns nil for a mark 0 that all ranks
	// have raised, whatever else has happened; ErrInterrupted if the call can never start; a PeerDown if a rank that
	// has not raised it is gone; else what ended the wait.
	Await(ctx context.Context, mark int) error
	// Behind appends to ranks those that have not raised the mark of the current call, and returns the result.
	Behind(mark int, ranks []int) []int
	// Withdraw takes this rank out of its current call and reports true, if the call has not started: then no call of this
	// group ever starts any more. It reports false if the call has started. Nobody is woken.
	Withdraw() bool
	// Interrupt keeps every call from starting that has not started, and wakes all local ranks. It may be called at any
	// time, by any goroutine.
	Interrupt()
}

// MarksMax bounds the marks of one call.
const MarksMax = 8

// Splitter is an endpoint that can make groups of some of its ranks.
type Splitter interface {
	Endpoint
	// Split returns this rank's end of a new group of the ranks listed, whose numbers there are their indices in the list.
	// Each rank listed, this one among them, calls Split once with the same id and list; the id must not have been used
	// for another group. It does not wait for the others. The groups are closed one by one.
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
	select {
	case <-ready:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
