package fingerprint

import (
	"github.com/lockstep-ml/lockstep/collective/internal/byrank"
	"github.com/lockstep-ml/lockstep/collective/plan"
)

// Numbers counts the calls of a rank: the collectives, the sends to each peer, and the receives from each peer.
// A call's number ([transport.Header.Seq]) is the count of the calls of its kind before it; so a send and the
// matching receive have the same number. The zero value has counted nothing.
type Numbers struct {
	collectives uint64 // not in a table: small tables of several ranks could share a cache line
	pairs       byrank.Table[pair]
}

// pair counts the messages exchanged with a peer.
type pair struct{ sends, receives uint64 }

// Of returns how many calls of a kind were counted. Only Send and Recv have a peer.
func (n *Numbers) Of(op plan.Op, peer int) uint64 {
	if !paired(op, peer) {
		return n.collectives
	}
	p := n.pairs.Get(peer)
	return *p.of(op)
}

// Next counts a call and returns its number. It allocates memory for each peer, so the caller must have checked that
// peer is at most a rank; a negative peer is invalid.
func (n *Numbers) Next(op plan.Op, peer int) uint64 {
	count := &n.collectives
	if paired(op, peer) {
		count = n.pairs.At(peer).of(op)
	}
	*count++
	return *count - 1
}

// SetCollectives sets the count of collectives.
func (n *Numbers) SetCollectives(count uint64) { n.collectives = count }

// Set makes n a copy of other.
func (n *Numbers) Set(other *Numbers) {
	n.collectives = other.collectives
	n.pairs.Set(&other.pairs)
}

// of returns the count of a Send or a Recv.
func (p *pair) of(op plan.Op) *uint64 {
	if op == plan.Send {
		return &p.sends
	}
	return &p.receives
}

// paired reports whether a call is counted by peer. A call with a negative peer counts as a collective: it fails
// anyway.
func paired(op plan.Op, peer int) bool { return op.Pairwise() && peer >= 0 }

// Opposite returns how many calls of the opposite kind were counted with a peer: the receives for Send, the
// sends for Recv.
func (n *Numbers) Opposite(op plan.Op, peer int) uint64 {
	if op == plan.Send {
		return n.Of(plan.Recv, peer)
	}
	return n.Of(plan.Send, peer)
}
