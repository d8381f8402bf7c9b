package mixed

import (
	"fmt"
	"strings"

	"github.com/lockstep-ml/lockstep/transport"
)

// Describe says for an end of any transport how its rank reaches every other one, a line each: "rank 0 and rank 1: memory, by
// shm".
func Describe(e transport.Endpoint) string {
	var b strings.Builder
	for peer := range e.Size() {
		if peer != e.Rank() {
			fmt.Fprintf(&b, "rank %d and rank %d: %v, by %s\n", e.Rank(), peer, e.Reach(peer), by(e, peer))
		}
	}
	return b.String()
}

// by returns the name of the transport between an end and a peer.
func by(e transport.Endpoint, peer int) string {
	if m, ok := e.(*end); ok {
		if m.shares(peer) {
			return m.near.Transport()
		}
		return m.allEnd.Transport()
	}
	return e.Transport()
}
