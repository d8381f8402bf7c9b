package fault

import (
	"slices"
	"sync"

	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
)

// Blocked records the calls in which the ranks of one process block. Ranks that exchange messages could
// otherwise wait for each other without ever receiving a frame. The zero value has no ranks. Any goroutine
// may use it at any time.
type Blocked struct {
	mu    sync.Mutex
	ranks []*BlockedRank // in increasing order
}

// BlockedRank is a rank, and the call in which it blocked last, and may still block.
type BlockedRank struct {
	all   *Blocked
	rank  int
	near  func(rank int) bool
	call  fingerprint.Numbered
	begun fingerprint.Numbers // the calls that the rank had begun then, including this one
}

// Join adds a rank, which blocks in no call yet. near reports whether a collective of this rank needs another rank to
// enter it, and vice versa.
func (b *Blocked) Join(rank int, near func(rank int) bool) *BlockedRank {
	b.mu.Lock()
	defer b.mu.Unlock()
	own := &BlockedRank{all: b, rank: rank, near: near}
	i, _ := slices.BinarySearchFunc(b.ranks, rank, func(r *BlockedRank, rank int) int { return r.rank - rank })
	b.ranks = slices.Insert(b.ranks, i, own)
	return own
}

// Block records that the rank blocks in a call. begun are the calls that the rank has begun, including this one.
// Block returns how the call conflicts with one in which another rank has blocked: a call with the same number
// that differs, or one that waits for this rank while this rank waits for it; nil: it does not.
func (own *BlockedRank) Block(call *fingerprint.Numbered, begun *fingerprint.Numbers) *Conflict {
	own.all.mu.Lock()
	defer own.all.mu.Unlock()
	own.call = *call
	own.begun.Set(begun)
	for _, other := range own.all.ranks {
		switch {
		case other == own || other.call.Like == nil:
		case own.call.Like.Pair != 0 || other.call.Like.Pair != 0:
			if deadlocked(own, other) {
				return waitForEachOther(own.part(), other.part())
			}
		case other.call.Seq == own.call.Seq && other.call.Like.Header != own.call.Like.Header:
			return Differ(own.part(), other.part())
		}
	}
	return nil
}

func (own *BlockedRank) part() Part {
	call := own.call.Call()
	return Part{Rank: own.rank, Call: &call}
}

// deadlocked reports whether own waits for a peer that is still blocked in a call that needs own, while
// neither has begun the other's half. (It may have begun: then the event that own waits for has happened, and
// it has not looked yet.) A Send and a Recv between the two never deadlock: they are the halves of one
// message, or the message that the Recv needs is on its way.
func deadlocked(own, peer *BlockedRank) bool {
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
