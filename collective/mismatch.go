package collective

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/lockstep-ml/lockstep/transport"
)

// early holds the calls of the peers that have come to the current call against this rank's, so that a mismatch is found
// without those that have not: their slots, or what local peers have blocked in. It is called before a wait blocks.
func (m *member) early() error {
	if m.site.marker == nil || m.wait.call.pairwise() {
		return m.team.meet(m)
	}
	if m.wait.mark != 0 {
		return nil
	}
	m.behind = m.site.marker.Behind(0, m.behind[:0])
	behind := m.behind
	for _, peer := range m.site.domain {
		if !slices.Contains(behind, peer) && m.site.marker.Peer(peer).Header != m.header {
			return m.mismatch(func(r int) bool { return !slices.Contains(behind, r) })
		}
	}
	return nil
}

// compare holds the slots of the domain against this rank's.
func (x *executor) compare() error {
	for _, peer := range x.m.site.domain {
		if x.m.site.marker.Peer(peer).Header != x.header {
			return x.m.mismatch(func(int) bool { return true })
		}
	}
	return nil
}

// mismatch says which of the ranks that are here call what, from their slots: the first rank here speaks for all that
// agree with it, then the first that does not.
func (m *member) mismatch(here func(rank int) bool) error {
	var calls []party
	for _, r := range m.site.domain {
		if !here(r) {
			continue
		}
		slot := m.site.marker.Peer(r)
		at := slices.IndexFunc(calls, func(g party) bool { return g.slot.Header == slot.Header })
		if at < 0 {
			calls = append(calls, party{slot: slot})
			at = len(calls) - 1
		}
		calls[at].ranks = append(calls[at].ranks, r)
	}
	if len(calls) < 2 {
		return nil
	}
	first := calls[0]
	var text string
	var peers []int
	for _, g := range calls[1:] {
		text += g.text() + ", "
		peers = append(peers, g.ranks...)
	}
	second := calls[1]
	err := m.failure(ErrMismatch, fmt.Errorf("%s%s: %s", text, first.text(),
		differ(&first.slot.Header, &second.slot.Header, first.label(), second.label())))
	err.Peers = peers
	return err
}

// party is the ranks that make the same call.
type party struct {
	ranks []int
	slot  *transport.Slot
}

func (g *party) label() *label {
	return &label{name: g.slot.Name, shape: g.slot.Shape, algo: g.slot.Algorithm}
}

func (g *party) text() string {
	verb := "calls"
	if len(g.ranks) > 1 {
		verb = "call"
	}
	return fmt.Sprintf("%s %s %s", ranksText(g.ranks), verb, describe(&g.slot.Header, g.label()))
}

// oddFrame is a frame that does not belong to the current call.
type oddFrame struct {
	peer   int
	header transport.Header
}

// errOdd refuses a frame: what it is, is said once the exchange has ended, for that may take asking the peer.
var errOdd = errors.New("collective: a frame of another call")

// judge holds the header of a frame that arrives against the current call. It is shown the frame that is received just
// before its data, others any number of times.
//
// The frames of one peer come in the order in which it sent them, so the next one of the peer that this rank waits for is
// of this call, or the peer makes another. Those of other peers may be of later calls, or of sends that this rank has
// yet to come to. But a peer that this rank sends to, and that sends itself, does not receive: nothing relies on buffers.
func (x *executor) judge(peer int, h transport.Header) error {
	own := x.header
	own.Frame = h.Frame
	w := &x.wait
	ahead := h.Frame - x.got[peer]
	awaited := peer == w.from && w.frames > 0
	switch {
	case awaited && h == own && ahead <= uint32(w.frames): // one more may be there already
		if ahead == 0 {
			x.seen = true
			if !w.call.pairwise() {
				x.heard[peer] = h.Seq + 1
			}
		}
		return nil
	case awaited && (w.frames > 1 || !x.seen):
	case h.Comm != own.Comm || h.Epoch != own.Epoch:
	case w.call.Op == Send && peer == w.to:
	case h == own || Op(h.Op) == Send || w.call.pairwise() || h.Seq > own.Seq:
		return nil
	}
	x.odd = oddFrame{peer, h}
	return errOdd
}

// arrived counts a frame that was received.
func (x *executor) arrived(peer int) error {
	w := &x.wait
	if !x.seen {
		return x.m.failure(ErrMismatch, fmt.Errorf("a frame of rank %d was left out: number %d did not come", peer, x.got[peer]))
	}
	x.seen = false
	x.got[peer]++
	w.frames--
	return nil
}

// mismatched says how a peer's call differs from this rank's; theirs is nil if the text behind its header is not known. Of
// two ranks both say the same.
func (m *member) mismatched(peer int, h *transport.Header, theirs *label) error {
	own := m.header
	own.Frame = m.got[peer]
	high, low := peer, m.rank
	highHeader, lowHeader, highLabel, lowLabel := h, &own, theirs, &m.current.label
	if high < low {
		high, low, highHeader, lowHeader, highLabel, lowLabel = low, high, lowHeader, highHeader, lowLabel, highLabel
	}
	kind, how := ErrMismatch, ""
	if own.Op == h.Op && Op(h.Op) == Send && m.wait.call.Op == Send {
		kind, how = ErrDesync, "both send to each other, and neither receives"
	} else {
		how = differ(lowHeader, highHeader, lowLabel, highLabel)
	}
	err := m.failure(kind, fmt.Errorf("rank %d calls %s, rank %d calls %s: %s",
		high, describe(highHeader, highLabel), low, describe(lowHeader, lowLabel), how))
	err.Peers = []int{peer}
	return err
}

// labelOf returns what is behind the header of a peer's call, or nil if that is not to be found out.
func (x *executor) labelOf(peer int, h *transport.Header) *label {
	if l := x.m.team.label(peer, h); l != nil {
		return l
	}
	if asker, ok := x.m.end.(transport.Asker); ok {
		if t, ok := decodeAnswer(asker.Ask(peer, h.Seq)); ok && t.header == plain(*h) {
			return &t.label
		}
	}
	return nil
}

// plain is a header without the number of the frame.
func plain(h transport.Header) transport.Header {
	h.Frame = 0
	return h
}

// answer gives a peer the text behind this rank's collective seq, or behind its latest call.
func (x *executor) answer(seq uint64) []byte {
	x.textMu.Lock()
	defer x.textMu.Unlock()
	if x.current == nil {
		return nil
	}
	t := x.current
	if other := &x.texts[seq&1]; other.header.Op != 0 && other.header.Seq == seq {
		t = other
	}
	return encodeAnswer(t)
}

// describe writes this rank's current call.
func (m *member) describe() string { return describe(&m.header, &m.current.label) }

// probe asks the rank of another process that this one waits for which call it makes, and returns how it differs.
func (m *member) probe() error {
	asker, ok := m.end.(transport.Asker)
	peer := m.elsewhere()
	if !ok || peer < 0 {
		return nil
	}
	seq := m.header.Seq
	if m.wait.call.pairwise() {
		seq = ^uint64(0) // its latest
	}
	theirs, ok := decodeAnswer(asker.Ask(peer, seq))
	if !ok || theirs.header.Comm != m.header.Comm || theirs.header.Epoch != m.header.Epoch {
		return nil
	}
	own := plain(m.header)
	switch {
	case m.wait.call.pairwise():
		other := &blocked{rank: peer, header: theirs.header, label: theirs.label}
		if theirs.label.op != Recv || !m.deadlocked(other) {
			return nil // what it sends may have been buffered
		}
		err := m.failure(ErrDesync, fmt.Errorf("rank %d calls %s, rank %d calls %s: they wait for each other",
			peer, describe(&theirs.header, &theirs.label), m.rank, m.describe()))
		err.Peers = []int{peer}
		return err
	case theirs.label.op == 0 && theirs.header.Seq == own.Seq && theirs.header != own:
		return m.mismatched(peer, &theirs.header, &theirs.label)
	}
	return nil
}

// elsewhere returns a rank that this one waits for and whose calls it cannot see, or -1.
func (m *member) elsewhere() int {
	for _, r := range m.missing() {
		if !m.site.in(r) {
			return r
		}
	}
	return -1
}

// lastCalls says what the ranks that this one waits for did last, as far as it can be found out, beginning with a comma.
func (m *member) lastCalls() string {
	var b strings.Builder
	for i, r := range m.missing() {
		if i == lastCallsMax {
			break
		}
		fmt.Fprintf(&b, ", rank %d %s", r, m.lastCall(r))
	}
	return b.String()
}

// lastCallsMax bounds of how many ranks the last calls are told.
const lastCallsMax = 4

// lastCall says what a rank did last.
func (m *member) lastCall(rank int) string {
	if asker, ok := m.end.(transport.Asker); ok && !m.site.in(rank) {
		if t, ok := decodeAnswer(asker.Ask(rank, ^uint64(0))); ok {
			return fmt.Sprintf("is in or after call %d, %s", t.header.Seq, describe(&t.header, &t.label))
		}
		return "does not answer"
	}
	before := &m.texts[(m.header.Seq+1)&1]
	if m.site.marker != nil && m.wait.mark == 0 && before.header.Op != 0 && before.header.Seq+1 == m.header.Seq {
		return fmt.Sprintf("came last to call %d, %s", before.header.Seq, describe(&before.header, &before.label))
	}
	if heard := m.heard[rank]; heard > 0 {
		return fmt.Sprintf("was heard last in call %d", heard-1)
	}
	return "was not heard of before"
}
