package collective

import (
	"fmt"
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
)

func (m *member) NewBuffer(bytes int) (tensor.Memory, error) {
	if bytes < 0 {
		return tensor.Memory{}, m.invalidBuffer(fmt.Errorf("a buffer of %d bytes", bytes))
	}
	m.mu.Lock()
	closing := m.closing
	m.mu.Unlock()
	if closing {
		return tensor.Memory{}, m.errClosed()
	}
	if !m.end.Capabilities().Memory {
		return tensor.HostMemory(alignedBytes(bytes)), nil
	}
	memory, err := m.end.NewBuffer(bytes)
	if err != nil {
		return tensor.Memory{}, m.invalidBuffer(err)
	}
	return memory, nil
}

// invalidBuffer returns an error that concerns only this call: the communicator stays usable.
func (m *member) invalidBuffer(err error) error {
	return &Error{Kind: ErrInvalid, Comm: m.team.cfg.Name, Rank: m.rank, Err: err}
}

// bufferAlignment is the size of a cache line.
const bufferAlignment = 64

// alignedBytes returns heap memory that starts at a cache line.
func alignedBytes(n int) []byte {
	b := make([]byte, n+bufferAlignment-1)
	skip := -int(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) & (bufferAlignment - 1)
	return b[skip:][:n:n]
}
