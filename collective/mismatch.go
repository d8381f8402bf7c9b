package collective

import (
	"errors"
	"fmt"
	"slices"
	"time"

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
	if m.wait.mark != 0 {
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
		if !slices.Contains(behind, peer) && m.site.marker.Peer(peer).Sum != m.sum {
			return m.mismatch(func(r int) bool { return !slices.Contains(behind, r) })
		}
	}
	return nil
}

// compare compares the slots of the domain with this rank's.
func (x *executor) compare() error {
	m := x.m
	for _, peer := range m.site.domain {
		if peer != m.rank && m.site.marker.Peer(peer).Sum != x.sum {
			return m.mismatch(func(int) bool { return true })
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

// oddFrame is a frame that does not belong to the current call.
type oddFrame struct {
	peer   int
	header transport.Header
}

// errOdd rejects a frame. The frame is described once the exchange has ended, because that may require
// probing the peer.
var errOdd = errors.New("collective: a frame of another call")

// judge compares the header of an arriving frame with the current call. It is called once for the frame that
// is received next, just before its data, and any number of times for others.
//
// The frames of one peer arrive in the order in which they were sent, so the next frame of the peer that this
// rank waits for belongs to this call, or the peer makes a different call. Frames of other peers may belong
// to later calls, or to sends that this rank has not reached yet. But a peer that this rank sends to, and
// that is sending itself, does not receive: no step relies on buffering.
func (x *executor) judge(peer int, h transport.Header) error {
	own := x.header
	own.Frame = h.Frame
	w := &x.wait
	ahead := h.Frame - x.got[peer]
	awaited := peer == w.from && w.frames > 0
	switch {
	case awaited && h == own && ahead <= uint32(w.frames): // one more may have arrived already
		if ahead == 0 {
			x.seen = true
			if !w.call.pairwise() {
				x.lastFrom[peer] = h.Seq + 1
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

// arrived counts a received frame.
func (x *executor) arrived(peer int) error {
	w := &x.wait
	if !x.seen {
		return x.m.failure(ErrMismatch, fmt.Errorf("a frame of rank %d is missing: number %d was not received", peer, x.got[peer]))
	}
	x.seen = false
	x.got[peer]++
	w.frames--
	return nil
}

// oddity describes the frame that judge rejected. If it belongs to another collective than this rank's, the
// two ranks diverged earlier: oddity then looks for the call in which they did.
func (x *executor) oddity() error {
	m := x.m
	peer, h := x.odd.peer, x.odd.header
	if Op(h.Op) != Send && !x.wait.call.pairwise() && h.Comm == x.header.Comm && h.Epoch == x.header.Epoch {
		before := x.notes[(x.header.Seq+1)&1].call()
		switch {
		case h.Seq+1 == x.header.Seq && before.Header.Seq == h.Seq && before.Header != fingerprint.WithoutFrame(h):
			theirs := x.callOf(peer, &h)
			return m.mismatchError(&before, peer, &theirs)
		case h.Seq > x.header.Seq:
			if theirs, ok := x.ask(peer, x.header.Seq); ok && theirs.Header.Seq == x.header.Seq && theirs.Header != fingerprint.WithoutFrame(x.header) {
				own := x.current.call()
				return m.mismatchError(&own, peer, theirs)
			}
		}
	}
	theirs := x.callOf(peer, &h)
	if theirs.HeaderOnly {
		// A peer that does not answer may have failed: then it reports the reason, which is more precise.
		if told := m.awaitReason(100 * time.Millisecond); told != nil {
			return x.diagnose(told)
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
func (x *executor) ask(peer int, seq uint64) (*fingerprint.Call, bool) {
	end := x.m.end
	s, ok := fault.DecodeState(end.Ask(peer, seq))
	if !ok { // its process may be getting no CPU time
		s, ok = fault.DecodeState(end.Ask(peer, seq))
	}
	return &s.Call, ok && !s.Call.None()
}

// mismatched describes how a peer's call differs from this rank's.
func (m *member) mismatched(peer int, theirs *fingerprint.Call) error {
	own := m.current.call()
	own.Header.Frame = m.got[peer]
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
func (x *executor) callOf(peer int, h *transport.Header) fingerprint.Call {
	header := fingerprint.WithoutFrame(*h)
	c, ok := x.m.team.callOf(peer, header)
	if !ok {
		seq := h.Seq
		if Op(h.Op) == Send {
			seq = fault.LatestCall
		}
		theirs, known := x.ask(peer, seq)
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
	seq := m.header.Seq
	if m.wait.call.pairwise() {
		seq = fault.LatestCall
	}
	state, ok := fault.DecodeState(m.end.Ask(peer, seq))
	theirs := &state.Call
	if m.wait.silent = -1; !ok {
		m.wait.silent = peer
	}
	if !ok || theirs.None() || theirs.Header.Comm != m.header.Comm || theirs.Header.Epoch != m.header.Epoch {
		return nil
	}
	own := fingerprint.WithoutFrame(m.header)
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
