package transport

import (
	"context"

	"github.com/lockstep-ml/lockstep/tensor"
)

// NoMemory implements the memory methods of an [Endpoint] that only exchanges frames: there is no memory to reach, and
// flags and buffers return [ErrUnsupported].
type NoMemory struct{}

// Publish does nothing.
func (NoMemory) Publish(*Slot) {}

// Peer returns nil.
func (NoMemory) Peer(int) *Slot { return nil }

// Reachable returns false.
func (NoMemory) Reachable(tensor.Memory) bool { return false }

// StagingBuffer returns nil.
func (NoMemory) StagingBuffer(int) []byte { return nil }

// Inline returns nil.
func (NoMemory) Inline(int) []byte { return nil }

// NewBuffer returns ErrUnsupported.
func (NoMemory) NewBuffer(int) (tensor.Memory, error) { return tensor.Memory{}, ErrUnsupported }

// Retire does nothing.
func (NoMemory) Retire(tensor.Memory) {}

// Signal returns ErrUnsupported.
func (NoMemory) Signal(int) error { return ErrUnsupported }

// Await returns ErrUnsupported.
func (NoMemory) Await(context.Context, int, int) error { return ErrUnsupported }

// Behind returns ranks.
func (NoMemory) Behind(_ int, ranks []int) []int { return ranks }

// Withdraw returns false.
func (NoMemory) Withdraw() bool { return false }

// Interrupt does nothing.
func (NoMemory) Interrupt() {}

// NoPosts implements the methods Post and Complete of an [Endpoint] without non-blocking exchanges.
type NoPosts struct{}

// Post returns ErrUnsupported.
func (NoPosts) Post(int, Frame, int, []byte) error { return ErrUnsupported }

// Complete returns ErrUnsupported.
func (NoPosts) Complete(context.Context) error { return ErrUnsupported }
