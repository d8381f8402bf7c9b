package deadlock

// searcher searches the wait-for graph; see the package documentation. Its slices are scratch, guarded by the
// detector's lock.
type searcher struct {
	seen []visitState
	path []hop
}

type visitState uint8

const (
	unseen visitState = iota
	onPath
	free // it runs, or its wait can end
)

// hop is one edge of the graph: the replica waits in a call for the replica of the next hop. The last hop of a chain
// names a replica that has ended (its wait is zero), or one that is earlier in the chain (a cycle).
type hop struct {
	replica int
	wait    waiting
}

// from returns a chain of waits that starts at the replica and cannot end, or nil. The caller holds the lock.
func (s *searcher) from(r *Run, replica int) []hop {
	if !r.blocked(replica) {
		return nil
	}
	if len(s.seen) != len(r.replicas) {
		s.seen = make([]visitState, len(r.replicas))
	}
	clear(s.seen)
	s.path = s.path[:0]
	if !s.visit(r, replica) {
		return nil
	}
	return append([]hop(nil), s.path...)
}

// visit reports whether the blocked replica can never continue; then path is the proof.
func (s *searcher) visit(r *Run, replica int) bool {
	w := r.replicas[replica].wait
	s.seen[replica] = onPath
	s.path = append(s.path, hop{replica, w})
	for rank, other := range w.monitor.members {
		if other < 0 || other == replica {
			continue
		}
		if w.monitor.slots[rank].entered.Load() > w.seq {
			continue // it has entered the call
		}
		switch {
		case r.replicas[other].state.Ended() || s.seen[other] == onPath:
			s.path = append(s.path, hop{replica: other})
			return true
		case s.seen[other] == unseen && r.blocked(other) && s.visit(r, other):
			return true
		}
	}
	s.seen[replica] = free
	s.path = s.path[:len(s.path)-1]
	return false
}

// blocked reports whether a replica is parked in a call, which may be able to complete.
func (r *Run) blocked(replica int) bool {
	them := &r.replicas[replica]
	return !them.state.Ended() && them.parked.Load()
}
