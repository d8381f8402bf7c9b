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
	calls []blocked // in the order of rank
}

// blocked is the call in which a rank blocked last, and may still block.
type blocked struct {
	rank  int
	call  fingerprint.Call
	begun fingerprint.Numbers // the calls that the rank had begun then, including this one
}

// Block records that a rank blocks in a call. begun are the calls that the rank has begun, including this one.
// Block returns how the call conflicts with one in which another rank has blocked: a call with the same number
// that differs, or one that waits for this rank while this rank waits for it; nil: it does not. near reports
// whether a collective of this rank needs another rank to enter it, and vice versa.
func (b *Blocked) Block(rank int, call *fingerprint.Call, begun *fingerprint.Numbers, near func(int) bool) *Conflict {
	b.mu.Lock()
	defer b.mu.Unlock()
	i, known := slices.BinarySearchFunc(b.calls, rank, func(c blocked, rank int) int { return c.rank - rank })
	if !known {
		b.calls = slices.Insert(b.calls, i, blocked{rank: rank})
	}
	own := &b.calls[i]
	own.call = *call
	own.begun.Set(begun)
	for i := range b.calls {
		other := &b.calls[i]
		switch {
		case other == own:
		case own.call.Pair != 0 || other.call.Pair != 0:
			if deadlocked(own, other, near) {
				return waitForEachOther(own.part(), other.part())
			}
		case other.call.Header.Seq == own.call.Header.Seq && other.call.Header != own.call.Header:
			return Differ(own.part(), other.part())
		}
	}
	return nil
}

func (b *blocked) part() Part { return Part{Rank: b.rank, Call: &b.call} }

// deadlocked reports whether own waits for a peer that is still blocked in a call that needs own, while
// neither has begun the other's half. (It may have begun: then the event that own waits for has happened, and
// it has not looked yet.) A Send and a Recv between the two never deadlock: they are the halves of one
// message, or the message that the Recv needs is on its way.
func deadlocked(own, peer *blocked, near func(int) bool) bool {
	seq, peerSeq := own.call.Header.Seq, peer.call.Header.Seq
	switch {
	case own.call.Pair != 0 && peer.call.Pair != 0:
		return messagesDeadlock(own.part(), peer.part())
	case own.call.Pair != 0:
		return peer.rank == own.call.Peer && near(peer.rank) &&
			peer.begun.Opposite(own.call.Pair, own.rank) <= seq && own.begun.Of(0, 0) <= peerSeq
	}
	return peer.call.Peer == own.rank && near(peer.rank) &&
		peer.begun.Of(0, 0) <= seq && own.begun.Opposite(peer.call.Pair, peer.rank) <= peerSeq
}
