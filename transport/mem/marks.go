package mem

import (
	"context"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// sharer is the end of a group whose ranks reach each other's memory.
type sharer struct{ *endpoint }

var (
	_ transport.Marker   = (*sharer)(nil)
	_ transport.Splitter = (*sharer)(nil)
)

func (s *sharer) Reach(int) transport.Reach { return transport.Memory }

func (s *sharer) Split(id uint64, ranks []int) (transport.Endpoint, error) {
	e, err := s.split(id, ranks)
	if err != nil {
		return nil, err
	}
	return &sharer{endpoint: e}, nil
}

// Publish writes the slot of this call. Two slots are enough: a rank can begin the call after next only when all ranks
// have begun the next one, and so have read the slots of this one.
func (s *sharer) Publish(slot transport.Slot) {
	s.calls++
	s.slots[s.calls&1] = slot
}

func (s *sharer) Peer(peer int) *transport.Slot { return &s.hub.ends[peer].slots[s.calls&1] }

func (s *sharer) Signal(mark int) error {
	target := uint64(s.hub.n) * (s.uses[mark] + 1)
	if mark == 0 {
		for {
			was := s.hub.starts.Load()
			if was&stopBit != 0 {
				return transport.ErrInterrupted
			}
			if s.hub.starts.CompareAndSwap(was, was+1) {
				s.note(mark)
				s.last(was+1 == target)
				return nil
			}
		}
	}
	s.note(mark)
	s.last(s.hub.marks[mark].Add(1) == target)
	return nil
}

// note counts this rank's use of the mark.
func (s *sharer) note(mark int) {
	s.uses[mark]++
	s.raised[mark].Store(s.uses[mark])
}

// last wakes the waiting ranks if this one was the last to raise a mark.
func (s *sharer) last(yes bool) {
	if yes {
		s.unparkPeers()
	}
}

func (e *endpoint) unparkPeers() {
	for i := range e.hub.ends {
		if i != e.rank {
			e.hub.ends[i].unpark()
		}
	}
}

func (s *sharer) Domain() []int { return s.hub.ranks }

func (s *sharer) Reachable(tensor.Memory) bool { return true }

func (s *sharer) Stage(rank int) []byte { return s.hub.ends[rank].stage }

func (s *sharer) Await(ctx context.Context, _, mark int) error {
	v := event{count: &s.hub.starts, target: uint64(s.hub.n) * s.uses[mark], mark: mark, peer: -1}
	if mark > 0 {
		v.count = &s.hub.marks[mark].Uint64
	}
	if v.happened() {
		return nil
	}
	return s.wait(ctx, v)
}

func (s *sharer) Behind(mark int, ranks []int) []int {
	for i := range s.hub.ends {
		if s.hub.ends[i].raised[mark].Load() < s.uses[mark] {
			ranks = append(ranks, i)
		}
	}
	return ranks
}

func (s *sharer) Withdraw() bool {
	target := uint64(s.hub.n) * s.uses[0]
	for {
		was := s.hub.starts.Load()
		switch {
		case was&^stopBit >= target:
			return false
		case was&stopBit != 0 || s.hub.starts.CompareAndSwap(was, was|stopBit):
			return true
		}
	}
}

func (s *sharer) Interrupt() { s.interrupt() }

func (e *endpoint) interrupt() {
	e.hub.starts.Or(stopBit)
	for i := range e.hub.ends {
		e.hub.ends[i].unpark()
	}
}
