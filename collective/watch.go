package collective

// These functions report a member's calls to the monitor: all collectives and, if the monitor is a
// [PairMonitor], the calls of two ranks.

// watchEnter reports that a call begins.
func (m *member) watchEnter(t ticket, call *Call) {
	switch monitor := m.team.monitor; {
	case monitor == nil:
	case !call.pairwise():
		monitor.Enter(m.rank, t.seq, call)
	case m.team.pairs != nil:
		m.team.pairs.EnterPair(m.rank, t.seq, call)
	}
}

// watchPark reports that the caller's goroutine is about to block. It returns the monitor to notify when the
// goroutine runs again, or nil if there is none.
func (m *member) watchPark(t ticket, call *Call) (monitor Monitor, err error) {
	switch monitor := m.team.monitor; {
	case monitor == nil:
		return nil, nil
	case !call.pairwise():
		return monitor, monitor.Park(m.rank, t.seq)
	case m.team.pairs != nil:
		return monitor, m.team.pairs.ParkPair(m.rank, t.seq, call)
	}
	return nil, nil
}

// watchLeave reports that a call has ended.
func (m *member) watchLeave(t ticket, call *Call, err error) {
	switch monitor := m.team.monitor; {
	case monitor == nil:
	case !call.pairwise():
		monitor.Leave(m.rank, t.seq, err)
	case m.team.pairs != nil:
		m.team.pairs.LeavePair(m.rank, t.seq, call, err)
	}
}
