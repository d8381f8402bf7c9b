package fingerprint

import "github.com/lockstep-ml/lockstep/collective/plan"

// Numbers counts the calls of a rank: the collectives, the sends to each peer, and the receives from each peer.
// A call's number ([transport.Header.Seq]) is the count of the calls of its kind before it; so a send and the
// matching receive have the same number. The zero value has counted nothing.
type Numbers struct {
	collectives     uint64   // not in a slice: small slices of several ranks could share a cache line
	sends, receives []uint64 // by peer
}

// Of returns how many calls of a kind were counted. Only Send and Recv have a peer.
func (n *Numbers) Of(op plan.Op, peer int) uint64 {
	switch pairs := n.pairs(op, peer); {
	case pairs == nil:
		return n.collectives
	case peer < len(*pairs):
		return (*pairs)[peer]
	}
	return 0
}

// Next counts a call and returns its number. It allocates memory for all peers up to this one, so the caller must
// have checked that peer is at most a rank; a negative peer is invalid.
func (n *Numbers) Next(op plan.Op, peer int) uint64 {
	pairs := n.pairs(op, peer)
	if pairs == nil {
		n.collectives++
		return n.collectives - 1
	}
	for len(*pairs) <= peer {
		*pairs = append(*pairs, 0)
	}
	(*pairs)[peer]++
	return (*pairs)[peer] - 1
}

// Set makes n a copy of other.
func (n *Numbers) Set(other *Numbers) {
	n.collectives = other.collectives
	n.sends, n.receives = append(n.sends[:0], other.sends...), append(n.receives[:0], other.receives...)
}

// pairs returns the counters by peer of a Send or a Recv; nil for a collective. A call with a negative peer counts as
// a collective: it fails anyway.
func (n *Numbers) pairs(op plan.Op, peer int) *[]uint64 {
	switch {
	case peer < 0:
	case op == plan.Send:
		return &n.sends
	case op == plan.Recv:
		return &n.receives
	}
	return nil
}

// Opposite returns how many calls of the opposite kind were counted with a peer: the receives for Send, the
// sends for Recv.
func (n *Numbers) Opposite(op plan.Op, peer int) uint64 {
	if op == plan.Send {
		return n.Of(plan.Recv, peer)
	}
	return n.Of(plan.Send, peer)
}
