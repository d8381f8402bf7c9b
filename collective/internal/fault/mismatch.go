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

// Conflict is how the calls of this rank and of a peer conflict. The text is the same on both ranks.
type Conflict struct {
	Peer     int
	Deadlock bool // the calls wait for each other; else they differ
	Text     string
}

// Differ returns how the calls of this rank and of a peer differ.
func Differ(own, peer Part) *Conflict {
	c := &Conflict{Peer: peer.Rank}
	low, high := order(own, peer)
	how := fingerprint.Differ(low.Call, high.Call)
	if own.Call.Pair == plan.Send && plan.Op(peer.Call.Header.Op) == plan.Send {
		c.Deadlock, how = true, "both send to each other, and neither receives"
	}
	c.Text = bothCall(low, high) + ": " + how
	return c
}

// ReceiveDeadlock returns the conflict of this rank and a peer if each receives from the other first; else nil:
// a message that the peer sends, or has sent before its call, may be in transit.
func ReceiveDeadlock(own, peer Part) *Conflict {
	if peer.Call.Pair != plan.Recv || !messagesDeadlock(own, peer) {
		return nil
	}
	return waitForEachOther(own, peer)
}

// messagesDeadlock reports whether two ranks each wait for the other to begin the other half of a message, and
// neither has.
func messagesDeadlock(own, peer Part) bool {
	a, b := own.Call, peer.Call
	return peer.Rank == a.Peer && b.Peer == own.Rank && a.Pair == b.Pair &&
		b.Back <= a.Header.Seq && a.Back <= b.Header.Seq
}

func waitForEachOther(own, peer Part) *Conflict {
	low, high := order(own, peer)
	return &Conflict{Peer: peer.Rank, Deadlock: true, Text: bothCall(low, high) + ": they wait for each other"}
}

func order(a, b Part) (low, high Part) {
	if b.Rank < a.Rank {
		return b, a
	}
	return a, b
}

func bothCall(low, high Part) string {
	return fmt.Sprintf("rank %d calls %v, rank %d calls %v", high.Rank, high.Call, low.Rank, low.Call)
}
