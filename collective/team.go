package collective

import (
	"errors"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective/flight"
	"github.com/lockstep-ml/lockstep/collective/internal/fault"
	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
	"github.com/lockstep-ml/lockstep/transport"
)

// team is what the local ranks of one communicator share: the configuration, and the failure. The first
// failure of any of them becomes the cause that all of them return.
type team struct {
	cfg     Config
	prefer  preference
	id      uint64 // in headers; the same on all ranks
	size    int
	local   int // number of local ranks
	monitor Monitor
	pairs   PairMonitor           // the monitor, if it is one; else nil
	release func()                // frees the monitor that Split made, once all local ranks are closed; or nil
	world   []int                 // its ranks as numbered in the group that Open made; nil: the same
	book    *flight.Book[*member] // shared with the communicators derived from this one

	fate atomic.Uint32 // sound, failing, failed
	done chan struct{} // closed when the fate is failed
	err  error         // the cause, set before done is closed
	torn atomic.Bool   // a rank left out part of a call that all ranks had entered

	// closed when a rank has left a call that all ranks had entered: no frame of that call can be received
	broken   chan struct{}
	breaking sync.Once

	leaving atomic.Int32 // ranks that try to withdraw from a call, or have withdrawn and will fail the team

	mates atomic.Pointer[[]*member] // members, for callers that must not wait

	mu      sync.Mutex
	left    sync.Cond        // signalled when a rank has left a call of a failed team
	members []*member        // the local ranks, in the order in which they joined
	closed  int              // how many of them are closed
	splits  map[uint64]*team // being split off: not all local ranks have arrived yet
	// of a team that is split off: how many local ranks have arrived; guarded by its parent's mu
	taken   int
	written []writing // by local rank: the last result stored in memory that ranks may share
	blocked []blocked // by local rank: the call in which it blocked last
}

// blocked is the call in which a rank blocked last, and may still block.
type blocked struct {
	call  fingerprint.Call
	rank  int     // -1: in none so far
	begun numbers // the rank's counters at that time
}

// writing records that a result of call seq is already being stored at dst.
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
	t.prefer, _ = parsePreference(cfg.Algorithm) // validated before
	t.left.L = &t.mu
	t.pairs, _ = t.monitor.(PairMonitor)
	return t
}

// cause returns the cause of the failure, or nil if there is none yet.
func (t *team) cause() error {
	if t.fate.Load() != failed {
		return nil
	}
	return t.err
}

// fail makes err the cause of the team's failure, unless there is one already, and returns the cause.
// explainer is the rank for which the monitor explains the failure, or -1. The peers do not wait for a slow
// description.
func (t *team) fail(err error, explainer int) error {
	if !t.fate.CompareAndSwap(sound, failing) {
		<-t.done
		return t.err
	}
	spread := t.addDescription(err)
	if t.monitor != nil && explainer >= 0 {
		if explained := t.monitor.Explain(explainer, err); explained != nil {
			err = explained
		}
	}
	t.settle(err, spread)
	return err
}

// abort is fail for callers that must not wait for an explanation.
func (t *team) abort(err error) {
	if t.fate.CompareAndSwap(sound, failing) {
		t.settle(err, false)
	}
}

// settle makes err the cause of the failure. The peers may have been notified already.
func (t *team) settle(err error, spread bool) {
	t.err = err
	if !spread {
		// before a call can return: its rank may then close its endpoint, and the peers would learn nothing
		// more
		t.spread(err)
	}
	t.fate.Store(failed)
	close(t.done)
	t.mu.Lock()
	partial := slices.Collect(maps.Values(t.splits))
	t.mu.Unlock()
	for _, s := range partial {
		s.abort(err) // a rank that failed in Split never calls it
	}
}

// breakOff ends waits of local ranks that nothing else would end, because a rank that they need leaves its
// call.
func (t *team) breakOff() { t.breaking.Do(func() { close(t.broken) }) }

// spread notifies the peers of all local ranks why the team has failed.
func (t *team) spread(err error) {
	t.mu.Lock()
	members := slices.Clone(t.members)
	t.mu.Unlock()
	for _, m := range members {
		m.spread(err)
	}
}

// spread notifies the peers of a local rank why its team has failed, and prevents calls of its domain from
// starting.
func (m *member) spread(err error) {
	if m.team.local < m.team.size {
		m.end.Fail(encodeFailure(err, m))
	}
	if m.site.marker != nil {
		m.site.marker.Interrupt()
	}
}

// depart takes a rank out of a call of a failed team. It returns when no local rank is in a call any more:
// until then they may access each other's memory. The wait is short, because the failure ends what they wait
// for. A rank first marks itself as inside and then checks whether the team has failed; depart runs after the
// failure and then reads who is inside. So no rank enters unnoticed.
func (t *team) depart(m *member) {
	m.inside.Store(false)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.left.Broadcast()
	for slices.ContainsFunc(t.members, func(m *member) bool { return m.inside.Load() }) {
		t.left.Wait()
	}
}

// departed notifies departing ranks that a rank has left a call that succeeded.
func (t *team) departed() {
	t.mu.Lock()
	t.left.Broadcast()
	t.mu.Unlock()
}

// share reports whether another local rank of the domain has the same Dst. All ranks of the domain have
// entered the call.
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

// leave records that a local rank is closed.
func (t *team) leave() {
	t.mu.Lock()
	t.closed++
	last := t.closed == t.local
	t.mu.Unlock()
	if last && t.release != nil {
		t.release()
	}
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
			peer.call.Back <= m.header.Seq && m.begun[opposite(own.Op)].of(peer.rank) <= peer.call.Header.Seq
	case own.pairwise():
		return near && peer.rank == own.Peer && peer.begun[opposite(own.Op)].of(m.rank) <= m.header.Seq &&
			m.begun[0].of(0) <= peer.call.Header.Seq
	}
	return near && peer.call.Pair != 0 && peer.call.Peer == m.rank && peer.begun[0].of(0) <= m.header.Seq &&
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

// writeOnce calls write unless a local rank has already stored the result of call seq at dst. Ranks that
// exchange only messages may share a destination without knowing it in advance.
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

// callOf returns the call of a local rank with this header; ok is false if the rank is in another process or
// in another call. The rank is waiting for its frame to be received, so the call does not change meanwhile.
func (t *team) callOf(rank int, h transport.Header) (c fingerprint.Call, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, m := range t.members {
		if m.rank != rank {
			continue
		}
		m.textMu.Lock()
		defer m.textMu.Unlock()
		for i := range m.notes {
			if c = m.notes[i].call(); c.Header == h {
				return c, true
			}
		}
	}
	return fingerprint.Call{}, false
}
