package deadlock

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/lockstep-ml/lockstep/collective"
)

// Monitor tracks the calls of the local ranks of one communicator; it implements [collective.Monitor]. One goroutine
// at a time may call the methods for a rank.
type Monitor struct {
	detector *Detector
	name     string
	members  []int // replica by rank, -1: in another process
	ranks    []int // rank by replica, -1: not a member
	abort    func(error)
	slots    []slot
	isMerge  bool     // of merge calls; not in Detector.monitors
	pairs    sync.Map // by [2]int of sender and receiver: the *Monitor of the calls between them
}

var _ collective.Monitor = (*Monitor)(nil)

// inflight is the number of calls of one rank that a report can describe. A rank that has started more is tracked
// too, but the report does not describe its oldest ones.
const inflight = 8

// slot holds the calls of one rank. The rank's calls write it; any goroutine reads it.
type slot struct {
	entered atomic.Uint64                             // number of calls entered, in the order of their numbers
	left    atomic.Uint64                             // number of these that have ended, in any order
	calls   [inflight]atomic.Pointer[collective.Call] // the latest calls, by number; nil after the end
	parked  atomic.Pointer[replica]                   // the replica whose parked flag Unpark clears

	_ [64]byte // the next rank's counts are on another cache line
}

// newMonitor returns a monitor; nil members means that rank i is replica i.
func newMonitor(l *Detector, name string, members []int, abort func(error)) *Monitor {
	if members == nil {
		members = make([]int, l.Replicas())
		for i := range members {
			members[i] = i
		}
	}
	m := &Monitor{detector: l, name: name, members: members, abort: abort, slots: make([]slot, len(members))}
	m.ranks = slices.Repeat([]int{-1}, l.Replicas())
	for rank, replica := range members {
		if replica >= 0 {
			m.ranks[replica] = rank
		}
	}
	return m
}

// Enter reports that rank starts call number seq. It takes no lock and does not allocate.
func (m *Monitor) Enter(rank int, seq uint64, call *collective.Call) {
	if at, role := m.monitorOf(rank, call); at != nil {
		at.enter(role, seq, call)
	}
}

func (m *Monitor) enter(rank int, seq uint64, call *collective.Call) {
	s := &m.slots[rank]
	s.entered.Store(seq + 1)
	s.calls[seq%inflight].Store(call)
}

// Leave reports that rank's call number seq has ended, with the error that it will return. It takes no lock, except
// that it waits for a report in progress, since the caller may change the call afterwards, which the report reads.
//
// (Leave clears the call and then reads the flag; a report sets the flag and then reads the calls. So either the
// report finds no call, or Leave sees the flag and waits.)
func (m *Monitor) Leave(rank int, seq uint64, call *collective.Call, _ error) {
	if at, role := m.monitorOf(rank, call); at != nil {
		at.leave(role, seq)
	}
}

func (m *Monitor) leave(rank int, seq uint64) {
	s := &m.slots[rank]
	s.calls[seq%inflight].Store(nil)
	s.left.Add(1)
	if m.detector.reporting.Load() {
		m.detector.awaitReport()
	}
}

// Park reports that the goroutine of rank's replica is about to block until the other members have entered call
// number seq. If they never will, the run fails: Park aborts all communicators and returns the failure.
func (m *Monitor) Park(rank int, seq uint64, call *collective.Call) error {
	at, role := m.monitorOf(rank, call)
	if at == nil {
		return nil
	}
	err := at.park(role, seq)
	if at != m {
		m.slots[rank].parked.Store(at.slots[role].parked.Swap(nil)) // for Unpark
	}
	return err
}

func (m *Monitor) park(rank int, seq uint64) error {
	l := m.detector
	s := &m.slots[rank]
	s.parked.Store(nil)
	r := l.current.Load()
	replica := m.members[rank]
	if r == nil || replica < 0 {
		return nil
	}
	l.mu.Lock()
	failure := r.failure.Load()
	spread := false
	switch me := &r.replicas[replica]; {
	case failure != nil || r.merge.executing || me.state != Running:
		// One goroutine acts for all ranks, or belongs to an earlier run: the wait is not the replica's.
		l.mu.Unlock()
		return errorOrNil(failure)
	case me.parked.Load():
		failure = r.failLocked(fault{kind: faultBusy, replica: replica, cause: collective.ErrBusy})
		spread = true
	default:
		s.parked.Store(me)
		failure = r.parkLocked(replica, waiting{m, seq})
		spread = failure != nil
	}
	l.mu.Unlock()
	if spread {
		r.spread(failure)
	}
	return errorOrNil(failure)
}

// parkLocked marks the replica as parked and searches for a proof that its wait cannot end. The caller holds the
// lock. If parkLocked returns a failure, the caller must call spread.
func (r *Run) parkLocked(replica int, w waiting) *StepError {
	me := &r.replicas[replica]
	me.wait = w
	me.parked.Store(true)
	chain := r.detector.search.from(r, replica)
	if chain == nil {
		return nil
	}
	return r.failLocked(fault{kind: faultStuck, replica: replica, chain: chain})
}

// Unpark reports that rank's goroutine runs again. It takes no lock.
func (m *Monitor) Unpark(rank int) {
	if me := m.slots[rank].parked.Swap(nil); me != nil {
		me.parked.Store(false)
	}
}

// Explain makes err, an error of rank, the failure of the run, and returns it: a *[StepError] that wraps err and
// describes every replica. If the run has failed already, it returns that failure. Outside a run it only returns the
// report.
func (m *Monitor) Explain(rank int, err error) error {
	at, role := m.failedMonitor(rank, err)
	f := fault{kind: faultFound, replica: m.members[rank], monitor: at, seq: at.slots[role].last(), cause: err}
	if errors.Is(err, collective.ErrBusy) && f.replica >= 0 {
		f.kind = faultBusy
	}
	if r := m.detector.current.Load(); r != nil {
		if failure := r.failure.Load(); failure != nil {
			return failure
		}
		return r.fail(f)
	}
	return m.detector.idleReport(f)
}

// Split returns a monitor for a communicator that was split from m's; ranks[i] is the rank in m of its rank i. The
// caller must call release when the communicator is closed, and not use the monitor afterwards.
func (m *Monitor) Split(name string, ranks []int, abort func(error)) (split collective.Monitor, release func()) {
	members := make([]int, len(ranks))
	for i, rank := range ranks {
		members[i] = m.members[rank]
	}
	child := m.detector.Monitor(name, members, abort)
	return child, child.Release
}

// Release removes the monitor from the detector, when its communicator is closed.
func (m *Monitor) Release() {
	l := m.detector
	l.mu.Lock()
	defer l.mu.Unlock()
	gone := map[*Monitor]bool{m: true}
	m.pairs.Range(func(_, p any) bool {
		gone[p.(*Monitor)] = true
		return true
	})
	l.monitors = slices.DeleteFunc(l.monitors, func(other *Monitor) bool { return gone[other] })
}

// rank returns the replica's rank in m's communicator, or -1.
func (m *Monitor) rank(replica int) int { return m.ranks[replica] }

// Reset prepares the monitor for another communicator, which replaces one that failed outside a run. No call may be in
// flight.
func (m *Monitor) Reset() {
	m.detector.mu.Lock()
	defer m.detector.mu.Unlock()
	m.reset()
}

// reset clears the calls: the next communicator numbers them from 0. No call may be in flight. A communicator that
// continues its numbers is tracked correctly too, because only later calls matter.
func (m *Monitor) reset() {
	for i := range m.slots {
		s := &m.slots[i]
		s.entered.Store(0)
		for j := range s.calls {
			s.calls[j].Store(nil)
		}
	}
}

// open returns the oldest of the latest calls that has not ended.
func (s *slot) open() (seq uint64, open bool) {
	entered := s.entered.Load()
	for seq := entered - min(entered, inflight); seq < entered; seq++ {
		if s.call(seq) != nil {
			return seq, true
		}
	}
	return 0, false
}

// last returns the oldest open call, or the last one entered.
func (s *slot) last() uint64 {
	if seq, open := s.open(); open {
		return seq
	}
	return max(s.entered.Load(), 1) - 1
}

// call returns call number seq, or nil if it has ended or too many were entered after it. (Enter counts a call before
// it stores it, so if a later call has replaced the entry before the Load, entered shows that.)
func (s *slot) call(seq uint64) *collective.Call {
	call := s.calls[seq%inflight].Load()
	if entered := s.entered.Load(); seq >= entered || entered-seq > inflight {
		return nil
	}
	return call
}

func errorOrNil(e *StepError) error {
	if e == nil {
		return nil
	}
	return e
}
