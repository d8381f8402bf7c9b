package collective

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/lockstep-ml/lockstep/transport"
)

// team is what the local ranks of one communicator have in common: the configuration, and one fate. The first failure of
// any of them becomes the cause that all of them return.
type team struct {
	cfg     Config
	id      uint64 // in headers; the same on all ranks
	size    int
	local   int // number of local ranks
	monitor Monitor
	release func() // of a monitor that Split made, once all local ranks are closed; or nil

	fate atomic.Uint32 // sound, failing, failed
	done chan struct{} // closed when the fate is failed
	err  error         // the cause, set before done is closed
	torn atomic.Bool   // a rank left out part of a call that all had entered

	leaving atomic.Int32 // ranks that try to withdraw from a call, or have done so and will fail the team

	mu      sync.Mutex
	members []*member        // local ones, as they join
	closed  int              // how many of them are
	splits  map[uint64]*team // being split off: not all local ranks have come yet
	taken   int              // of a team that is split off: how many have; guarded by its parent's mu
	written []writing        // by local rank: what was written last to memory that ranks may share
	blocked []blocked        // by local rank: the call that it blocked in last
}

// blocked is a call in which a rank has blocked.
type blocked struct {
	rank   int // -1: in none so far
	header transport.Header
	label  label
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
	return &team{cfg: cfg, id: id, size: size, local: local, monitor: cfg.Monitor, done: make(chan struct{}), splits: map[uint64]*team{}}
}

// cause returns the cause of the failure, or nil if there is none, or not yet.
func (t *team) cause() error {
	if t.fate.Load() != failed {
		return nil
	}
	return t.err
}

// fail makes err the cause of the team's failure, unless there is one already, and returns the cause. explainer is the
// rank on whose behalf the monitor is asked to explain it, or -1.
func (t *team) fail(err error, explainer int) error {
	if !t.fate.CompareAndSwap(sound, failing) {
		<-t.done
		return t.err
	}
	if t.monitor != nil && explainer >= 0 {
		if explained := t.monitor.Explain(explainer, err); explained != nil {
			err = explained
		}
	}
	t.settle(err)
	return err
}

// abort is fail for those that must not wait for an explanation.
func (t *team) abort(err error) {
	if t.fate.CompareAndSwap(sound, failing) {
		t.settle(err)
	}
}

func (t *team) settle(err error) {
	t.err = err
	t.fate.Store(failed)
	close(t.done)
	t.mu.Lock()
	for _, m := range t.members {
		if m.marker != nil {
			m.marker.Interrupt()
		}
	}
	partial := slices.Collect(maps.Values(t.splits))
	t.mu.Unlock()
	for _, s := range partial {
		s.abort(err) // a rank that failed in Split never comes to it
	}
}

// join makes the communicator of a local rank.
func (t *team) join(end transport.Endpoint) *member {
	m := newMember(t, end)
	t.mu.Lock()
	defer t.mu.Unlock()
	m.local = len(t.members)
	t.members = append(t.members, m)
	t.written = append(t.written, writing{seq: ^uint64(0)})
	t.blocked = append(t.blocked, blocked{rank: -1})
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
// another local rank has blocked. Ranks that exchange messages could otherwise wait for each other without a frame ever
// crossing.
func (t *team) meet(m *member) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	own := &t.blocked[m.local]
	l := &m.labels[m.header.Seq&1]
	own.rank, own.header = m.rank, m.header
	own.label = label{l.name, append(own.label.shape[:0], l.shape...), l.algo}
	for i := range t.blocked {
		if other := &t.blocked[i]; other.rank >= 0 && other.header.Seq == own.header.Seq && other.header != own.header {
			return m.mismatched(other.rank, &other.header, &other.label)
		}
	}
	return nil
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
