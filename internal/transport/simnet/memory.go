package simnet

import (
	"context"
	"fmt"
	"math"
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// sharer is an endpoint that accesses the memory of the ranks of its domain.
type sharer struct{ *end }

// stagingBytes is the length of a rank's staging buffer.
const stagingBytes = 64 << 10

func (s *sharer) Capabilities() transport.Capabilities {
	return transport.Capabilities{Places: s.group.places, Memory: true, StagingBytes: stagingBytes, Posts: true}
}

func (s *sharer) Reachable(tensor.Memory) bool { return true }

func (s *sharer) StagingBuffer(rank int) []byte { return s.group.ends[rank].staging }

func (s *sharer) Inline(int) []byte { return nil }

func (s *sharer) Retire(tensor.Memory) {}

func (s *sharer) Publish(slot *transport.Slot) {
	s.net.mu.Lock()
	defer s.net.mu.Unlock()
	s.calls++
	s.base = s.set
	s.slots[s.calls&1] = *slot
}

func (s *sharer) Peer(peer int) *transport.Slot {
	if !s.shares(peer) {
		return nil
	}
	return &s.group.ends[peer].slots[s.calls&1]
}

func (s *sharer) Signal(flag int) error {
	err := s.alive()
	defer s.net.mu.Unlock()
	switch {
	case err != nil:
		return err
	case s.set != s.base+uint64(flag):
		panic(fmt.Sprintf("simnet: flag %d is set as number %d of its call", flag, s.set-s.base))
	case flag == 0 && s.halted:
		return transport.ErrInterrupted
	}
	s.set++
	s.notifyDomain()
	return nil
}

func (s *sharer) notifyDomain() {
	for _, r := range s.domain {
		s.group.ends[r].notify()
	}
}

func (s *sharer) Await(ctx context.Context, rank, flag int) error {
	target := s.base + uint64(flag) + 1
	return s.until(ctx, func() (bool, error) {
		all := true
		var err error
		for _, r := range s.domain {
			switch p := s.group.ends[r]; {
			case p.set >= target:
			case flag == 0 && p.halted:
				err = transport.ErrInterrupted
				all = all && rank >= 0 && r != rank
			case rank < 0 || r == rank:
				all = false
				if s.knows(r) && err == nil {
					err = s.lostError(r)
				}
			}
		}
		if all {
			return true, nil
		}
		return false, err
	})
}

func (s *sharer) Behind(flag int, ranks []int) []int {
	s.net.mu.Lock()
	defer s.net.mu.Unlock()
	for _, r := range s.domain {
		if s.group.ends[r].set < s.base+uint64(flag)+1 {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

func (s *sharer) Withdraw() bool {
	s.net.mu.Lock()
	defer s.net.mu.Unlock()
	for _, r := range s.domain {
		if p := s.group.ends[r]; p.set < s.base+1 {
			p.halted = true
			return true
		}
	}
	return false
}

func (s *sharer) Interrupt() {
	s.net.mu.Lock()
	defer s.net.mu.Unlock()
	for _, r := range s.domain {
		s.group.ends[r].halted = true
	}
	s.notifyDomain()
}

func (s *sharer) NewBuffer(bytes int) (tensor.Memory, error) {
	err := s.alive()
	s.net.mu.Unlock()
	switch {
	case err != nil:
		return tensor.Memory{}, err
	case bytes < 0 || bytes > min(math.MaxInt-64, math.MaxInt64>>16):
		return tensor.Memory{}, fmt.Errorf("simnet: a buffer of %d bytes", bytes)
	case bytes == 0:
		return tensor.Memory{}, nil
	}
	b := make([]byte, bytes+63)
	skip := int(-uintptr(unsafe.Pointer(unsafe.SliceData(b))) & 63)
	return tensor.Memory{Ptr: unsafe.Pointer(&b[skip]), Bytes: bytes}, nil
}
