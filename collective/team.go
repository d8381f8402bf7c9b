package collective

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/lockstep-ml/lockstep/collective/internal/executor"
	"github.com/lockstep-ml/lockstep/collective/internal/fault"
	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
	"github.com/lockstep-ml/lockstep/transport"
)

// team is what the local ranks of one communicator over a transport share.
type team struct {
	cfg    *Config // set when the first rank joins
	prefer preference
	id     uint64 // in headers; the same on all ranks
	size   int
	local  int             // number of local ranks
	execs  *executor.Group // executes their calls

	// closed when a rank has left a call that all ranks had entered: no frame of that call can be received
	broken   chan struct{}
	breaking sync.Once

	mates atomic.Pointer[[]*member] // members, for callers that must not wait

	mu      sync.Mutex
	members []*member        // the local ranks, in the order in which they joined
	parts   map[uint64]*team // being split off: not all local ranks have arrived yet
	taken   int              // of a team that is split off: how many have; guarded by its parent's mu
	rebuilt *team            // the team of the same ranks in the next epoch
	blocked []blocked        // by local rank: the call in which it blocked last
}

// blocked is the call in which a rank blocked last, and may still block.
type blocked struct {
	call  fingerprint.Call
	rank  int     // -1: in none so far
	begun numbers // the rank's counters at that time
}

func newTeam(id uint64, size, local int) *team {
	t := &team{id: id, size: size, local: local, broken: make(chan struct{}), parts: map[uint64]*team{}}
	t.execs = executor.NewGroup(local)
	return t
}

// breakOff ends waits of local ranks that nothing else would end, because a rank that they need leaves its
// call.
func (t *team) breakOff() { t.breaking.Do(func() { close(t.broken) }) }

// join adds a local rank, whose front end is known.
func (t *team) join(m *member) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.cfg == nil {
		t.cfg = m.front.Config()
		t.prefer, _ = parsePreference(t.cfg.Algorithm) // validated before
	}
	m.local = len(t.members)
	t.members = append(t.members, m)
	mates := slices.Clone(t.members)
	t.mates.Store(&mates)
	t.blocked = append(t.blocked, blocked{rank: -1})
}

// child returns the team of the communicator of these ranks that is split off under id. The first local rank to
// arrive makes it.
func (t *team) child(id uint64, ranks []int) *team {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.parts[id]
	if s == nil {
		local := 0
		for _, m := range t.members {
			if slices.Contains(ranks, m.rank) {
				local++
			}
		}
		s = newTeam(id, len(ranks), local)
		t.parts[id] = s
	}
	if s.taken++; s.taken == s.local {
		delete(t.parts, id)
	}
	return s
}

// next returns the team of the same ranks in the next epoch.
func (t *team) next() *team {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.rebuilt == nil {
		t.rebuilt = newTeam(fingerprint.HashString(fingerprint.Seed, t.cfg.Name), t.size, t.local)
	}
	return t.rebuilt
}

// meet records the call in which a local rank blocks. It returns an error if a call with the same number in
// which another local rank has blocked differs, or if the two wait for each other. Ranks that exchange
// messages could otherwise wait for each other without ever receiving a frame.
func (t *team) meet(m *member) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	own := &t.blocked[m.local]
	own.rank, own.call = m.rank, m.current.call()
	for kind := range own.begun {
		own.begun[kind] = append(own.begun[kind][:0], m.begun[kind]...)
	}
	for i := range t.blocked {
		other := &t.blocked[i]
		switch {
		case other.rank < 0 || other == own:
		case own.call.Pair != 0 || other.call.Pair != 0:
			if m.deadlocked(other) {
				return m.deadlockError(other)
			}
		case other.call.Header.Seq == own.call.Header.Seq && other.call.Header != own.call.Header:
			return m.mismatched(other.rank, &other.call)
		}
	}
	return nil
}

// deadlocked reports whether this rank, blocked in a call, waits for a peer that is still blocked in a call
// that needs this rank, while neither has begun the other's half. (It may have begun: then the event that
// this rank waits for has happened, and it has not looked yet.) A Send and a Recv between the two never
// deadlock: they are the halves of one message, or the message that the Recv needs is on its way.
func (m *member) deadlocked(peer *blocked) bool {
	near := m.site.marker != nil && m.site.in(peer.rank) // collectives need every rank of the domain
	own := m.wait.call
	switch {
	case own.pairwise() && peer.call.Pair != 0:
		return peer.rank == own.Peer && peer.call.Peer == m.rank && own.Op == peer.call.Pair &&
			peer.call.Back <= m.call.Slot.Seq && m.begun[opposite(own.Op)].of(peer.rank) <= peer.call.Header.Seq
	case own.pairwise():
		return near && peer.rank == own.Peer && peer.begun[opposite(own.Op)].of(m.rank) <= m.call.Slot.Seq &&
			m.begun[0].of(0) <= peer.call.Header.Seq
	}
	return near && peer.call.Pair != 0 && peer.call.Peer == m.rank && peer.begun[0].of(0) <= m.call.Slot.Seq &&
		m.begun[opposite(peer.call.Pair)].of(peer.rank) <= peer.call.Header.Seq
}

// opposite returns the other of Send and Recv.
func opposite(op Op) Op {
	if op == Send {
		return Recv
	}
	return Send
}

// deadlockError returns the error that this rank and a peer wait for each other.
func (m *member) deadlockError(peer *blocked) error {
	own := m.current.call()
	text := fault.Deadlock(fault.Part{Rank: m.rank, Call: &own}, fault.Part{Rank: peer.rank, Call: &peer.call})
	err := m.failure(ErrDesync, errors.New(text))
	err.Peers = []int{peer.rank}
	return err
}

// callOf returns the call of a local rank with this header; ok is false if the rank is in another process or
// in another call. The rank is waiting for its frame to be received, so the call does not change meanwhile.
func (t *team) callOf(rank int, h transport.Header) (c fingerprint.Call, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, m := range t.members {
		if m.rank != rank {
			continue
		}
		m.notesMu().Lock()
		defer m.notesMu().Unlock()
		for i := range m.notes {
			if c = m.notes[i].call(); c.Header == h {
				return c, true
			}
		}
	}
	return fingerprint.Call{}, false
}
