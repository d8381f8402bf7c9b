package collective

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective/flight"
	"github.com/lockstep-ml/lockstep/transport"
)

// team is what the local ranks of one communicator have in common: the configuration, and one fate. The first failure of
// any of them becomes the cause that all of them return.
type team struct {
	cfg     Config
	prefer  preference
	id      uint64 // in headers; the same on all ranks
	size    int
	local   int // number of local ranks
	monitor Monitor
	pairs   PairMonitor           // the monitor, if it is one; else nil
	release func()                // of a monitor that Split made, once all local ranks are closed; or nil
	world   []int                 // the numbers of its ranks in the group that Open made; nil: the same
	book    *flight.Book[*member] // shared with the communicators that come from this one

	fate atomic.Uint32 // sound, failing, failed
	done chan struct{} // closed when the fate is failed
	err  error         // the cause, set before done is closed
	torn atomic.Bool   // a rank left out part of a call that all had entered

	broken   chan struct{} // closed when a rank has left a call that all had entered: no frame of it could be taken
	breaking sync.Once

	leaving atomic.Int32 // ranks that try to withdraw from a call, or have done so and will fail the team

	mates atomic.Pointer[[]*member] // members, for those that must not wait

	mu      sync.Mutex
	left    sync.Cond        // signalled when a rank has left a call of a failed team
	members []*member        // local ones, as they join
	closed  int              // how many of them are
	splits  map[uint64]*team // being split off: not all local ranks have come yet
	taken   int              // of a team that is split off: how many have; guarded by its parent's mu
	written []writing        // by local rank: what was written last to memory that ranks may share
	blocked []blocked        // by local rank: the call that it blocked in last
}

// blocked is a call in which a rank has blocked last, and may still be.
type blocked struct {
	text
	rank  int     // -1: in none so far
	begun numbers // of the rank, then
}

// writing is a result of call seq that lies at dst already.
type writing struct {
	seq uint64
	dst unsafe.Pointer
}

const (
	sound uint32 = iota
	failing
	failed
)

func newTeam(cfg Config, id uint64, size, local int) *team {
	t := &team{cfg: cfg, id: id, size: size, local: local, monitor: cfg.Monitor, done: make(chan struct{}), broken: make(chan struct{}), splits: map[uint64]*team{}}
	t.prefer, _ = parsePreference(cfg.Algorithm) // which was checked
	t.left.L = &t.mu
	t.pairs, _ = t.monitor.(PairMonitor)
	return t
}

// cause returns the cause of the failure, or nil if there is none, or not yet.
func (t *team) cause() error {
	if t.fate.Load() != failed {
		return nil
	}
	return t.err
}

// fail makes err the cause of the team's failure, unless there is one already, and returns the cause. explainer is the
// rank on whose behalf the monitor is asked to explain it, or -1. The peers do not wait for a description that takes
// long.
func (t *team) fail(err error, explainer int) error {
	if !t.fate.CompareAndSwap(sound, failing) {
		<-t.done
		return t.err
	}
	spread := t.tell(err)
	if t.monitor != nil && explainer >= 0 {
		if explained := t.monitor.Explain(explainer, err); explained != nil {
			err = explained
		}
	}
	t.settle(err, spread)
	return err
}

// abort is fail for those that must not wait for an explanation.
func (t *team) abort(err error) {
	if t.fate.CompareAndSwap(sound, failing) {
		t.settle(err, false)
	}
}

// settle makes err the cause of the failure. The peers may have been told already.
func (t *team) settle(err error, spread bool) {
	t.err = err
	if !spread {
		t.spread(err) // before a call can return: its rank may then close its end, and the peers learn no more than that
	}
	t.fate.Store(failed)
	close(t.done)
	t.mu.Lock()
	partial := slices.Collect(maps.Values(t.splits))
	t.mu.Unlock()
	for _, s := range partial {
		s.abort(err) // a rank that failed in Split never comes to it
	}
}

// breakOff ends the waits of local ranks that nothing else ends, because a rank that they need leaves its call.
func (t *team) breakOff() { t.breaking.Do(func() { close(t.broken) }) }

// spread tells the peers of all local ranks why the team has failed.
func (t *team) spread(err error) {
	t.mu.Lock()
	members := slices.Clone(t.members)
	t.mu.Unlock()
	for _, m := range members {
		m.spread(err)
	}
}

// spread tells the peers of a local rank why its team has failed, and keeps calls of its domain from starting.
func (m *member) spread(err error) {
	if m.team.local < m.team.size {
		m.end.Fail(encodeFailure(err, m))
	}
	if m.site.marker != nil {
		m.site.marker.Interrupt()
	}
}

// depart takes a rank out of a call of a failed team, and returns when no local rank is in one any more: until then they
// may touch each other's memory. The others do not wait long, for the failure ends what they wait for. A rank looks at the
// team's fate after it has said that it is inside, and this looks who is inside after the team has failed, so nobody comes in
// unseen.
func (t *team) depart(m *member) {
	m.inside.Store(false)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.left.Broadcast()
	for slices.ContainsFunc(t.members, func(m *member) bool { return m.inside.Load() }) {
		t.left.Wait()
	}
}

// departed tells those that depart that a rank has left a call that ended well.
func (t *team) departed() {
	t.mu.Lock()
	t.left.Broadcast()
	t.mu.Unlock()
}

// share reports whether another local rank of the domain has this one's Dst. All of the domain have entered the call.
func (t *team) share(m *member, half int) bool {
	own := m.shows[half].Load()
	if own == nil {
		return false
	}
	for _, other := range *t.mates.Load() {
		if other != m && other.shows[half].Load() == own && m.site.in(other.rank) {
			return true
		}
	}
	return false
}

// join makes the communicator of a local rank.
func (t *team) join(end transport.Endpoint) *member {
	m := newMember(t, end)
	t.mu.Lock()
	defer t.mu.Unlock()
	m.local = len(t.members)
	t.members = append(t.members, m)
	mates := slices.Clone(t.members)
	t.mates.Store(&mates)
	t.written = append(t.written, writing{seq: ^uint64(0)})
	t.blocked = append(t.blocked, blocked{rank: -1})
	t.book.Add(m)
	return m
}

// leave notes that a local rank is closed.
func (t *team) leave() {
	t.mu.Lock()
	t.closed++
	last := t.closed == t.local
	t.mu.Unlock()
	if last && t.release != nil {
		t.release()
	}
}

// meet notes the call in which a local rank blocks, and returns how it differs from one with the same number in which
// another local rank has blocked, or that both wait for each other. Ranks that exchange messages could otherwise wait for each other
// without a frame ever crossing.
func (t *team) meet(m *member) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	own := &t.blocked[m.local]
	own.rank, own.text = m.rank, m.current.text()
	for kind := range own.begun {
		own.begun[kind] = append(own.begun[kind][:0], m.begun[kind]...)
	}
	for i := range t.blocked {
		other := &t.blocked[i]
		switch {
		case other.rank < 0 || other == own:
		case own.label.op != 0 || other.label.op != 0:
			if m.deadlocked(other) {
				return m.sayDeadlock(other)
			}
		case other.header.Seq == own.header.Seq && other.header != own.header:
			return m.mismatched(other.rank, &other.header, &other.label)
		}
	}
	return nil
}

// deadlocked reports whether this rank, blocked in a call, waits for a peer that is still blocked in a call that needs this
// rank: neither has begun the other's half. (It may have: then what this one waits for has happened, and it has not looked yet.)
// A Send and a Recv of the two are never so: they are the halves of one message, or what the Recv needs is on its way.
func (m *member) deadlocked(peer *blocked) bool {
	near := m.site.marker != nil && m.site.in(peer.rank) // collectives need every rank of the domain
	own := m.wait.call
	switch {
	case own.pairwise() && peer.label.op != 0:
		return peer.rank == own.Peer && peer.label.peer == m.rank && own.Op == peer.label.op &&
			peer.label.back <= m.header.Seq && m.begun[opposite(own.Op)].of(peer.rank) <= peer.header.Seq
	case own.pairwise():
		return near && peer.rank == own.Peer && peer.begun[opposite(own.Op)].of(m.rank) <= m.header.Seq &&
			m.begun[0].of(0) <= peer.header.Seq
	}
	return near && peer.label.op != 0 && peer.label.peer == m.rank && peer.begun[0].of(0) <= m.header.Seq &&
		m.begun[opposite(peer.label.op)].of(peer.rank) <= peer.header.Seq
}

// opposite returns the other of Send and Recv.
func opposite(op Op) Op {
	if op == Send {
		return Recv
	}
	return Send
}

// sayDeadlock says that this rank and a peer wait for each other.
func (m *member) sayDeadlock(peer *blocked) error {
	high, low := describe(&peer.header, &peer.label), m.describe()
	first, second := peer.rank, m.rank
	if first < second {
		first, second, high, low = second, first, low, high
	}
	err := m.failure(ErrDesync, fmt.Errorf("rank %d calls %s, rank %d calls %s: they wait for each other", first, high, second, low))
	err.Peers = []int{peer.rank}
	return err
}

// writeOnce calls write unless a local rank has written the result of call seq to dst already: ranks may share a
// destination that they cannot agree on in advance, because they exchange messages only.
func (t *team) writeOnce(local int, seq uint64, dst unsafe.Pointer, write func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range t.written {
		if t.written[i] == (writing{seq, dst}) {
			return
		}
	}
	if write != nil {
		write()
	}
	t.written[local] = writing{seq, dst}
}

// label returns what a local rank calls the call of a header, or nil if the rank is another process's, or is in another
// call. The rank waits for its frame to be taken meanwhile, so the label stays what it is.
func (t *team) label(rank int, h *transport.Header) *label {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, m := range t.members {
		if m.rank != rank {
			continue
		}
		m.textMu.Lock()
		defer m.textMu.Unlock()
		for i := range m.notes {
			if t := m.notes[i].text(); t.header == plain(*h) {
				return &t.label
			}
		}
	}
	return nil
}
