package collective

import (
	"slices"

	"github.com/lockstep-ml/lockstep/collective/internal/fault"
	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
	"github.com/lockstep-ml/lockstep/transport"
)

// recent is the latest calls of a rank, for errors and for the ranks that read its slot or probe it. The last two
// collectives are noted, because there are two slots, and the last call of two ranks. The lock of the front end's
// record guards them, so that a call locks once.
type recent struct {
	rank   int
	front  FrontEnd
	notes  [3]fingerprint.Numbered // of the even and the odd collectives, and of calls of two ranks
	latest *fingerprint.Numbered   // one of these; nil: there was no call
}

// note notes a call that begins, and records it. begun are the calls that the rank has begun, including this
// one.
func (c *recent) note(r *Running, s *signature, begun *fingerprint.Numbers) {
	n, back := &c.notes[r.seq&1], uint64(0)
	if r.Call.Op.Pairwise() {
		n, back = &c.notes[2], begun.Opposite(r.Call.Op, r.Call.Peer)
	}
	log := &c.front.c.log
	log.mu.Lock()
	log.add(r, &s.record, s.long)
	n.Like, n.Seq, n.Back = &s.call, r.seq, back
	c.latest = n
	log.mu.Unlock()
}

// call returns the latest call. Only the goroutine that executes calls may use call and before.
func (c *recent) call() fingerprint.Call { return c.latest.Call() }

// before returns the collective before the current one, number seq, or none if it is not noted.
func (c *recent) before(seq uint64) fingerprint.Call {
	if n := &c.notes[(seq+1)&1]; n.Like != nil && n.Seq+1 == seq {
		return n.Call()
	}
	return fingerprint.Call{}
}

// find returns the call with a header, if it is noted. Any goroutine may call it at any time.
func (c *recent) find(h transport.Header) (call fingerprint.Call, ok bool) {
	mu := &c.front.c.log.mu
	mu.Lock()
	defer mu.Unlock()
	for i := range c.notes {
		if call = c.notes[i].Call(); call.Header == h {
			return call, true
		}
	}
	return fingerprint.Call{}, false
}

// state returns the rank's state, with the description of collective seq, or of the latest call if collective
// seq is not noted. Any goroutine may call it at any time.
func (c *recent) state(seq uint64) (s fault.State) {
	log := &c.front.c.log
	log.mu.Lock()
	used, waits := log.used, log.waits
	s.Waits = slices.Clone(log.of)
	for _, n := range c.notes[:2] {
		if n.Like != nil {
			s.Entered = max(s.Entered, n.Seq+1)
		}
	}
	n := c.latest
	if other := &c.notes[seq&1]; other.Like != nil && other.Seq == seq {
		n = other
	}
	s.Call = n.Call()
	log.mu.Unlock()
	over := c.front.over() // read after the call: if the call has ended by now, the state says so
	switch {
	case c.front.Failing():
		s.Activity = fault.Broken
	case used <= over:
		s.Activity = fault.Idle
	case waits == used && len(s.Waits) > 0:
		s.Activity = fault.Waiting
	default:
		s.Activity = fault.Busy
	}
	if s.Activity != fault.Waiting {
		s.Waits = nil
	}
	return s
}

// answer returns the encoded state, for a peer.
func (c *recent) answer(seq uint64) []byte {
	s := c.state(seq)
	return s.Encode()
}
