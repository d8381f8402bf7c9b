package deadlock

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/lockstep-ml/lockstep/collective"
)

// Monitor watches the calls of one communicator's local ranks; it implements [collective.Monitor]. Each rank's
// methods are called by one goroutine at a time.
type Monitor struct {
	detector *Detector
	name     string
	members  []int // replica by rank, -1: in another process
	ranks    []int // rank by replica, -1: not a member
	abort    func(error)
	slots    []slot
	isMerge  bool     // the rendezvous of merge calls, which is in no list
	pairs    sync.Map // by [2]int of sender and receiver: the *Monitor of the calls between them
}

var _ collective.SplitMonitor = (*Monitor)(nil)

// inflight is how many calls of one rank can be described in a report. A rank that has started more is watched just as
// well, but the oldest go without a name.
const inflight = 8

// slot is what one rank has done. It is written by the rank's calls and read by everybody.
type slot struct {
	entered atomic.Uint64                             // how many calls it has entered, in the order of their numbers
	left    atomic.Uint64                             // how many of these are over, in any order
	calls   [inflight]atomic.Pointer[collective.Call] // by number, those entered last; nil once over
	parked  atomic.Pointer[replica]                   // whose mark Unpark clears

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

// Enter says that rank begins call number seq. It takes no lock and allocates nothing.
func (m *Monitor) Enter(rank int, seq uint64, call *collective.Call) {
	s := &m.slots[rank]
	s.entered.Store(seq + 1)
	s.calls[seq%inflight].Store(call)
}

// Leave says that rank's call number seq is over, with the error that it will return. It takes no lock, except that it
// waits for a report that is being made: the caller's next act may be to change the call that the report reads.
//
// (Leave clears the call and then looks at the flag; a report sets the flag and then looks for calls. So either the
// report finds no call, or Leave sees the flag and waits.)
func (m *Monitor) Leave(rank int, seq uint64, _ error) {
	s := &m.slots[rank]
	s.calls[seq%inflight].Store(nil)
	s.left.Add(1)
	if m.detector.reporting.Load() {
		m.detector.awaitReport()
	}
}

// Park says that the goroutine of rank's replica is about to block until the other members have entered call number
// seq. If they never will, the run has failed; then Park has aborted all communicators, and returns the failure.
func (m *Monitor) Park(rank int, seq uint64) error {
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
		// A goroutine acts for all ranks, or one of an earlier run is still at it: its wait is not the replica's.
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

// parkLocked marks the replica as parked and searches for a reason why its wait cannot end. The caller holds the
// lock, and calls spread if the run has failed.
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

// Unpark says that rank's goroutine runs again. It takes no lock.
func (m *Monitor) Unpark(rank int) {
	if me := m.slots[rank].parked.Swap(nil); me != nil {
		me.parked.Store(false)
	}
}

// Explain makes err, which rank found first, the failure of the run, and returns it: an *[StepError] that wraps err and
// says what every replica does. If the run has failed already, it returns that failure. Outside a run it
// returns the report alone.
func (m *Monitor) Explain(rank int, err error) error {
	at, role := m.concerned(rank, err)
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

// Split returns a monitor for a communicator that was split off m's; ranks[i] is the rank in m of its rank i. The
// caller calls release when the communicator is closed, after which the monitor is not asked any more.
func (m *Monitor) Split(name string, ranks []int, abort func(error)) (split collective.Monitor, release func()) {
	members := make([]int, len(ranks))
	for i, rank := range ranks {
		members[i] = m.members[rank]
	}
	child := m.detector.Monitor(name, members, abort)
	return child, child.Release
}

// Release takes the monitor out of the detector: its communicator is closed.
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

// Reset says that the monitor watches another communicator from now on, which takes the place of one that failed outside of
// every run. It is called while no call is in flight.
func (m *Monitor) Reset() {
	m.detector.mu.Lock()
	defer m.detector.mu.Unlock()
	m.reset()
}

// reset forgets what was entered: the communicator that comes counts from 0. It is called while no call is in flight, so a
// communicator that counts on loses nothing either: only calls that are entered from now on matter.
func (m *Monitor) reset() {
	for i := range m.slots {
		s := &m.slots[i]
		s.entered.Store(0)
		for j := range s.calls {
			s.calls[j].Store(nil)
		}
	}
}

// open returns the oldest call that was entered and is not over, of those entered last.
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

// call returns call number seq, or nil if it is over, or too many were entered after it. (Enter counts a call before it
// notes it, so if the place has gone to a later call by the time of the first look, the second look sees that.)
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
