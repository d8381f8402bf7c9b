package fault

import "github.com/lockstep-ml/lockstep/collective/internal/fingerprint"

// Blocked is the call in which a rank blocked last, and may still block. Ranks of one process that exchange messages
// could otherwise wait for each other without ever receiving a frame. The caller serializes its use by all ranks of the
// process.
type Blocked struct {
	rank  int
	near  func(rank int) bool
	call  fingerprint.Numbered
	begun fingerprint.Numbers // the calls that the rank had begun then, including this one
}

// NewBlocked returns that of a rank that blocks in no call yet. near reports whether a collective of this rank needs
// another rank to enter it, and vice versa.
func NewBlocked(rank int, near func(rank int) bool) Blocked { return Blocked{rank: rank, near: near} }

// Block records that the rank blocks in a call. begun are the calls that the rank has begun, including this one.
func (own *Blocked) Block(call *fingerprint.Numbered, begun *fingerprint.Numbers) {
	own.call = *call
	own.begun.Set(begun)
}

// Conflict returns how the rank's call conflicts with one in which another rank has blocked: a call with the same
// number that differs, or one that waits for this rank while this rank waits for it; nil: it does not.
func (own *Blocked) Conflict(other *Blocked) *Conflict {
	switch {
	case other == own || other.call.Like == nil:
	case own.call.Like.Pair != 0 || other.call.Like.Pair != 0:
		if deadlocked(own, other) {
			return waitForEachOther(own.part(), other.part())
		}
	case other.call.Seq == own.call.Seq && other.call.Like.Header != own.call.Like.Header:
		return Differ(own.part(), other.part())
	}
	return nil
}

func (own *Blocked) part() Part {
	call := own.call.Call()
	return Part{Rank: own.rank, Call: &call}
}

// deadlocked reports whether own waits for a peer that is still blocked in a call that needs own, while
// neither has begun the other's half. (It may have begun: then the event that own waits for has happened, and
// it has not looked yet.) A Send and a Recv between the two never deadlock: they are the halves of one
// message, or the message that the Recv needs is on its way.
func deadlocked(own, peer *Blocked) bool {
	call, peerCall := own.call.Like, peer.call.Like
	seq, peerSeq := own.call.Seq, peer.call.Seq
	switch {
	case call.Pair != 0 && peerCall.Pair != 0:
		return messagesDeadlock(own.part(), peer.part())
	case call.Pair != 0:
		return peer.rank == call.Peer && own.near(peer.rank) &&
			peer.begun.Opposite(call.Pair, own.rank) <= seq && own.begun.Of(0, 0) <= peerSeq
	}
	return peerCall.Peer == own.rank && own.near(peer.rank) &&
		peer.begun.Of(0, 0) <= seq && own.begun.Opposite(peerCall.Pair, peer.rank) <= peerSeq
}
