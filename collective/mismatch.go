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

// compareEarly compares the calls of the peers that have entered the current call with this rank's, so that a
// mismatch is detected without waiting for the other ranks: it reads their slots, or the calls in which local
// peers have blocked. It is called before a wait blocks.
func (d *diagnosis) compareEarly() error {
	if !d.site.sharesMemory() || d.run.Call.Op.Pairwise() {
		return d.block()
	}
	if !d.exec.Entering() {
		return nil
	}
	if d.team.local > 1 { // a local rank may wait for this one in a call of two ranks
		if err := d.block(); err != nil {
			return err
		}
	}
	d.behind = d.end.Memory().Behind(0, d.behind[:0])
	behind := d.behind
	for _, peer := range d.site.domain {
		if !slices.Contains(behind, peer) && d.end.Memory().Peer(peer).Sum != d.slot.Sum {
			return d.mismatch(func(r int) bool { return !slices.Contains(behind, r) })
		}
	}
	return nil
}

// block records the call in which this rank blocks. It returns an error if the call conflicts with one in which
// another local rank has blocked.
func (d *diagnosis) block() error {
	if d.team.local == 1 {
		return nil
	}
	if c := d.team.block(d.localRank, &d.begun); c != nil {
		return d.conflict(c)
	}
	return nil
}

// mismatch returns the error that ranks which have arrived make different calls, from their slots; nil if
// they make the same call.
func (d *diagnosis) mismatch(here func(rank int) bool) error {
	var parties fault.Parties
	for _, r := range d.site.domain {
		if here(r) {
			parties.Add(r, d.end.Memory().Peer(r))
		}
	}
	text, others := parties.Mismatch()
	if others == nil {
		return nil
	}
	err := d.failure(ErrMismatch, errors.New(text))
	err.Peers = others
	return err
}

// otherCall describes a frame that the executor rejected. If it belongs to another collective than this rank's, the
// two ranks diverged earlier: otherCall then looks for the call in which they did.
func (d *diagnosis) otherCall(frame *executor.OtherCall) error {
	peer, h, header := frame.Peer, frame.Header, fingerprint.WithoutFrame(frame.Header)
	if Op(h.Op) != Send && !d.run.Call.Op.Pairwise() && h.Comm == d.slot.Comm && h.Epoch == d.slot.Epoch {
		before := d.calls.before(d.slot.Seq)
		switch {
		case h.Seq+1 == d.slot.Seq && !before.None() && before.Header != header:
			theirs := d.callOf(peer, &h)
			return d.differ(&before, peer, &theirs)
		case h.Seq > d.slot.Seq:
			theirs, ok := d.ask(peer, d.slot.Seq)
			if own := d.calls.call(); ok && theirs.Header.Seq == own.Header.Seq && theirs.Header != own.Header {
				return d.differ(&own, peer, theirs)
			}
		}
	}
	theirs := d.callOf(peer, &h)
	if theirs.HeaderOnly {
		// A peer that does not answer may have failed: then it reports the reason, which is more precise.
		if reason := d.awaitReason(100 * time.Millisecond); reason != nil {
			return d.lost(&reason.down)
		}
	}
	own := d.calls.call()
	own.Header.Frame = d.exec.Received(peer)
	return d.differ(&own, peer, &theirs)
}

// ask returns the description of call seq of a peer in another process, or of its latest call.
func (d *diagnosis) ask(peer int, seq uint64) (*fingerprint.Call, bool) {
	end := d.end
	s, ok := fault.DecodeState(end.Ask(peer, seq))
	if !ok { // its process may be getting no CPU time
		s, ok = fault.DecodeState(end.Ask(peer, seq))
	}
	return &s.Call, ok && !s.Call.None()
}

// differ returns the error that a call of this rank and one of a peer differ.
func (d *diagnosis) differ(own *fingerprint.Call, peer int, theirs *fingerprint.Call) error {
	err := d.conflict(fault.Differ(fault.Part{Rank: d.rank, Call: own}, fault.Part{Rank: peer, Call: theirs}))
	err.Seq = own.Header.Seq
	return err
}

// callOf returns the call of a peer's frame; if its description cannot be determined, only the header.
func (d *diagnosis) callOf(peer int, h *transport.Header) fingerprint.Call {
	header := fingerprint.WithoutFrame(*h)
	c, ok := d.team.callOf(peer, header)
	if !ok {
		seq := h.Seq
		if Op(h.Op) == Send {
			seq = fault.LatestCall
		}
		theirs, known := d.ask(peer, seq)
		if ok = known && theirs.Header == header; ok {
			c = *theirs
		}
	}
	c.Header, c.HeaderOnly = *h, !ok
	return c
}

// probe requests the call of the rank in another process that this rank waits for, and returns how it
// conflicts with this rank's.
func (d *diagnosis) probe() error {
	peer := d.hiddenPeer()
	if peer < 0 {
		return nil
	}
	seq := d.slot.Seq
	if d.run.Call.Op.Pairwise() {
		seq = fault.LatestCall
	}
	state, ok := fault.DecodeState(d.end.Ask(peer, seq))
	if d.silent = -1; !ok {
		d.silent = peer
	}
	own, theirs := d.calls.call(), &state.Call
	switch {
	case !ok || theirs.None() || theirs.Header.Comm != own.Header.Comm || theirs.Header.Epoch != own.Header.Epoch:
	case d.run.Call.Op.Pairwise():
		c := fault.ReceiveDeadlock(fault.Part{Rank: d.rank, Call: &own}, fault.Part{Rank: peer, Call: theirs})
		if c != nil {
			return d.conflict(c)
		}
	case theirs.Pair == 0 && theirs.Header.Seq == own.Header.Seq && theirs.Header != own.Header:
		return d.differ(&own, peer, theirs)
	}
	return nil
}

// hiddenPeer returns a rank that this one waits for and whose calls it cannot see, or -1. A slot shows only
// calls of all ranks.
func (d *diagnosis) hiddenPeer() int {
	for _, r := range d.missing() {
		if !d.canSee(r) {
			return r
		}
	}
	return -1
}

// canSee reports whether this rank can look up what another rank does.
func (d *diagnosis) canSee(rank int) bool {
	return d.site.in(rank) && (d.site.oneWorker || !d.run.Call.Op.Pairwise())
}
