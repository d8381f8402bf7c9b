package deadlock

import (
	"errors"

	"github.com/lockstep-ml/lockstep/collective"
)

// Send and Recv calls are numbered separately for each pair of ranks. So each direction between two ranks is tracked
// as a communicator of size two: its rank 0 sends, its rank 1 receives, and calls with the same number match. A
// sender that waits for a receiver that waits for it in another call is an ordinary cycle.

// sender and receiver are the ranks of a pair's monitor.
const (
	sender = iota
	receiver
)

// monitorOf returns the monitor that tracks a call of rank, and which rank of it makes the call: m, or that of one
// direction between two ranks. It returns nil if the call names no peer.
func (m *Monitor) monitorOf(rank int, call *collective.Call) (*Monitor, int) {
	if call.Op != collective.Send && call.Op != collective.Recv {
		return m, rank
	}
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

// failedMonitor returns the monitor of the call that failed with err, m or that of a pair, and the rank there.
func (m *Monitor) failedMonitor(rank int, err error) (*Monitor, int) {
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
