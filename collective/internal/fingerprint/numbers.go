package fingerprint

import "github.com/lockstep-ml/lockstep/collective/plan"

// Numbers counts the calls of a rank: the collectives, the sends to each peer, and the receives from each peer.
// A call's number ([transport.Header.Seq]) is the count of the calls of its kind before it; so a send and the
// matching receive have the same number. The zero value has counted nothing.
type Numbers [3][]uint64 // collectives, sends and receives, by peer

// Of returns how many calls of a kind were counted. Only Send and Recv have a peer.
func (n *Numbers) Of(op plan.Op, peer int) uint64 {
	kind, peer := kindOf(op, peer)
	if peer < len(n[kind]) {
		return n[kind][peer]
	}
	return 0
}

// Next counts a call and returns its number. It allocates memory for all peers up to this one, so the caller must
// have checked that peer is at most a rank; a negative peer is invalid.
func (n *Numbers) Next(op plan.Op, peer int) uint64 {
	kind, peer := kindOf(op, peer)
	for len(n[kind]) <= peer {
		n[kind] = append(n[kind], 0)
	}
	n[kind][peer]++
	return n[kind][peer] - 1
}

// Set makes n a copy of other.
func (n *Numbers) Set(other *Numbers) {
	for kind := range n {
		n[kind] = append(n[kind][:0], other[kind]...)
	}
}

// kindOf returns the indices of a call's counter. A call with a negative peer counts as a collective: it fails
// anyway.
func kindOf(op plan.Op, peer int) (kind, index int) {
	switch {
	case peer < 0:
	case op == plan.Send:
		return 1, peer
	case op == plan.Recv:
		return 2, peer
	}
	return 0, 0
}

// Opposite returns how many calls of the opposite kind were counted with a peer: the receives for Send, the
// sends for Recv.
func (n *Numbers) Opposite(op plan.Op, peer int) uint64 {
	if op == plan.Send {
		return n.Of(plan.Recv, peer)
	}
	return n.Of(plan.Send, peer)
}
