package collective

import (
	"errors"
	"slices"
	"time"

	"github.com/lockstep-ml/lockstep/collective/internal/executor"
	"github.com/lockstep-ml/lockstep/collective/internal/fault"
	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
	"github.com/lockstep-ml/lockstep/transport"
)

// early compares the calls of the peers that have entered the current call with this rank's, so that a
// mismatch is detected without waiting for the other ranks: it reads their slots, or the calls in which local
// peers have blocked. It is called before a wait blocks.
func (m *member) early() error {
	if m.site.marker == nil || m.wait.call.pairwise() {
		return m.team.meet(m)
	}
	if !m.exec.Entering() {
		return nil
	}
	if m.team.local > 1 { // a local rank may wait for this one in a call of two ranks
		if err := m.team.meet(m); err != nil {
			return err
		}
	}
	m.behind = m.site.marker.Behind(0, m.behind[:0])
	behind := m.behind
	for _, peer := range m.site.domain {
		if !slices.Contains(behind, peer) && m.site.marker.Peer(peer).Sum != m.call.Slot.Sum {
			return m.mismatch(func(r int) bool { return !slices.Contains(behind, r) })
		}
	}
	return nil
}

// mismatch returns the error that ranks which have arrived make different calls, from their slots; nil if
// they make the same call.
func (m *member) mismatch(here func(rank int) bool) error {
	var parties fault.Parties
	for _, r := range m.site.domain {
		if here(r) {
			parties.Add(r, m.site.marker.Peer(r))
		}
	}
	text, others := parties.Mismatch()
	if others == nil {
		return nil
	}
	err := m.failure(ErrMismatch, errors.New(text))
	err.Peers = others
	return err
}

// oddity describes a frame that the executor rejected. If it belongs to another collective than this rank's, the
// two ranks diverged earlier: oddity then looks for the call in which they did.
func (m *member) oddity(frame *executor.OtherCall) error {
	peer, h := frame.Peer, frame.Header
	if Op(h.Op) != Send && !m.wait.call.pairwise() && h.Comm == m.call.Slot.Comm && h.Epoch == m.call.Slot.Epoch {
		before := m.notes[(m.call.Slot.Seq+1)&1].call()
		switch {
		case h.Seq+1 == m.call.Slot.Seq && before.Header.Seq == h.Seq && before.Header != fingerprint.WithoutFrame(h):
			theirs := m.callOf(peer, &h)
			return m.mismatchError(&before, peer, &theirs)
		case h.Seq > m.call.Slot.Seq:
			if theirs, ok := m.ask(peer, m.call.Slot.Seq); ok && theirs.Header.Seq == m.call.Slot.Seq && theirs.Header != fingerprint.WithoutFrame(m.call.Slot.Header) {
				own := m.current.call()
				return m.mismatchError(&own, peer, theirs)
			}
		}
	}
	theirs := m.callOf(peer, &h)
	if theirs.HeaderOnly {
		// A peer that does not answer may have failed: then it reports the reason, which is more precise.
		if told := m.awaitReason(100 * time.Millisecond); told != nil {
			return m.diagnose(told)
		}
	}
	return m.mismatched(peer, &theirs)
}

// awaitReason waits until a peer has reported that it failed, and why; it returns nil if none has. With no
// patience it only checks.
func (m *member) awaitReason(patience time.Duration) *departure {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for {
		var down transport.PeerDown
		select {
		case down = <-m.end.Down():
		default:
			select {
			case down = <-m.end.Down():
			case <-timer.C:
				return nil
			}
		}
		if !errors.Is(down.Err, transport.ErrClosed) {
			return keep(down)
		}
	}
}

// ask returns the description of call seq of a peer in another process, or of its latest call.
func (m *member) ask(peer int, seq uint64) (*fingerprint.Call, bool) {
	end := m.end
	s, ok := fault.DecodeState(end.Ask(peer, seq))
	if !ok { // its process may be getting no CPU time
		s, ok = fault.DecodeState(end.Ask(peer, seq))
	}
	return &s.Call, ok && !s.Call.None()
}

// mismatched describes how a peer's call differs from this rank's.
func (m *member) mismatched(peer int, theirs *fingerprint.Call) error {
	own := m.current.call()
	own.Header.Frame = m.exec.Received(peer)
	return m.mismatchError(&own, peer, theirs)
}

// mismatchError returns the error that a call of this rank and one of a peer differ.
func (m *member) mismatchError(own *fingerprint.Call, peer int, theirs *fingerprint.Call) error {
	kind := ErrMismatch
	text, deadlock := fault.Differ(fault.Part{Rank: m.rank, Call: own}, fault.Part{Rank: peer, Call: theirs})
	if deadlock {
		kind = ErrDesync
	}
	err := m.failure(kind, errors.New(text))
	err.Peers, err.Seq = []int{peer}, own.Header.Seq
	return err
}

// callOf returns the call of a peer's frame; if its description cannot be determined, only the header.
func (m *member) callOf(peer int, h *transport.Header) fingerprint.Call {
	header := fingerprint.WithoutFrame(*h)
	c, ok := m.team.callOf(peer, header)
	if !ok {
		seq := h.Seq
		if Op(h.Op) == Send {
			seq = fault.LatestCall
		}
		theirs, known := m.ask(peer, seq)
		if ok = known && theirs.Header == header; ok {
			c = *theirs
		}
	}
	c.Header, c.HeaderOnly = *h, !ok
	return c
}

// probe requests the call of the rank in another process that this rank waits for, and returns how it
// differs.
func (m *member) probe() error {
	peer := m.elsewhere()
	if peer < 0 {
		return nil
	}
	seq := m.call.Slot.Seq
	if m.wait.call.pairwise() {
		seq = fault.LatestCall
	}
	state, ok := fault.DecodeState(m.end.Ask(peer, seq))
	theirs := &state.Call
	if m.wait.silent = -1; !ok {
		m.wait.silent = peer
	}
	if !ok || theirs.None() || theirs.Header.Comm != m.call.Slot.Comm || theirs.Header.Epoch != m.call.Slot.Epoch {
		return nil
	}
	own := fingerprint.WithoutFrame(m.call.Slot.Header)
	switch {
	case m.wait.call.pairwise():
		other := &blocked{call: *theirs, rank: peer}
		if theirs.Pair != Recv || !m.deadlocked(other) {
			return nil // a frame that it sends, or has sent before that collective, may be in transit
		}
		return m.deadlockError(other)
	case theirs.Pair == 0 && theirs.Header.Seq == own.Seq && theirs.Header != own:
		return m.mismatched(peer, theirs)
	}
	return nil
}

// elsewhere returns a rank that this one waits for and whose calls it cannot see, or -1. A slot shows only
// calls of all ranks.
func (m *member) elsewhere() int {
	for _, r := range m.missing() {
		if !m.sees(r) {
			return r
		}
	}
	return -1
}

// sees reports whether this rank can look up what another rank does.
func (m *member) sees(rank int) bool {
	return m.site.in(rank) && (m.site.near || !m.wait.call.pairwise())
}
