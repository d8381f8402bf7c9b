package collective

// watcher reports the calls of local ranks to a monitor: all collectives and, if the monitor is a
// [PairMonitor], the calls of two ranks. The zero value reports nothing.
type watcher struct {
	monitor Monitor     // nil: none
	pairs   PairMonitor // the monitor, if it is one; else nil
}

func newWatcher(m Monitor) watcher {
	pairs, _ := m.(PairMonitor)
	return watcher{m, pairs}
}

// enter reports that a call begins.
func (w *watcher) enter(rank int, seq uint64, call *Call) {
	if w.monitor != nil {
		w.entered(rank, seq, call)
	}
}

func (w *watcher) entered(rank int, seq uint64, call *Call) {
	switch {
	case !call.pairwise():
		w.monitor.Enter(rank, seq, call)
	case w.pairs != nil:
		w.pairs.EnterPair(rank, seq, call)
	}
}

// park reports that the caller's goroutine is about to block. It returns the monitor to notify when the
// goroutine runs again, or nil if there is none.
func (w *watcher) park(rank int, seq uint64, call *Call) (Monitor, error) {
	switch {
	case w.monitor == nil:
		return nil, nil
	case !call.pairwise():
		return w.monitor, w.monitor.Park(rank, seq)
	case w.pairs != nil:
		return w.monitor, w.pairs.ParkPair(rank, seq, call)
	}
	return nil, nil
}

// leave reports that a call has ended.
func (w *watcher) leave(rank int, seq uint64, call *Call, err error) {
	if w.monitor != nil {
		w.left(rank, seq, call, err)
	}
}

func (w *watcher) left(rank int, seq uint64, call *Call, err error) {
	switch {
	case !call.pairwise():
		w.monitor.Leave(rank, seq, err)
	case w.pairs != nil:
		w.pairs.LeavePair(rank, seq, call, err)
	}
}
