package fault

import (
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/internal/ranges"
	"github.com/lockstep-ml/lockstep/transport"
)

// Parties groups ranks by the call that they make, in the order in which the calls were first seen. The zero
// value is empty.
type Parties struct{ all []party }

// party is the ranks that make the same call.
type party struct {
	ranks []int
	call  fingerprint.Call
}

// Add adds a rank with the call that its slot describes.
func (p *Parties) Add(rank int, slot *transport.Slot) {
	at := slices.IndexFunc(p.all, func(g party) bool { return g.call.Header == slot.Header })
	if at < 0 {
		at = len(p.all)
		p.all = append(p.all, party{call: fingerprint.Of(slot)})
	}
	p.all[at].ranks = append(p.all[at].ranks, rank)
}

// Mismatch describes which ranks make which call, and how the first two calls differ. others are the ranks
// that do not make the first call; nil: all ranks make the same call.
func (p *Parties) Mismatch() (text string, others []int) {
	if len(p.all) < 2 {
		return "", nil
	}
	first, second := &p.all[0], &p.all[1]
	for i := range p.all[1:] {
		g := &p.all[1+i]
		text += g.text() + ", "
		others = append(others, g.ranks...)
	}
	return fmt.Sprintf("%s%s: %s", text, first.text(), fingerprint.Differ(&first.call, &second.call)), others
}

func (g *party) text() string {
	verb := "calls"
	if len(g.ranks) > 1 {
		verb = "call"
	}
	return fmt.Sprintf("%s %s %v", ranges.Text("rank", g.ranks), verb, &g.call)
}

// Part is a rank and the call that it makes.
type Part struct {
	Rank int
	Call *fingerprint.Call
}

// Differ describes how the calls of this rank and of a peer differ. The text is the same on both ranks.
// deadlock reports that both ranks send to each other.
func Differ(own, peer Part) (text string, deadlock bool) {
	deadlock = own.Call.Pair == plan.Send && plan.Op(peer.Call.Header.Op) == plan.Send
	low, high := own, peer
	if high.Rank < low.Rank {
		low, high = high, low
	}
	how := "both send to each other, and neither receives"
	if !deadlock {
		how = fingerprint.Differ(low.Call, high.Call)
	}
	return bothCall(low, high) + ": " + how, deadlock
}

// Deadlock describes two ranks that wait for each other. The text is the same on both ranks.
func Deadlock(own, peer Part) string {
	if peer.Rank < own.Rank {
		own, peer = peer, own
	}
	return bothCall(own, peer) + ": they wait for each other"
}

func bothCall(low, high Part) string {
	return fmt.Sprintf("rank %d calls %v, rank %d calls %v", high.Rank, high.Call, low.Rank, low.Call)
}
