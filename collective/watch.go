package collective

// What a member tells the monitor: of collectives all, of calls of two ranks if it wants to know.

// watchEnter says that a call begins.
func (m *member) watchEnter(t ticket, call *Call) {
	switch monitor := m.team.monitor; {
	case monitor == nil:
	case !call.pairwise():
		monitor.Enter(m.rank, t.seq, call)
	case m.team.pairs != nil:
		m.team.pairs.EnterPair(m.rank, t.seq, call)
	}
}

// watchPark says that the caller's goroutine is about to block. It returns the monitor that is told when it runs again; nil: none.
func (m *member) watchPark(t ticket, call *Call) (told Monitor, err error) {
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

// watchLeave says that a call is over.
func (m *member) watchLeave(t ticket, call *Call, err error) {
	switch monitor := m.team.monitor; {
	case monitor == nil:
	case !call.pairwise():
		monitor.Leave(m.rank, t.seq, err)
	case m.team.pairs != nil:
		m.team.pairs.LeavePair(m.rank, t.seq, call, err)
	}
}
