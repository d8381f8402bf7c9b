package collective

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/lockstep-ml/lockstep/collective/internal/executor"
	"github.com/lockstep-ml/lockstep/collective/internal/fault"
	"github.com/lockstep-ml/lockstep/internal/ranges"
)

// state returns this rank's state, with the description of collective seq, or of its latest call if
// collective seq is not recorded. Any goroutine may call it at any time.
func (m *member) state(seq uint64) (s fault.State) {
	d := &m.front.c.log
	d.mu.Lock()
	used, waits := d.used, d.waits
	s.Entered, s.Waits = d.entered, slices.Clone(d.of)
	if n := m.current; n != nil {
		if other := &m.notes[seq&1]; other.sig != nil && other.seq == seq {
			n = other
		}
		s.Call = n.call()
	}
	d.mu.Unlock()
	over := m.front.over() // read after the call: if the call has ended by now, the state says so
	switch {
	case m.front.Failing():
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

// answer returns this rank's encoded state, for a peer.
func (m *member) answer(seq uint64) []byte {
	s := m.state(seq)
	return s.Encode()
}

// peers is the other ranks, for fault attribution.
type peers struct{ m *member }

func (p peers) Missing() []int { return p.m.missing() }

func (p peers) State(rank int) (s fault.State, ok bool) {
	for _, mate := range *p.m.team.mates.Load() {
		if mate.rank == rank {
			return mate.state(fault.LatestCall), true
		}
	}
	return fault.DecodeState(p.m.end.Ask(rank, fault.LatestCall))
}

func (p peers) LastSeen(rank int) (l fault.LastSeen) {
	m := p.m
	l.Frame = m.exec.LastCall(rank)
	if m.site.marker != nil && m.site.in(rank) && !m.wait.call.pairwise() {
		l.Entered = !slices.Contains(m.site.marker.Behind(0, nil), rank)
		if before := &m.notes[(m.call.Slot.Seq+1)&1]; !l.Entered && before.sig != nil && before.seq+1 == m.call.Slot.Seq {
			l.Previous = before.call()
		}
	}
	return l
}

func (p peers) Process(rank int) int { return p.m.site.process(rank) }

func (p peers) Failed() bool { return p.m.front.Failing() }

// fault returns the wait of the current call, for fault attribution.
func (w *waiter) fault() *fault.Wait {
	m := w.m
	return &fault.Wait{Rank: m.rank, Size: m.team.size, Call: m.current.call(), Silent: w.silent, Peers: peers{m}}
}

// overdue returns the error of a wait that took too long: it names the ranks at fault. cause is what ended
// the wait; nil: the call's own deadline.
func (w *waiter) overdue(cause *ended) error {
	m := w.m
	waited := time.Since(w.since)
	wait := w.fault()
	found := wait.Probe()
	if m.front.Failing() {
		return executor.ErrFailed
	}
	patience := time.Duration(0) // others may have given up meanwhile, and have left
	if found.Failed {
		patience = failsMost
	}
	if told := m.awaitReason(patience); told != nil {
		w.told = told // the wait may have ended for another reason, as in Park
		return told
	}
	text := wait.Describe(waited, found)
	var err *Error
	if cause == nil {
		err = m.failure(ErrTimeout, errors.New(text))
	} else {
		err = m.failure(cause.kind(), fmt.Errorf("%s: %w", text, cause))
	}
	if len(found.Ranks) > 0 {
		err.Peers = found.Ranks
	}
	return err
}

// failsMost is how long a rank waits to receive the reason why another rank has failed.
const failsMost = 500 * time.Millisecond

// stall logs that the call has waited long, and for which ranks.
func (w *waiter) stall(waited time.Duration) {
	m, wait := w.m, w.fault()
	found := wait.ProbeBriefly()
	if found.Ranks == nil {
		found.Ranks = m.missing()
	}
	m.front.LogStall(w.run, waited, ranges.Text("rank", found.Ranks), wait.Describe(waited, found))
}
