package deadlock

import (
	"errors"

	"github.com/lockstep-ml/lockstep/collective"
)

// Send and Recv calls are numbered separately for each pair of ranks. So each direction between two ranks is tracked
// as a communicator of size two: its rank 0 sends, its rank 1 receives, and calls with the same number match. A
// sender that waits for a receiver that waits for it in another call is an ordinary cycle.

var _ collective.PairMonitor = (*Monitor)(nil)

// sender and receiver are the ranks of a pair's monitor.
const (
	sender = iota
	receiver
)

// pair returns the monitor of one direction between two ranks, and which rank of it makes the call; nil if the call
// names no peer.
func (m *Monitor) pair(rank int, call *collective.Call) (*Monitor, int) {
	if call.Peer < 0 || call.Peer >= len(m.members) || call.Peer == rank {
		return nil, 0
	}
	key, role := [2]int{rank, call.Peer}, sender
	if call.Op == collective.Recv {
		key, role = [2]int{call.Peer, rank}, receiver
	}
	if p, ok := m.pairs.Load(key); ok {
		return p.(*Monitor), role
	}
	m.detector.mu.Lock()
	defer m.detector.mu.Unlock()
	p, ok := m.pairs.Load(key)
	if !ok { // no abort function: the calls belong to m's communicator
		p = newMonitor(m.detector, m.name, []int{m.members[key[0]], m.members[key[1]]}, nil)
		m.detector.monitors = append(m.detector.monitors, p.(*Monitor))
		m.pairs.Store(key, p)
	}
	return p.(*Monitor), role
}

// EnterPair reports that rank starts call number seq with its peer.
func (m *Monitor) EnterPair(rank int, seq uint64, call *collective.Call) {
	if p, role := m.pair(rank, call); p != nil {
		p.Enter(role, seq, call)
	}
}

// ParkPair reports that the goroutine of rank's replica is about to block until its peer has entered the matching call.
func (m *Monitor) ParkPair(rank int, seq uint64, call *collective.Call) error {
	p, role := m.pair(rank, call)
	if p == nil {
		return nil
	}
	err := p.Park(role, seq)
	m.slots[rank].parked.Store(p.slots[role].parked.Swap(nil)) // for Unpark
	return err
}

// LeavePair reports that the call has ended.
func (m *Monitor) LeavePair(rank int, seq uint64, call *collective.Call, err error) {
	if p, role := m.pair(rank, call); p != nil {
		p.Leave(role, seq, err)
	}
}

// monitorOf returns the monitor of the call that failed with err, m or that of a pair, and the rank there.
func (m *Monitor) monitorOf(rank int, err error) (*Monitor, int) {
	e := (*collective.Error)(nil)
	if !errors.As(err, &e) || e.Op != collective.Send && e.Op != collective.Recv {
		return m, rank
	}
	found, role := m, rank
	m.pairs.Range(func(key, value any) bool {
		p, k := value.(*Monitor), key.([2]int)
		r := sender
		if e.Op == collective.Recv {
			r = receiver
		}
		if k[r] != rank {
			return true
		}
		if _, open := p.slots[r].open(); open {
			found, role = p, r
			return false
		}
		return true
	})
	return found, role
}
