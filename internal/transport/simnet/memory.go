package simnet

import (
	"context"
	"fmt"
	"math"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// stagingBytes is the length of a rank's staging buffer.
const stagingBytes = 64 << 10

func (e *end) Reachable(tensor.Memory) bool { return true }

func (e *end) StagingBuffer(rank int) []byte { return e.group.ends[rank].staging }

func (e *end) Inline(int) []byte { return nil }

func (e *end) Retire(tensor.Memory) {}

func (e *end) Publish(slot *transport.Slot) {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	e.calls++
	e.base = e.set
	e.slots[e.calls&1] = *slot
}

func (e *end) Peer(peer int) *transport.Slot {
	if !e.shares(peer) {
		return nil
	}
	return &e.group.ends[peer].slots[e.calls&1]
}

func (e *end) Signal(flag int) error {
	err := e.alive()
	defer e.net.mu.Unlock()
	switch {
	case err != nil:
		return err
	case e.set != e.base+uint64(flag):
		panic(fmt.Sprintf("simnet: flag %d is set as number %d of its call", flag, e.set-e.base))
	case flag == 0 && e.halted:
		return transport.ErrInterrupted
	}
	e.set++
	e.notifyDomain()
	return nil
}

func (e *end) notifyDomain() {
	for _, r := range e.domain {
		e.group.ends[r].notify()
	}
}

func (e *end) Await(ctx context.Context, rank, flag int) error {
	target := e.base + uint64(flag) + 1
	return e.until(ctx, func() (bool, error) {
		all := true
		var err error
		for _, r := range e.domain {
			switch p := e.group.ends[r]; {
			case p.set >= target:
			case flag == 0 && p.halted:
				err = transport.ErrInterrupted
				all = all && rank >= 0 && r != rank
			case rank < 0 || r == rank:
				all = false
				if e.knows(r) && err == nil {
					err = e.lostError(r)
				}
			}
		}
		if all {
			return true, nil
		}
		return false, err
	})
}

func (e *end) Behind(flag int, ranks []int) []int {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	for _, r := range e.domain {
		if e.group.ends[r].set < e.base+uint64(flag)+1 {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

func (e *end) Withdraw() bool {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	for _, r := range e.domain {
		if p := e.group.ends[r]; p.set < e.base+1 {
			p.halted = true
			return true
		}
	}
	return false
}

func (e *end) Interrupt() {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	for _, r := range e.domain {
		e.group.ends[r].halted = true
	}
	e.notifyDomain()
}

func (e *end) NewBuffer(bytes int) (tensor.Memory, error) {
	err := e.alive()
	e.net.mu.Unlock()
	switch {
	case err != nil:
		return tensor.Memory{}, err
	case bytes < 0 || bytes > min(math.MaxInt-64, math.MaxInt64>>16):
		return tensor.Memory{}, fmt.Errorf("simnet: a buffer of %d bytes", bytes)
	}
	return tensor.HostMemory(tensor.AlignedBytes(bytes, tensor.CacheLine)), nil
}
