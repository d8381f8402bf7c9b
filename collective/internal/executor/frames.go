package executor

import (
	"fmt"

	"github.com/lockstep-ml/lockstep/collective/internal/byrank"
	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/transport"
)

// frames numbers the frames of a rank, and verifies those that it receives.
type frames struct {
	shared  transport.SharedMemory // nil: no memory is shared
	header  *transport.Header      // of the current call
	message bool                   // the current call is a message between two ranks

	peers    byrank.Table[peerFrames]
	verified bool // the header of the next awaited frame was accepted
	wait     wait
}

// peerFrames are the frames exchanged with a peer since the start.
type peerFrames struct {
	sent, received uint32
	lastSeq        uint64 // number of the last collective of which a frame was received, plus 1
}

// wait is what the current wait is for.
type wait struct {
	flag   int // the number of a flag, or -1
	of     int // the rank whose flag it is, or -1 for all of the domain
	to     int // the receiver of an exchange, or -1
	from   int // its sender, or -1
	frames int // that the sender has not sent yet
}

// OtherCall rejects a frame that does not belong to the current call.
type OtherCall struct {
	Peer   int // its sender
	Header transport.Header
}

// Error names the sender.
func (e *OtherCall) Error() string {
	return fmt.Sprintf("executor: a frame of rank %d belongs to another call", e.Peer)
}

// MissingFrame reports that the transport delivered the data of a frame, but not its header.
type MissingFrame struct {
	Peer   int    // its sender
	Number uint32 // of the frame, from its sender to this rank
}

// Error names the sender and the frame.
func (e *MissingFrame) Error() string {
	return fmt.Sprintf("a frame of rank %d is missing: number %d was not received", e.Peer, e.Number)
}

// begin begins a call.
func (f *frames) begin(header *transport.Header, message bool) {
	f.header, f.message = header, message
	f.noWait()
}

// noWait records that the rank waits for nothing.
func (f *frames) noWait() {
	w := &f.wait
	w.flag, w.of, w.to, w.from, w.frames = -1, -1, -1, -1, 0
}

// nextHeader returns the header of the next frame to a rank.
func (f *frames) nextHeader(to int) transport.Header {
	h := *f.header
	peer := f.peers.At(to)
	h.Frame = peer.sent
	peer.sent++
	return h
}

// inspect compares the header of an arriving frame with the current call. It is called once for the frame that is
// received next, just before its data, and any number of times for others.
//
// The frames of one peer arrive in the order in which they were sent, so the next frame of the peer that this rank
// waits for belongs to this call, or the peer makes a different call. Frames of other peers may belong to later
// calls, or to sends that this rank has not reached yet. But a peer that this rank sends to, and that is sending
// itself, does not receive: no step relies on buffering.
func (f *frames) inspect(peer int, h transport.Header) error {
	own := *f.header
	own.Frame = h.Frame
	w := &f.wait
	ahead := h.Frame - f.peers.Get(peer).received
	awaited := peer == w.from && w.frames > 0
	switch {
	case awaited && h == own && ahead <= uint32(w.frames): // one more may have arrived already
		if ahead == 0 {
			f.verified = true
			if !f.message {
				f.peers.At(peer).lastSeq = h.Seq + 1
			}
		}
		return nil
	case awaited && (w.frames > 1 || !f.verified):
	case h.Comm != own.Comm || h.Epoch != own.Epoch:
	case f.message && peer == w.to:
	case h == own || plan.Op(h.Op) == plan.Send || f.message || h.Seq > own.Seq:
		return nil
	}
	return &OtherCall{peer, h}
}

// count counts a received frame.
func (f *frames) count(peer int) error {
	if !f.verified {
		return &MissingFrame{peer, f.Received(peer)}
	}
	f.verified = false
	f.peers.At(peer).received++
	f.wait.frames--
	return nil
}

// Received returns the number of frames received from a peer.
func (f *frames) Received(peer int) uint32 { return f.peers.Get(peer).received }

// LastCall returns the number of the last collective of which a frame of a peer was received, plus 1; 0 if there was
// none.
func (f *frames) LastCall(peer int) uint64 { return f.peers.Get(peer).lastSeq }

// Entering reports whether the current wait is for the ranks of the domain to enter the call.
func (f *frames) Entering() bool { return f.wait.flag == 0 }

// Missing appends to ranks those that the current wait is for, and returns the result.
func (f *frames) Missing(ranks []int) []int {
	switch w := &f.wait; {
	case w.to >= 0 && f.verified && w.frames == 1:
		return append(ranks, w.to) // the other half has arrived
	case w.to >= 0 && w.from >= 0 && w.to != w.from:
		return append(ranks, min(w.to, w.from), max(w.to, w.from))
	case w.to >= 0:
		return append(ranks, w.to)
	case w.from >= 0:
		return append(ranks, w.from)
	case w.flag >= 0 && w.of >= 0:
		return append(ranks, w.of)
	case w.flag >= 0:
		return f.shared.Behind(w.flag, ranks)
	}
	return ranks
}
