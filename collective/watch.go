package collective

// These functions report a rank's calls to the monitor: all collectives and, if the monitor is a
// [PairMonitor], the calls of two ranks.

// watchEnter reports that a call begins.
func (c *communicator) watchEnter(t ticket, call *Call) {
	switch monitor := c.group.monitor; {
	case monitor == nil:
	case !call.pairwise():
		monitor.Enter(c.rank, t.seq, call)
	case c.group.pairs != nil:
		c.group.pairs.EnterPair(c.rank, t.seq, call)
	}
}

// watchPark reports that the caller's goroutine is about to block. It returns the monitor to notify when the
// goroutine runs again, or nil if there is none.
func (c *communicator) watchPark(t ticket, call *Call) (monitor Monitor, err error) {
	switch monitor := c.group.monitor; {
	case monitor == nil:
		return nil, nil
	case !call.pairwise():
		return monitor, monitor.Park(c.rank, t.seq)
	case c.group.pairs != nil:
		return monitor, c.group.pairs.ParkPair(c.rank, t.seq, call)
	}
	return nil, nil
}

// watchLeave reports that a call has ended.
func (c *communicator) watchLeave(t ticket, call *Call, err error) {
	switch monitor := c.group.monitor; {
	case monitor == nil:
	case !call.pairwise():
		monitor.Leave(c.rank, t.seq, err)
	case c.group.pairs != nil:
		c.group.pairs.LeavePair(c.rank, t.seq, call, err)
	}
}
